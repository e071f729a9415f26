"""Check ``repetition``: an answer that says the same words over and over (Holtzman et al. 2020, "The Curious Case of
Neural Text Degeneration", figure 1), also as one word without spaces.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from inference_consumers.guardrails.check import CheckContext, Finding
from inference_consumers.guardrails.spans import joined
from inference_consumers.guardrails.words import words

REPETITION = "repetition"
_LEAST_TIMES = 3
_LONGEST_LOOP_WORDS = 128
_LEAST_LOOPED_WORDS = 24
_LONGEST_LOOP_CHARACTERS = 16
_LEAST_LOOPED_CHARACTERS = 128


class RepetitionCheck:
    """A finding begins behind the first time, so that one remains when it is cut out. The score grows with the times
    that the words come again. Numbers, lines of signs and white space may repeat: tables have them.
    """

    name = REPETITION

    def find(self, texts: Sequence[str], context: CheckContext) -> list[list[Finding]]:  # noqa: ARG002 - of the protocol
        return [joined((*_looped_words(text), *_looped_characters(text))) for text in texts]


def _looped_words(text: str) -> Iterator[Finding]:
    found = words(text)
    numbers: dict[str, int] = {}
    ids = np.array([numbers.setdefault(word.text, len(numbers)) for word in found], dtype=np.int64)
    for period, first, last in _loops(ids, _LONGEST_LOOP_WORDS, _LEAST_LOOPED_WORDS):
        if any(character.isalpha() for word in found[first : first + period] for character in word.text):
            start, end = found[first + period - 1].end, found[last - 1].end
            yield Finding(REPETITION, start, end, _score(period, last - first))


def _looped_characters(text: str) -> Iterator[Finding]:
    ids = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.int64)
    for period, first, last in _loops(ids, _LONGEST_LOOP_CHARACTERS, _LEAST_LOOPED_CHARACTERS):
        if any(map(str.isalpha, text[first : first + period])):
            yield Finding(REPETITION, first + period, last, _score(period, last - first))


def _score(period: int, length: int) -> float:
    return round(1 - period / length, 3)


def _loops(ids: npt.NDArray[np.int64], longest: int, least: int) -> Iterator[tuple[int, int, int]]:
    """Period and [first, last) of each stretch of at least ``least`` ids in which each equals the one a period before,
    and which has the period at least three times."""
    for period in range(1, min(longest, len(ids) // _LEAST_TIMES) + 1):
        equal = np.concatenate(([False], ids[period:] == ids[:-period], [False]))
        edges = np.flatnonzero(equal[1:] != equal[:-1])
        for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            if end - begin + period >= max(least, _LEAST_TIMES * period):
                yield period, begin, end + period
