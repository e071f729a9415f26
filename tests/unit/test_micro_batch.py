"""Micro-batches: nothing lost or run twice, no bound exceeded, nobody starved."""

from collections import Counter
from collections.abc import Iterable
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fairlane.outcomes import Priority
from fairlane.ownership import Claim, PartitionId
from fairlane.records import InferenceRequest, RequestInput, SourceCoordinate, WorkItem
from inference_consumers.micro_batch import BatchLimits, MicroBatch, MicroBatcher, ModelKey, ReceivedWork

LIMITS = BatchLimits(max_items=4, max_tokens=100, timeout_ms=20)
MODEL: ModelKey = ("chat", "1")
SMALL_MODEL: ModelKey = ("small", "1")
SMALL_LIMITS = BatchLimits(max_items=2, max_tokens=30, timeout_ms=5)
PRIORITIES = tuple(str(priority) for priority in Priority)

_offsets = count()


def work(
    priority: str = "normal",
    *,
    at_ms: int = 0,
    tokens: int = 10,
    model: ModelKey = MODEL,
    deadline_at_ms: int = 10**9,
    size_bytes: int = 100,
    partition: int = 0,
) -> ReceivedWork:
    """A work item of its own offset."""
    claim = Claim(PartitionId("priority.gpu." + priority, partition), next(_offsets), 1)
    request = InferenceRequest("id", model[0], "generate", RequestInput(prompt="hello"), priority=priority)
    item = WorkItem(
        request=request,
        tenant="acme",
        pool="gpu",
        model_version=model[1],
        priority_class=priority,
        cost_tokens=tokens,
        submitted_at_ms=0,
        admitted_at_ms=0,
        dispatched_at_ms=0,
        deadline_at_ms=deadline_at_ms,
        reply_topic="replies.acme",
        dispatcher_id="d",
        source=SourceCoordinate("requests.acme", 0, claim.offset),
    )
    return ReceivedWork(claim, item, size_bytes, at_ms)


def batcher(*items: ReceivedWork, limits: BatchLimits = LIMITS) -> MicroBatcher:
    made = MicroBatcher(limits, {SMALL_MODEL: SMALL_LIMITS})
    for item in items:
        made.add(item)
    return made


def taken(batch: MicroBatch | None) -> tuple[ReceivedWork, ...]:
    assert batch is not None
    return batch.work


def limits_of(key: ModelKey) -> BatchLimits:
    return SMALL_LIMITS if key == SMALL_MODEL else LIMITS


def is_full(items: Iterable[ReceivedWork], limits: BatchLimits) -> bool:
    items = list(items)
    return len(items) >= limits.max_items or sum(one.item.cost_tokens for one in items) >= limits.max_tokens


class BatcherModel(RuleBasedStateMachine):
    """The batcher beside a plain list of what waits."""

    def __init__(self) -> None:
        super().__init__()
        self.batcher = batcher()
        self.waiting: list[ReceivedWork] = []
        self.now_ms = 0

    @rule(
        priorities=st.lists(st.sampled_from(PRIORITIES), min_size=1, max_size=8),
        model=st.sampled_from((MODEL, MODEL, SMALL_MODEL)),
        tokens=st.sampled_from((1, 10, 40, 99, 100, 250)),
        patience_ms=st.sampled_from((3, 30, 10**6)),
        partition=st.integers(0, 2),
    )
    def arrive(self, priorities: list[str], model: ModelKey, tokens: int, patience_ms: int, partition: int) -> None:
        for priority in priorities:
            one = work(
                priority,
                at_ms=self.now_ms,
                tokens=tokens,
                model=model,
                deadline_at_ms=self.now_ms + patience_ms,
                partition=partition,
            )
            self.batcher.add(one)
            self.waiting.append(one)

    @initialize(priorities=st.lists(st.sampled_from(PRIORITIES), max_size=10))
    def begin(self, priorities: list[str]) -> None:
        self.arrive(priorities, MODEL, 10, 30, 0)

    @rule(passed_ms=st.integers(0, 25))
    def time_passes(self, passed_ms: int) -> None:
        self.now_ms += passed_ms

    @rule(idle=st.booleans())
    def take(self, idle: bool) -> None:
        batch = self.batcher.next_batch(self.now_ms, idle=idle)
        if batch is None:
            assert not self.waiting or not idle, "an idle engine takes what is there"
            for one in self.waiting:
                assert self.now_ms < one.received_at_ms + limits_of(one.model_key).timeout_ms, "its time bound passed"
            by_model = {key: [one for one in self.waiting if one.model_key == key] for key in (MODEL, SMALL_MODEL)}
            assert not any(is_full(items, limits_of(key)) for key, items in by_model.items())
            return
        limits = limits_of(batch.model_key)
        assert {one.model_key for one in batch.work} == {batch.model_key}
        assert len(batch.work) <= limits.max_items
        if len(batch.work) > 1:
            assert sum(one.item.cost_tokens for one in batch.work) <= limits.max_tokens
        self.remove(batch.work)

    @rule()
    def expire(self) -> None:
        expired = self.batcher.take_expired(self.now_ms)
        assert {one.claim for one in expired} == {
            one.claim for one in self.waiting if one.item.deadline_at_ms < self.now_ms
        }
        self.remove(expired)

    @rule(partition=st.integers(0, 2))
    def lose(self, partition: int) -> None:
        stale = [one for one in self.waiting if one.claim.partition.partition == partition]
        assert self.batcher.discard_stale(lambda claim: claim.partition.partition != partition) == len(stale)
        self.remove(stale)

    def remove(self, gone: Iterable[ReceivedWork]) -> None:
        """Raises ValueError for what does not wait: run twice, or never received."""
        for one in gone:
            self.waiting.remove(one)

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.batcher) == len(self.waiting)
        assert self.batcher.size_bytes == sum(one.size_bytes for one in self.waiting)
        counted = Counter(one.item.priority_class for one in self.waiting)
        assert all(self.batcher.count(priority) == counted[priority] for priority in PRIORITIES)

    def teardown(self) -> None:
        while self.waiting:
            before = len(self.waiting)
            self.take(idle=True)
            assert len(self.waiting) < before


TestBatcher = BatcherModel.TestCase
TestBatcher.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_a_batch_waits_for_more_until_its_time_bound() -> None:
    made = batcher(work(at_ms=100), work(at_ms=115))
    assert made.due_at_ms(idle=False) == 120
    assert made.next_batch(119, idle=False) is None
    assert len(taken(made.next_batch(120, idle=False))) == 2
    assert made.due_at_ms(idle=False) is None
    assert made.next_batch(10**6, idle=True) is None


def test_an_idle_engine_takes_what_is_there_at_once() -> None:
    made = batcher(work(at_ms=100))
    assert made.due_at_ms(idle=True) == 100
    assert len(taken(made.next_batch(100, idle=True))) == 1


def test_the_item_bound_closes_a_batch() -> None:
    made = batcher(*(work() for _ in range(6)))
    assert len(taken(made.next_batch(0, idle=False))) == 4
    assert made.next_batch(0, idle=False) is None
    assert len(taken(made.next_batch(20, idle=False))) == 2


def test_the_token_bound_closes_a_batch() -> None:
    made = batcher(work(tokens=60), work(tokens=39), work(tokens=2))
    assert [one.item.cost_tokens for one in taken(made.next_batch(0, idle=False))] == [60, 39]


def test_an_item_over_the_token_bound_runs_alone() -> None:
    made = batcher(work(tokens=1_000), work(tokens=1))
    assert [one.item.cost_tokens for one in taken(made.next_batch(0, idle=False))] == [1_000]
    assert len(made) == 1


def test_each_model_has_its_own_limits_and_batches() -> None:
    made = batcher(work(at_ms=0), *(work(model=SMALL_MODEL, at_ms=1) for _ in range(3)))
    batch = made.next_batch(1, idle=False)
    assert batch is not None
    assert batch.model_key == SMALL_MODEL, "it is full, and does not wait for an older one that is not"
    assert len(batch.work) == 2
    assert made.due_at_ms(idle=False) == 6


def test_batches_keep_the_order_of_arrival_within_a_priority() -> None:
    items = [work(tokens=30) for _ in range(5)]
    made = batcher(*items)
    assert [*taken(made.next_batch(50, idle=False)), *taken(made.next_batch(50, idle=False))] == items


def test_room_left_is_filled_from_other_priorities() -> None:
    low, normal, high = work("low"), work("normal"), work("high")
    made = batcher(low, normal, high)
    assert taken(made.next_batch(0, idle=True)) == (high, normal, low)


@given(
    depths=st.dictionaries(st.sampled_from(PRIORITIES), st.just(400), min_size=1),
    rounds=st.integers(12, 60),
)
@settings(max_examples=30, deadline=None)
def test_priorities_share_batches_by_weight(depths: dict[str, int], rounds: int) -> None:
    """While all have work, each leads its weighted share of the batches, to one batch; nobody waits longer."""
    weights = {"high": 8, "normal": 3, "low": 1}
    made = batcher(*(work(priority) for priority, depth in depths.items() for _ in range(depth)))
    led = [taken(made.next_batch(10**6, idle=False))[0].item.priority_class for _ in range(rounds)]
    total = sum(weights[priority] for priority in depths)
    for priority in depths:
        assert abs(led.count(priority) - rounds * weights[priority] / total) <= 1
    assert led[0] == next(priority for priority in PRIORITIES if priority in depths)


def test_low_is_never_starved_by_a_flood_of_high() -> None:
    made = batcher(work("low", at_ms=0))
    for now_ms in range(1, 100):
        for _ in range(8):
            made.add(work("high", at_ms=now_ms))
        if any(one.item.priority_class == "low" for one in taken(made.next_batch(now_ms, idle=False))):
            assert now_ms <= 9
            return
    pytest.fail("low was starved")


def test_a_priority_that_was_away_saved_nothing_up() -> None:
    made = batcher(*(work("normal") for _ in range(200)))
    for _ in range(30):
        made.next_batch(10**6, idle=False)
    for _ in range(40):
        made.add(work("low"))
        made.add(work("normal"))
    led = [taken(made.next_batch(10**6, idle=False))[0].item.priority_class for _ in range(8)]
    assert led.count("low") == 2, "its quarter beside normal, and no burst"


def test_expired_work_is_removed_before_it_runs() -> None:
    late, on_time = work(deadline_at_ms=99), work(deadline_at_ms=100)
    made = batcher(late, on_time)
    assert made.take_expired(100) == [late]
    assert made.take_expired(100) == []
    assert taken(made.next_batch(100, idle=True)) == (on_time,)


def test_an_answer_that_changes_while_it_is_asked_loses_nothing() -> None:
    """Another thread may revoke a partition between two questions."""
    made = batcher(work(), work(), work())
    answers = iter([True, True, False])
    assert made.discard_stale(lambda _claim: next(answers, False)) == 1
    assert len(made) == 2
    assert len(taken(made.next_batch(0, idle=True))) == 2
