"""What a shadow has copied, how its copies ended, and how they compare with their originals."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fairlane.settings import Settings
from fairlane_server.evaluation.pairs import PairReport, PairTally
from fairlane_server.postgres.evaluation_results import read_ends, read_pairs, read_sampled
from fairlane_server.postgres.reading import reading

if TYPE_CHECKING:
    import psycopg

MOST_PAIRS = 10_000
"""Compared in a report: enough for an interval of one percent, and read within seconds."""

_APPLICATION = "fairlane-shadows"
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class ShadowCounts:
    """Requests that a shadow sampled, by ``copied`` or why not, and its copies by how they ended. A copy that is in
    neither count of ends is still waiting, running, or not recorded yet."""

    sampled: Mapping[str, int]
    ended: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ShadowReport:
    """The counts of a shadow, and the comparison of each task, of at most so many pairs."""

    run: str
    counts: ShadowCounts
    tasks: tuple[PairReport, ...]


def read_shadow_counts(settings: Settings, run: str) -> ShadowCounts:
    """From the tables that the recorder fills. Raises DatabaseError."""
    with reading(settings, _APPLICATION, _TIMEOUT_S) as connection:
        return _counts(connection, run)


def read_shadow_report(settings: Settings, run: str, most: int = MOST_PAIRS) -> ShadowReport:
    """From the tables that the recorder fills. Raises DatabaseError."""
    tallies: dict[str, PairTally] = {}
    with reading(settings, _APPLICATION, _TIMEOUT_S, one_snapshot=True) as connection:
        counts = _counts(connection, run)
        for _, pair in read_pairs(connection, run, most):
            tallies.setdefault(pair.task, PairTally(pair.task)).add(pair)
    return ShadowReport(run, counts, tuple(tallies[task].report() for task in sorted(tallies)))


def _counts(connection: "psycopg.Connection", run: str) -> ShadowCounts:
    ended = {end: count for (_, end), count in read_ends(connection, run).items()}
    return ShadowCounts(read_sampled(connection, run), ended)
