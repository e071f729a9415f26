"""Words of a text with their places, for checks that compare sequences of words."""

import re
from dataclasses import dataclass

# Chinese and Japanese put no spaces between words: each of their characters counts as one.
_SINGLE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(f"[{_SINGLE}]|[^\\W{_SINGLE}]+")


@dataclass(frozen=True, slots=True)
class Word:
    """In lower case; [start, end) are characters of the text."""

    text: str
    start: int
    end: int


def words(text: str) -> list[Word]:
    """Punctuation and white space are left out."""
    return [Word(match[0].casefold(), match.start(), match.end()) for match in _WORD.finditer(text)]
