"""Text of one answer during generation."""

from collections.abc import Callable, Sequence

from fairlane.outcomes import FinishReason
from inference_consumers.engines.detokenizer import REPLACEMENT, Detokenizer
from inference_consumers.engines.stop_strings import StopStrings


class GeneratedText:
    """Tells text when it is certain: whole characters that are not, and cannot become, part of a stop string.

    What is told, in its order, is the text of the answer.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        """``decode`` is a Detokenizer's."""
        self._detokenizer = Detokenizer(decode)
        self._stops = StopStrings(stops)
        self._told: list[str] = []
        self._told_length = 0
        self._pending = ""
        self.is_stopped = False

    @property
    def length(self) -> int:
        """Characters so far, those that may become part of a stop string among them."""
        return self._told_length + len(self._pending)

    def add(self, token_id: int) -> str:
        """The text that is certain with this token; ``is_stopped`` says whether a stop string is complete."""
        piece = self._detokenizer.add(token_id)
        self._pending += piece
        cut = self._stops.feed(piece)
        if cut is None:
            return self._tell(len(self._pending) - self._stops.held)
        self.is_stopped = True
        self._pending = self._pending[: cut - self._told_length]
        return self._tell(len(self._pending))

    def end(self) -> str:
        """No more tokens: the text that was held for a stop string which never came. Half a character is dropped."""
        return self._tell(len(self._pending))

    def whole(self) -> str:
        """All that was told."""
        return "".join(self._told)

    def _tell(self, characters: int) -> str:
        certain, self._pending = self._pending[:characters], self._pending[characters:]
        if certain:
            self._told.append(certain)
            self._told_length += characters
        return certain


def fault_of(
    text: str, tokens: int, reason: FinishReason, *, may_be_empty: bool, may_be_broken: Callable[[], bool]
) -> str | None:
    """Why the text of so many tokens is no answer, or None: it is empty, or they wrote bytes that are no UTF-8.

    ``may_be_broken`` is for a prompt with a replacement character, which the answer may repeat. It is asked where there
    is one.
    """
    if (REPLACEMENT not in text or may_be_broken()) and (text or may_be_empty):
        return None
    if not text and tokens == 1 and reason == FinishReason.STOP:
        return "the model ended its answer before the first token"
    return f"the model wrote {tokens} tokens that are no text"
