"""Windows over the tokens of texts that are longer than what is looked at in one go."""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

# From the first mark of a row alone: tried from each of them, a long row would take quadratic time.
SENTENCE_END = re.compile(r"(?<![.!?:;])[.!?:;]++[\s\"')\]]+|\n+")
_LEAST_SENTENCE_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Window:
    """``text`` is the text's place in the list; [start, end) are characters of it."""

    text: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class WindowSize:
    """In tokens, without those that mark begin and end. ``overlap`` tokens are shared with the window before."""

    tokens: int
    overlap: int

    def __post_init__(self) -> None:
        if not 0 <= self.overlap < self.tokens:
            raise ValueError(f"windows of {self.tokens} tokens cannot overlap by {self.overlap}")

    def cut(self, count: int) -> list[tuple[int, int]]:
        """[first, last) of each window over ``count`` tokens: every token is in one, and the last window is full
        unless it is the only one."""
        if count <= self.tokens:
            return [(0, count)] if count else []
        starts = range(0, count - self.tokens, self.tokens - self.overlap)
        return [*((start, start + self.tokens) for start in starts), (count - self.tokens, count)]

    def cut_with_sentences(self, text: str, offsets: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """``cut``, and each sentence by itself, so that one is not lost in the mean over its neighbours.

        Args:
            text: what the tokens are of.
            offsets: [start, end) of each token in characters of the text, in order.
        """
        ends = [bisect_left(offsets, (match.end(), 0)) for match in SENTENCE_END.finditer(text)]
        edges = sorted({0, *ends, len(offsets)})
        sentences = [
            (first + begin, first + end)
            for first, last in pairwise(edges)
            if last - first >= _LEAST_SENTENCE_TOKENS
            for begin, end in self.cut(last - first)
        ]
        return list(dict.fromkeys((*self.cut(len(offsets)), *sentences)))
