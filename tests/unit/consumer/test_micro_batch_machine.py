"""The micro-batcher beside a plain list of what waits: nothing lost or run twice, no bound exceeded, nothing idle."""

from collections import Counter
from collections.abc import Iterable, Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from inference_consumers.batching.length_buckets import MAX_PADDING
from inference_consumers.batching.micro_batch import MicroBatch
from inference_consumers.batching.priority_pick import PRIORITY_WEIGHTS
from inference_consumers.batching.received_work import ModelKey, ReceivedWork
from tests.kit.micro_batch_kit import MODEL, PRIORITIES, SMALL_MODEL, batcher, shape_of, work

MODELS = (MODEL, SMALL_MODEL)


class BatcherModel(RuleBasedStateMachine):
    """One thread's calls in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.batcher = batcher()
        self.waiting: list[ReceivedWork] = []
        self.measured: set[ModelKey] = set()
        self.now_ms = 0

    @rule(
        priorities=st.lists(st.sampled_from(PRIORITIES), min_size=1, max_size=8),
        model=st.sampled_from((MODEL, MODEL, SMALL_MODEL)),
        prompt_tokens=st.sampled_from((0, 1, 18, 22, 40, 97, 240)),
        output_tokens=st.sampled_from((0, 1, 20)),
        patience_ms=st.sampled_from((3, 30, 200, 10**6)),
        late_ms=st.sampled_from((0, 0, 7)),
        partition=st.integers(0, 2),
    )
    def arrive(
        self,
        priorities: list[str],
        model: ModelKey,
        prompt_tokens: int,
        output_tokens: int,
        patience_ms: int,
        late_ms: int,
        partition: int,
    ) -> None:
        """``late_ms`` is for what was received before, and comes again."""
        for priority in priorities:
            one = work(
                priority,
                at_ms=self.now_ms - late_ms,
                tokens=prompt_tokens + 2 * output_tokens,
                prompt_tokens=prompt_tokens,
                model=model,
                deadline_at_ms=self.now_ms + patience_ms,
                partition=partition,
            )
            self.batcher.add(one)
            self.waiting.append(one)

    @initialize(priorities=st.lists(st.sampled_from(PRIORITIES), max_size=10))
    def begin(self, priorities: list[str]) -> None:
        self.arrive(priorities, MODEL, 18, 1, 30, 0, 0)

    @rule(passed_ms=st.integers(0, 25))
    def time_passes(self, passed_ms: int) -> None:
        self.now_ms += passed_ms

    @rule(idle=st.booleans(), runnable=st.sampled_from((None, {MODEL}, {SMALL_MODEL}, set())))
    def take(self, idle: bool, runnable: set[ModelKey] | None) -> None:
        alive = self.alive(MODELS if runnable is None else runnable)
        batch = self.batcher.next_batch(self.now_ms, idle=idle, runnable=runnable)
        if batch is None:
            assert not (idle and alive), "an idle engine takes what is there"
            for one in alive:
                bound_ms = one.received_at_ms + self.batcher.limits_of(one.model_key).timeout_ms
                assert self.now_ms < bound_ms, "its time bound passed"
            for key in MODELS:
                assert not self.is_full(key, [one for one in alive if one.model_key == key])
            due_at_ms = self.batcher.due_at_ms(idle=idle, runnable=runnable)
            assert (due_at_ms is not None and due_at_ms > self.now_ms) if alive else due_at_ms is None
            return
        assert runnable is None or batch.model_key in runnable
        self.check(batch)
        self.remove(batch.work)

    def check(self, batch: MicroBatch) -> None:
        limits, shape = self.batcher.limits_of(batch.model_key), shape_of(batch.work)
        assert batch.cost_tokens == shape.cost_tokens
        assert {one.model_key for one in batch.work} == {batch.model_key}
        assert all(one.item.deadline_at_ms >= self.now_ms for one in batch.work), "what expired costs nothing more"
        assert shape.items <= limits.max_items
        if shape.items > 1:
            assert shape.padded_tokens <= limits.max_tokens
        if batch.model_key not in self.measured:
            assert shape.padding_share() <= MAX_PADDING

    @rule(model=st.sampled_from(MODELS), items=st.integers(0, 4), tokens=st.integers(0, 4))
    def take_for(self, model: ModelKey, items: int, tokens: int) -> None:
        bound = self.batcher.limits_of(model).max_tokens
        room = tokens * bound // 4
        joined = self.batcher.take_for(model, self.now_ms, items, room)
        assert len(joined) <= items
        assert all(one.model_key == model and one.item.deadline_at_ms >= self.now_ms for one in joined)
        cost = sum(one.item.cost_tokens for one in joined)
        assert cost <= room or (len(joined) == 1 and room == bound)
        alive = self.alive({model})
        if items and room == bound and alive:
            assert joined, "an engine with all its room takes what there is"
        self.remove(joined)

    @rule(
        model=st.sampled_from(MODELS),
        items=st.integers(1, 4),
        tokens=st.integers(1, 120),
        seconds=st.sampled_from((0.001, 0.01, 0.05, 1.0)),
    )
    def ran(self, model: ModelKey, items: int, tokens: int, seconds: float) -> None:
        self.batcher.ran(model, items, tokens, seconds)
        self.measured.add(model)

    @rule(model=st.sampled_from(MODELS), items=st.integers(1, 4), tokens=st.integers(1, 120))
    def out_of_memory(self, model: ModelKey, items: int, tokens: int) -> None:
        self.batcher.out_of_memory(model, items, tokens)
        limits = self.batcher.limits_of(model)
        assert limits.max_items <= max(1, items // 2) or limits.max_tokens <= max(1, tokens // 2)

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
        assert len(self.batcher.take(lambda work: work.claim.partition.partition == partition)) == len(stale)
        self.remove(stale)

    def alive(self, models: Iterable[ModelKey]) -> list[ReceivedWork]:
        keys = set(models)
        return [one for one in self.waiting if one.model_key in keys and one.item.deadline_at_ms >= self.now_ms]

    def is_full(self, key: ModelKey, items: Sequence[ReceivedWork]) -> bool:
        limits = self.batcher.limits_of(key)
        return len(items) >= limits.max_items or sum(one.item.cost_tokens for one in items) >= limits.max_tokens

    def remove(self, gone: Iterable[ReceivedWork]) -> None:
        """Raises ValueError for what does not wait: run twice, or never received."""
        for one in gone:
            self.waiting.remove(one)

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.batcher) == len(self.waiting)
        for priority in PRIORITY_WEIGHTS:
            mine = [one.size_bytes for one in self.waiting if one.item.priority_class == priority]
            assert self.batcher.size_bytes(priority) == sum(mine)
        assert self.batcher.cost_tokens == sum(one.item.cost_tokens for one in self.waiting)
        counted = Counter(one.item.priority_class for one in self.waiting)
        assert all(self.batcher.count(priority) == counted[priority] for priority in PRIORITIES)

    def teardown(self) -> None:
        """What is left can be had, and is had once."""
        self.expire()
        while self.waiting:
            before = len(self.waiting)
            self.take(idle=True, runnable=None)
            assert len(self.waiting) < before


TestBatcher = BatcherModel.TestCase
TestBatcher.settings = settings(stateful_step_count=30)
