"""Lease of a running job and its owner's commands, on a thread of its own; retries that react to both.

The job loop may wait for Kafka for half a minute; the lease must not end meanwhile.
"""

import random
import threading
from collections.abc import Callable
from time import monotonic
from typing import TypeVar

from fairlane.backoff import Backoff
from fairlane.logs import get_logger
from fairlane_server.processes.service import StopSignal
from producers.backfill.errors import JobFailedError, LeaseLostError, UnavailableError
from producers.backfill.job import Status, Wanted
from producers.backfill.job_store import PostgresJobLog

log = get_logger(__name__)

_BACKOFF = Backoff(first_s=0.2, longest_s=5.0)

T = TypeVar("T")


class LeftError(Exception):
    """Raised to leave the job to another runner."""


LEASE_S = 20.0
_RENEW_S = 1.0
_JOIN_TIMEOUT_S = 15.0


class LeaseKeeper:
    """Renews the lease of a job within its context, and reads the commands to its runner.

    Attributes:
        wanted: command of the job's owner.
        lost: another runner has the job.
        max_cost_tokens: cost limit, which the owner may raise.
        answered_rows: rows with a result; the runner sets it, and it is recorded with the lease.
    """

    def __init__(
        self,
        job_log: PostgresJobLog,
        stop: StopSignal,
        max_cost_tokens: int | None,
        lease_s: float = LEASE_S,
        give_way: threading.Event | None = None,
    ) -> None:
        """``job_log`` is used by the lease thread alone. ``give_way``: set to free this job's slot for another job."""
        self.wanted = Wanted.RUN
        self.lost = False
        self.max_cost_tokens = max_cost_tokens
        self.answered_rows = 0
        self._stop = stop
        self._give_way = give_way or threading.Event()
        self._log = job_log
        self._lease_s = lease_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    @property
    def stopping(self) -> bool:
        """Whether this process is to end."""
        return self._stop.stopping

    @property
    def gives_way(self) -> bool:
        """Whether the job is to free its slot for another job, at the next convenient step."""
        return self._give_way.is_set()

    def wait(self, timeout_s: float) -> None:
        """Sleep; return early when the process is to end."""
        self._stop.wait(timeout_s)

    def __enter__(self) -> "LeaseKeeper":
        self._renew()
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self._thread.join(_JOIN_TIMEOUT_S)
        # Twice: an idle connection may have been closed.
        for tries_left in (1, 0):
            try:
                self._log.release()
                break
            except UnavailableError as error:
                if not tries_left:
                    log.warning("lease_not_released", reason=str(error), lease_s=self._lease_s)
        self._log.close()

    def _run(self) -> None:
        kept_at = monotonic()
        try:
            while not self._over.wait(min(_RENEW_S, self._lease_s / 4)):
                try:
                    self._renew()
                    kept_at = monotonic()
                except (UnavailableError, JobFailedError) as error:
                    log.warning("lease_not_kept", reason=str(error), since_s=round(monotonic() - kept_at, 1))
        except LeaseLostError:
            self.lost = True
        except Exception:
            log.exception("lease_thread_died")
            self.lost = True

    def _renew(self) -> None:
        wanted, self.max_cost_tokens = self._log.keep(self._lease_s, self.answered_rows)
        self.wanted = Wanted(wanted)


class JobRetries:
    """Retries of one job's calls, with backoff, until they succeed or the job is left.

    Attributes:
        is_ending: the job is being ended: a pause comes too late.
    """

    def __init__(self, job_id: str, job_log: PostgresJobLog, control: LeaseKeeper) -> None:
        self._job_id = job_id
        self._log = job_log
        self._control = control
        self.is_ending = False

    def __call__(self, call: Callable[[], T]) -> T:
        """Repeat a call while it raises UnavailableError. Raises LeftError and LeaseLostError."""
        failures = 0
        while True:
            try:
                return call()
            except UnavailableError as error:
                reason = str(error)
            failures += 1
            self._check_while_unavailable()
            log.warning("waiting", job_id=self._job_id, reason=reason, failures=failures)
            self._control.wait(_BACKOFF.delay_s(failures, random.random()))  # noqa: S311 - jitter, not a secret

    def check_commands(self) -> None:
        """Between two steps. Raises LeftError if the job is to pause or the process to end, LeaseLostError if another
        runner has the job."""
        if self._control.lost:
            raise LeaseLostError
        if self._control.stopping:
            raise LeftError
        if self._control.wanted is Wanted.PAUSE:
            self(lambda: self._log.move(Status.PAUSED))
            raise LeftError

    def _check_while_unavailable(self) -> None:
        if self._control.lost:
            raise LeaseLostError
        if self._control.stopping or self._control.gives_way:
            raise LeftError
        if self._control.wanted is Wanted.PAUSE and not self.is_ending:
            try:
                self._log.move(Status.PAUSED)
            except UnavailableError:
                return
            raise LeftError
