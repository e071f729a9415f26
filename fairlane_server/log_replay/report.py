"""The report of a replay: its pairs are joined to requests, added up by task, and judged."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fairlane_server.evaluation.copies import EvaluationArm
from fairlane_server.log_replay.verdict import ReplayedAnswers, ReplayReport, ReplayTally, judge_replay
from fairlane_server.postgres.evaluation_results import ArmPair, read_pairs

if TYPE_CHECKING:
    import psycopg

MOST_LABELS = 100_000
MOST_PAIRS_AT_ONCE = 40_000
"""Of a report of a replay that is under way; the report of a finished one is of all."""

_LABELS = "SELECT tenant, request_id, label FROM log_replay_labels(%s, %s)"

PairPlace = tuple[str, str, str]
"""Tenant, request and arm."""
ReplayLabels = Mapping[tuple[str, str], str]
"""The right label by tenant and request."""
FIRST_PLACE: PairPlace = ("", "", "")


@dataclass(slots=True)
class ReportBuilder:
    """Joins the two copies of each request; pairs of one request come one after the other.

    Attributes:
        place: of the last pair.
    """

    labels: ReplayLabels
    place: PairPlace = FIRST_PLACE
    _tallies: dict[str, ReplayTally] = field(default_factory=dict)
    _first: ArmPair | None = None

    def add(self, pairs: Iterable[ArmPair]) -> None:
        """Add pairs, in their order. A request of which one copy has no result yet does not count."""
        for one in pairs:
            pair, before = one.pair, self._first
            self.place = (pair.tenant, pair.request_id, one.arm)
            self._first = one
            if before is not None and (before.pair.tenant, before.pair.request_id) == (pair.tenant, pair.request_id):
                self._add({before.arm: before, one.arm: one})
                self._first = None

    def report(self) -> ReplayReport:
        return judge_replay(self._tallies.values())

    def _add(self, by_arm: Mapping[str, ArmPair]) -> None:
        candidate, champion = (by_arm[arm].pair for arm in (EvaluationArm.CANDIDATE, EvaluationArm.CHAMPION))
        # A copy that did not run may not say what its task was.
        task = candidate.task or champion.task
        self._tallies.setdefault(task, ReplayTally(task)).add(
            ReplayedAnswers(
                task=task,
                original=candidate.original,
                candidate=candidate.copy,
                candidate_end=candidate.end,
                champion=champion.copy,
                champion_end=champion.end,
                expected=self.labels.get((candidate.tenant, candidate.request_id)),
            )
        )


def read_labels(connection: "psycopg.Connection", replay: str) -> ReplayLabels:
    """The right labels of a replay's requests, of tenants that allow evaluation now. Raises psycopg.Error."""
    rows = connection.execute(_LABELS, (replay, MOST_LABELS))
    return {(tenant, request): label for tenant, request, label in rows}


def read_report(connection: "psycopg.Connection", replay: str, most_pairs: int = MOST_PAIRS_AT_ONCE) -> ReplayReport:
    """The report of what has a result now. Raises psycopg.Error."""
    builder = ReportBuilder(read_labels(connection, replay))
    builder.add(read_pairs(connection, replay, most_pairs))
    return builder.report()
