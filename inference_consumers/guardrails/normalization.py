"""Texts as checks compare them, with the way back to the characters of the original.

NFKC maps full-width letters, ligatures and the like to the plain ones (Unicode Standard Annex 15). Characters that show
nothing (zero-width spaces, soft hyphens, direction marks, variation selectors, tags) are left out: they split a word
for a pattern and not for a reader.
"""

import re
import unicodedata
from array import array
from dataclasses import dataclass

from inference_consumers.guardrails.check import Finding

_INVISIBLE = (
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff"
    "\U000e0000-\U000e0fff"
)
_ANY_INVISIBLE = re.compile(f"[{_INVISIBLE}]")
# No encoder takes them; each is replaced by one character, so that places stay.
_SURROGATE = re.compile(r"[\ud800-\udfff]")


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
    """Linear in the length, and free for ASCII."""
    if text.isascii():
        return NormalizedText(text)
    text = _SURROGATE.sub("\ufffd", text)
    if unicodedata.is_normalized("NFKC", text) and not _ANY_INVISIBLE.search(text):
        return NormalizedText(text)
    parts: list[str] = []
    first, last = array("Q"), array("Q")
    for start, end in _clusters(text):
        part = unicodedata.normalize("NFKC", _ANY_INVISIBLE.sub("", text[start:end]))
        parts.append(part)
        first.extend([start] * len(part))
        last.extend([end] * len(part))
    return NormalizedText("".join(parts), first, last)


def _clusters(text: str) -> list[tuple[int, int]]:
    """Characters with the marks that combine with them, and Korean syllables written in letters: the least that can
    be normalized apart. What is invisible does not end one."""
    found: list[tuple[int, int]] = []
    start, previous = 0, ""
    for place, character in enumerate(text):
        if _ANY_INVISIBLE.match(character):
            continue
        joins = unicodedata.combining(character) or (_is_jamo(character) and _is_jamo(previous))
        if previous and not joins:
            found.append((start, place))
            start = place
        previous = character
    if start < len(text):
        found.append((start, len(text)))
    return found


def _is_jamo(character: str) -> bool:
    """Whether NFC may join it with its neighbour: conjoining letters, and syllables that may take one more."""
    return "\u1100" <= character <= "\u11ff" or "\uac00" <= character <= "\ud7a3"
