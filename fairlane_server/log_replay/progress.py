"""Progress of a replay, as it is committed with the copies: an offset and counts for each partition. Pure.

The counts are the metadata of the committed offset. So offset, counts and copies are in one transaction, and a reader
that takes over after a kill knows all of them exactly.
"""

import re
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Self

from fairlane.frozen import frozen_dataclass
from fairlane.offsets import CommitPoint, MetadataError

_FORM = "r1"
_COUNTS = re.compile(rf"{_FORM}:(\d{{1,18}}(?:,\d{{1,18}})*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class ReplayCounts:
    """What was found in ranges of the log.

    Attributes:
        read: work items.
        sampled: of these, the ones that the replay is about: its model, version and tenants, and in the sample.
        copied: of the sampled ones, those that run again; each has a copy for each arm.
        denied: their tenant does not allow evaluation.
        erased: the request, its conversation, or a turn in its history was erased.
        unanswered: there is no answer to compare with: another dispatch of the request was answered, the request was
            refused or expired, or its result is older than its retention.
        repeated: another dispatch of the request was copied.
        too_large: the copy would be larger than a record may be.
        gone: offsets that the log does not hold any more, with those of transaction markers.
        unreadable: records and ranges that cannot be read.
    """

    read: int = 0
    sampled: int = 0
    copied: int = 0
    denied: int = 0
    erased: int = 0
    unanswered: int = 0
    repeated: int = 0
    too_large: int = 0
    gone: int = 0
    unreadable: int = 0

    def __add__(self, other: "ReplayCounts") -> "ReplayCounts":
        return ReplayCounts(*(one + more for one, more in zip(astuple(self), astuple(other), strict=True)))

    @classmethod
    def total(cls, counts: Iterable["ReplayCounts"]) -> "ReplayCounts":
        """The sum of all."""
        return sum(counts, start=cls())


@frozen_dataclass(frozen=True, slots=True)
class ReplayPoint(CommitPoint):
    """How far a partition is copied: everything below ``offset``, with the counts of it."""

    counts: ReplayCounts = ReplayCounts()

    @property
    def metadata(self) -> str:
        """``r1:`` and the counts, in their order."""
        return f"{_FORM}:{','.join(map(str, astuple(self.counts)))}"

    @classmethod
    def parse(cls, offset: int, metadata: str | None) -> Self:
        """Decode a committed offset. Fields that a later version adds are left out. Raises MetadataError."""
        found = _COUNTS.fullmatch(metadata or "")
        if found is None:
            raise MetadataError(f"offset metadata of {len(metadata or '')} characters is not of a replay")
        numbers = [int(one) for one in found[1].split(",")]
        return cls(offset, counts=ReplayCounts(*numbers[: len(ReplayCounts.__dataclass_fields__)]))


@dataclass(frozen=True, slots=True)
class ReplayRange:
    """Offsets of a partition that a replay is about: from ``first`` up to but not including ``end``."""

    topic: str
    partition: int
    first: int
    end: int

    def __len__(self) -> int:
        return max(0, self.end - self.first)


def expected_requests(counts: ReplayCounts, done_offsets: int, all_offsets: int, most: int | None) -> float | None:
    """How many requests a replay will have copied at its end, if the rest of its ranges is like what was read; None
    before anything was."""
    if not done_offsets:
        return None if all_offsets else 0.0
    expected = counts.copied / done_offsets * all_offsets
    return expected if most is None else min(float(most), expected)


def remaining_s(expected: float | None, answered: float, per_s: float | None) -> float | None:
    """Predicted time until all requests are answered at the present rate of answers; None while that is unknown."""
    if expected is None or per_s is None or per_s <= 0:
        return None
    return max(0.0, expected - answered) / per_s
