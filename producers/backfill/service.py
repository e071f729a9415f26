"""Runs waiting jobs, several at a time, one thread each."""

import logging
import random
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import count
from time import monotonic
from typing import Protocol

from confluent_kafka import KafkaException

from fairlane import metrics
from fairlane.backoff import Backoff
from fairlane.cluster import reason_of
from fairlane.logs import get_logger
from fairlane.settings import Settings
from fairlane_server.processes.service import HealthServer, Readiness, StopSignal
from producers.backfill.app import JobRunner, NotToBeRunError
from producers.backfill.batches import FileSweep, KeptFiles
from producers.backfill.job import Status
from producers.backfill.job_store import JobStore
from producers.backfill.job_turns import MAX_JOBS, TURN_S, RunningJob, WaitingJob, next_turns
from producers.backfill.kafka import reply_partitions
from producers.backfill.ports import AwayError, JobFailedError, LeaseLostError
from producers.backfill.progress import JobWatch

log = get_logger(__name__)

POSTGRES, KAFKA = "postgres", "kafka"
CONDITIONS = (POSTGRES, KAFKA)

_STEP_S = 0.2
_LOOK_S = 1.0
_COUNT_S = 10.0
_FIND_TIMEOUT_S = 5.0
_BACKOFF = Backoff(first_s=1.0, longest_s=60.0)
_MOST_HELD_BACK = 1_000
"""Jobs that are known to have failed to start; beyond them the first that is due again is tried again early."""


class Jobs(Protocol):
    """Jobs in Postgres, as seen by the service. All methods raise AwayError and JobFailedError."""

    def waiting(self, per_tenant: int, left_out: Collection[str]) -> list[WaitingJob]:
        """Waiting jobs without a runner: the oldest of each tenant, except excluded ones."""
        ...

    def unfinished(self) -> Mapping[Status, tuple[int, int]]:
        """Number of unfinished jobs, and of their rows without a result, by status."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Run:
    """A job that runs here."""

    job: WaitingJob
    started_at_s: float
    give_way: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    is_over: bool = False
    has_failed: bool = False
    """It could not be begun, or gone on with, for a reason that may pass."""


@dataclass(slots=True)
class _HeldBack:
    failures: int
    until_s: float


class JobService:
    """Used by one thread.

    Args:
        jobs: that there are.
        run: runs one, in a thread of its own, until it ends or is to give way; as ``JobRunner.run``.
        find_topic: raises AwayError when the topic of the replies cannot be reached.
        stop: tells it to leave every job as it is, to be gone on with by another runner.
        max_jobs: that run at a time.
        turn_s: see ``producers.backfill.job_turns``.
        leave_s: how long jobs may take to be left once it is to stop.
    """

    def __init__(
        self,
        jobs: Jobs,
        run: Callable[[str, threading.Event], Status],
        find_topic: Callable[[], object],
        stop: StopSignal,
        readiness: Readiness,
        *,
        max_jobs: int = MAX_JOBS,
        turn_s: float = TURN_S,
        leave_s: float = 25.0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._jobs = jobs
        self._run_job = run
        self._find_topic = find_topic
        self._stop = stop
        self._readiness = readiness
        self._max_jobs = max_jobs
        self._turn_s = turn_s
        self._leave_s = leave_s
        self._clock = clock
        self._runs: dict[str, _Run] = {}
        self._turns = count()
        self._last_turn: dict[str, int] = {}
        self._held_back: dict[str, _HeldBack] = {}
        self._look_at_s = self._count_at_s = float("-inf")
        self._failure: KafkaException | None = None

    def run(self) -> None:
        """Run jobs until stopped; returns when all are left. Raises KafkaException for settings that no job can run
        with."""
        try:
            while not self._stop.stopping and self._failure is None:
                self.step()
                self._stop.wait(_STEP_S)
        finally:
            self._readiness.set(KAFKA, "stopping")
            self._leave_all()
            self._jobs.close()
        if self._failure is not None:
            raise self._failure

    def step(self) -> None:
        """One round: see which jobs are over, and start or stop some."""
        now_s = self._clock()
        if self._collect(now_s) or now_s >= self._look_at_s:
            self._look_at_s = now_s + _LOOK_S
            self._share(now_s)
        if now_s >= self._count_at_s:
            self._count_at_s = now_s + _COUNT_S
            self._count()

    def _collect(self, now_s: float) -> bool:
        """Take away what is over. Returns whether there was any."""
        over = [run for run in self._runs.values() if run.is_over]
        for run in over:
            del self._runs[run.job.job_id]
            if run.has_failed:
                self._hold_back(run.job.job_id, now_s)
            else:
                self._held_back.pop(run.job.job_id, None)
        metrics.BACKFILL_RUNNING_JOBS.set(len(self._runs))
        return bool(over)

    def _hold_back(self, job_id: str, now_s: float) -> None:
        """A job that cannot be begun now must not keep those behind it waiting, nor be tried without end."""
        before = self._held_back.pop(job_id, None)
        failures = 1 if before is None else before.failures + 1
        delay_s = _BACKOFF.delay_s(failures, random.random())  # noqa: S311 - jitter, not a secret
        self._held_back[job_id] = _HeldBack(failures, now_s + delay_s)
        if len(self._held_back) > _MOST_HELD_BACK:
            del self._held_back[min(self._held_back, key=lambda one: self._held_back[one].until_s)]

    def _share(self, now_s: float) -> None:
        held_back = {job_id for job_id, one in self._held_back.items() if one.until_s > now_s}
        try:
            waiting = self._jobs.waiting(self._max_jobs, {*self._runs, *held_back})
        except (AwayError, JobFailedError) as error:
            self._readiness.set(POSTGRES, str(error))
            log.warning("jobs_not_seen", reason=str(error))
            return
        self._readiness.set(POSTGRES)
        running = [
            RunningJob(run.job.job_id, run.job.tenant, run.started_at_s, run.give_way.is_set())
            for run in self._runs.values()
        ]
        turns = next_turns(waiting, running, self._last_turn, max_jobs=self._max_jobs, now_s=now_s, turn_s=self._turn_s)
        for job_id in turns.give_way:
            log.info("job_gives_way", job_id=job_id)
            self._runs[job_id].give_way.set()
        for job in turns.start:
            self._start(job, now_s)

    def _start(self, job: WaitingJob, now_s: float) -> None:
        run = self._runs[job.job_id] = _Run(job, now_s)
        self._last_turn[job.tenant] = next(self._turns)
        # A daemon: what hangs must not keep a process from ending. Its lease ends by itself.
        run.thread = threading.Thread(target=self._work, args=(run,), name=f"job-{job.job_id}", daemon=True)
        run.thread.start()

    def _work(self, run: _Run) -> None:
        job_id = run.job.job_id
        try:
            status = self._run_job(job_id, run.give_way)
            log.info("job_left", job_id=job_id, tenant=run.job.tenant, status=status.value)
        except (NotToBeRunError, LeaseLostError):
            log.info("job_is_with_another_runner", job_id=job_id)
        except (AwayError, JobFailedError) as error:
            run.has_failed = True
            log.warning("job_cannot_be_run_now", job_id=job_id, tenant=run.job.tenant, reason=str(error))
        except KafkaException as error:
            run.has_failed = True
            self._failure = error
            log.error("jobs_cannot_be_run", reason=reason_of(error))
        except Exception as error:  # noqa: BLE001 - the other jobs go on
            run.has_failed = True
            # Not its text, which may quote a row.
            log.error("job_broke", job_id=job_id, tenant=run.job.tenant, error=type(error).__name__)
        finally:
            run.is_over = True

    def _count(self) -> None:
        try:
            self._find_topic()
            self._readiness.set(KAFKA)
        except AwayError as error:
            self._readiness.set(KAFKA, str(error))
        try:
            found = self._jobs.unfinished()
        except (AwayError, JobFailedError):
            return
        for status in Status:
            if not status.is_final:
                metrics.BACKFILL_JOBS.labels(status.value).set(found.get(status, (0, 0))[0])
        metrics.BACKFILL_WAITING_ROWS.set(
            sum(rows for status, (_, rows) in found.items() if status not in (Status.FAILED, Status.PAUSED))
        )

    def _leave_all(self) -> None:
        """Wait until every job is left. What hangs ends with the process, and its lease ends by itself."""
        for run in self._runs.values():
            # ``stop`` says so too, unless it is a failure that ends all this.
            run.give_way.set()
        left_at = monotonic() + self._leave_s
        for run in self._runs.values():
            if run.thread is not None:
                run.thread.join(max(0.0, left_at - monotonic()))
        held = [job_id for job_id, run in self._runs.items() if not run.is_over]
        log.log(logging.WARNING if held else logging.INFO, "jobs_left", jobs=len(self._runs), not_left=held)


def serve(settings: Settings, *, lease_s: float, max_jobs: int, watch: JobWatch) -> None:
    """Run jobs in this process until SIGTERM or SIGINT. Raises KafkaException for settings that no job can be run
    with."""
    stop = StopSignal()
    stop.install()
    readiness = Readiness(*CONDITIONS)
    health = HealthServer(readiness, settings.metrics_host, settings.metrics_port)
    health.start()
    runner = JobRunner(settings, stop, lease_s=lease_s)

    def run(job_id: str, give_way: threading.Event) -> Status:
        with watch.job() as on_progress:
            return runner.run(job_id, on_progress, give_way=give_way)

    service = JobService(
        JobStore(settings.postgres_dsn.get_secret_value()),
        run,
        lambda: reply_partitions(settings, _FIND_TIMEOUT_S),
        stop,
        readiness,
        max_jobs=max_jobs,
        # A job that is left within this time is gone on with at once; otherwise when its lease has ended.
        leave_s=settings.drain_timeout_s,
    )
    log.info("backfill_started", max_jobs=max_jobs)
    sweep = FileSweep(KeptFiles(settings.postgres_dsn.get_secret_value(), settings.files_url, settings.files_ttl_s))
    sweep.start()
    try:
        service.run()
    finally:
        sweep.stop()
        health.stop()
    log.info("backfill_stopped")
