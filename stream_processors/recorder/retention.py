"""Retention of rows: old ones are not stored, and stored ones are removed in small steps."""

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic

import psycopg

from fairlane import metrics
from fairlane.clock import ClockMs, now_ms
from fairlane.logs import get_logger
from fairlane.settings import Settings
from fairlane_server.postgres.connection import ReconnectingConnection, reason
from stream_processors.recorder.projection import Projection
from stream_processors.recorder.tables import (
    AUDIT_LOGS,
    DAILY_SUMS,
    ERASED,
    ERASURES,
    EVALUATION_RESULTS,
    FEEDBACK,
    HOURLY_SUMS,
    LABEL_ITEMS,
    RESULTS,
    TURNS,
    USAGE,
    Table,
)

INTERVAL_S = 60.0
"""Between two looks at a table in which nothing more is old."""

_PAUSE_S = 0.05
_RETRY_S = 5.0
_LEAST_AT_ONCE = 50
_JITTER = 0.5


@dataclass(frozen=True, slots=True)
class Rule:
    """How long the rows of one table are kept; ``column`` is milliseconds since the epoch, an hour or a day, from which
    a row's age counts, and indexed."""

    table: Table
    column: str
    keep_s: int

    @property
    def name(self) -> str:
        return self.table.name

    def before_ms(self, epoch_ms: int) -> int:
        """Rows from before this are old."""
        return epoch_ms - 1_000 * self.keep_s


def rules_of(settings: Settings) -> tuple[Rule, ...]:
    """One for each table that grows with the requests."""
    daily_s = max(settings.usage_daily_ttl_s, settings.usage_ttl_s)
    return (
        Rule(RESULTS, "replied_at_ms", settings.results_ttl_s),
        Rule(TURNS, "replied_at_ms", settings.conversation_ttl_s),
        Rule(USAGE, "occurred_at_ms", settings.usage_ttl_s),
        Rule(AUDIT_LOGS, "occurred_at_ms", settings.audit_ttl_s),
        Rule(FEEDBACK, "given_at_ms", settings.feedback_ttl_s),
        Rule(LABEL_ITEMS, "queued_at_ms", settings.labels_ttl_s),
        # As long as the originals that they are compared with.
        Rule(EVALUATION_RESULTS, "finished_at_ms", settings.results_ttl_s),
        *(Rule(table, "day", daily_s) for table in DAILY_SUMS),
        Rule(ERASURES, "requested_at_ms", settings.audit_ttl_s),
        # A tombstone names the end of its own time.
        Rule(ERASED, "kept_until_ms", 0),
        Rule(HOURLY_SUMS, "hour", settings.usage_ttl_s),
    )


def drop_old(projection: Projection, rules: Sequence[Rule], epoch_ms: int) -> None:
    """Take out the rows that would be removed at once: those of a log that is read again from its beginning."""
    for rule in rules:
        layers = projection.layers.get(rule.name)
        if layers is None:
            continue
        at, before_ms = list(rule.table.columns).index(rule.column), rule.before_ms(epoch_ms)
        kept = [[row for row in layer if row[at] >= before_ms] for layer in layers]
        projection.layers[rule.name] = [layer for layer in kept if layer]


class RemovalLag:
    """By how much rows of each table exceed their retention.

    It counts from the oldest row that the last removal left, or else from the time before which that removal left none.
    The lag of a table whose removals fail therefore grows, whatever the table holds. A table that was never looked at
    counts as clean at ``started_ms``, since the epoch.
    """

    def __init__(self, rules: Sequence[Rule], started_ms: int) -> None:
        self._rules = {rule.name: rule for rule in rules}
        self._clean_until_ms = {rule.name: rule.before_ms(started_ms) for rule in rules}

    def removed(self, name: str, before_ms: int, oldest_ms: int | None) -> None:
        """Rows from before ``before_ms`` were removed; the oldest of those that were left is from ``oldest_ms``."""
        self._clean_until_ms[name] = before_ms if oldest_ms is None else oldest_ms

    def lags_ms(self, epoch_ms: int) -> dict[str, int]:
        return {
            name: max(0, rule.before_ms(epoch_ms) - self._clean_until_ms[name]) for name, rule in self._rules.items()
        }


@dataclass(slots=True)
class _Pace:
    due_at: float = 0.0
    at_once: int = 0


class RemovalSchedule:
    """The table that is due, and the number of rows to remove at once.

    Each removal is followed by a pause as long as itself, so that it takes half of one connection's time at most. A
    table in which nothing more is old rests for about ``INTERVAL_S``. ``at_once`` is halved while removals take too
    long.
    """

    def __init__(self, names: Sequence[str], at_once: int = 1_000) -> None:
        self._at_once = at_once
        self._paces: Mapping[str, _Pace] = {name: _Pace(at_once=at_once) for name in names}

    def next_due(self) -> tuple[str, float, int]:
        """The table that is due first, when it is, and how many rows to remove."""
        name = min(self._paces, key=lambda name: self._paces[name].due_at)
        pace = self._paces[name]
        return name, pace.due_at, pace.at_once

    def removed(self, name: str, count: int, took_s: float, now: float, chance: float) -> None:
        """So many rows were removed just now. ``chance`` is from 0 to 1; ``now`` any clock that never goes back."""
        pace = self._paces[name]
        is_all = count < pace.at_once
        pace.due_at = now + (INTERVAL_S * (1 + _JITTER * (chance - 0.5)) if is_all else max(_PAUSE_S, took_s))
        pace.at_once = min(self._at_once, 2 * pace.at_once)

    def failed(self, name: str, now: float, chance: float, *, was_late: bool) -> None:
        """It was not removed; ``was_late``: because it took too long."""
        pace = self._paces[name]
        pace.due_at = now + _RETRY_S * (1 + _JITTER * (chance - 0.5))
        if was_late:
            pace.at_once = max(_LEAST_AT_ONCE, pace.at_once // 2)


log = get_logger(__name__)

APPLICATION_NAME = "fairlane-retention"

_CALL_TIMEOUT_S = 10.0
_SERVER_TIMEOUTS_S = {"idle_in_transaction_session_timeout": 10, "statement_timeout": 8, "lock_timeout": 2}
_STOP_TIMEOUT_S = 15.0
_REMOVE = "SELECT removed, oldest_ms FROM remove_old_rows(%s, %s, %s)"
_MOST_WAIT_S = 5.0


class OldRows:
    """The old rows of the tables, as the role of the recorder."""

    def __init__(self, dsn: str, call_timeout_s: float = _CALL_TIMEOUT_S) -> None:
        self._kept = ReconnectingConnection(dsn, APPLICATION_NAME, call_timeout_s, server_timeouts_s=_SERVER_TIMEOUTS_S)

    def remove(self, rule: Rule, before_ms: int, most: int) -> tuple[int, int | None]:
        """Remove rows from before this, the oldest first. Returns how many there were, and from when the oldest is that
        is left of them. Raises psycopg.Error."""
        with self._kept.transaction() as connection:
            row = connection.execute(_REMOVE, (rule.name, before_ms, most)).fetchone()
        removed, oldest_ms = row or (0, None)
        return int(removed), None if oldest_ms is None else int(oldest_ms)

    def close(self) -> None:
        self._kept.close()


class Removal:
    """The thread that removes old rows. ``on_failure`` is called on it with the error that ended it."""

    def __init__(
        self,
        rows: OldRows,
        rules: Sequence[Rule],
        on_failure: Callable[[BaseException], None],
        wall_clock: ClockMs = now_ms,
    ) -> None:
        self._rows = rows
        self._rules = {rule.name: rule for rule in rules}
        self._on_failure = on_failure
        self._wall_clock = wall_clock
        self._schedule = RemovalSchedule(list(self._rules))
        self._lag = RemovalLag(rules, wall_clock())
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="retention", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End it, after the removal that is under way."""
        self._stopping.set()
        self._thread.join(_STOP_TIMEOUT_S)

    def _run(self) -> None:
        try:
            while True:
                name, due_at, most = self._schedule.next_due()
                # Not longer: the lag is shown while nothing can be removed.
                if self._stopping.wait(min(_MOST_WAIT_S, max(0.0, due_at - monotonic()))):
                    break
                if monotonic() >= due_at:
                    self._step(self._rules[name], most)
                for table, lag_ms in self._lag.lags_ms(self._wall_clock()).items():
                    metrics.RETENTION_LAG.labels(table).set(lag_ms / 1_000)
        except Exception as error:  # noqa: BLE001 - handed to the owner
            self._on_failure(error)
        finally:
            self._rows.close()

    def _step(self, rule: Rule, most: int) -> None:
        begun, before_ms = monotonic(), rule.before_ms(self._wall_clock())
        chance = random.random()  # noqa: S311 - jitter, no secret
        try:
            removed, oldest_ms = self._rows.remove(rule, before_ms, most)
        except psycopg.Error as error:
            was_late = isinstance(error, psycopg.errors.QueryCanceled)
            self._schedule.failed(rule.name, monotonic(), chance, was_late=was_late)
            log.warning("old_rows_not_removed", table=rule.name, reason=reason(error))
            return
        self._schedule.removed(rule.name, removed, monotonic() - begun, monotonic(), chance)
        metrics.ROWS_REMOVED.labels(rule.name).inc(removed)
        self._lag.removed(rule.name, before_ms, oldest_ms)
