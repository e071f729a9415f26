"""Replays in Postgres: planned, listed and steered by people."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from fairlane.closing import Closing
from fairlane_server.administration.events import AdminEvent, AdminEventKind
from fairlane_server.api_keys.api_key import DEPLOYMENT
from fairlane_server.log_replay.plan import (
    LogReplayAction,
    LogReplayConflictError,
    LogReplayPlan,
    LogReplayState,
    new_replay_id,
    state_after,
)
from fairlane_server.log_replay.progress import ReplayCounts, ReplayRange
from fairlane_server.postgres.connection import ALL_TENANTS, ReconnectingConnection, reason
from fairlane_server.store_error import ReportableError, StoreError

APPLICATION_NAME = "fairlane-log-replays"
CALL_TIMEOUT_S = 20.0

_COLUMNS = """replay, name, model, candidate, against, tenants, from_ms, until_ms, sample, most_requests,
    most_outstanding, ranges, state, trouble, created_by, reason, created_at_ms, started_at_ms, ended_at_ms, progress,
    report"""
_CREATE = """
INSERT INTO log_replays (replay, name, model, candidate, against, tenants, from_ms, until_ms, sample, most_requests,
    most_outstanding, created_by, reason, created_at_ms)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
"""
_ONE = f"SELECT {_COLUMNS} FROM log_replays WHERE replay = %(wanted)s OR name = %(wanted)s"  # noqa: S608 - our own names
_PAGE = f"""
SELECT {_COLUMNS} FROM log_replays
WHERE %(behind_ms)s::bigint IS NULL OR (created_at_ms, replay) < (%(behind_ms)s, %(behind)s)
ORDER BY created_at_ms DESC, replay DESC LIMIT %(most)s
"""  # noqa: S608 - our own names
_OPEN = f"""
SELECT {_COLUMNS} FROM log_replays WHERE state IN ('planned', 'running') ORDER BY created_at_ms, replay LIMIT %s
"""  # noqa: S608 - our own names
_STEER = """
UPDATE log_replays SET state = %s, trouble = NULL, ended_at_ms = %s WHERE replay = %s
"""
_KINDS: Mapping[LogReplayAction, AdminEventKind] = {
    LogReplayAction.PAUSE: AdminEventKind.LOG_REPLAY_PAUSED,
    LogReplayAction.RESUME: AdminEventKind.LOG_REPLAY_RESUMED,
    LogReplayAction.CANCEL: AdminEventKind.LOG_REPLAY_CANCELLED,
}


class LogReplayNotFoundError(ReportableError):
    """No replay has this id or name."""


class LogReplayStateError(ReportableError):
    """The state of the replay, or the name of another one, does not permit it."""


@dataclass(frozen=True, slots=True)
class ReplayProgress:
    """How far a replay is.

    Attributes:
        counts: of what was read.
        done_offsets: of the ranges; ``all_offsets`` is what they hold together.
        answered: results of copies, by arm; ``failed`` those of them that are failures, ``dropped`` those that did not
            run.
        per_s: answered requests a second, of late.
        remaining_s: predicted time until all are answered.
        at_ms: when this was so.
    """

    counts: ReplayCounts = ReplayCounts()  # noqa: RUF009 - frozen
    done_offsets: int = 0
    all_offsets: int = 0
    answered: Mapping[str, int] = field(default_factory=dict)
    failed: Mapping[str, int] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)
    per_s: float | None = None
    remaining_s: float | None = None
    at_ms: int = 0

    @classmethod
    def of_json(cls, plain: Mapping[str, Any]) -> "ReplayProgress":
        """As ``asdict`` makes it; fields of a later version are left out."""
        known = {one.name for one in fields(ReplayCounts)}
        counts = ReplayCounts(**{name: value for name, value in plain["counts"].items() if name in known})
        names = {one.name for one in fields(cls)} - {"counts"}
        return cls(counts=counts, **{name: value for name, value in plain.items() if name in names})


@dataclass(frozen=True, slots=True)
class LogReplay:
    """A replay. ``ranges`` is None before it is begun; ``trouble`` says why it makes no progress, or why it failed.
    ``report`` is a ``ReplayReport`` in plain values, None before it is finished."""

    replay: str
    name: str | None
    model: str
    candidate: str
    against: str
    tenants: tuple[str, ...]
    from_ms: int
    until_ms: int
    sample: float
    most_requests: int | None
    most_outstanding: int
    ranges: tuple[ReplayRange, ...] | None
    state: LogReplayState
    trouble: str | None
    created_by: str
    reason: str
    created_at_ms: int
    started_at_ms: int | None
    ended_at_ms: int | None
    progress: ReplayProgress
    report: Mapping[str, Any] | None


class LogReplays(Closing):
    """All replays. Every call raises StoreError when Postgres cannot be used. For one thread at a time."""

    def __init__(self, dsn: str) -> None:
        self._kept = ReconnectingConnection(dsn, APPLICATION_NAME, CALL_TIMEOUT_S)

    def close(self) -> None:
        self._kept.close()

    def create(self, plan: LogReplayPlan, against: str, author: str, now_ms: int) -> LogReplay:
        """Record a checked plan and the audit of it. Raises LogReplayStateError if its name is taken."""
        made = new_replay_id()
        given = (made, plan.name, plan.model, plan.candidate, against, list(plan.tenants), plan.from_ms, plan.until_ms)
        values = (*given, plan.sample, plan.most_requests, plan.most_outstanding, author, plan.reason, now_ms)
        details = {**asdict(plan), "replay": made, "against": against}
        try:
            with self._transaction() as connection:
                connection.execute(_CREATE, values)
                AdminEvent(AdminEventKind.LOG_REPLAY_CREATED, DEPLOYMENT, author, details=details).note(connection)
                return _one(connection, made)
        except psycopg.errors.UniqueViolation:
            raise LogReplayStateError(f"another replay has the name {plan.name}") from None

    def get(self, wanted: str) -> LogReplay:
        """The replay with this id or name. Raises LogReplayNotFoundError."""
        with self._transaction() as connection:
            return _one(connection, wanted)

    def page(self, behind: tuple[int, str] | None, most: int) -> Sequence[LogReplay]:
        """The latest replays, newest first, behind the one of this time and id."""
        behind_ms, behind_id = behind or (None, None)
        values = {"behind_ms": behind_ms, "behind": behind_id, "most": most}
        with self._transaction() as connection:
            return [replay_of_row(row) for row in connection.execute(_PAGE.encode(), values)]

    def steer(self, wanted: str, action: LogReplayAction, author: str, why: str, now_ms: int) -> LogReplay:
        """Pause, resume or cancel a replay. Raises LogReplayNotFoundError, LogReplayStateError."""
        with self._transaction() as connection:
            found = _one(connection, wanted, lock=b" FOR UPDATE")
            try:
                after = state_after(found.state, action)
            except LogReplayConflictError as error:
                raise LogReplayStateError(str(error)) from None
            ended_at_ms = now_ms if after is LogReplayState.CANCELLED else None
            connection.execute(_STEER, (after, ended_at_ms, found.replay))
            details = {"replay": found.replay, "before": found.state, "reason": why}
            AdminEvent(_KINDS[action], DEPLOYMENT, author, details=details).note(connection)
            return _one(connection, found.replay)

    @contextmanager
    def _transaction(self) -> Iterator[psycopg.Connection]:
        try:
            with self._kept.transaction(ALL_TENANTS) as connection:
                yield connection
        except psycopg.errors.UniqueViolation:
            raise
        except psycopg.Error as error:
            raise StoreError(reason(error)) from None


def open_replays(connection: psycopg.Connection, most: int) -> Sequence[LogReplay]:
    """Those that are planned or running, the oldest first. Raises psycopg.Error."""
    return [replay_of_row(row) for row in connection.execute(_OPEN.encode(), (most,))]


def _one(connection: psycopg.Connection, wanted: str, lock: bytes = b"") -> LogReplay:
    row = connection.execute(_ONE.encode() + lock, {"wanted": wanted}).fetchone()
    if row is None:
        raise LogReplayNotFoundError(f"no replay has the id or name {wanted}")
    return replay_of_row(row)


def replay_of_row(row: tuple[Any, ...]) -> LogReplay:
    """A row with all columns, in their order."""
    values = dict(zip((one.name for one in fields(LogReplay)), row, strict=True))
    ranges, progress = values["ranges"], values["progress"]
    values["tenants"] = tuple(values["tenants"])
    values["ranges"] = None if ranges is None else tuple(ReplayRange(**one) for one in ranges)
    values["state"] = LogReplayState(values["state"])
    values["progress"] = ReplayProgress() if progress is None else ReplayProgress.of_json(progress)
    return LogReplay(**values)


def plain_json(value: object) -> Jsonb:
    """A value for a ``jsonb`` column."""
    return Jsonb(value, dumps=lambda one: json.dumps(one, allow_nan=False))
