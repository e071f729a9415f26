"""Replays of the log for callers of the admin API."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from fairlane.clock import now_ms
from fairlane.closing import Closing
from fairlane.settings import Settings
from fairlane_server.administration.model_routes import ModelRoutes, invalid_change
from fairlane_server.log_replay.plan import LogReplayAction, LogReplayPlan, check_plan
from fairlane_server.log_replay.report import read_report
from fairlane_server.log_replay.store import LogReplay, LogReplays
from fairlane_server.models.catalog import ModelCatalog
from fairlane_server.postgres.reading import reading

MOST_PAIRS_OF_CALL = 4_000
"""Of a report of a replay that is under way; `fairlane replay report` reads more."""
_REPORT_TIMEOUT_S = 20.0


class LogReplayOffice(Closing):
    """All replays. For one thread at a time."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._replays = LogReplays(settings.postgres_dsn.get_secret_value())

    def close(self) -> None:
        self._replays.close()

    def create(self, plan: LogReplayPlan, against: str, author: str) -> LogReplay:
        """Record a checked plan. Raises LogReplayStateError, StoreError."""
        return self._replays.create(plan, against, author, now_ms())

    def get(self, wanted: str) -> LogReplay:
        """Raises LogReplayNotFoundError, StoreError."""
        return self._replays.get(wanted)

    def page(self, behind: tuple[int, str] | None, most: int) -> Sequence[LogReplay]:
        """The latest replays, newest first, without their reports. Raises StoreError."""
        return [replace(one, report=None) for one in self._replays.page(behind, most)]

    def steer(self, wanted: str, action: LogReplayAction, author: str, why: str) -> LogReplay:
        """Raises LogReplayNotFoundError, LogReplayStateError, StoreError."""
        return self._replays.steer(wanted, action, author, why, now_ms())

    def report(self, wanted: str) -> tuple[LogReplay, dict[str, Any]]:
        """A replay and its report: the stored one, or one of what has a result now. Raises LogReplayNotFoundError,
        StoreError, DatabaseError."""
        found = self._replays.get(wanted)
        if found.report is not None:
            return found, dict(found.report)
        with reading(self._settings, "fairlane-log-replays", _REPORT_TIMEOUT_S) as connection:
            return found, asdict(read_report(connection, found.replay, MOST_PAIRS_OF_CALL))


def checked_against(plan: LogReplayPlan, routes: ModelRoutes) -> str:
    """The version that the candidate of a plan is compared with, by what is published now. Raises
    InvalidModelChangeError, ClusterError."""
    published = {key: record for key, record in routes.read().items() if record is not None}
    try:
        return check_plan(plan, ModelCatalog.of(published))
    except ValueError as error:
        raise invalid_change(error) from None
