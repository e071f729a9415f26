"""Scheduled evaluation runs of all tenants, as the recorder shows them and rollouts explain them. Read-only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fairlane.settings import Settings
from fairlane_server.evaluation.schedules import measured_versions
from fairlane_server.models.routes import version_key
from fairlane_server.postgres.reading import reading

if TYPE_CHECKING:
    import psycopg

_TIMEOUT_S = 10.0
_COLUMNS = "tenant, run_id, reference, set_name, set_version, scorer, finished_at_ms, result, baseline_run, fall"
_LATEST = f"""
SELECT DISTINCT ON (tenant, reference) {_COLUMNS} FROM evaluation_runs AS run
WHERE is_scheduled AND state = 'finished' AND EXISTS (
    SELECT FROM evaluation_schedules AS schedule WHERE schedule.tenant = run.tenant AND schedule.model = run.model
)
ORDER BY tenant, reference, finished_at_ms DESC
"""  # noqa: S608 - our own names
_ROUTES = """
SELECT DISTINCT ON (model) model, aliases, rollout FROM model_routes
WHERE model IN (SELECT model FROM evaluation_schedules) ORDER BY model, log_topic, log_partition, log_offset DESC
"""
_OF_MODEL = f"""
SELECT {_COLUMNS} FROM evaluation_runs
WHERE model = %s AND state = 'finished' AND finished_at_ms >= %s ORDER BY finished_at_ms LIMIT %s
"""  # noqa: S608 - our own names
# A schedule that nobody runs: twice its time without a result. One by requests alone has no time.
_OVERDUE = """
SELECT schedule.tenant, schedule.model, %(now_ms)s - greatest(schedule.created_at_ms, coalesce((
    SELECT max(finished_at_ms) FROM evaluation_runs AS run
    WHERE run.tenant = schedule.tenant AND run.model = schedule.model AND run.is_scheduled
), 0)) > 2 * schedule.every_hours * 3600000
FROM evaluation_schedules AS schedule WHERE schedule.every_hours IS NOT NULL
"""


@dataclass(frozen=True, slots=True)
class EndedRun:
    """A run that has a result. ``result`` and ``fall`` are as they are stored."""

    tenant: str
    run_id: str
    reference: str
    set_name: str
    set_version: int
    scorer: str
    finished_at_ms: int
    result: Mapping[str, Any]
    baseline_run: str | None
    fall: Mapping[str, Any] | None

    @property
    def is_fall(self) -> bool:
        return self.fall is not None and bool(self.fall["is_fall"])


def latest_scheduled_runs(connection: "psycopg.Connection") -> Sequence[EndedRun]:
    """The last run of each version that schedules measure now: what was taken back is no alarm any more. In a
    transaction that acts for all tenants."""
    measured = {
        version_key(model, version)
        for model, aliases, rollout in connection.execute(_ROUTES)
        for version in measured_versions(aliases, rollout)
    }
    return [run for row in connection.execute(_LATEST.encode()) if (run := EndedRun(*row)).reference in measured]


def overdue_schedules(connection: "psycopg.Connection", now_ms: int) -> dict[tuple[str, str], bool]:
    """By tenant and model, whether a schedule has had no result for twice its time. As above."""
    rows = connection.execute(_OVERDUE, {"now_ms": now_ms})
    return {(tenant, model): bool(is_overdue) for tenant, model, is_overdue in rows}


def runs_of_model(settings: Settings, model: str, since_ms: int, most: int) -> Sequence[EndedRun]:
    """The runs of a model by all tenants that ended since then, the oldest first. Raises DatabaseError."""
    with reading(settings, "fairlane-evaluation", _TIMEOUT_S) as connection:
        return [EndedRun(*row) for row in connection.execute(_OF_MODEL.encode(), (model, since_ms, most))]
