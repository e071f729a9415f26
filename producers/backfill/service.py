"""Runs waiting jobs, several at a time, one thread each."""

import logging
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from itertools import count
from time import monotonic

from confluent_kafka import KafkaException

from fairlane import metrics
from fairlane.backoff import Backoff
from fairlane.cluster import reason_of
from fairlane.logs import get_logger
from fairlane.settings import Settings
from fairlane_server.processes.service import HealthServer, Readiness, StopSignal
from producers.backfill.app import JobRunner, NotToBeRunError
from producers.backfill.batches import FileSweep
from producers.backfill.errors import JobFailedError, LeaseLostError, UnavailableError
from producers.backfill.job import Status
from producers.backfill.job_store import JobStore
from producers.backfill.job_turns import MAX_JOBS, TURN_S, RunningJob, WaitingJob, next_turns
from producers.backfill.kafka import reply_partitions
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
"""Bound of the jobs in backoff; beyond it the one that is due first is retried early."""


@dataclass(slots=True)
class _Run:
    """A job that runs here."""

    job: WaitingJob
    started_at_s: float
    give_way: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    is_over: bool = False
    has_failed: bool = False
    """It could not be started or continued, for a reason that may pass."""


@dataclass(slots=True)
class JobService:
    """For one thread.

    Attributes:
        run_job: runs one job in a thread of its own until it ends or is to give way; see ``JobRunner.run``.
        find_topic: raises UnavailableError when the reply topic cannot be reached.
        stop: leaves every job when set, to be continued by another runner.
        max_jobs: most jobs at a time.
        turn_s: see ``producers.backfill.job_turns``.
        leave_s: how long to wait at the end until every job is left.
    """

    jobs: JobStore
    run_job: Callable[[str, threading.Event], Status]
    find_topic: Callable[[], object]
    stop: StopSignal
    readiness: Readiness
    _: KW_ONLY
    max_jobs: int = MAX_JOBS
    turn_s: float = TURN_S
    leave_s: float = 25.0
    clock: Callable[[], float] = monotonic
    _runs: dict[str, _Run] = field(default_factory=dict, init=False)
    _turns: Iterator[int] = field(default_factory=count, init=False)
    _last_turn: dict[str, int] = field(default_factory=dict, init=False)
    _held_back: dict[str, tuple[int, float]] = field(default_factory=dict, init=False)
    """Failures of a job in backoff, and the end of the backoff."""
    _look_at_s: float = field(default=float("-inf"), init=False)
    _count_at_s: float = field(default=float("-inf"), init=False)
    _failure: KafkaException | None = field(default=None, init=False)

    def run(self) -> None:
        """Run jobs until stopped; returns when all are left. Raises KafkaException for settings that no job can run
        with."""
        try:
            while not self.stop.stopping and self._failure is None:
                self.step()
                self.stop.wait(_STEP_S)
        finally:
            self.readiness.set(KAFKA, "stopping")
            self._leave_all()
            self.jobs.close()
        if self._failure is not None:
            raise self._failure

    def step(self) -> None:
        """One round: remove the jobs that are over, start and stop others."""
        now_s = self.clock()
        if self._collect(now_s) or now_s >= self._look_at_s:
            self._look_at_s = now_s + _LOOK_S
            self._share(now_s)
        if now_s >= self._count_at_s:
            self._count_at_s = now_s + _COUNT_S
            self._count()

    def _collect(self, now_s: float) -> bool:
        """Remove the jobs that are over. Returns whether there were any."""
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
        """Backoff of a job that cannot be started now: it must not delay the others."""
        failures = self._held_back.pop(job_id, (0, 0.0))[0] + 1
        delay_s = _BACKOFF.delay_s(failures, random.random())  # noqa: S311 - jitter, not a secret
        self._held_back[job_id] = failures, now_s + delay_s
        if len(self._held_back) > _MOST_HELD_BACK:
            del self._held_back[min(self._held_back, key=lambda one: self._held_back[one][1])]

    def _share(self, now_s: float) -> None:
        held_back = {job_id for job_id, (_, until_s) in self._held_back.items() if until_s > now_s}
        try:
            waiting = self.jobs.waiting(self.max_jobs, {*self._runs, *held_back})
        except (UnavailableError, JobFailedError) as error:
            self.readiness.set(POSTGRES, str(error))
            log.warning("jobs_not_seen", reason=str(error))
            return
        self.readiness.set(POSTGRES)
        running = [
            RunningJob(run.job.job_id, run.job.tenant, run.started_at_s, run.give_way.is_set())
            for run in self._runs.values()
        ]
        turns = next_turns(waiting, running, self._last_turn, max_jobs=self.max_jobs, now_s=now_s, turn_s=self.turn_s)
        for job_id in turns.give_way:
            log.info("job_gives_way", job_id=job_id)
            self._runs[job_id].give_way.set()
        for job in turns.start:
            self._start(job, now_s)

    def _start(self, job: WaitingJob, now_s: float) -> None:
        run = self._runs[job.job_id] = _Run(job, now_s)
        self._last_turn[job.tenant] = next(self._turns)
        # A daemon: a hung job must not keep the process from ending. Its lease expires.
        run.thread = threading.Thread(target=self._work, args=(run,), name=f"job-{job.job_id}", daemon=True)
        run.thread.start()

    def _work(self, run: _Run) -> None:
        job_id = run.job.job_id
        try:
            status = self.run_job(job_id, run.give_way)
            log.info("job_left", job_id=job_id, tenant=run.job.tenant, status=status.value)
        except (NotToBeRunError, LeaseLostError):
            log.info("job_is_with_another_runner", job_id=job_id)
        except (UnavailableError, JobFailedError) as error:
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
            self.find_topic()
            self.readiness.set(KAFKA)
        except UnavailableError as error:
            self.readiness.set(KAFKA, str(error))
        try:
            found = self.jobs.unfinished()
        except (UnavailableError, JobFailedError):
            return
        for status in Status:
            if not status.is_final:
                metrics.BACKFILL_JOBS.labels(status.value).set(found.get(status, (0, 0))[0])
        metrics.BACKFILL_WAITING_ROWS.set(
            sum(rows for status, (_, rows) in found.items() if status not in (Status.FAILED, Status.PAUSED))
        )

    def _leave_all(self) -> None:
        """Wait until every job is left. A hung job ends with the process, and its lease expires."""
        for run in self._runs.values():
            # Needed when a failure ends the service: then ``stop`` is not set.
            run.give_way.set()
        left_at = monotonic() + self.leave_s
        for run in self._runs.values():
            if run.thread is not None:
                run.thread.join(max(0.0, left_at - monotonic()))
        held = [job_id for job_id, run in self._runs.items() if not run.is_over]
        log.log(logging.WARNING if held else logging.INFO, "jobs_left", jobs=len(self._runs), not_left=held)


def serve(settings: Settings, *, lease_s: float, max_jobs: int, watch: JobWatch) -> None:
    """Run jobs until SIGTERM or SIGINT. Raises KafkaException for settings that no job can be run with."""
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
        # A job that is left within this time can be continued at once, otherwise when its lease has expired.
        leave_s=settings.drain_timeout_s,
    )
    log.info("backfill_started", max_jobs=max_jobs)
    sweep = FileSweep(settings.postgres_dsn.get_secret_value(), settings.files_url, settings.files_ttl_s)
    sweep.start()
    try:
        service.run()
    finally:
        sweep.stop()
        health.stop()
    log.info("backfill_stopped")
