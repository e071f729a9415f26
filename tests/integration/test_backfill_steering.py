"""What its owner wants of a job against what its runner says of it, in a real Postgres."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from fairlane.clock import now_ms
from fairlane_server.postgres.connection import ALL_TENANTS, act_for, connect
from fairlane_server.postgres.job_reservations import HOLDING, LEFT
from producers.backfill.errors import JobFailedError
from producers.backfill.job import (
    MAX_COST_REACHED,
    ChunkPlan,
    Fingerprint,
    InputPosition,
    Job,
    JobSpec,
    RowTally,
    Status,
    Wanted,
)
from producers.backfill.job_store import JobStore, PostgresJobLog, new_job_id
from tests.kit.pipeline import unique_name
from tests.kit.stack import PostgresServer, migrated_database

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
def tables(postgres: PostgresServer) -> Iterator[PostgresServer]:
    with migrated_database(postgres, unique_name()) as database:
        yield database


@pytest.fixture
def dsn(tables: PostgresServer) -> str:
    return tables.backfill_dsn


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
    taken.log.finish(ChunkPlan(0, 0, 4, InputPosition(), InputPosition(), 0), "part", RowTally(ok=4))
    assert taken.store.unfinished()[Status.RUNNING] == (jobs, rows)
    chunk = ChunkPlan(0, 0, 4, InputPosition(), InputPosition(), 0)
    taken.log.plan(chunk)
    taken.log.finish(chunk, "part", RowTally(ok=3, failed=1))
    assert taken.store.unfinished()[Status.RUNNING] == (jobs, rows - 4)
    taken.log.move(Status.COMPLETED)
    assert taken.store.unfinished().get(Status.RUNNING, (0, 0)) == (jobs - 1, rows - 10)


def test_a_job_that_this_runner_cannot_read_fails_and_is_not_tried_again(taken: Taken, tables: PostgresServer) -> None:
    job_id = queued(taken.store, unique_name(), 1)
    with connect(tables.owner_dsn, "test", autocommit=True) as connection, connection.transaction():
        act_for(connection, ALL_TENANTS)
        connection.execute(
            "UPDATE backfill_jobs SET spec = spec || %s WHERE job_id = %s", ('{"input_format": "tape"}', job_id)
        )

    with pytest.raises(JobFailedError, match="cannot be read by this version"):
        taken.store.take(job_id, "runner", LEASE_S, now_ms())

    assert taken.store.take(job_id, "runner", LEASE_S, now_ms()) is None
    assert job_id not in {job.job_id for job in taken.store.waiting(100)}
    assert Status.FAILED in taken.store.unfinished()


# ------------------------------------------------------------------ times


DAY_MS = 86_400_000


@pytest.mark.parametrize("stored", [True, False])
def test_the_window_begins_when_a_job_is_submitted(taken: Taken, tables: PostgresServer, stored: bool) -> None:
    job_id = queued(taken.store, unique_name(), created_at_ms=5)
    if not stored:  # as an older version left it
        with connect(tables.owner_dsn, "test", autocommit=True) as connection, connection.transaction():
            act_for(connection, ALL_TENANTS)
            connection.execute("UPDATE backfill_jobs SET deadline_at_ms = NULL WHERE job_id = %s", (job_id,))
    assert (found := taken.store.find(job_id)) is not None
    assert found.deadline_at_ms == 5 + DAY_MS

    late = taken.store.take(job_id, "runner", LEASE_S, 3 * DAY_MS)

    assert late is not None
    assert (late[0].started_at_ms, late[0].deadline_at_ms) == (3 * DAY_MS, 5 + DAY_MS)


def test_a_job_is_started_once_its_rows_are_counted(taken: Taken, dsn: str) -> None:
    job_id = new_job_id()
    job = Job(job_id, "acme", JobSpec("in", "out"), Fingerprint(1, "1"), 0, 12, created_at_ms=1, counted=False)
    taken.store.add(job, estimated_row_cost=1.0)
    begun = taken.store.take(job_id, "runner", LEASE_S, 10)
    assert begun is not None
    assert begun[0].started_at_ms is None
    with closing(PostgresJobLog(dsn, job_id, begun[0].token, lambda: 20)) as log:
        log.count(4, 1.0)
        log.release()
    again = taken.store.take(job_id, "another", LEASE_S, 30)
    assert again is not None
    assert (again[0].started_at_ms, again[0].total_rows) == (20, 4)


def test_when_a_job_was_cancelled_and_when_its_parts_were_joined(taken: Taken, dsn: str) -> None:
    assert (taken.found().cancelling_at_ms, taken.found().finalizing_at_ms) == (None, None)
    taken.log.move(Status.FINALIZING)
    assert taken.found().finalizing_at_ms is not None
    taken.log.release()
    # Its runner was killed, and the next one is not as far.
    again = taken.store.take(taken.job_id, "another", LEASE_S, now_ms())
    assert again is not None
    assert again[0].finalizing_at_ms is None

    with closing(PostgresJobLog(dsn, taken.job_id, again[0].token, lambda: 30)) as log:
        for at_ms in (10, 20):
            assert taken.store.steer(taken.job_id, Wanted.CANCEL, at_ms) is not None
        assert taken.found().cancelling_at_ms == 10
        log.move(Status.FINALIZING)
        log.move(Status.CANCELLED)
    found = taken.found()
    assert (found.cancelling_at_ms, found.finalizing_at_ms, found.ended_at_ms) == (10, 30, 30)


def test_a_job_has_nothing_reserved_for_rows_with_a_result(taken: Taken, tables: PostgresServer) -> None:
    """Also for those of a chunk that is not finished, of which no sum knows yet."""

    def left() -> int:
        with connect(tables.dispatcher_dsn, "tests") as connection:
            act_for(connection, "acme")
            query = f"SELECT {LEFT} FROM backfill_jobs WHERE reserved_nanos = 1000 AND {HOLDING}"  # noqa: S608 - ours
            ((nanos,),) = connection.execute(query.encode()).fetchall()
            return int(nanos)

    with connect(tables.owner_dsn, "tests") as owner:
        act_for(owner, ALL_TENANTS)
        owner.execute("UPDATE backfill_jobs SET reserved_nanos = 1000 WHERE job_id = %s", (taken.job_id,))
    assert left() == 1_000
    taken.log.keep(LEASE_S, 7)
    assert left() == 300
    taken.log.keep(LEASE_S, 2)
    assert left() == 300, "a runner that has begun again knows of fewer"
    chunk = ChunkPlan(0, 0, 9, InputPosition(), InputPosition(0, 9), 0)
    taken.log.plan(chunk)
    taken.log.finish(chunk, "part", RowTally(ok=4, failed=3, expired=1, cancelled=1))
    assert left() == 100
    assert (taken.found().reserved_nanos, taken.found().answered) == (1_000, 7)
    taken.wants(Wanted.PAUSE)
    taken.log.move(Status.PAUSED)
    assert taken.found().reserved_nanos == 1_000, "and its status says that it holds nothing"
    taken.wants(Wanted.RUN)
    assert (taken.found().status, taken.found().reserved_nanos) == (Status.QUEUED, None), "it is reserved anew"


def test_a_job_that_goes_on_after_it_failed_is_not_as_far_as_it_was(taken: Taken) -> None:
    taken.log.move(Status.FINALIZING)
    taken.log.move(Status.FAILED, "the storage refuses")
    assert taken.found().finalizing_at_ms is not None
    taken.wants(Wanted.RUN)
    assert (taken.found().finalizing_at_ms, taken.found().ended_at_ms) == (None, None)


def test_a_job_that_is_cancelled_at_once_says_when(taken: Taken) -> None:
    job_id = queued(taken.store, unique_name(), 1)
    ended = taken.store.steer(job_id, Wanted.CANCEL, 40)
    assert ended is not None
    assert (ended.status, ended.cancelling_at_ms, ended.ended_at_ms) == (Status.CANCELLED, 40, 40)
