"""Waits with timeouts that also react to the job's commands."""

import random
from collections.abc import Callable
from itertools import count
from typing import TypeVar

from fairlane.backoff import Backoff
from fairlane.logs import get_logger
from producers.backfill.job import Status, Wanted
from producers.backfill.ports import AwayError, Control, JobLog, LeaseLostError

log = get_logger(__name__)

_BACKOFF = Backoff(first_s=0.2, longest_s=5.0)

T = TypeVar("T")


class LeftError(Exception):
    """The job is to be left as it is, for another runner to go on with."""


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
        """Whoever waits holds up neither the end of the process, nor other jobs, nor a pause."""
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
