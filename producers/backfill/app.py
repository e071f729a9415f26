"""Composition root of a job that this process runs, with everything it needs."""

import os
import random
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from time import monotonic

from fairlane import metrics
from fairlane.backoff import Backoff
from fairlane.clock import now_ms
from fairlane.logs import get_logger
from fairlane.schema_registry import codec_for
from fairlane.settings import Settings
from fairlane_server.processes.service import StopSignal
from producers.backfill.budget_store import reserve_job
from producers.backfill.errors import InputChangedError, JobFailedError, UnavailableError
from producers.backfill.files import blob_of
from producers.backfill.inputs import source_of
from producers.backfill.job import Job, RowIds, RowTally, Status, Wanted
from producers.backfill.job_store import CALL_TIMEOUT_S, JobStore, PostgresJobLog
from producers.backfill.kafka import KafkaPublisher, KafkaReplies
from producers.backfill.lease import LEASE_S, JobRetries, LeaseKeeper, LeftError
from producers.backfill.outputs import FileParts
from producers.backfill.runner import GRACE_MS, Runner, guarded
from producers.backfill.submission import survey

log = get_logger(__name__)

_LOOK_S = 0.5
_LOCKED_S = 2 * CALL_TIMEOUT_S
_WITH_A_RUNNER = (Status.RUNNING, Status.CANCELLING, Status.FINALIZING)
_BACKOFF = Backoff(first_s=0.2, longest_s=5.0)

OnProgress = Callable[[Job, RowTally], None]


class NotToBeRunError(Exception):
    """Another runner has the job, or it has ended or is paused."""


class JobRunner:
    """Runs jobs in this process, each in the calling thread.

    Args:
        stop: leaves every job when set, to be continued later.
        lease_s: how long a silent runner keeps its job.
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
        self._codec = codec_for(settings)
        self._name = f"{settings.instance_id}@{socket.gethostname()}:{os.getpid()}"

    def run(
        self,
        job_id: str,
        on_progress: OnProgress = lambda _job, _done: None,
        *,
        wait_s: float = 0.0,
        give_way: threading.Event | None = None,
    ) -> Status:
        """Lease a job and run it. Returns its status afterwards; PAUSED also if another runner is to continue it.

        ``wait_s``: how long to wait for the lease of a runner that may be dead, and a little longer for a Postgres that
        does not answer. ``give_way`` is set to leave the job for the sake of another one. Raises NotToBeRunError,
        LeaseLostError, UnavailableError and JobFailedError.
        """
        job, row_cost = self._take(job_id, wait_s)
        with ExitStack() as open_parts:
            keeper_log = PostgresJobLog(self._dsn, job_id, job.token, now_ms)
            control = open_parts.enter_context(
                LeaseKeeper(keeper_log, self._stop, job.spec.max_cost_tokens, self._lease_s, give_way)
            )
            job_log = open_parts.enter_context(closing(PostgresJobLog(self._dsn, job_id, job.token, now_ms)))

            def work() -> Status:
                try:
                    counted = (job, row_cost) if job.counted else _count_rows(job, job_log, control)
                except LeftError:
                    return Status.PAUSED
                except _CancelledBeforeStartError:
                    job_log.move(Status.CANCELLED)
                    return Status.CANCELLED
                runner = self._runner(*counted, job_log, control, open_parts, on_progress)
                if runner.job.reserved_nanos is None and control.wanted is not Wanted.CANCEL:
                    reserve_job(self._settings, self._codec, runner.job, runner.source, now_ms())
                return runner.run()

            return guarded(job, job_log, work)

    def _take(self, job_id: str, wait_s: float) -> tuple[Job, float]:
        given_up_at = monotonic() + wait_s
        # A runner that was stopped inside a transaction keeps the job locked until Postgres ends the transaction.
        unavailable_until = given_up_at + _LOCKED_S if wait_s else 0.0
        failures = 0
        with closing(JobStore(self._dsn)) as store:
            while True:
                try:
                    taken = store.take(job_id, self._name, self._lease_s, now_ms())
                    if taken is not None:
                        return taken
                    found = store.find(job_id)
                except UnavailableError as error:
                    if monotonic() >= unavailable_until or self._stop.stopping:
                        raise
                    failures += 1
                    log.warning("job_not_taken_yet", job_id=job_id, reason=str(error))
                    self._stop.wait(_BACKOFF.delay_s(failures, random.random()))  # noqa: S311 - jitter, not a secret
                    continue
                # A runner that was killed keeps its job until its lease ends.
                is_leased = found is not None and found.status in _WITH_A_RUNNER
                if not is_leased or monotonic() >= given_up_at or self._stop.stopping:
                    raise NotToBeRunError(job_id)
                self._stop.wait(_LOOK_S)

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
        publisher = KafkaPublisher(self._settings, self._codec, job.tenant, job.job_id, partition, _end_if_hung)
        open_parts.callback(publisher.close)
        return Runner(
            job,
            job_log,
            open_parts.enter_context(closing(source)),
            publisher,
            open_parts.enter_context(closing(KafkaReplies(self._settings, self._codec, job))),
            FileParts(job),
            control,
            now_ms,
            self._codec.encode,
            row_cost=row_cost,
            max_timeout_ms=self._settings.max_timeout_ms,
            grace_ms=self._grace_ms,
            on_progress=_counted_progress(job, on_progress),
        )


def _counted_progress(job: Job, on_progress: OnProgress) -> Callable[[RowTally], None]:
    """Counts finished rows in the metrics, and passes the progress on, the first time at once."""
    counted = job.tally

    def progressed(done: RowTally) -> None:
        nonlocal counted
        for outcome in ("ok", "failed", "expired", "cancelled"):
            metrics.BACKFILL_ROWS.labels(outcome).inc(getattr(done, outcome) - getattr(counted, outcome))
        counted = done
        on_progress(job, done)

    on_progress(job, job.tally)
    return progressed


def _count_rows(job: Job, job_log: PostgresJobLog, control: LeaseKeeper) -> tuple[Job, float]:
    """The job with its rows counted, and the estimated cost of a row.

    Raises LeftError, _CancelledBeforeStartError, UnavailableError, LeaseLostError, JobFailedError.
    """
    retries = JobRetries(job.job_id, job_log, control)

    def check_commands() -> None:
        retries.check_commands()
        if control.wanted is Wanted.CANCEL:
            raise _CancelledBeforeStartError

    check_commands()
    try:
        estimate, fingerprint = survey(job.tenant, job.spec, check_commands)
    except UnavailableError as error:
        if job.deadline_at_ms is None or now_ms() < job.deadline_at_ms:
            raise
        raise JobFailedError(f"the input could not be read in time: {error}") from None
    if fingerprint != job.fingerprint:
        raise InputChangedError(f"{job.spec.input} has changed since the job was submitted")
    job_log.count(estimate.rows, estimate.row_cost)
    return replace(job, total_rows=estimate.rows, counted=True), estimate.row_cost


class _CancelledBeforeStartError(Exception):
    """The job is cancelled, and nothing of it was sent."""


def _end_if_hung(name: str) -> None:
    """A call of the producer never returned. The process ends; the next runner continues its job."""
    log.error("kafka_call_hung", call=name)
    os._exit(1)
