"""Turns of partitions at the fetcher, and what is let go when too much was fetched. Without a broker."""

import asyncio
from collections import OrderedDict
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import errors
from aiokafka.consumer.fetcher import FetchError
from aiokafka.structs import TopicPartition

from benchmarks.record_batches import batch, gzip_of_zeros
from fairlane.clock import now_ms
from stream_processors.dispatcher.reading import bounded_fetcher
from stream_processors.dispatcher.reading.bounded_fetcher import (
    BUSY_INTERVAL_S_PER_PARTITION,
    IDLE_WAIT_MS,
    LEAST_BUSY_WAIT_MS,
    MAX_BUFFERED_BYTES,
    MAX_PAUSE_S,
    MAX_SLOW_TURN_RECORDS,
    MAX_TURN_RECORDS,
    PAUSE_S_PER_RECORD,
    POLL_EXPECTED_WITHIN_S,
    BoundedFetcher,
)
from stream_processors.dispatcher.reading.fetch_session import Answer, FetchRequest, FetchResponse
from stream_processors.dispatcher.reading.fetched_partition import CommittedRecords, FetchedPartition

MIB = 1024 * 1024
NODE = 1


class World:
    """A fetcher whose answers the test makes."""

    def __init__(self) -> None:
        self.fetcher: Any = BoundedFetcher.__new__(BoundedFetcher)
        self.states: dict[TopicPartition, Any] = {}
        self.entries: list[FetchedPartition] = []
        self.assignment = SimpleNamespace(active=True, state_value=self.states.__getitem__, tps=self.states.keys())
        self.fetcher._records = OrderedDict()
        self.fetcher._subscriptions = SimpleNamespace(is_assigned=self.states.__contains__)
        self.fetcher._wait_consume_future = None
        self.fetcher._default_reset_strategy = 0
        self.fetcher._refusals, self.fetcher._served_at_s, self.fetcher._places = {}, {}, {}
        self.fetcher._busy_wait_ms, self.fetcher._next_busy_request_s = LEAST_BUSY_WAIT_MS, 0.0
        self.now_s = 100.0
        self.fetcher._loop = SimpleNamespace(time=lambda: self.now_s)
        self.leaders: dict[TopicPartition, int | None] = {}
        cluster = SimpleNamespace(leader_for_partition=lambda tp: self.leaders.get(tp, NODE))
        self.fetcher._client = SimpleNamespace(force_metadata_update=lambda: None, cluster=cluster, send=self.send)
        self.fetcher._sessions, self.fetcher._in_flight = {}, set()
        self.fetcher._unpolled_since_s, self.fetcher._paused_until_s = None, 0.0
        self.fetcher._fetcher_timeout, self.fetcher._retry_backoff = 0.2, 0.0
        self.fetcher._fetch_max_bytes = self.fetcher._max_partition_fetch_bytes = MIB
        self.fetcher._isolation_level = 1
        self.answer: FetchResponse | BaseException = FetchResponse(0, 1, [])
        self.fetcher.held = self.fetcher.slow = frozenset()

    def assign(self, tenant: str, position: int = 0) -> TopicPartition:
        tp = TopicPartition(f"requests.{tenant}", 0)
        state = SimpleNamespace(paused=False, position=position, has_valid_position=True)
        state.consumed_to = lambda offset: setattr(state, "position", offset)
        self.states[tp] = state
        return tp

    def fetched(self, tp: TopicPartition, data: bytes) -> FetchedPartition:
        records = CommittedRecords(tp, data, [], self.states[tp].position)
        entry = FetchedPartition(tp, self.assignment, records)
        self.fetcher._records[tp] = entry
        self.entries.append(entry)
        return entry

    async def send(self, node_id: int, request: FetchRequest) -> FetchResponse:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    def requests(self) -> list[FetchRequest]:
        """The next requests."""
        return [request for _, request in self.fetcher._get_actions_per_node(self.assignment)[0]]

    def ask(self, answer: FetchResponse | BaseException) -> bool:
        """Send the next request, which gets this answer."""
        self.answer = answer
        ((node_id, request),) = self.fetcher._get_actions_per_node(self.assignment)[0]
        self.wait_ms = request.max_wait_ms
        return bool(asyncio.run(self.fetcher._proc_fetch_request(self.assignment, node_id, request)))

    @property
    def taken(self) -> list[FetchedPartition]:
        """Of the last poll."""
        return [entry for entry in self.entries if entry.turn_bytes]

    def wanted(self) -> list[TopicPartition]:
        """The partitions of the next request in their order, as a new session sends it."""
        self.fetcher._sessions.clear()
        (request,) = self.requests()
        return list(request.change.changed)

    def drain(self, most: int = 2_000) -> dict[str, int]:
        """How many records of each tenant a poll brings."""
        for entry in self.entries:
            entry.turn_bytes = 0
        drained = self.fetcher._drain(set(self.states), most)
        return {tp.topic.removeprefix("requests."): len(records) for tp, records in drained.items()}


def small(count: int) -> bytes:
    return batch([b"x"] * count)


def answer(tp: TopicPartition, records: bytes, error_code: int = 0) -> Answer:
    return Answer(tp, error_code, high_watermark=12, last_stable_offset=10, aborted=[], records=records)


def test_a_poll_takes_turns_and_who_had_one_goes_to_the_back() -> None:
    world = World()
    for tenant in "ab":
        world.fetched(world.assign(tenant), small(MAX_TURN_RECORDS + 10))
    world.fetched(world.assign("c"), small(3))
    assert world.drain() == {"a": MAX_TURN_RECORDS, "b": MAX_TURN_RECORDS, "c": 3}
    assert world.drain() == {"a": 10, "b": 10}
    assert world.drain() == {}
    for tenant in "ab":
        world.fetched(world.assign(tenant), small(100))
    assert world.drain(60) == {"a": 60}
    assert world.drain(60) == {"b": 60}


def test_slow_partitions_take_small_turns_and_held_ones_none() -> None:
    world = World()
    slow, held = world.assign("slow"), world.assign("held")
    for tp in (slow, held):
        world.fetched(tp, small(100))
    world.fetcher.slow, world.fetcher.held = {slow}, {held}
    assert world.drain() == {"slow": MAX_SLOW_TURN_RECORDS}
    world.fetcher.held = frozenset()
    assert world.drain() == {"held": 100, "slow": MAX_SLOW_TURN_RECORDS}


def test_a_poll_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_fetcher, "MAX_POLL_BYTES", 2 * MIB)
    world = World()
    for tenant in "abc":
        world.fetched(world.assign(tenant), batch([bytes(MIB)] * 3))
    assert sum(world.drain().values()) == 2


def test_what_a_poll_inflates_is_bounded_however_little_of_it_is_handed_on() -> None:
    """A bomb is a few bytes on the wire, and takes as long as 16 MiB."""
    world = World()
    bomb = batch([b"a"] * 2, codec=1, compressed=gzip_of_zeros(20 * MIB))
    large = batch([b"a"] * 5 + [bytes(7 * MIB)] * 2, codec=1)
    for number in range(6):
        world.fetched(world.assign(f"bombs-{number}"), bomb)
        world.fetched(world.assign(f"large-{number}"), large)
    world.fetched(world.assign("neighbour"), small(5))
    turns: list[str] = []
    for _ in range(30):
        drained = world.drain()
        assert sum(entry.turn_bytes for entry in world.taken) <= 2 * bounded_fetcher.MAX_POLL_BYTES
        assert world.fetcher.buffered_bytes <= bounded_fetcher.MAX_BUFFERED_BYTES
        turns += drained
    assert turns.index("neighbour") <= 12


def test_who_waits_longest_is_first_in_the_next_request() -> None:
    """The first alone gets a batch that is larger than what is asked for."""
    world = World()
    tps = [world.assign(tenant) for tenant in "abc"]
    for tp in (tps[1], tps[0]):
        assert world.fetcher._keep(world.assignment, answer(tp, small(2)), {tp: 0})
        world.now_s += 1
    world.drain()
    assert world.wanted() == [tps[2], tps[1], tps[0]]


def test_while_something_waits_to_be_handed_on_requests_leave_time_for_that() -> None:
    world = World()
    busy, *others = [world.assign(f"tenant-{number}") for number in range(101)]
    world.fetched(busy, small(10))
    interval_s = len(others) * BUSY_INTERVAL_S_PER_PARTITION
    assert world.wanted() == others
    world.now_s += 0.4 * interval_s
    requests, _, timeout_s, *_ = world.fetcher._get_actions_per_node(world.assignment)
    assert requests == []
    assert timeout_s == pytest.approx(0.6 * interval_s)
    # What it leaves time for was handed on.
    world.drain()
    assert set(world.wanted()) == {busy, *others}
    world.fetched(busy, small(10))
    world.now_s += 1.1 * interval_s
    assert world.wanted() == others


def test_a_wait_that_brings_nothing_doubles_the_next_one() -> None:
    world = World()
    busy, idle = world.assign("busy"), world.assign("idle")
    waits_ms = []

    def ask(*answers: Answer) -> None:
        world.now_s += 1.0
        world.ask(FetchResponse(0, 1, answers))
        waits_ms.append(world.wait_ms)

    world.fetched(busy, small(10))
    for _ in range(6):
        ask()
    assert waits_ms == [10, 20, 40, 80, 160, IDLE_WAIT_MS]
    ask(answer(idle, small(3)))
    assert world.fetcher._records[idle].has_more()
    waits_ms.clear()
    del world.fetcher._records[idle]
    ask()
    ask()
    assert waits_ms == [10, 20]


def test_what_is_read_of_a_batch_is_not_looked_for_again_when_it_is_fetched_again() -> None:
    world = World()
    tp = world.assign("a")
    data = batch([b"x"] * 300)
    world.fetched(tp, data)
    world.drain(100)
    world.fetcher._records[tp].release()
    assert world.drain() == {}
    assert world.fetcher._keep(world.assignment, answer(tp, data), {tp: 100})
    records = world.fetcher._records[tp]._partition_records
    assert records._resume.records.number == 100
    assert world.drain() == {"a": MAX_TURN_RECORDS}


def test_beyond_the_bound_the_held_and_the_large_are_let_go_and_the_small_are_kept() -> None:
    """Whatever a hostile tenant has fetched must not push out what its neighbours have."""
    world = World()
    bomb = batch([b""] * 5 + [bytes(7 * MIB)] * 2, codec=1)
    hostile = [world.assign(f"hostile-{number}") for number in range(8)]
    entries = [world.fetched(tp, bomb) for tp in hostile]
    world.fetcher.slow = set(hostile)
    for entry in entries:
        entry.take(1, 1)  # inflates
    world.fetcher._records.move_to_end(hostile[0])
    neighbour = world.fetched(world.assign("neighbour"), small(500))
    assert world.fetcher.buffered_bytes > bounded_fetcher.MAX_BUFFERED_BYTES
    world.fetcher._release_excess()
    assert world.fetcher.buffered_bytes <= bounded_fetcher.MAX_BUFFERED_BYTES
    assert neighbour.has_more()
    world.fetcher.held = set(hostile[:3])
    for tp in hostile:
        world.fetched(tp, bomb).take(1, 1)
    world.fetcher._release_excess()
    assert [world.fetcher._records[tp].has_more() for tp in hostile[:3]] == [False] * 3
    assert neighbour.has_more()


def test_what_was_let_go_is_fetched_again_once_and_not_while_it_is_held_or_paused() -> None:
    """A partition without an entry is fetched; an empty entry keeps it from being."""
    world = World()
    tp = world.assign("a")
    world.fetched(tp, small(10)).release()
    world.fetcher.held = {tp}
    assert world.drain() == {}
    assert tp in world.fetcher._records
    world.fetcher.held = frozenset()
    assert world.fetcher._drain({TopicPartition("another", 0)}, 10) == {}  # paused by Faust
    assert tp in world.fetcher._records
    assert world.drain() == {}
    assert tp not in world.fetcher._records


def test_an_error_is_raised_when_there_is_nothing_before_it() -> None:
    world = World()
    good, bad = world.assign("good"), world.assign("bad")
    world.fetched(good, small(1))
    world.fetcher._records[bad] = FetchError(error=errors.OffsetOutOfRangeError({bad: 5}), backoff=0)
    assert world.drain() == {"good": 1}
    with pytest.raises(errors.OffsetOutOfRangeError):
        world.drain()
    assert bad not in world.fetcher._records


def test_an_answer_moves_high_watermark_and_last_stable_offset() -> None:
    world = World()
    tp = world.assign("a")
    told = Answer(tp, 0, high_watermark=12, last_stable_offset=10, aborted=[(7, 0)], records=small(2))
    assert world.fetcher._keep(world.assignment, told, {tp: 0})
    assert world.fetcher._records[tp]._partition_records._aborted == [(7, 0)]
    assert (world.states[tp].highwater, world.states[tp].lso) == (12, 10)
    assert now_ms() - world.states[tp].timestamp < 60_000
    assert world.drain() == {"a": 2}


def test_a_partition_that_the_broker_refuses_is_asked_again_ever_more_rarely() -> None:
    """And nobody else waits for it."""
    world = World()
    bad, good = world.assign("bad"), world.assign("good")
    times_s: list[float] = []
    for _ in range(200):
        wanted = world.wanted()
        assert good in wanted
        if bad in wanted:
            times_s.append(world.now_s)
            unknown = errors.UnknownError.errno
            assert not world.fetcher._keep(world.assignment, answer(bad, b"", unknown), {bad: 0})
        assert world.drain() == {}
        world.now_s += 0.2
    pauses_s = [later - earlier for earlier, later in pairwise(times_s)]
    assert pauses_s[0] < 0.5
    assert 2.0 < max(pauses_s) < 6.0
    assert 10 < len(times_s) < 30
    world.now_s += 10
    assert bad in world.wanted()
    assert world.fetcher._keep(world.assignment, answer(bad, small(2)), {bad: 0})
    assert world.fetcher._refusals == {}
    assert world.drain() == {"bad": 2}


def test_an_answer_to_a_position_that_was_left_is_dropped() -> None:
    world = World()
    tp = world.assign("a", position=5)
    assert not world.fetcher._keep(world.assignment, answer(tp, small(2)), {tp: 0})
    assert tp not in world.fetcher._records


def test_a_request_says_only_what_changed_since_the_one_before() -> None:
    world = World()
    a, b, _ = (world.assign(tenant, position=5) for tenant in "abc")
    assert not world.ask(FetchResponse(0, 77, []))
    assert world.ask(FetchResponse(0, 77, [answer(a, batch([b"x"] * 3, base_offset=5))]))
    world.drain()
    world.now_s += MAX_PAUSE_S
    world.states[b].paused, world.states[b].resume_fut = True, None
    (request,) = world.requests()
    assert request.change == (77, 2, {a: 8}, [b])


def test_the_next_request_waits_for_the_poll_that_takes_what_was_fetched() -> None:
    """Before it, the request would leave out the partitions with records, and they would wait for its end."""
    world = World()
    tp, _ = world.assign("a"), world.assign("b")
    assert world.ask(FetchResponse(0, 77, [answer(tp, small(2))]))
    requests, _, timeout_s, *_ = world.fetcher._get_actions_per_node(world.assignment)
    assert requests == []
    assert timeout_s == pytest.approx(POLL_EXPECTED_WITHIN_S)
    assert world.drain() == {"a": 2}
    world.now_s += PAUSE_S_PER_RECORD
    (request,) = world.requests()
    assert request.change.changed == {tp: 2}
    assert request.max_wait_ms == IDLE_WAIT_MS


@pytest.mark.parametrize(("records", "pause_s"), [(1, 0.0), (2, PAUSE_S_PER_RECORD), (100, MAX_PAUSE_S)])
def test_more_records_at_once_make_the_next_request_wait_for_more_of_them(records: int, pause_s: float) -> None:
    """A lone request never waits."""
    world = World()
    tp = world.assign("a")
    assert world.ask(FetchResponse(0, 77, [answer(tp, small(records))]))
    assert world.drain() == {"a": records}
    requests, _, timeout_s, *_ = world.fetcher._get_actions_per_node(world.assignment)
    if not pause_s:
        assert len(requests) == 1
        return
    assert requests == []
    assert timeout_s == pytest.approx(pause_s)
    world.now_s += 1.01 * pause_s
    assert len(world.requests()) == 1


def test_partitions_without_a_poll_do_not_stop_the_others_for_long() -> None:
    world = World()
    tp, _ = world.assign("a"), world.assign("b")
    assert world.ask(FetchResponse(0, 77, [answer(tp, small(2))]))
    world.now_s += 2 * POLL_EXPECTED_WITHIN_S
    (request,) = world.requests()
    assert request.change.forgotten == [tp]
    assert request.max_wait_ms == LEAST_BUSY_WAIT_MS


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(FetchResponse(70, 0, []), id="the broker forgot the session"),
        pytest.param(errors.RequestTimedOutError(), id="no answer"),
        pytest.param(asyncio.CancelledError(), id="cancelled"),
    ],
)
def test_after_a_failure_everything_is_asked_for_again(problem: FetchResponse | BaseException) -> None:
    world = World()
    tps = [world.assign(tenant) for tenant in "abc"]
    assert not world.ask(FetchResponse(0, 77, []))
    assert world.requests()[0].change.changed == {}
    assert not world.ask(problem)
    (request,) = world.requests()
    assert request.change.epoch == 0
    assert set(request.change.changed) == set(tps)


def test_nothing_is_asked_for_beyond_the_bound_of_what_is_buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.assign("a")
    entry = world.fetched(world.assign("b"), small(10))
    monkeypatch.setattr(bounded_fetcher, "MAX_BUFFERED_BYTES", entry.size_bytes)
    assert world.requests() == []
    monkeypatch.setattr(bounded_fetcher, "MAX_BUFFERED_BYTES", MAX_BUFFERED_BYTES)
    assert len(world.requests()) == 1


def test_partitions_without_leader_ask_for_metadata_and_those_without_position_for_one() -> None:
    world = World()
    lost, reset, running = (world.assign(tenant) for tenant in ("lost", "reset", "running"))
    world.leaders[lost] = None
    world.states[reset].has_valid_position = False
    world.leaders[reset] = 2
    requests, resets, _, is_outdated, _ = world.fetcher._get_actions_per_node(world.assignment)
    assert is_outdated
    assert resets == {2: [reset]}
    assert [(node, list(request.change.changed)) for node, request in requests] == [(NODE, [running])]
    world.fetcher._in_flight = {NODE, 2}
    world.fetcher._sessions.clear()
    requests, resets, *_ = world.fetcher._get_actions_per_node(world.assignment)
    assert (requests, resets) == ([], {})
