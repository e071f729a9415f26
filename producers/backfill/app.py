"""Composition root of a job that this process runs, with everything it needs."""

import os
import random
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from time import monotonic
from typing import TypeVar

from fairlane import metrics
from fairlane.backoff import Backoff
from fairlane.clock import now_ms
from fairlane.codec import Codec
from fairlane.logs import get_logger
from fairlane.schema_registry import codec_for
from fairlane.settings import Settings
from fairlane_server.processes.service import StopSignal
from producers.backfill.files import blob_of
from producers.backfill.inputs import source_of
from producers.backfill.job import Budget, Job, Status, Tally, Wanted
from producers.backfill.job_store import CALL_TIMEOUT_S, JobStore, PostgresJobLog
from producers.backfill.kafka import KafkaPublisher, KafkaReplies
from producers.backfill.lease import LEASE_S, JobTimeouts, LeaseKeeper, LeftError
from producers.backfill.outputs import FileParts
from producers.backfill.ports import AwayError, Control, InputChangedError, JobFailedError
from producers.backfill.row import RowIds
from producers.backfill.runner import GRACE_MS, Runner, guarded
from producers.backfill.submission import survey

log = get_logger(__name__)

_LOOK_S = 0.5
_LOCKED_S = 2 * CALL_TIMEOUT_S
_WITH_A_RUNNER = (Status.RUNNING, Status.CANCELLING, Status.FINALIZING)
_BACKOFF = Backoff(first_s=0.2, longest_s=5.0)

_ROW_OUTCOMES = ("ok", "failed", "expired", "cancelled")

T = TypeVar("T")
OnProgress = Callable[[Job, Tally], None]


def _unheard(_job: Job, _done: Tally) -> None:
    pass


class NotToBeRunError(Exception):
    """Another runner has the job, or it has ended or is paused."""


class JobRunner:
    """Runs jobs in this process, each in the thread that calls.

    Args:
        settings: of everything outside.
        stop: tells every job to be left as it is.
        lease_s: how long a runner that says nothing keeps its job.
        grace_ms: see ``producers.backfill.runner``.
    """

    def __init__(
        self, settings: Settings, stop: StopSignal, *, lease_s: float = LEASE_S, grace_ms: int = GRACE_MS
    ) -> None:
        self._settings = settings
        self._stop = stop
        self._lease_s = lease_s
        self._grace_ms = grace_ms
        self._dsn = settings.postgres_dsn.get_secret_value()
        self._codec: Codec = codec_for(settings)
        self._name = f"{settings.instance_id}@{socket.gethostname()}:{os.getpid()}"

    def run(
        self,
        job_id: str,
        on_progress: OnProgress = _unheard,
        *,
        wait_s: float = 0.0,
        give_way: threading.Event | None = None,
    ) -> Status:
        """Lease a job and run it. Returns its status afterwards; PAUSED also if another runner is to continue it.

        ``wait_s``: how long to wait for a runner that may be dead to lose it, and a little longer for a Postgres that
        does not answer. ``give_way`` is set when it is to be left for the sake of another job. Raises NotToBeRunError,
        LeaseLostError, AwayError and JobFailedError.
        """
        job, row_cost = self._take(job_id, wait_s)
        with ExitStack() as open_parts:
            keeper_log = PostgresJobLog(self._dsn, job_id, job.token, now_ms)
            control = open_parts.enter_context(
                LeaseKeeper(keeper_log, self._stop, job.spec.max_cost_tokens, self._lease_s, give_way)
            )
            job_log = PostgresJobLog(self._dsn, job_id, job.token, now_ms)
            open_parts.callback(job_log.close)

            def work() -> Status:
                whole, cost = job, row_cost
                if not job.counted:
                    found = _counted(job, job_log, control)
                    if isinstance(found, Status):
                        return found
                    whole, cost = found
                return self._runner(whole, cost, job_log, control, open_parts, on_progress).run()

            return guarded(job, job_log, work)

    def _take(self, job_id: str, wait_s: float) -> tuple[Job, float]:
        given_up_at = monotonic() + wait_s
        # A runner that was stopped amid a transaction keeps the job locked until Postgres ends that.
        away_until = given_up_at + _LOCKED_S if wait_s else 0.0
        store = JobStore(self._dsn)
        try:
            for looks in count(1):
                try:
                    taken = store.take(job_id, self._name, self._lease_s, now_ms())
                    if taken is not None:
                        return taken
                    found = store.find(job_id)
                except AwayError as error:
                    if monotonic() >= away_until or self._stop.stopping:
                        raise
                    log.warning("job_not_taken_yet", job_id=job_id, reason=str(error))
                    self._stop.wait(_BACKOFF.delay_s(looks, random.random()))  # noqa: S311 - jitter, not a secret
                    continue
                # A runner that was killed keeps its job until its lease is over.
                is_leased = found is not None and found.status in _WITH_A_RUNNER
                if not is_leased or monotonic() >= given_up_at or self._stop.stopping:
                    raise NotToBeRunError(job_id)
                self._stop.wait(_LOOK_S)
            raise AssertionError("count() has no end")
        finally:
            store.close()

    def _runner(
        self,
        job: Job,
        row_cost: float,
        job_log: PostgresJobLog,
        control: LeaseKeeper,
        open_parts: ExitStack,
        on_progress: OnProgress,
    ) -> Runner:
        """Raises JobFailedError."""
        partition = RowIds(job.job_id, job.partitions).partition
        source = source_of(blob_of(job.spec.input, job.spec.endpoint), job.fingerprint, job.spec)
        open_parts.callback(source.close)
        publisher = KafkaPublisher(self._settings, self._codec, job.tenant, job.job_id, partition, _end_if_hung)
        open_parts.callback(publisher.close)
        replies = KafkaReplies(self._settings, self._codec, job)
        open_parts.callback(replies.close)
        return Runner(
            job,
            job_log,
            source,
            publisher,
            replies,
            FileParts(job),
            control,
            now_ms,
            self._codec.encode,
            budget=Budget(job.spec.max_cost_tokens, row_cost),
            max_timeout_ms=self._settings.max_timeout_ms,
            grace_ms=self._grace_ms,
            on_progress=_Progress(job, on_progress),
        )


class _Progress:
    """Counts what becomes of rows here, and passes on how far the job is, also where it begins."""

    def __init__(self, job: Job, on_progress: OnProgress) -> None:
        self._job = job
        self._on_progress = on_progress
        self._told = job.tally
        on_progress(job, job.tally)

    def __call__(self, done: Tally) -> None:
        for outcome in _ROW_OUTCOMES:
            metrics.BACKFILL_ROWS.labels(outcome).inc(getattr(done, outcome) - getattr(self._told, outcome))
        self._told = done
        self._on_progress(self._job, done)


def _counted(job: Job, job_log: PostgresJobLog, control: Control) -> tuple[Job, float] | Status:
    """The job with its rows counted, or its status if it is not to run any more.

    Raises AwayError, LeaseLostError, JobFailedError.
    """
    patience = JobTimeouts(job.job_id, job_log, control)

    def heed() -> None:
        patience.heed()
        if control.wanted is Wanted.CANCEL:
            raise _CancelHeardError

    try:
        heed()
        estimate, fingerprint = _in_time(job, lambda: survey(job.tenant, job.spec, heed))
    except LeftError:
        return Status.PAUSED
    except _CancelHeardError:
        # Nothing of it was sent, and nothing has to be read to say so.
        job_log.move(Status.CANCELLED)
        return Status.CANCELLED
    if fingerprint != job.fingerprint:
        raise InputChangedError(f"{job.spec.input} has changed since the job was submitted")
    job_log.count(estimate.rows, estimate.row_cost)
    return replace(job, total_rows=estimate.rows, counted=True), estimate.row_cost


class _CancelHeardError(Exception):
    """The job is to be cancelled, and was never begun."""


def _in_time(job: Job, call: Callable[[], T]) -> T:
    """An input that does not answer is asked again, but not for ever. Raises AwayError, JobFailedError."""
    try:
        return call()
    except AwayError as error:
        if job.deadline_at_ms is None or now_ms() < job.deadline_at_ms:
            raise
        raise JobFailedError(f"the input could not be read in time: {error}") from None


def _end_if_hung(name: str) -> None:
    """A call of the producer never returned. The process ends, and its job is gone on with by the next one."""
    log.error("kafka_call_hung", call=name)
    os._exit(1)
