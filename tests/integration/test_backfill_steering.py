"""What its owner wants of a job against what its runner says of it, in a real Postgres."""

from collections.abc import Iterator

import pytest

from fairlane.clock import now_ms
from fairlane.database import upgrade
from fairlane.postgres import ALL_TENANTS, act_for, connect
from fairlane.settings import Settings
from producers.backfill.job import (
    MAX_COST_REACHED,
    ChunkPlan,
    Fingerprint,
    Job,
    JobSpec,
    Position,
    Status,
    Tally,
    Wanted,
)
from producers.backfill.job_log import PostgresJobLog
from producers.backfill.job_store import JobStore, new_job_id
from producers.backfill.seams import JobFailedError
from tests.integration.pipeline import unique_name
from tests.stack import PostgresServer, empty_database

LEASE_S = 600.0


class Taken:
    """A job that a runner has."""

    def __init__(self, dsn: str) -> None:
        self.store = JobStore(dsn)
        self.job_id = new_job_id()
        job = Job(self.job_id, "acme", JobSpec("in", "out"), Fingerprint(1, "1"), 10, 12, created_at_ms=now_ms())
        self.store.add(job, estimated_row_cost=1.0)
        taken = self.store.take(self.job_id, "runner", LEASE_S, now_ms())
        assert taken is not None
        self.log = PostgresJobLog(dsn, self.job_id, taken[0].token, now_ms)

    def wants(self, wanted: Wanted) -> None:
        assert self.store.steer(self.job_id, wanted, now_ms()) is not None

    def found(self) -> Job:
        found = self.store.find(self.job_id)
        assert found is not None
        return found

    def close(self) -> None:
        self.log.close()
        self.store.close()


@pytest.fixture(scope="module")
def dsn(postgres: PostgresServer) -> Iterator[str]:
    with empty_database(postgres, unique_name()) as database:
        upgrade(Settings(postgres_dsn=database.dsn, postgres_owner_dsn=database.owner_dsn))
        yield database.dsn


@pytest.fixture
def taken(dsn: str) -> Iterator[Taken]:
    made = Taken(dsn)
    yield made
    made.close()


@pytest.mark.parametrize("reason", [None, MAX_COST_REACHED])
def test_a_cancel_while_a_job_is_being_paused_is_not_lost(taken: Taken, reason: str | None) -> None:
    if reason is None:
        taken.wants(Wanted.PAUSE)
    taken.wants(Wanted.CANCEL)

    taken.log.move(Status.PAUSED, reason)

    found = taken.found()
    assert (found.status, found.reason, found.wanted) == (Status.CANCELLING, None, Wanted.CANCEL)
    taken.log.release()
    # It waits for a runner, which ends it.
    again = taken.store.take(taken.job_id, "another", LEASE_S, now_ms())
    assert again is not None
    assert again[0].status is Status.CANCELLING


def test_a_pause_is_a_pause_and_one_that_was_taken_back_is_none(taken: Taken) -> None:
    taken.wants(Wanted.PAUSE)
    taken.log.move(Status.PAUSED)
    assert taken.found().status is Status.PAUSED
    taken.wants(Wanted.RUN)
    taken.log.move(Status.PAUSED)
    assert taken.found().status is Status.QUEUED
    taken.log.move(Status.PAUSED, MAX_COST_REACHED)
    assert (taken.found().status, taken.found().reason) == (Status.PAUSED, MAX_COST_REACHED)


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.EXPIRED, Status.CANCELLED])
def test_what_has_ended_stays_as_it_ended(taken: Taken, status: Status) -> None:
    taken.log.move(status)
    ended = taken.found()

    taken.log.move(Status.FAILED, "too late")

    assert taken.found() == ended
    assert ended.status is status


def queued(store: JobStore, tenant: str, created_at_ms: int) -> str:
    job_id = new_job_id()
    job = Job(job_id, tenant, JobSpec("in", "out"), Fingerprint(1, "1"), 10, 12, created_at_ms=created_at_ms)
    store.add(job, estimated_row_cost=1.0)
    return job_id


def test_the_oldest_jobs_of_every_tenant_wait_but_for_those_that_run(taken: Taken) -> None:
    store, (many, few) = taken.store, (unique_name(), unique_name())
    first, second, third = (queued(store, many, at_ms) for at_ms in (1, 2, 3))
    last = queued(store, few, 4)

    def waiting(per_tenant: int, left_out: tuple[str, ...] = ()) -> list[str]:
        return [job.job_id for job in store.waiting(per_tenant, left_out) if job.tenant in (many, few)]

    assert waiting(1) == [first, last]
    assert waiting(2) == [first, last, second]
    assert waiting(2, (first,)) == [second, last, third]
    assert store.take(first, "runner", LEASE_S, now_ms()) is not None
    assert waiting(1) == [second, last]
    assert taken.job_id not in {job.job_id for job in store.waiting(100)}
    assert (store.waiting(1)[0].created_at_ms, store.waiting(1)[0].tenant) == (2, many)


def test_jobs_that_have_not_ended_are_counted_with_their_rows(taken: Taken) -> None:
    jobs, rows = taken.store.unfinished()[Status.RUNNING]
    taken.log.finish(ChunkPlan(0, 0, 4, Position(), Position(), 0), "part", Tally(ok=4))
    assert taken.store.unfinished()[Status.RUNNING] == (jobs, rows)
    chunk = ChunkPlan(0, 0, 4, Position(), Position(), 0)
    taken.log.plan(chunk)
    taken.log.finish(chunk, "part", Tally(ok=3, failed=1))
    assert taken.store.unfinished()[Status.RUNNING] == (jobs, rows - 4)
    taken.log.move(Status.COMPLETED)
    assert taken.store.unfinished().get(Status.RUNNING, (0, 0)) == (jobs - 1, rows - 10)


def test_a_job_that_this_runner_cannot_read_fails_and_is_not_tried_again(taken: Taken, dsn: str) -> None:
    job_id = queued(taken.store, unique_name(), 1)
    with connect(dsn, "test", autocommit=True) as connection, connection.transaction():
        act_for(connection, ALL_TENANTS)
        connection.execute(
            "UPDATE backfill_jobs SET spec = spec || %s WHERE job_id = %s", ('{"input_format": "tape"}', job_id)
        )

    with pytest.raises(JobFailedError, match="cannot be read by this version"):
        taken.store.take(job_id, "runner", LEASE_S, now_ms())

    assert taken.store.take(job_id, "runner", LEASE_S, now_ms()) is None
    assert job_id not in {job.job_id for job in taken.store.waiting(100)}
    assert Status.FAILED in taken.store.unfinished()
