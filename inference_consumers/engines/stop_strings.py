"""Finding stop strings in a text that comes in pieces."""

from collections.abc import Sequence


class StopStrings:
    """Watches a text for its first stop string, at a cost per character that does not grow with the text.

    Knuth, Morris and Pratt 1977, "Fast Pattern Matching in Strings", section 2: for each string, how much of its
    beginning the text ends with.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Empty strings stop nothing."""
        self._stops = [stop for stop in stops if stop]
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._seen = 0

    @property
    def held(self) -> int:
        """How many of the last characters may be the beginning of a stop string."""
        return max(self._matched, default=0)

    def feed(self, text: str) -> int | None:
        """Read on. The place in the whole text where the first stop string begins, once that is complete.

        Of several that are complete with the same character the longest counts. Nothing may be fed after that.
        """
        if not self._stops:
            return None
        for character in text:
            self._seen += 1
            longest = 0
            for number, stop in enumerate(self._stops):
                matched = self._matched[number]
                while matched and stop[matched] != character:
                    matched = self._fallbacks[number][matched - 1]
                if stop[matched] == character:
                    matched += 1
                self._matched[number] = matched
                if matched == len(stop):
                    longest = max(longest, matched)
            if longest:
                return self._seen - longest
        return None


def _fallbacks(stop: str) -> list[int]:
    """For each beginning of the string, the length of the longest shorter beginning that it ends with."""
    fallbacks = [0] * len(stop)
    length = 0
    for place in range(1, len(stop)):
        while length and stop[place] != stop[length]:
            length = fallbacks[length - 1]
        if stop[place] == stop[length]:
            length += 1
        fallbacks[place] = length
    return fallbacks
