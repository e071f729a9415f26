"""The languages that inputs are written in (py3langid, after Lui and Baldwin 2012, "langid.py"). Pure.

A guess, and for a few words often a wrong one. What counts is the distribution over many texts, in which the wrong
guesses are as frequent as before.
"""

from py3langid import classify

NO_LANGUAGE = "none"
LEAST_LETTERS = 8
"""A text with fewer has no language."""


def language_of(text: str) -> str:
    """The ISO 639-1 code of the likeliest language; ``none`` for few letters. The first call loads the model."""
    if sum(map(str.isalpha, text)) < LEAST_LETTERS:
        return NO_LANGUAGE
    language, _ = classify(text)
    return str(language)
