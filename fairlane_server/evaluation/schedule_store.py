"""Schedules of one tenant's evaluations in Postgres, with what decides when they are due.

>>> with EvaluationSchedules(dsn, tenant="acme") as schedules:
...     schedules.set(EvaluationSchedule("digits", "holdout", "accuracy", {}, None, every_hours=24.0))
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psycopg.types.json import Jsonb

from fairlane.names import is_model_name
from fairlane_server.evaluation.schedules import EvaluationSchedule, LastRun, check_schedule, measured_versions
from fairlane_server.evaluation.set_store import (
    EvaluationStoreError,
    UnknownEvaluationError,
)
from fairlane_server.evaluation.tenant_store import TenantStore
from fairlane_server.postgres.connection import ALL_TENANTS

MOST_SCHEDULES = 1_000
"""Of a tenant."""

_COLUMNS = (
    "model, set_name, scorer, parameters, judge, every_hours, every_requests, baseline_run, created_at_ms, created_by"
)
_SET = f"""
INSERT INTO evaluation_schedules (tenant, {_COLUMNS}) VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
ON CONFLICT (tenant, model) DO UPDATE SET set_name = excluded.set_name, scorer = excluded.scorer,
    parameters = excluded.parameters, judge = excluded.judge, every_hours = excluded.every_hours,
    every_requests = excluded.every_requests,
    baseline_run = coalesce(excluded.baseline_run, evaluation_schedules.baseline_run),
    created_at_ms = excluded.created_at_ms, created_by = excluded.created_by
"""  # noqa: S608 - our own names
_COUNT = "SELECT count(*) FROM evaluation_schedules WHERE tenant = %s AND model <> %s"
_LIST = f"SELECT {_COLUMNS} FROM evaluation_schedules WHERE tenant = %s ORDER BY model"  # noqa: S608 - our own names
_REMOVE = "DELETE FROM evaluation_schedules WHERE tenant = %s AND model = %s"
_BASELINE = "UPDATE evaluation_schedules SET baseline_run = %s WHERE tenant = %s AND model = %s"
# Reading a sum of days is cheap, and it counts every request once; a tenant's own rows would not be the model's load.
_REQUESTS = "SELECT coalesce(sum(requests), 0) FROM usage_daily WHERE model = %s"
_ROUTE = """
SELECT aliases, rollout FROM model_routes WHERE model = %s ORDER BY log_topic, log_partition, log_offset DESC LIMIT 1
"""
_LAST_RUNS = """
SELECT DISTINCT ON (reference) reference, started_at_ms, coalesce(model_requests, 0) FROM evaluation_runs
WHERE tenant = %s AND model = %s AND set_digest = %s AND scorer = %s AND is_scheduled AND state = 'finished'
ORDER BY reference, started_at_ms DESC
"""


@dataclass(frozen=True, slots=True)
class ModelState:
    """What decides whether a model is due: its versions to measure, and the requests to it since they are counted."""

    versions: tuple[str, ...]
    requests: int


class EvaluationSchedules(TenantStore):
    """Every call raises StoreError: Postgres cannot be used, and it is unknown whether it was done;
    EvaluationStoreError: as each call says."""

    def set(self, schedule: EvaluationSchedule) -> None:
        """Store a schedule in place of that of its model. Without a baseline the present one stays. Raises
        EvaluationStoreError for an invalid one."""
        if not is_model_name(schedule.model):
            raise EvaluationStoreError(f"model: no model can have the name {schedule.model!r}", "model")
        try:
            check_schedule(schedule)
        except ValueError as error:
            raise EvaluationStoreError(str(error), str(error).partition(":")[0]) from None
        judge = None if schedule.judge is None else Jsonb(dict(schedule.judge))
        row = (
            *(
                self._tenant,
                schedule.model,
                schedule.set_name,
                schedule.scorer,
                Jsonb(dict(schedule.parameters)),
                judge,
            ),
            *(schedule.every_hours, schedule.every_requests, schedule.baseline_run),
            *(schedule.created_at_ms, schedule.created_by),
        )
        with self._transaction() as connection:
            count = connection.execute(_COUNT, (self._tenant, schedule.model)).fetchone() or (0,)
            if count[0] >= MOST_SCHEDULES:
                raise EvaluationStoreError(f"{self._tenant} has {MOST_SCHEDULES} schedules, which is the most", "model")
            connection.execute(_SET.encode(), row)

    def list(self) -> Sequence[EvaluationSchedule]:
        """By model."""
        with self._transaction() as connection:
            return [EvaluationSchedule(*row) for row in connection.execute(_LIST.encode(), (self._tenant,))]

    def remove(self, model: str) -> None:
        """Raises UnknownEvaluationError."""
        with self._transaction() as connection:
            if connection.execute(_REMOVE, (self._tenant, model)).rowcount != 1:
                raise self._unknown(model)

    def set_baseline(self, model: str, run_id: str | None) -> None:
        """Compare further runs with this one; None: with the next one that ends. Raises UnknownEvaluationError."""
        with self._transaction() as connection:
            if connection.execute(_BASELINE, (run_id, self._tenant, model)).rowcount != 1:
                raise self._unknown(model)

    def state(self, model: str) -> ModelState:
        """Of a model now. It has no versions to measure if its route is not recorded."""
        with self._transaction(ALL_TENANTS) as connection:
            requests = connection.execute(_REQUESTS, (model,)).fetchone() or (0,)
            route = connection.execute(_ROUTE, (model,)).fetchone()
        return ModelState(() if route is None else measured_versions(*route), int(requests[0]))

    def last_runs(self, schedule: EvaluationSchedule, set_digest: str) -> dict[str, LastRun]:
        """The last scheduled run of each version on this set."""
        asked = (self._tenant, schedule.model, set_digest, schedule.scorer)
        with self._transaction() as connection:
            rows: Sequence[tuple[Any, ...]] = connection.execute(_LAST_RUNS, asked).fetchall()
        versions = {reference.partition("/")[2]: (began_ms, requests) for reference, began_ms, requests in rows}
        return {version: LastRun(version, *rest) for version, rest in versions.items()}

    def _unknown(self, model: str) -> UnknownEvaluationError:
        return UnknownEvaluationError(f"{self._tenant} has no evaluation schedule of {model}", "model")
