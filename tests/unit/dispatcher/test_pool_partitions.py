"""Who owns which partitions of a pool: dead consumers take up nobody's window, failing ones attract no work."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.names import priority_topic
from fairlane.outcomes import Health
from fairlane.records import CapacityReport
from fairlane_server.admission_rule import CAPACITY_TTL_MS
from stream_processors.dispatcher.scheduling.in_flight import Dispatched, WorkId
from tests.kit.scheduler_kit import DISPATCHER, POOL, Kit, capacity_report, source_of

COST, BATCH_ITEMS, RATE = 100, 10, 1_000.0
RUNNING_ITEMS = BATCH_ITEMS + 1
"""A batch, and what is served within the target queue time of 100 ms."""
NEARLY_DONE_ITEMS = 2 * BATCH_ITEMS
TOPIC = priority_topic(POOL, "normal")


class PartitionedPool:
    """Consumers, each with partitions of its own, and the log that their work stands in."""

    def __init__(self, *owned: tuple[int, ...]) -> None:
        self.kit = Kit()
        self.owned = {f"c{number}": partitions for number, partitions in enumerate(owned)}
        self.count = 1 + max(partition for partitions in owned for partition in partitions)
        self.kit.in_flight.set_partitions(TOPIC, self.count)
        self.work: dict[int, deque[WorkId]] = {partition: deque() for partition in range(self.count)}
        self._offset = 0

    def report(self, *names: str, failing: tuple[str, ...] = ()) -> None:
        self.kit.report(*(self.report_of(name, failing=name in failing) for name in names))

    def report_of(self, name: str, *, failing: bool = False) -> CapacityReport:
        health = Health.FAILING if failing else Health.HEALTHY
        return capacity_report(
            name, RATE, items=BATCH_ITEMS, tokens=BATCH_ITEMS * COST, health=health, partitions=self.owned[name]
        )

    def dispatch(self) -> list[int]:
        """The partitions that got the work whose turn it is, all of it committed and read back."""
        chosen = []
        for turn in self.kit.turns():
            self._offset += 1
            work = WorkId(TOPIC, turn.partition, self._offset)
            self.kit.in_flight.dispatched(work, Dispatched(source_of(turn.item), "a", DISPATCHER, COST))
            self.work[turn.partition].append(work)
            chosen.append(turn.partition)
        return chosen

    def serve(self, name: str, items: int) -> int:
        """A consumer answers the oldest of its work. Returns how many there were."""
        served = 0
        for partition in self.owned[name]:
            while self.work[partition] and served < items:
                self.kit.scheduler.finished(TOPIC, partition, self.kit.now_ms)
                self.kit.in_flight.settled(self.work[partition].popleft())
                served += 1
        return served

    def tokens_of(self, *names: str) -> int:
        return COST * sum(len(self.work[partition]) for name in names for partition in self.owned[name])


def test_what_a_dead_consumer_left_does_not_keep_the_living_from_work() -> None:
    pool = PartitionedPool((0,), (1,))
    pool.report("c0", "c1")
    pool.kit.push_many(400)
    assert sorted(pool.dispatch()) == [0] * RUNNING_ITEMS + [1] * RUNNING_ITEMS
    pool.kit.now_ms = CAPACITY_TTL_MS
    pool.report("c0")
    pool.kit.now_ms += 1
    pool.serve("c0", 1)
    assert pool.dispatch() == [0], "its window is full but for one"
    pool.serve("c0", RUNNING_ITEMS)
    assert pool.dispatch() == [0] * RUNNING_ITEMS
    # The group has moved the partition: what stands there is work of the living again, and only that.
    pool.owned["c0"] = (0, 1)
    pool.report("c0")
    pool.serve("c0", RUNNING_ITEMS)
    assert pool.dispatch() == []
    pool.serve("c0", 5)
    assert pool.dispatch() == [0] * 5


@pytest.mark.parametrize("consumers", [2, 3, 4, 8])
def test_the_survivors_do_all_that_they_can_until_the_group_moves_the_partition(consumers: int) -> None:
    """45 s by the broker's default. One of them is killed after 5 s."""
    pool = PartitionedPool(*((number,) for number in range(consumers)))
    survivors = [f"c{number}" for number in range(consumers - 1)]
    pool.kit.push_many(consumers * 300)
    served, offered = 0, 0
    for now_ms in range(0, 20_000, 100):
        pool.kit.now_ms = now_ms
        live = survivors if now_ms >= 5_000 else [*pool.owned]
        pool.report(*live)
        pool.dispatch()
        for name in live:
            done = pool.serve(name, 1)
            if now_ms >= 5_000:
                served, offered = served + done, offered + 1
    assert served == offered


def test_a_prediction_leaves_out_what_a_dead_consumer_left() -> None:
    pool = PartitionedPool((0,), (1,))
    pool.report("c0", "c1")
    pool.kit.push_many(2 * RUNNING_ITEMS)
    pool.dispatch()
    waiting, tokens = pool.kit.request(), RUNNING_ITEMS * COST
    assert pool.kit.scheduler.predict(waiting)[0].in_flight_tokens == 2 * tokens
    pool.kit.now_ms = CAPACITY_TTL_MS
    pool.report("c0")
    pool.kit.now_ms += 1
    pool.kit.scheduler.refresh(pool.kit.now_ms)
    load, prediction = pool.kit.scheduler.predict(waiting)
    assert load.in_flight_tokens == tokens
    assert prediction.wait_ms == 1_000 * tokens / RATE


def test_one_that_fails_at_once_attracts_nothing_beside_one_that_works() -> None:
    """Its partition is always the emptiest."""
    pool = PartitionedPool((0,), (1,))
    pool.kit.push_many(1_000)
    failed = served = 0
    for now_ms in range(0, 20_000, 100):
        pool.kit.now_ms = now_ms
        pool.report("c0", "c1", failing=("c1",))
        pool.dispatch()
        served += pool.serve("c0", 1)
        failed += pool.serve("c1", 1_000)
    assert (served, failed) == (200, 0)


def test_if_all_fail_all_get_work_because_only_that_shows_who_recovered() -> None:
    pool = PartitionedPool((0,), (1,))
    pool.report("c0", "c1", failing=("c0", "c1"))
    pool.kit.push_many(100)
    assert set(pool.dispatch()) == {0, 1}


def test_a_pool_whose_consumers_do_not_name_their_partitions_is_as_before() -> None:
    pool = PartitionedPool((0,), (1,))
    pool.owned["c0"] = ()
    pool.report("c0", "c1")
    pool.kit.push_many(400)
    assert sorted(pool.dispatch()) == [0] * 20 + [1] * 20
    pool.kit.now_ms = CAPACITY_TTL_MS
    pool.report("c0")
    pool.kit.now_ms += 1
    assert pool.dispatch() == []


@given(data=st.data(), consumers=st.integers(1, 4), each=st.integers(1, 3))
def test_the_living_always_have_their_window_full_and_no_more(data: st.DataObject, consumers: int, each: int) -> None:
    """Whoever is silent, fails or works, and however much: with enough waiting, the window of those that work is filled
    with what stands on partitions of the living, and new work goes to those that work."""
    pool = PartitionedPool(*(tuple(range(number * each, (number + 1) * each)) for number in range(consumers)))
    names = sorted(pool.owned)
    heard_at_ms: dict[str, int] = {}
    failing: set[str] = set()
    pool.kit.push_many(1_000)
    for _ in range(data.draw(st.integers(1, 12))):
        pool.kit.now_ms += data.draw(st.integers(1, 2_000))
        for name in data.draw(st.lists(st.sampled_from(names), unique=True)):
            heard_at_ms[name] = pool.kit.now_ms
            failing.discard(name)
            if data.draw(st.booleans()):
                failing.add(name)
            pool.report(name, failing=tuple(failing))
            pool.serve(name, data.draw(st.integers(0, 30)))
        live = [name for name, at_ms in heard_at_ms.items() if pool.kit.now_ms - at_ms <= CAPACITY_TTL_MS]
        counted = [name for name in live if name not in failing] or live
        before, held = pool.tokens_of(*live), {name: pool.tokens_of(name) for name in live}
        chosen = pool.dispatch()
        if not live:
            assert not chosen or not heard_at_ms, "a lost pool gets nothing, one that never reported does"
            continue
        assert set(chosen) <= {partition for name in counted for partition in pool.owned[name]}
        least, most = (COST * items * len(counted) for items in (RUNNING_ITEMS, NEARLY_DONE_ITEMS))
        overfull = sum(max(0, held[name] - COST * NEARLY_DONE_ITEMS) for name in counted)
        assert max(before, least) <= pool.tokens_of(*live) <= max(before, most + overfull)
