"""Texts as checks compare them, with the way back to the characters of the original.

NFKC maps full-width letters, ligatures and the like to the plain ones (Unicode Standard Annex 15). Characters that show
nothing (controls, zero-width spaces, soft hyphens, direction marks, fillers, variation selectors, tags) are left out:
they split a word for a pattern and not for a reader.
"""

import re
import unicodedata
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from inference_consumers.guardrails.check import Finding

_INVISIBLE = re.compile(
    # Controls (category Cc) but for tab, line feed and carriage return.
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f"
    # Format characters (Cf).
    "\u00ad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff"
    "\ufff0-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    # What else has no glyph: joiners, fillers, the blank of Braille, selectors of variants, tags. Two of the fillers
    # (3164, ffa0) become a third (1160) by NFKC.
    "\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0000-\U000e0fff]"
)
# No encoder takes them; each is replaced by one character, so that places stay.
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_WORD = re.compile(r"[ \n][^ \n]*|[^ \n]+")


@dataclass(frozen=True, slots=True)
class NormalizedText:
    """``text`` is the normalized one; ``first`` and ``last`` hold, for each of its characters, where the original's
    characters that it comes from begin and end. None where nothing was changed.
    """

    text: str
    first: "array[int] | None" = None
    last: "array[int] | None" = None

    def original(self, finding: Finding) -> Finding:
        """The finding in the original text. It includes what was left out within, and nothing around it."""
        if self.first is None or self.last is None:
            return finding
        return Finding(finding.type, self.first[finding.start], self.last[finding.end - 1], finding.score)


def normalized(text: str) -> NormalizedText:
    """Linear in the length; what is plain costs little."""
    text = _SURROGATE.sub("\ufffd", text)
    if _is_plain(text):
        return NormalizedText(text)
    parts: list[str] = []
    first, last = array("Q"), array("Q")
    # A space or the end of a line never joins what is before it: each word with the space before it is by itself.
    for match in _WORD.finditer(text):
        start, end = match.span()
        if _is_plain(match[0]):
            parts.append(match[0])
            first.extend(range(start, end))
            last.extend(range(start + 1, end + 1))
            continue
        for begin, stop in _clusters(match[0]):
            part = unicodedata.normalize("NFKC", _INVISIBLE.sub("", match[0][begin:stop]))
            parts.append(part)
            first.extend([start + begin] * len(part))
            last.extend([start + stop] * len(part))
    return NormalizedText("".join(parts), first, last)


def _is_plain(text: str) -> bool:
    return unicodedata.is_normalized("NFKC", text) and not _INVISIBLE.search(text)


def _clusters(text: str) -> Iterator[tuple[int, int]]:
    """Characters with the marks that combine with them, and Korean syllables written in letters: the least that can
    be normalized apart. What is invisible does not end one."""
    start, previous = 0, ""
    for place, character in enumerate(text):
        if _INVISIBLE.match(character):
            continue
        joins = unicodedata.combining(character) or (_is_jamo(character) and _is_jamo(previous))
        if previous and not joins:
            yield start, place
            start = place
        previous = character
    if start < len(text):
        yield start, len(text)


def _is_jamo(character: str) -> bool:
    """Whether NFC may join it with its neighbour: conjoining letters, and syllables that may take one more."""
    return "\u1100" <= character <= "\u11ff" or "\uac00" <= character <= "\ud7a3"
