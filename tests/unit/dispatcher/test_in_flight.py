"""In flight: counted once, never leaked, whatever order the log is seen in and whatever of it is lost or repeated."""

from dataclasses import dataclass
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fairlane.names import priority_topic
from fairlane.outcomes import Outcome
from fairlane.records import SourceCoordinate, UsageEvent
from stream_processors.dispatcher.scheduling.in_flight import (
    ANY_PARTITION,
    RESERVATION_TTL_MS,
    Dispatched,
    InFlight,
    Reserved,
    WorkId,
)

POOLS = ("p", "q")
CLASSES = ("high", "low")
TENANTS = ("acme", "globex")
PARTITIONS = 2
TOPIC = priority_topic("p", "high")


def source_of(number: int) -> SourceCoordinate:
    return SourceCoordinate("requests.acme", 0, number)


def reserved(cost: int = 10, *, pool: str = "p", partition: int = 0, tenant: str = "acme") -> Reserved:
    return Reserved(pool, "high", partition, tenant, "", cost, cost // 2, "model")


def seen(number: int, cost: int = 10, *, dispatcher: str = "me", tenant: str = "acme") -> Dispatched:
    return Dispatched(source_of(number), tenant, dispatcher, cost)


def usage(work: WorkId, number: int = 0) -> UsageEvent:
    where = SourceCoordinate(*work)
    return UsageEvent(str(number), "acme", "p", "m", "1", "high", Outcome.OK, None, 3, 2, 0, 10, 5, 1, where)


def nothing(in_flight: InFlight) -> bool:
    left = [held for ledger in in_flight._ledgers.values() for held in (ledger.total, *ledger._by_partition.values())]
    if any(any((held.tokens, held.items, held.own_tokens, held.own_items)) for held in left):
        return False
    return not in_flight._own_tenant_tokens and not any(place.work for place in in_flight._partitions.values())


def test_a_dispatch_is_counted_once_from_reservation_to_settlement() -> None:
    in_flight, work = InFlight("me"), WorkId(TOPIC, 0, 7)
    in_flight.reserve(source_of(1), reserved())
    assert in_flight.tokens("p") == in_flight.own_tokens("p") == in_flight.own_tenant_tokens("acme", "p") == 10
    assert in_flight.dispatched(work, seen(1)) is None
    assert in_flight.tokens("p") == in_flight.own_tokens("p") == in_flight.own_tenant_tokens("acme", "p") == 10
    assert in_flight.pools() == ["p"]
    settled = in_flight.settled(work, usage(work))
    assert settled is not None
    assert settled.own == reserved()
    assert settled.usage == usage(work)
    assert settled.source == source_of(1)
    assert nothing(in_flight)
    assert in_flight.settled(work, usage(work)) is None


def test_what_another_dispatcher_dispatched_is_not_our_own() -> None:
    in_flight, work = InFlight("me"), WorkId(TOPIC, 0, 7)
    in_flight.dispatched(work, seen(1, dispatcher="other"))
    assert in_flight.tokens("p") == 10
    assert in_flight.own_tokens("p") == 0
    settled = in_flight.settled(work)
    assert settled is not None
    assert settled.own is None


def test_work_of_our_predecessor_is_ours_without_the_facts() -> None:
    in_flight, work = InFlight("me"), WorkId(TOPIC, 0, 7)
    in_flight.dispatched(work, seen(1))
    assert in_flight.own_tokens("p") == 10
    settled = in_flight.settled(work)
    assert settled is not None
    assert settled.own is None


def test_a_source_that_another_dispatched_ends_our_reservation() -> None:
    """Its partition moved on before our transaction committed."""
    in_flight = InFlight("me")
    in_flight.reserve(source_of(1), reserved())
    in_flight.dispatched(WorkId(TOPIC, 0, 7), seen(1, dispatcher="other"))
    assert in_flight.tokens("p") == 10
    assert in_flight.own_tokens("p") == 0
    settled = in_flight.settled(WorkId(TOPIC, 0, 7))
    assert settled is not None
    assert settled.own is None


def test_a_reservation_may_be_taken_back_or_made_anew() -> None:
    in_flight = InFlight("me")
    in_flight.reserve(source_of(1), reserved(10, pool="p"))
    in_flight.reserve(source_of(1), reserved(4, pool="q"))
    assert in_flight.tokens("p") == 0
    assert in_flight.tokens("q") == 4
    in_flight.release(source_of(1))
    in_flight.release(source_of(1))
    assert nothing(in_flight)


def test_what_was_committed_and_is_never_read_back_expires() -> None:
    in_flight = InFlight("me")
    for number in (1, 2, 3):
        in_flight.reserve(source_of(number), reserved())
    in_flight.committed_own(source_of(2), 0)
    in_flight.committed_own(source_of(1), 10)
    in_flight.committed_own(source_of(2), 20)  # the first time counts
    assert in_flight.expire(RESERVATION_TTL_MS - 1) == 0
    assert in_flight.expire(RESERVATION_TTL_MS + 9) == 1
    assert in_flight.tokens("p") == 20
    assert in_flight.expire(RESERVATION_TTL_MS + 10) == 1
    assert in_flight.tokens("p") == 10


def test_a_dispatch_that_is_not_committed_holds_its_room_however_long() -> None:
    """A topic that takes nothing: else another window of work would be sent after it every half minute."""
    in_flight = InFlight("me")
    in_flight.reserve(source_of(1), reserved())
    assert in_flight.expire(1_000 * RESERVATION_TTL_MS) == 0
    assert in_flight.tokens("p") == 10
    in_flight.release_all()
    assert nothing(in_flight)


def test_a_commit_of_what_is_not_reserved_changes_nothing() -> None:
    """Refusals are committed too, and work may be read back before its commit is told."""
    in_flight = InFlight("me")
    in_flight.reserve(source_of(1), reserved())
    in_flight.dispatched(WorkId(TOPIC, 0, 7), seen(1))
    in_flight.committed_own(source_of(1), 0)
    in_flight.committed_own(source_of(2), 0)
    assert in_flight.expire(RESERVATION_TTL_MS) == 0
    assert not in_flight._committed
    assert in_flight.tokens("p") == 10


def test_a_reservation_made_anew_has_not_been_committed() -> None:
    in_flight = InFlight("me")
    in_flight.reserve(source_of(1), reserved())
    in_flight.committed_own(source_of(1), 0)
    in_flight.reserve(source_of(1), reserved())
    assert in_flight.expire(RESERVATION_TTL_MS) == 0
    assert in_flight.tokens("p") == 10


def test_a_settlement_that_comes_first_waits_for_its_work() -> None:
    in_flight, work = InFlight("me"), WorkId(TOPIC, 0, 7)
    in_flight.reserve(source_of(1), reserved())
    assert in_flight.settled(work, usage(work)) is None
    settled = in_flight.dispatched(work, seen(1))
    assert settled is not None
    assert settled.own == reserved()
    assert settled.usage == usage(work)
    assert nothing(in_flight)


def test_every_order_of_read_back_settlement_and_commit_settles_once() -> None:
    work = WorkId(TOPIC, 0, 7)
    for order in permutations(("dispatched", "settled", "committed")):
        in_flight = InFlight("me")
        in_flight.reserve(source_of(1), reserved())
        settled = []
        for step in order:
            if step == "dispatched":
                settled.append(in_flight.dispatched(work, seen(1)))
            elif step == "settled":
                settled.append(in_flight.settled(work, usage(work)))
            else:
                in_flight.committed(TOPIC, 0, 8)
        assert nothing(in_flight), order
        (one,) = [entry for entry in settled if entry is not None]
        assert one.own == reserved(), order
        assert one.usage == usage(work), order


def test_what_the_group_has_done_beyond_its_offset_is_not_in_flight() -> None:
    in_flight = InFlight("me")
    for offset in range(6):
        in_flight.dispatched(WorkId(TOPIC, 0, offset), seen(offset))
    in_flight.committed(TOPIC, 0, 2, {3, 7})
    assert in_flight.tokens("p") == 30
    in_flight.dispatched(WorkId(TOPIC, 0, 7), seen(7))
    in_flight.dispatched(WorkId(TOPIC, 0, 8), seen(8))
    assert in_flight.tokens("p") == 40


def test_what_was_read_before_changes_nothing() -> None:
    in_flight, work = InFlight("me"), WorkId(TOPIC, 0, 7)
    in_flight.dispatched(work, seen(1))
    in_flight.dispatched(work, seen(1))
    assert in_flight.tokens("p") == 10
    in_flight.settled(work)
    in_flight.dispatched(work, seen(1))
    assert nothing(in_flight)


def test_a_log_that_was_replaced_begins_anew() -> None:
    in_flight = InFlight("me")
    in_flight.reserve(source_of(1), reserved())
    in_flight.dispatched(WorkId(TOPIC, 0, 70), seen(1))
    in_flight.dispatched(WorkId(TOPIC, 1, 70), seen(2))
    in_flight.settled(WorkId(TOPIC, 0, 90))
    in_flight.restart(TOPIC, 0)
    assert in_flight.tokens("p") == 10
    in_flight.dispatched(WorkId(TOPIC, 0, 0), seen(3))
    in_flight.dispatched(WorkId(TOPIC, 0, 90), seen(4))
    assert in_flight.tokens("p") == 30


def test_unmatched_settlements_take_bounded_memory_and_a_forgotten_one_is_no_leak() -> None:
    in_flight = InFlight("me", max_unmatched=3)
    for offset in range(10):
        in_flight.settled(WorkId(TOPIC, 0, offset))
    assert len(in_flight._early) == 3
    for offset in range(10):
        in_flight.dispatched(WorkId(TOPIC, 0, offset), seen(offset))
    assert in_flight.tokens("p") == 70
    in_flight.committed(TOPIC, 0, 10)
    assert nothing(in_flight)


def test_a_settlement_that_comes_twice_pushes_no_early_one_out() -> None:
    in_flight, early = InFlight("me", max_unmatched=2), WorkId(TOPIC, 0, 9)
    in_flight.settled(early)
    for offset in range(5):
        in_flight.dispatched(WorkId(TOPIC, 0, offset), seen(offset))
        in_flight.settled(WorkId(TOPIC, 0, offset))
        in_flight.settled(WorkId(TOPIC, 0, offset))
    in_flight.dispatched(early, seen(9))
    assert nothing(in_flight)


def test_unbilled_work_takes_bounded_memory() -> None:
    in_flight = InFlight("me", max_unmatched=3)
    for offset in range(10):
        in_flight.reserve(source_of(offset), reserved())
        in_flight.dispatched(WorkId(TOPIC, 0, offset), seen(offset))
    in_flight.committed(TOPIC, 0, 10)
    billed = [offset for offset in range(10) if in_flight.settled(WorkId(TOPIC, 0, offset)) is not None]
    assert billed == [7, 8, 9]


def test_no_partition_is_chosen_before_any_is_known() -> None:
    assert InFlight("me").choose_partition(TOPIC) == ANY_PARTITION


def test_equals_take_turns() -> None:
    in_flight = InFlight("me")
    in_flight.set_partitions(TOPIC, 3)
    assert [in_flight.choose_partition(TOPIC) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_what_is_in_flight_in_another_class_counts() -> None:
    """The same consumer holds partition 0 of all classes."""
    in_flight = InFlight("me")
    in_flight.set_partitions(TOPIC, 2)
    in_flight.dispatched(WorkId(priority_topic("p", "low"), 0, 0), seen(1))
    assert [in_flight.choose_partition(TOPIC) for _ in range(3)] == [1, 1, 1]


def both(in_flight: InFlight, partitions: frozenset[int]) -> tuple[int, int]:
    held = in_flight.held("p", partitions)
    return held.tokens, held.own_tokens


def test_what_lies_on_other_partitions_may_be_left_out() -> None:
    in_flight = InFlight("me")
    in_flight.dispatched(WorkId(TOPIC, 0, 0), seen(1, 10))
    in_flight.dispatched(WorkId(TOPIC, 1, 0), seen(2, 20, dispatcher="other"))
    in_flight.reserve(source_of(3), reserved(40, partition=1))
    in_flight.reserve(source_of(4), reserved(80, partition=ANY_PARTITION))
    assert (in_flight.tokens("p"), in_flight.own_tokens("p")) == (150, 130)
    assert both(in_flight, frozenset({0})) == (90, 90)
    assert both(in_flight, frozenset({1})) == (140, 120)
    assert both(in_flight, frozenset({0, 1})) == (150, 130)
    assert both(in_flight, frozenset()) == (80, 80)
    assert in_flight.held("q", frozenset()).own_tokens == 0


def test_the_choice_of_a_partition_may_be_limited() -> None:
    in_flight = InFlight("me")
    in_flight.set_partitions(TOPIC, 3)
    in_flight.dispatched(WorkId(TOPIC, 1, 0), seen(1))
    assert [in_flight.choose_partition(TOPIC, [frozenset({1})]) for _ in range(2)] == [1, 1]
    each = [frozenset({0}), frozenset({1})]
    assert [in_flight.choose_partition(TOPIC, each) for _ in range(2)] == [0, 0]
    assert {in_flight.choose_partition(TOPIC, [frozenset({7})]) for _ in range(2)} == {0, 2}, (
        "there is no such partition"
    )


def test_in_one_round_what_a_consumer_gets_is_on_one_of_its_partitions() -> None:
    in_flight, consumers = InFlight("me"), [frozenset({0, 2}), frozenset({1, 3})]
    in_flight.set_partitions(TOPIC, 4)
    rounds = []
    for number in range(3):
        in_flight.start_round("p")
        chosen = []
        for item in range(4):
            chosen.append(in_flight.choose_partition(TOPIC, consumers))
            in_flight.reserve(source_of(10 * number + item), reserved(10, partition=chosen[-1]))
        rounds.append(chosen)
    assert rounds == [[0, 1, 0, 1], [2, 3, 2, 3], [0, 1, 0, 1]], (
        "each consumer gets half, and its partitions take turns"
    )


def test_only_priority_topics_are_followed() -> None:
    with pytest.raises(ValueError, match="no priority topic"):
        InFlight("me").dispatched(WorkId("requests.acme", 0, 0), seen(1))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 1_000)), max_size=60), st.integers(1, 4))
def test_the_choose_partition_is_chosen(loads: list[tuple[int, int]], count: int) -> None:
    in_flight = InFlight("me")
    in_flight.set_partitions(TOPIC, count)
    tokens = [0] * count
    for number, (partition, cost) in enumerate(loads):
        in_flight.dispatched(WorkId(TOPIC, partition % count, number), seen(number, cost))
        tokens[partition % count] += cost
        assert tokens[in_flight.choose_partition(TOPIC)] == min(tokens)


@given(st.lists(st.integers(1, 1_000), min_size=1, max_size=60), st.integers(1, 4))
def test_no_partition_is_ahead_by_more_than_one_item(costs: list[int], count: int) -> None:
    in_flight = InFlight("me")
    in_flight.set_partitions(TOPIC, count)
    tokens = [0] * count
    for number, cost in enumerate(costs):
        chosen = in_flight.choose_partition(TOPIC)
        in_flight.reserve(source_of(number), reserved(cost, partition=chosen))
        tokens[chosen] += cost
        assert max(tokens) - min(tokens) <= max(costs)


@dataclass
class Item:
    """A work item of the log, and what became of it."""

    number: int
    work: WorkId
    cost: int
    mine: bool
    tenant: str
    reserved: bool = False
    read: bool = False
    done: bool = False


class AnyOrder(RuleBasedStateMachine):
    """A log of work items; its reader sees read-backs, settlements and commits late, twice or never, in any order
    between partitions and topics, and settlements before the work."""

    def __init__(self) -> None:
        super().__init__()
        self.in_flight = InFlight("me", max_unmatched=4)
        self.log: dict[tuple[str, int], list[Item]] = {
            (priority_topic(pool, name), partition): []
            for pool in POOLS
            for name in CLASSES
            for partition in range(PARTITIONS)
        }
        self.now_ms = 0

    @property
    def items(self) -> list[Item]:
        return [item for items in self.log.values() for item in items]

    @rule(data=st.data(), cost=st.integers(1, 100), mine=st.booleans(), tenant=st.sampled_from(TENANTS))
    def dispatch(self, data: st.DataObject, cost: int, mine: bool, tenant: str) -> None:
        place = data.draw(st.sampled_from(sorted(self.log)))
        items = self.log[place]
        # Markers of transactions leave gaps.
        offset = items[-1].work.offset + data.draw(st.integers(1, 3)) if items else data.draw(st.integers(0, 3))
        number = len(self.items)
        item = Item(number, WorkId(*place, offset), cost, mine, tenant)
        items.append(item)
        if mine:
            pool = place[0].split(".")[1]
            self.in_flight.reserve(source_of(number), reserved(cost, pool=pool, partition=place[1], tenant=tenant))
            item.reserved = True

    @rule()
    def dispatch_in_vain(self) -> None:
        """Its transaction is aborted again and again."""
        self.in_flight.reserve(source_of(10_000 + self.now_ms), reserved(7))

    @precondition(lambda self: self.in_flight._reservations)
    @rule(data=st.data())
    def commit_own(self, data: st.DataObject) -> None:
        """With the work, or with something else in its place."""
        source = data.draw(st.sampled_from(sorted(self.in_flight._reservations, key=lambda one: one.offset)))
        self.in_flight.committed_own(source, self.now_ms)

    @rule()
    def leave_the_group(self) -> None:
        self.in_flight.release_all()

    def unread(self) -> list[Item]:
        """The next of every partition: Kafka keeps the order within one."""
        return [
            next(item for item in items if not item.read)
            for items in self.log.values()
            if not all(item.read for item in items)
        ]

    @precondition(lambda self: self.unread())
    @rule(data=st.data(), lost=st.booleans())
    def read_back(self, data: st.DataObject, lost: bool) -> None:
        item = data.draw(st.sampled_from(self.unread()), label="item")
        item.read = True
        if not lost:
            self.see(item)

    @precondition(lambda self: any(item.read for item in self.items))
    @rule(data=st.data())
    def read_again(self, data: st.DataObject) -> None:
        self.see(data.draw(st.sampled_from([item for item in self.items if item.read]), label="item"))

    def see(self, item: Item) -> None:
        dispatcher = "me" if item.mine else "other"
        self.in_flight.dispatched(item.work, seen(item.number, item.cost, dispatcher=dispatcher, tenant=item.tenant))

    @precondition(lambda self: self.items)
    @rule(data=st.data(), lost=st.booleans())
    def settle(self, data: st.DataObject, lost: bool) -> None:
        """By a consumer, maybe before this reader saw the work; a duplicate when it was settled already."""
        item = data.draw(st.sampled_from(self.items), label="item")
        item.done = True
        if not lost:
            self.in_flight.settled(item.work)

    @rule(data=st.data())
    def look_at_commits(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(sorted(self.log)))
        self.commit(place)

    def commit(self, place: tuple[str, int]) -> None:
        items = self.log[place]
        undone = [item.work.offset for item in items if not item.done]
        first = undone[0] if undone else (items[-1].work.offset + 1 if items else 0)
        self.in_flight.committed(*place, first, {item.work.offset for item in items if item.done})

    @rule(later_ms=st.integers(1, 20_000))
    def wait(self, later_ms: int) -> None:
        self.now_ms += later_ms
        waiting = self.in_flight._reservations.keys() - self.in_flight._committed.keys()
        self.in_flight.expire(self.now_ms)
        assert waiting <= self.in_flight._reservations.keys()

    @invariant()
    def nothing_is_counted_twice(self) -> None:
        counted = sum(map(self.in_flight.tokens, POOLS))
        vain = sum(1 for source in self.in_flight._reservations if source.offset >= 10_000)
        assert counted <= sum(item.cost for item in self.items) + 7 * vain

    @invariant()
    def the_sums_agree(self) -> None:
        for pool in POOLS:
            total = self.in_flight.tokens(pool)
            own_total = self.in_flight.own_tokens(pool)
            assert 0 <= own_total <= total
            assert own_total == sum(self.in_flight.own_tenant_tokens(tenant, pool) for tenant in TENANTS)
            held = [self.in_flight.held(pool, frozenset({partition})) for partition in range(PARTITIONS)]
            parts, own_parts = [each.tokens for each in held], [each.own_tokens for each in held]
            assert (sum(parts), sum(own_parts)) == (total, self.in_flight.own_tokens(pool))
            assert all(0 <= own <= part for own, part in zip(own_parts, parts, strict=True))

    @invariant()
    def memory_is_bounded(self) -> None:
        assert len(self.in_flight._early) <= 4
        assert len(self.in_flight._unbilled) <= 4

    def teardown(self) -> None:
        """All is done and its commits are seen; what was committed and never read back expires."""
        for item in self.items:
            item.done = True
        for place in self.log:
            self.commit(place)
        # Read-backs that come after all that change nothing.
        for item in self.items:
            self.see(item)
        for source in self.in_flight._reservations:
            self.in_flight.committed_own(source, self.now_ms)
        self.in_flight.expire(self.now_ms + RESERVATION_TTL_MS)
        assert not self.in_flight._committed
        assert nothing(self.in_flight)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(stateful_step_count=40)


@given(st.permutations(range(12)), st.integers(0, 11), st.data())
def test_settlements_alone_end_everything(order: list[int], early: int, data: st.DataObject) -> None:
    """Without any commit: read-backs in order, settlements in any order, some before the work, each maybe twice."""
    in_flight = InFlight("me")
    for number in range(12):
        in_flight.reserve(source_of(number), reserved())
    for number in order[:early]:
        in_flight.settled(WorkId(TOPIC, 0, number))
    for number in range(12):
        in_flight.dispatched(WorkId(TOPIC, 0, number), seen(number))
    assert in_flight.tokens("p") == 10 * (12 - early)
    for number in order[early:]:
        in_flight.settled(WorkId(TOPIC, 0, number))
        if data.draw(st.booleans()):
            in_flight.settled(WorkId(TOPIC, 0, number))
    assert nothing(in_flight)
