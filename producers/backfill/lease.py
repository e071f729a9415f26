"""Lease of a running job and its owner's commands, on a thread of its own; waits that react to both.

The loop may wait for Kafka for half a minute; the lease must not end meanwhile.
"""

import random
import threading
from collections.abc import Callable
from itertools import count
from time import monotonic
from typing import TypeVar

from fairlane.backoff import Backoff
from fairlane.logs import get_logger
from fairlane_server.processes.service import StopSignal
from producers.backfill.job import Status, Wanted
from producers.backfill.job_store import PostgresJobLog
from producers.backfill.ports import AwayError, Control, JobFailedError, JobLog, LeaseLostError

log = get_logger(__name__)

_BACKOFF = Backoff(first_s=0.2, longest_s=5.0)

T = TypeVar("T")


class LeftError(Exception):
    """Raised to leave the job to another runner."""


class JobTimeouts:
    """Of one job's loop.

    Attributes:
        is_ending: the job is being ended: a pause comes too late.
    """

    def __init__(self, job_id: str, job_log: JobLog, control: Control) -> None:
        self._job_id = job_id
        self._log = job_log
        self._control = control
        self.is_ending = False

    def __call__(self, call: Callable[[], T]) -> T:
        """Make a call until it is answered. Raises LeftError and LeaseLostError."""
        for failures in count(1):
            try:
                return call()
            except AwayError as error:
                reason = str(error)
            self._heed_in_vain()
            log.warning("waiting", job_id=self._job_id, reason=reason, failures=failures)
            self._control.wait(_BACKOFF.delay_s(failures, random.random()))  # noqa: S311 - jitter, not a secret
        raise AssertionError("count() has no end")

    def heed(self) -> None:
        """Between two steps. Raises LeftError when the job is to pause or the process to end, LeaseLostError when it is
        another's."""
        if self._control.lost:
            raise LeaseLostError
        if self._control.stopping:
            raise LeftError
        if self._control.wanted is Wanted.PAUSE:
            self(lambda: self._log.move(Status.PAUSED))
            raise LeftError

    def _heed_in_vain(self) -> None:
        """Interrupt a wait at the end of the process, for other jobs' turns, and for a pause."""
        if self._control.lost:
            raise LeaseLostError
        if self._control.stopping or self._control.gives_way:
            raise LeftError
        if self._control.wanted is Wanted.PAUSE and not self.is_ending:
            try:
                self._log.move(Status.PAUSED)
            except AwayError:
                return
            raise LeftError


LEASE_S = 20.0
_LOOK_S = 1.0
_JOIN_TIMEOUT_S = 15.0


class LeaseKeeper:
    """See :class:`producers.backfill.ports.Control`.

    with LeaseKeeper(...) as control:
        Runner(..., control, ...).run()
    """

    def __init__(
        self,
        job_log: PostgresJobLog,
        stop: StopSignal,
        max_cost_tokens: int | None,
        lease_s: float = LEASE_S,
        give_way: threading.Event | None = None,
    ) -> None:
        """``job_log`` is for this thread alone. ``give_way`` is set when another job is to have this one's place."""
        self._log = job_log
        self._stop = stop
        self._give_way = give_way or threading.Event()
        self._lease_s = lease_s
        self._wanted = Wanted.RUN
        self._max_cost_tokens = max_cost_tokens
        self._lost = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._guarded, name="lease", daemon=True)

    def __enter__(self) -> "LeaseKeeper":
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self._thread.join(_JOIN_TIMEOUT_S)
        # Twice: the connection may have broken while it rested.
        for tries_left in (1, 0):
            try:
                self._log.release()
                break
            except AwayError as error:
                if not tries_left:
                    log.warning("lease_not_released", reason=str(error), lease_s=self._lease_s)
        self._log.close()

    @property
    def wanted(self) -> Wanted:
        return self._wanted

    @property
    def lost(self) -> bool:
        return self._lost

    @property
    def stopping(self) -> bool:
        return self._stop.stopping

    @property
    def gives_way(self) -> bool:
        return self._give_way.is_set()

    @property
    def max_cost_tokens(self) -> int | None:
        return self._max_cost_tokens

    def wait(self, timeout_s: float) -> None:
        self._stop.wait(timeout_s)

    def _guarded(self) -> None:
        kept_at = monotonic()
        try:
            while not self._over.wait(min(_LOOK_S, self._lease_s / 4)):
                try:
                    self._look()
                    kept_at = monotonic()
                except (AwayError, JobFailedError) as error:
                    log.warning("lease_not_kept", reason=str(error), since_s=round(monotonic() - kept_at, 1))
        except LeaseLostError:
            self._lost = True
        except Exception:
            log.exception("lease_thread_died")
            self._lost = True

    def _look(self) -> None:
        wanted, self._max_cost_tokens = self._log.keep(self._lease_s)
        self._wanted = Wanted(wanted)
