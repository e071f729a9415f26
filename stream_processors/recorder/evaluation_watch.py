"""The thread that shows what scheduled evaluation runs measured: commands make them, which nobody scrapes."""

from collections.abc import Callable, Sequence

import psycopg

from fairlane import metrics
from fairlane.clock import ClockMs, now_ms
from fairlane.logs import get_logger
from fairlane_server.postgres.connection import ALL_TENANTS, ReconnectingConnection, reason
from fairlane_server.postgres.scheduled_runs import EndedRun, latest_scheduled_runs, overdue_schedules
from stream_processors.recorder.watch import Watch

log = get_logger(__name__)

APPLICATION_NAME = "fairlane-evaluation-watch"

_MOST_SHOWN = 500
_INTERVAL_S = 60.0
_CALL_TIMEOUT_S = 10.0


class EvaluationWatch(Watch):
    """Looks once a minute. Every recorder of a fleet shows the same. ``on_failure`` is called on the thread with the
    error that ended it; Postgres that does not answer is none."""

    def __init__(self, dsn: str, on_failure: Callable[[BaseException], None], wall_clock: ClockMs = now_ms) -> None:
        super().__init__("evaluation-watch", _INTERVAL_S, on_failure)
        self._kept = ReconnectingConnection(dsn, APPLICATION_NAME, _CALL_TIMEOUT_S)
        self._wall_clock = wall_clock
        self._shown: set[tuple[str, str, str]] = set()
        self._schedules: set[tuple[str, str]] = set()
        self._known: set[str] = set()

    def close(self) -> None:
        self._kept.close()

    def look(self) -> None:
        """Show the last run of each version, once."""
        try:
            with self._kept.transaction(ALL_TENANTS) as connection:
                found = latest_scheduled_runs(connection)[:_MOST_SHOWN]
                overdue = overdue_schedules(connection, self._wall_clock())
        except psycopg.Error as error:
            log.warning("evaluations_not_shown", reason=reason(error))
            return
        by_version = {_labels(one): one for one in found}
        means = {one: run.result["mean"] for one, run in by_version.items() if run.result["mean"] is not None}
        falls = {one: float(by_version[one].is_fall) for one in means}
        metrics.show(metrics.EVALUATION_SCORE_RATIO, means, self._shown)
        self._shown = metrics.show(metrics.EVALUATION_FELL, falls, self._shown)
        shown = dict(sorted(overdue.items())[:_MOST_SHOWN])
        self._schedules = metrics.show(metrics.EVALUATION_OVERDUE, shown, self._schedules)
        self._log(found)

    def _log(self, found: Sequence[EndedRun]) -> None:
        fallen = {run.run_id: run for run in found if run.is_fall}
        for run_id in fallen.keys() - self._known:
            run = fallen[run_id]
            assert run.fall is not None  # noqa: S101 - it fell
            log.warning(
                "evaluation_fell",
                tenant=run.tenant,
                model=run.reference,
                run=run_id,
                baseline_run=run.baseline_run,
                difference=run.fall["difference"],
            )
        self._known = set(fallen)


def _labels(run: EndedRun) -> tuple[str, str, str]:
    model, _, version = run.reference.partition("/")
    return run.tenant, model, version
