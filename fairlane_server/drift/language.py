"""The languages that inputs are written in, as far as their letters tell. Pure."""

import unicodedata
from collections import Counter
from functools import lru_cache

NO_LETTERS = "none"
LEAST_LETTERS = 8
"""A text with fewer has no language."""


def language_of(text: str) -> str:
    """The Unicode script of most of its letters, such as ``latin`` or ``cyrillic``; ``none`` for few letters."""
    scripts = Counter(map(_script, filter(str.isalpha, text)))
    if scripts.total() < LEAST_LETTERS:
        return NO_LETTERS
    ((script, _),) = scripts.most_common(1)
    return script


@lru_cache(maxsize=4_096)
def _script(letter: str) -> str:
    """The first word of its Unicode name, which is its script for nearly all letters."""
    return unicodedata.name(letter, "unknown").split()[0].split("-")[0].lower()
