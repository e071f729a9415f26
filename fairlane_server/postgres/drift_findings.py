"""What the drift watch found, and how far its statistics are, from the tables that the recorder fills. Read-only."""

from dataclasses import dataclass
from typing import Any

from fairlane.settings import Settings
from fairlane_server.postgres.reading import reading

_APPLICATION = "fairlane-drift"
_TIMEOUT_S = 10.0
_COLUMNS = """
finding_id, tenant, model, task, version, statistic, effect, log_evidence, log_needed, since_ms, until_ms, blocks,
before, now, found_at_ms
"""
_FINDINGS = f"""
SELECT {_COLUMNS} FROM drift_findings
WHERE (%(tenant)s::text IS NULL OR tenant = %(tenant)s) AND (%(model)s::text IS NULL OR model = %(model)s)
    AND (%(behind_ms)s::bigint IS NULL OR (found_at_ms, finding_id) < (%(behind_ms)s, %(behind_id)s))
ORDER BY found_at_ms DESC, finding_id DESC LIMIT %(most)s
"""  # noqa: S608 - our own names
_FINDING = f"SELECT {_COLUMNS} FROM drift_findings WHERE finding_id = %s"  # noqa: S608 - our own names
_SAMPLES = """
SELECT request_id, strangeness, answered_at_ms FROM drift_samples WHERE tenant = %s AND finding_id = %s
ORDER BY strangeness DESC, request_id
"""
_STATISTICS = """
SELECT tenant, model, task, version, one.key, one.value ->> 'phase', (one.value ->> 'blocks')::bigint, seen_at_ms,
    (one.value ->> 'log_evidence')::double precision
FROM drift_streams, jsonb_each(statistics) AS one
WHERE (%(tenant)s::text IS NULL OR tenant = %(tenant)s) AND (%(model)s::text IS NULL OR model = %(model)s)
ORDER BY 9 DESC NULLS LAST, 1, 2, 3, 4, 5 LIMIT %(most)s
"""


@dataclass(frozen=True, slots=True)
class FoundDrift:
    """A change of the requests or answers of one tenant and model.

    Attributes:
        version: whose answers changed; empty for the requests.
        effect: how much (see docs/drift.md).
        log_evidence, log_needed: natural logarithms.
        since_ms: the estimated time of the change.
        blocks: judged since then.
        before, now: quantiles of numbers, parts of categories.
    """

    finding_id: str
    tenant: str
    model: str
    task: str
    version: str
    statistic: str
    effect: float
    log_evidence: float
    log_needed: float
    since_ms: int
    until_ms: int
    blocks: int
    before: dict[str, float]
    now: dict[str, float]
    found_at_ms: int


@dataclass(frozen=True, slots=True)
class DriftSample:
    """A request that shows a finding; the strangest comes first."""

    request_id: str
    strangeness: float
    answered_at_ms: int


@dataclass(frozen=True, slots=True)
class StatisticState:
    """How far one statistic is.

    Attributes:
        phase: reference, calibration or watching.
        blocks: of the phase.
        log_evidence: natural logarithm; None before the first judged block.
    """

    tenant: str
    model: str
    task: str
    version: str
    statistic: str
    phase: str
    blocks: int
    seen_at_ms: int
    log_evidence: float | None = None


class DriftFindings:
    """Reads as a trusted service. Every call raises DatabaseError."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def page(
        self,
        tenant: str | None = None,
        model: str | None = None,
        behind: tuple[int, str] | None = None,
        most: int = 100,
    ) -> list[FoundDrift]:
        """The latest findings first, behind the one of this time and id."""
        behind_ms, behind_id = behind or (None, None)
        asked = {"tenant": tenant, "model": model, "behind_ms": behind_ms, "behind_id": behind_id, "most": most}
        return [FoundDrift(*row) for row in self._rows(_FINDINGS, asked)]

    def get(self, finding_id: str) -> tuple[FoundDrift, list[DriftSample]] | None:
        """A finding with the requests that show it, or None."""
        with reading(self._settings, _APPLICATION, _TIMEOUT_S, one_snapshot=True) as connection:
            row = connection.execute(_FINDING.encode(), (finding_id,)).fetchone()
            if row is None:
                return None
            found = FoundDrift(*row)
            samples = connection.execute(_SAMPLES, (found.tenant, found.finding_id)).fetchall()
        return found, [DriftSample(*sample) for sample in samples]

    def statistics(
        self, tenant: str | None = None, model: str | None = None, most: int = 1_000
    ) -> list[StatisticState]:
        """States of statistics, those with the most evidence first."""
        return [
            StatisticState(*row) for row in self._rows(_STATISTICS, {"tenant": tenant, "model": model, "most": most})
        ]

    def _rows(self, query: str, asked: dict[str, Any]) -> list[tuple[Any, ...]]:
        with reading(self._settings, _APPLICATION, _TIMEOUT_S) as connection:
            return connection.execute(query.encode(), asked).fetchall()
