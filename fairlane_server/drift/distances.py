"""Distances of a block of figures from a reference: one number each, larger the stranger the block. Pure.

No distribution of the distances is assumed: each is only compared with those of other blocks of the same size.
"""

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

MOST_KEPT = 512
"""Values that a reference of numbers keeps, evenly by rank."""
MOST_CATEGORIES = 32
"""Categories of a reference, the most frequent; all others are one."""
OTHERS = ""
"""The category of what the reference does not have. No figure has this name."""

_LEGENDRE_DEGREES = 4
_SMOOTHING = 0.5

Vector = tuple[float, ...]


class DriftReference(Protocol):
    """What figures were like."""

    def distance(self, block: Sequence[Any]) -> float:
        """Of a block of figures that is not empty; not negative."""
        ...

    def effect(self, block: Sequence[Any]) -> float:
        """How much a block differs, in units that a person can read; not negative, and biased upwards in small
        blocks."""
        ...

    def strangeness(self, block: Sequence[Any]) -> list[float]:
        """For each figure of a block that differs, how much it makes the difference."""
        ...


@dataclass(frozen=True, slots=True)
class NumberReference:
    """Numbers that were usual, in rising order."""

    kept: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> "NumberReference":
        """The reference of these values, which are not none."""
        ordered = sorted(values)
        if len(ordered) <= MOST_KEPT:
            return cls(tuple(ordered))
        step = len(ordered) / MOST_KEPT
        return cls(tuple(ordered[int((place + 0.5) * step)] for place in range(MOST_KEPT)))

    def rank(self, value: float) -> float:
        """The part of the reference below a value, from 0 to 1; of equal values half counts."""
        return (bisect_left(self.kept, value) + bisect_right(self.kept, value)) / (2 * len(self.kept))

    def quantile(self, part: float) -> float:
        return self.kept[min(len(self.kept) - 1, int(part * len(self.kept)))]

    def distance(self, block: Sequence[float]) -> float:
        """Neyman's smooth statistic (1937) of the ranks, with Legendre polynomials up to degree 4: shifts, spread, skew
        and tails each have one."""
        sums = [0.0] * _LEGENDRE_DEGREES
        for value in block:
            for degree, of_rank in enumerate(_legendre(2.0 * self.rank(value) - 1.0)):
                sums[degree] += of_rank
        return sum(one * one for one in sums) / len(block)

    def effect(self, block: Sequence[float]) -> float:
        """The largest difference of the two distribution functions (Kolmogorov and Smirnov): from 0 to 1."""
        ordered = sorted(block)
        count = len(ordered)
        largest = 0.0
        for value in {*ordered, *self.kept}:
            here = bisect_right(ordered, value) / count
            largest = max(largest, abs(here - bisect_right(self.kept, value) / len(self.kept)))
        return largest

    def strangeness(self, block: Sequence[float]) -> list[float]:
        """How many times as frequent as in the reference values of its tenth are."""
        tenths = [min(9, int(10 * self.rank(value))) for value in block]
        counts = Counter(tenths)
        return [10 * counts[tenth] / len(block) for tenth in tenths]


@dataclass(frozen=True, slots=True)
class CategoryReference:
    """How often each category was seen, the most frequent ones; ``OTHERS`` are the rest."""

    counts: Mapping[str, int]

    @classmethod
    def of(cls, values: Iterable[str]) -> "CategoryReference":
        """The reference of these categories."""
        counts = Counter(values)
        frequent = dict(counts.most_common(MOST_CATEGORIES))
        return cls({**frequent, OTHERS: counts.total() - sum(frequent.values())})

    def parts(self) -> dict[str, float]:
        """The part of each category, and of others; never 0, so that a new category is no infinite distance."""
        total = sum(self.counts.values()) + _SMOOTHING * len(self.counts)
        return {name: (count + _SMOOTHING) / total for name, count in self.counts.items()}

    def distance(self, block: Sequence[str]) -> float:
        """Pearson's chi-squared statistic (1900)."""
        usual, seen, count = self.parts(), self._seen(block), len(block)
        return sum((seen[name] - count * part) ** 2 / (count * part) for name, part in usual.items())

    def effect(self, block: Sequence[str]) -> float:
        """Total variation: the part of the figures that would have to be of another category; from 0 to 1."""
        usual, seen, count = self.parts(), self._seen(block), len(block)
        return sum(abs(seen[name] / count - part) for name, part in usual.items()) / 2

    def strangeness(self, block: Sequence[str]) -> list[float]:
        """How many times as frequent as in the reference its category is."""
        usual, seen, count = self.parts(), self._seen(block), len(block)
        return [seen[name] / count / usual[name] for name in map(self._known, block)]

    def _seen(self, block: Iterable[str]) -> Counter[str]:
        return Counter(map(self._known, block))

    def _known(self, name: str) -> str:
        return name if name in self.counts else OTHERS


@dataclass(frozen=True, slots=True)
class VectorReference:
    """Vectors that were usual: their centroid, and the standard deviation of each direction."""

    centroid: Vector
    spread: Vector

    @classmethod
    def of(cls, vectors: Sequence[Vector]) -> "VectorReference":
        """The reference of these vectors of one length, which are not none."""
        count = len(vectors)
        centroid = tuple(math.fsum(one) / count for one in zip(*vectors, strict=True))
        spread = tuple(
            math.sqrt(math.fsum((value - middle) ** 2 for value in values) / count)
            for values, middle in zip(zip(*vectors, strict=True), centroid, strict=True)
        )
        # Where all vectors are equal, any other is far away, and not infinitely.
        least = max((*spread, 1e-9)) * 1e-3
        return cls(centroid, tuple(max(one, least) for one in spread))

    def distance(self, block: Sequence[Vector]) -> float:
        """Squared distance of the block's centroid, in standard deviations of a centroid, by direction."""
        return len(block) * self.effect(block) ** 2

    def effect(self, block: Sequence[Vector]) -> float:
        """Distance of the block's centroid in standard deviations of one vector, by direction."""
        shift = self._shift(block)
        return math.sqrt(math.fsum(one * one for one in shift) / len(shift))

    def strangeness(self, block: Sequence[Vector]) -> list[float]:
        """How far a vector lies in the direction in which the centroid moved."""
        shift = self._shift(block)
        return [
            math.fsum(
                moved * (value - middle) / spread
                for moved, value, middle, spread in zip(shift, vector, self.centroid, self.spread, strict=True)
            )
            for vector in block
        ]

    def _shift(self, block: Sequence[Vector]) -> list[float]:
        return [
            (math.fsum(values) / len(block) - middle) / spread
            for values, middle, spread in zip(zip(*block, strict=True), self.centroid, self.spread, strict=True)
        ]


def _legendre(x: float) -> tuple[float, float, float, float]:
    """Legendre polynomials of degree 1 to 4 at x, from -1 to 1, each with mean square 1 over that range."""
    square = x * x
    return (
        _ROOTS[0] * x,
        _ROOTS[1] * 0.5 * (3.0 * square - 1.0),
        _ROOTS[2] * 0.5 * x * (5.0 * square - 3.0),
        _ROOTS[3] * 0.125 * ((35.0 * square - 30.0) * square + 3.0),
    )


_ROOTS = tuple(math.sqrt(2.0 * degree + 1.0) for degree in range(1, _LEGENDRE_DEGREES + 1))
