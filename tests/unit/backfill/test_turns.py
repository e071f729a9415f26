"""Which jobs run: tenants share the slots, whatever they have queued and however long their jobs are."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.backfill.job_turns import RunningJob, Turns, WaitingJob, next_turns

TURN_S = 60.0


def waiting_jobs(tenants: str) -> list[WaitingJob]:
    """A job of each of these tenants, the oldest first."""
    return [WaitingJob(f"w{number:03}", tenant, number) for number, tenant in enumerate(tenants)]


def running_jobs(tenants: str, started_at_s: float = 0.0) -> list[RunningJob]:
    return [RunningJob(f"r{number:03}", tenant, started_at_s + number) for number, tenant in enumerate(tenants)]


def turns(waiting: list[WaitingJob], running: list[RunningJob], *, max_jobs: int = 4, now_s: float = 30.0) -> Turns:
    return next_turns(waiting, running, {}, max_jobs=max_jobs, now_s=now_s, turn_s=TURN_S)


def test_a_tenant_alone_has_every_slot_oldest_first() -> None:
    waiting = waiting_jobs("aaaaaa")
    assert turns(waiting[::-1], []) == Turns(start=tuple(waiting[:4]))


def test_tenants_that_wait_have_a_slot_each_before_anybody_has_two() -> None:
    started = turns(waiting_jobs("aaaabc"), []).start
    assert Counter(job.tenant for job in started) == {"a": 2, "b": 1, "c": 1}


def test_who_has_two_slots_more_gives_one_up_at_once() -> None:
    found = turns(waiting_jobs("b"), running_jobs("aaaa"))
    # The latest: it has least to lose.
    assert found == Turns(give_way=("r003",))


def test_nobody_is_asked_twice_for_one_slot() -> None:
    running = running_jobs("aaa")
    leaving = [*running, RunningJob("r003", "a", 3.0, gives_way=True)]
    assert turns(waiting_jobs("b"), leaving) == Turns()
    assert turns(waiting_jobs("b"), running).start == tuple(waiting_jobs("b"))


def test_where_there_are_more_tenants_than_slots_they_take_turns() -> None:
    waiting, running = waiting_jobs("e"), running_jobs("abcd")
    assert turns(waiting, running, now_s=TURN_S - 1) == Turns()
    assert turns(waiting, running, now_s=TURN_S) == Turns(give_way=("r000",))


def test_a_job_that_nobody_waits_behind_is_left_alone() -> None:
    assert turns([], running_jobs("abcd"), now_s=1e9) == Turns()
    assert turns(waiting_jobs("aaa"), running_jobs("aaaa"), now_s=1e9) == Turns()


def test_who_had_a_turn_longest_ago_comes_first() -> None:
    found = next_turns(waiting_jobs("abc"), [], {"a": 5, "b": 3, "c": 4}, max_jobs=2, now_s=10.0)
    assert [job.tenant for job in found.start] == ["b", "c"]


def test_who_has_just_lost_a_slot_takes_no_other_for_it_in_the_same_round() -> None:
    waiting, running = waiting_jobs("aabc"), running_jobs("aabc")
    found = next_turns(waiting, running, {"a": 3, "b": 1, "c": 2}, max_jobs=4, now_s=TURN_S + 4, turn_s=TURN_S)
    # The first of a's, for b; and one of b's, for c. Not another one, for a.
    assert found == Turns(give_way=("r000", "r002"))


TENANTS = st.text("abcdefg", max_size=14)


@given(TENANTS, TENANTS, st.sets(st.integers(0, 13)), st.integers(1, 8), st.floats(0, 200))
def test_what_is_decided_is_always_fair(
    queued: str, slots: str, leaving: set[int], max_jobs: int, now_s: float
) -> None:
    waiting = waiting_jobs(queued)
    running = [
        RunningJob(job.job_id, job.tenant, job.started_at_s, number in leaving)
        for number, job in enumerate(running_jobs(slots[:max_jobs]))
    ]

    found = turns(waiting, running, max_jobs=max_jobs, now_s=now_s)

    started, left = set(found.start), set(found.give_way)
    assert len(started) == len(found.start)
    assert started <= set(waiting)
    assert len(left) == len(found.give_way)
    assert left <= {job.job_id for job in running if not job.gives_way}
    assert len(running) + len(started) <= max_jobs
    # No slot stays empty, and no tenant's later job is started before its earlier one.
    still = [job for job in waiting if job not in started]
    assert not still or len(running) + len(started) == max_jobs
    for job in started:
        assert all(other.created_at_ms > job.created_at_ms for other in still if other.tenant == job.tenant)
    # What is given up goes to those who wait: then nobody who still waits has two slots less than another.
    held = Counter(job.tenant for job in running if not job.gives_way and job.job_id not in left)
    held.update(job.tenant for job in started)
    after = next_turns(
        still,
        [RunningJob(f"x{number}", tenant, now_s) for number, tenant in enumerate(held.elements())],
        {},
        max_jobs=max_jobs,
        now_s=now_s,
    )
    held.update(job.tenant for job in after.start)
    assert after.give_way == ()
    waits = {job.tenant for job in still if job not in after.start}
    assert all(held[tenant] + 1 >= most for tenant in waits for most in held.values())


@dataclass
class Cluster:
    """Jobs on slots, second by second. A job that is to give way does so a second later."""

    max_jobs: int
    left_s: dict[str, int]
    tenants: dict[str, str]
    created_s: dict[str, int]
    now_s: int = 0
    running: dict[str, RunningJob] = field(default_factory=dict)
    turns: Iterator[int] = field(default_factory=count)
    last_turn: dict[str, int] = field(default_factory=dict)
    had_s: Counter[str] = field(default_factory=Counter)
    """By tenant: the seconds that its jobs ran, together."""
    waited_s: Counter[str] = field(default_factory=Counter)
    """By tenant: how long it has had no slot though it has a job."""
    longest_s: int = 0

    def tick(self) -> None:
        for job_id, job in list(self.running.items()):
            self.left_s[job_id] -= 1
            if job.gives_way or not self.left_s[job_id]:
                del self.running[job_id]
        ready = [job_id for job_id, left_s in self.left_s.items() if left_s and self.created_s[job_id] <= self.now_s]
        waiting = [
            WaitingJob(job_id, self.tenants[job_id], self.created_s[job_id])
            for job_id in ready
            if job_id not in self.running
        ]
        found = next_turns(
            waiting,
            list(self.running.values()),
            self.last_turn,
            max_jobs=self.max_jobs,
            now_s=self.now_s,
            turn_s=TURN_S,
        )
        for job_id in found.give_way:
            job = self.running[job_id]
            self.running[job_id] = RunningJob(job_id, job.tenant, job.started_at_s, gives_way=True)
        for one in found.start:
            self.running[one.job_id] = RunningJob(one.job_id, one.tenant, self.now_s)
            self.last_turn[one.tenant] = next(self.turns)
        self.had_s.update(job.tenant for job in self.running.values())
        served = {job.tenant for job in self.running.values()}
        for tenant in {self.tenants[job_id] for job_id in ready}:
            self.waited_s[tenant] = 0 if tenant in served else self.waited_s[tenant] + 1
            self.longest_s = max(self.longest_s, self.waited_s[tenant])
        self.now_s += 1


JOB = st.tuples(st.sampled_from("abcdefg"), st.sampled_from([1, 5, 40, 100_000]), st.integers(0, 300))


@given(st.lists(JOB, min_size=1, max_size=20), st.integers(1, 4))
def test_no_tenant_waits_longer_than_the_turns_of_the_others(jobs: list[tuple[str, int, int]], max_jobs: int) -> None:
    ids = [f"j{number:02}" for number in range(len(jobs))]
    cluster = Cluster(
        max_jobs,
        dict(zip(ids, (length for _, length, _ in jobs), strict=True)),
        dict(zip(ids, (tenant for tenant, _, _ in jobs), strict=True)),
        dict(zip(ids, (created for _, _, created in jobs), strict=True)),
    )
    tenants = len({tenant for tenant, _, _ in jobs})

    for _ in range(900):
        cluster.tick()

    # Each of the others has one turn before it, so many at a time as there are slots; and a second to be left.
    rounds = -(-tenants // max_jobs)
    assert cluster.longest_s <= rounds * (TURN_S + 2)


@pytest.mark.parametrize(
    ("tenants", "jobs_each", "max_jobs"), [(5, 1, 2), (5, 3, 2), (7, 1, 4), (3, 4, 4), (3, 4, 5), (5, 3, 4), (4, 9, 6)]
)
def test_tenants_that_always_wait_have_equal_shares(tenants: int, jobs_each: int, max_jobs: int) -> None:
    """Though jobs that began together give way together."""
    ids = [f"{number}-{tenant}" for number in range(jobs_each) for tenant in "abcdefg"[:tenants]]
    cluster = Cluster(
        max_jobs,
        dict.fromkeys(ids, 100_000),
        {job_id: job_id[-1] for job_id in ids},
        dict.fromkeys(ids, 0),
    )

    for _ in range(7_200):
        cluster.tick()

    assert len(cluster.had_s) == tenants
    assert max(cluster.had_s.values()) <= 1.05 * min(cluster.had_s.values())
