"""Removal of old rows, in small steps, on a thread and a connection of its own."""

import random
import threading
from collections.abc import Callable, Sequence
from time import monotonic

import psycopg

from fairlane import metrics
from fairlane.clock import ClockMs, now_ms
from fairlane.logs import get_logger
from fairlane_server.postgres.connection import ReconnectingConnection, reason
from stream_processors.recorder.retention import RemovalLag, RemovalSchedule, Rule

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
        """Give the connection back; the next call opens another."""
        self._kept.close()


class Removal:
    """The thread.

    Args:
        rows: that it removes.
        rules: how long they are kept.
        on_failure: called on the thread with what ended it.
        wall_clock: milliseconds since the epoch.
    """

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
                self._show_lag()
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

    def _show_lag(self) -> None:
        for name, lag_ms in self._lag.lags_ms(self._wall_clock()).items():
            metrics.RETENTION_LAG.labels(name).set(lag_ms / 1_000)
