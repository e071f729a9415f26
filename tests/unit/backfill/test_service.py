"""The service that runs jobs: several at a time, none held up by another, all of them left when it is to end."""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import pytest
from confluent_kafka import KafkaException
from prometheus_client import REGISTRY

from fairlane_server.processes.service import Readiness, StopSignal
from producers.backfill.errors import JobFailedError, UnavailableError
from producers.backfill.job import Status
from producers.backfill.job_store import JobStore
from producers.backfill.job_turns import WaitingJob
from producers.backfill.service import CONDITIONS, JobService
from tests.kit.waiting import eventually


@dataclass
class Jobs(JobStore):
    """Jobs in memory; what was run to its end is gone."""

    queued: dict[str, WaitingJob]
    away: UnavailableError | None = None

    def waiting(self, per_tenant: int, left_out: Collection[str] = ()) -> list[WaitingJob]:
        if self.away is not None:
            raise self.away
        return [job for job in self.queued.values() if job.job_id not in left_out]

    def unfinished(self) -> dict[Status, tuple[int, int]]:
        return {Status.QUEUED: (len(self.queued), 10), Status.FAILED: (2, 7)}

    def close(self) -> None: ...


@dataclass
class Bench:
    """A service that is stepped by hand, on a clock that is set by hand."""

    jobs: Jobs
    max_jobs: int = 2
    now_s: float = 0.0
    stop: StopSignal = field(default_factory=StopSignal)
    readiness: Readiness = field(default_factory=lambda: Readiness(*CONDITIONS))
    ended: threading.Event = field(default_factory=threading.Event)
    """Set: jobs come to their end."""
    running: set[str] = field(default_factory=set)
    begun: list[str] = field(default_factory=list)
    troubles: dict[str, Exception] = field(default_factory=dict)
    topic: Callable[[], object] = lambda: 12

    def __post_init__(self) -> None:
        self.service = JobService(
            self.jobs,
            self.run,
            self.find_topic,
            self.stop,
            self.readiness,
            max_jobs=self.max_jobs,
            turn_s=60.0,
            clock=lambda: self.now_s,
        )

    def find_topic(self) -> object:
        return self.topic()

    def run(self, job_id: str, give_way: threading.Event) -> Status:
        self.begun.append(job_id)
        if job_id in self.troubles:
            raise self.troubles[job_id]
        self.running.add(job_id)
        try:
            while not (give_way.wait(0.005) or self.stop.stopping):
                if self.ended.is_set():
                    self.jobs.queued.pop(job_id)
                    return Status.COMPLETED
            return Status.PAUSED
        finally:
            self.running.discard(job_id)

    def has_begun(self, jobs: int) -> bool:
        return len(self.begun) == jobs

    def step_until(self, reached: Callable[[], bool], what: str) -> None:
        def stepped() -> bool:
            self.now_s += 0.25
            self.service.step()
            return reached()

        eventually(stepped, what=what)


def job(job_id: str, tenant: str, created_at_ms: int = 0) -> WaitingJob:
    return WaitingJob(job_id, tenant, created_at_ms)


def job_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("job-")]


@contextmanager
def bench_of(*jobs: WaitingJob, max_jobs: int = 2) -> Iterator[Bench]:
    bench = Bench(Jobs({one.job_id: one for one in jobs}), max_jobs)
    try:
        yield bench
    finally:
        bench.stop.stop()
        bench.service.run()


def test_jobs_run_beside_each_other_and_no_more_than_there_are_slots() -> None:
    with bench_of(job("a1", "a"), job("b1", "b"), job("c1", "c")) as bench:
        bench.step_until(lambda: bench.running == {"a1", "b1"}, "two jobs at a time")
        assert REGISTRY.get_sample_value("fairlane_backfill_running_jobs") == 0  # as of the step before
        bench.ended.set()
        bench.step_until(lambda: not bench.jobs.queued, "the end of all jobs")
        assert sorted(bench.begun) == ["a1", "b1", "c1"]


def test_a_job_gives_way_to_another_tenants_and_goes_on_later() -> None:
    with bench_of(job("a1", "a"), job("a2", "a", 1)) as bench:
        bench.step_until(lambda: bench.running == {"a1", "a2"}, "one tenant in every slot")
        bench.jobs.queued["b1"] = job("b1", "b", 2)
        bench.step_until(lambda: bench.running == {"a1", "b1"}, "the other tenant's job")
        bench.ended.set()
        bench.step_until(lambda: not bench.jobs.queued, "the end of all jobs")
        assert bench.begun.count("a2") == 2


def test_jobs_that_began_together_have_had_their_turns_one_after_the_other() -> None:
    with bench_of(*(job(f"{tenant}1", tenant, number) for number, tenant in enumerate("abcde"))) as bench:
        for turn in range(1, 6):
            bench.now_s += 60
            bench.service.step()
            eventually(partial(bench.has_begun, 2 * turn), what="the next two")
            bench.now_s += 60
            bench.service.step()
            eventually(lambda: not job_threads(), what="that they gave way")
        assert Counter(bench.begun) == {f"{tenant}1": 2 for tenant in "abcde"}


@pytest.mark.parametrize("trouble", [UnavailableError("the storage"), JobFailedError("Postgres"), ValueError("secret")])
def test_a_job_that_cannot_begin_is_tried_again_later_and_holds_up_nobody(trouble: Exception) -> None:
    with bench_of(job("a1", "a"), job("b1", "b", 1), max_jobs=1) as bench:
        bench.troubles["a1"] = trouble
        bench.step_until(lambda: bench.running == {"b1"}, "the job behind it")
        bench.ended.set()
        bench.step_until(lambda: bench.begun.count("a1") >= 3, "more tries")
        tries_s = bench.now_s
        del bench.troubles["a1"]
        bench.step_until(lambda: not bench.jobs.queued, "its end")
        # By the bench's own clock: the pauses grow.
        assert tries_s > 1.0


def test_settings_that_no_job_can_be_run_with_end_the_service() -> None:
    bench = Bench(Jobs({"a1": job("a1", "a"), "b1": job("b1", "b")}))
    bench.troubles["a1"] = KafkaException("no such setting")
    with pytest.raises(KafkaException):
        bench.service.run()
    assert not bench.running


def test_every_job_is_left_before_the_service_ends() -> None:
    with bench_of(job("a1", "a"), job("b1", "b")) as bench:
        thread = threading.Thread(target=bench.service.run)
        thread.start()
        eventually(lambda: bench.running == {"a1", "b1"}, what="both jobs")
        bench.stop.stop()
        thread.join(60)
        assert not thread.is_alive()
        assert not bench.running
        assert set(bench.jobs.queued) == {"a1", "b1"}


def test_readiness_says_what_is_away() -> None:
    def topic() -> object:
        raise UnavailableError("Kafka: no broker")

    with bench_of() as bench:
        bench.service.step()
        assert bench.readiness.ready
        bench.jobs.away, bench.topic = UnavailableError("Postgres: refused"), topic
        bench.now_s += 60
        bench.service.step()
        assert bench.readiness.reasons() == {"postgres": "Postgres: refused", "kafka": "Kafka: no broker"}


def test_metrics_say_how_much_there_is_to_do() -> None:
    with bench_of(job("a1", "a"), job("b1", "b"), job("c1", "c")) as bench:
        bench.service.step()
        assert REGISTRY.get_sample_value("fairlane_backfill_jobs", {"status": "queued"}) == 3
        assert REGISTRY.get_sample_value("fairlane_backfill_jobs", {"status": "failed"}) == 2
        assert REGISTRY.get_sample_value("fairlane_backfill_jobs", {"status": "completed"}) is None
        assert REGISTRY.get_sample_value("fairlane_backfill_waiting_rows") == 10
        bench.service.step()
        assert REGISTRY.get_sample_value("fairlane_backfill_running_jobs") == 2
