"""Figures of simulated requests, in blocks: streams without drift, and changes of them.

Numbers are the prompt lengths of the trace. A block is five minutes, and a day has 288 of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.trace import load_trace
from fairlane_server.drift.figures import FigureKind

Values = npt.NDArray[np.float64]
"""Blocks by requests; for vectors by directions as well."""

BLOCK = 64
BLOCK_MS = 300_000
BLOCKS_OF_DAY = 288
DIRECTIONS = 16
_RHO = 0.95


@dataclass(frozen=True, slots=True)
class QuietStream:
    """A stream in which nothing changes for good. ``scale`` has what the lengths of each block are multiplied by."""

    name: str
    scale: Callable[[np.random.Generator, int], Values]
    is_exchangeable: bool

    def draw(self, seed: int, blocks: int) -> Values:
        drawn = np.random.default_rng(seed)
        return lengths(drawn, blocks) * self.scale(drawn, blocks)[:, None]


def _alike(drawn: np.random.Generator, blocks: int) -> Values:
    return np.exp(drawn.normal(0, 0.3, blocks))


def _daily(_drawn: np.random.Generator, blocks: int) -> Values:
    return 1 + 0.5 * np.sin(2 * np.pi * np.arange(blocks) / BLOCKS_OF_DAY)


def _waves(drawn: np.random.Generator, blocks: int) -> Values:
    steps = drawn.normal(0, 0.3 * np.sqrt(1 - _RHO**2), blocks)
    found = np.zeros(blocks)
    for block in range(1, blocks):
        found[block] = _RHO * found[block - 1] + steps[block]
    return np.exp(found)


QUIET = (
    QuietStream("independent requests", lambda _drawn, blocks: np.ones(blocks), is_exchangeable=True),
    QuietStream("requests of a block alike", _alike, is_exchangeable=True),
    QuietStream("hours of the day", _daily, is_exchangeable=False),
    QuietStream("slow waves", _waves, is_exchangeable=False),
)


@dataclass(frozen=True, slots=True)
class DriftChange:
    """A change of figures of one kind: ``before`` and ``after`` draw that many blocks."""

    name: str
    kind: FigureKind
    before: Callable[[np.random.Generator, int], Values]
    after: Callable[[np.random.Generator, int], Values]

    def draw(self, seed: int, before: int, after: int) -> Values:
        drawn = np.random.default_rng(seed)
        return np.concatenate((self.before(drawn, before), self.after(drawn, after)))


@cache
def _known_lengths() -> Values:
    return np.asarray([row.context_tokens for row in load_trace()], dtype=np.float64)


def lengths(drawn: np.random.Generator, blocks: int) -> Values:
    """Prompt lengths of the trace, in any order."""
    return drawn.choice(_known_lengths(), (blocks, BLOCK))


def trace_blocks(size: int) -> Values:
    """The prompt lengths of the trace as they came."""
    known = _known_lengths()
    count = len(known) // size
    return known[: count * size].reshape(count, size)


def _longer(factor: float) -> Callable[[np.random.Generator, int], Values]:
    return lambda drawn, blocks: lengths(drawn, blocks) * factor


def _foreign(part: float) -> Callable[[np.random.Generator, int], Values]:
    def draw(drawn: np.random.Generator, blocks: int) -> Values:
        usual = lengths(drawn, blocks)
        return np.where(drawn.random(usual.shape) < part, 20.0, usual)

    return draw


def _growing(drawn: np.random.Generator, blocks: int) -> Values:
    factors: Values = 1 + np.minimum(0.5, 0.005 * np.arange(blocks))
    return lengths(drawn, blocks) * factors[:, None]


def _rate(rate: float) -> Callable[[np.random.Generator, int], Values]:
    return lambda drawn, blocks: (drawn.random((blocks, BLOCK)) < rate).astype(np.float64)


def _centroid(shift: float) -> Callable[[np.random.Generator, int], Values]:
    return lambda drawn, blocks: drawn.normal(shift, 1, (blocks, BLOCK, DIRECTIONS))


def _number(name: str, after: Callable[[np.random.Generator, int], Values]) -> DriftChange:
    return DriftChange(name, FigureKind.NUMBER, lengths, after)


CHANGES = (
    *(_number(f"{percent} % longer", _longer(1 + percent / 100)) for percent in (10, 25, 50, 100)),
    *(_number(f"{percent} % of the requests are short", _foreign(percent / 100)) for percent in (5, 10, 25)),
    _number("longer by 0.5 % with each block", _growing),
    *(
        DriftChange(f"refusals from 2 to {percent} %", FigureKind.CATEGORY, _rate(0.02), _rate(percent / 100))
        for percent in (4, 10, 30)
    ),
    *(
        DriftChange(f"centroid by {shift:g} deviations", FigureKind.VECTOR, _centroid(0.0), _centroid(shift))
        for shift in (0.1, 0.2, 0.5)
    ),
)
FIGURE_OF: Mapping[FigureKind, Callable[[Any], Any]] = {
    FigureKind.NUMBER: float,
    FigureKind.CATEGORY: lambda value: "refused" if value else "answered",
    FigureKind.VECTOR: tuple,
}
