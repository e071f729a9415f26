"""Micro-batcher: which items run together, and when. Pure: items and ``now`` in, a batch out.

A batch holds one model version. It closes at its item bound, its token bound or its time bound, whichever comes first;
without waiting if the engine was idle, or if no further item is expected in time (``model_queue.py``).
The number of items is learned from measured throughput, and lowered when memory is exhausted (``batch_size.py``).

**Who leads** a batch: the oldest item of the priority whose turn it is (``priority_pick.py``, which also says how long
others may have it), of the models that are ready. Lengths have no say in that: once its time bound is over, an item is
led by no younger item of its priority, however rare its length. **Who joins** it: what waits for the same model, its
own priority first, the nearest lengths first, while padding stays small (``length_buckets.py``), or where a run of
their own would cost more than the padding does.

**Deadlines.** From the time that runs took (``model_queue.py``), a start is known that is just early enough.

- An item whose latest start has come does not wait for others.
- An item that would miss its deadline behind the due batch runs first, if that batch's leader still meets its own. A
  priority may do so once between two regular turns, and its next turn comes later by one.
- A batch stays small enough that every item in it that could finish in time alone still does.
- An item that can no longer finish in time, even alone, still runs until its deadline has passed: the dispatcher
  admitted it, and the prediction may be wrong. But it takes only room that no other item needs: it leads no batch while
  an item waits that can finish, and joins after those.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from itertools import product

from inference_consumers.batching.batch_size import BatchLimits
from inference_consumers.batching.length_buckets import MAX_PADDING, PaddingRecord, Shape
from inference_consumers.batching.model_queue import (
    WAITING,
    CellLines,
    EntryHeap,
    ModelQueue,
    QueuedItem,
    RunTimes,
    Standing,
)
from inference_consumers.batching.priority_pick import PRIORITY_WEIGHTS, PriorityPick
from inference_consumers.batching.received_work import ModelKey, ReceivedWork


@dataclass(slots=True)
class _BatchRoom:
    """Remaining room of a batch while it is formed. ``max_tokens`` bounds its cost, padding included, except for the
    first item; ``padding`` is that of earlier batches; ``done_by_ms`` is the deadline of an item outside, if any."""

    max_items: int
    max_tokens: int
    now_ms: int
    times: RunTimes
    padding: PaddingRecord
    done_by_ms: int | None = None
    shape: Shape = field(default_factory=Shape)

    def take(self, entry: QueuedItem) -> None:
        self.shape = self.shape.plus(entry.work)
        if entry.standing is Standing.HOPEFUL and (self.done_by_ms is None or entry.deadline_at_ms < self.done_by_ms):
            self.done_by_ms = entry.deadline_at_ms

    @property
    def is_full(self) -> bool:
        return self.shape.items >= self.max_items

    def has_place_for(self, entry: QueuedItem, *, anyway: bool) -> bool:
        """Whether one more fits. ``anyway`` says that padding is no reason against it."""
        shape = self.shape.plus(entry.work)
        if shape.items > self.max_items or shape.padded_tokens > self.max_tokens:
            return False
        if not anyway and shape.padding_share(self.padding.weight) > MAX_PADDING:
            return False
        done_at_ms = self.now_ms + 1_000 * self.times.predicted_s(shape.padded_tokens)
        if self.done_by_ms is not None and done_at_ms > self.done_by_ms:
            return False
        return entry.standing is not Standing.HOPEFUL or done_at_ms <= entry.deadline_at_ms

    def is_worth_padding(self, group: Shape) -> bool:
        """Whether to take a whole group costs less in padding than to give it a run of its own. Not if it does not fit
        in whole: then that run is needed anyway. Nor if too much was padded already."""
        merged = self.shape.merged(group)
        if merged.items > self.max_items or merged.padded_tokens > self.max_tokens:
            return False
        more = merged.padding_tokens - self.shape.padding_tokens
        return self.padding.weight * more <= self.times.base_tokens and self.padding.allows(merged)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Work for one run of one model; no other run of its engine is active meanwhile if ``alone``."""

    model_key: ModelKey
    work: tuple[ReceivedWork, ...]
    alone: bool = False

    @property
    def cost_tokens(self) -> int:
        return sum(work.item.cost_tokens for work in self.work)


@dataclass(slots=True)
class MicroBatcher:
    """What was received and not yet run. One thread at a time.

    Adding an item and taking it cost O(log n). Making a batch and asking when one is due also cost O(cells) each, at
    most one per class of lengths. ``take`` looks at everything.
    """

    limits: BatchLimits
    limits_by_model: dict[ModelKey, BatchLimits] = field(default_factory=dict)
    _models: dict[ModelKey, ModelQueue] = field(default_factory=dict)
    _turns: PriorityPick = field(default_factory=PriorityPick)
    _entries: dict[int, QueuedItem] = field(default_factory=dict)
    """Everything that waits or has expired, by its number."""
    _by_deadline: EntryHeap = field(default_factory=lambda: EntryHeap(*WAITING))
    _expired: list[QueuedItem] = field(default_factory=list)
    _arrived: int = 0
    _items: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PRIORITY_WEIGHTS, 0))
    _bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PRIORITY_WEIGHTS, 0))
    cost_tokens: int = 0
    _requests: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, work: ReceivedWork) -> None:
        self._items[work.item.priority_class] += 1
        self._bytes[work.item.priority_class] += work.size_bytes
        self._requests[work.item.tenant, work.request_id] += 1
        self.cost_tokens += work.item.cost_tokens
        self._arrived += 1
        entry = self._entries[self._arrived] = QueuedItem(work, self._arrived)
        model = self._model(work.model_key)
        model.add(entry)
        model.pace.arrived(work.received_at_ms)
        self._by_deadline.push((entry.deadline_at_ms, entry.number), entry)

    def count(self, priority: str) -> int:
        return self._items[priority]

    def size_bytes(self, priority: str) -> int:
        return self._bytes[priority]

    def holds(self, tenant: str, request_id: str) -> bool:
        return (tenant, request_id) in self._requests

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def waiting_models(self) -> list[ModelKey]:
        """The versions that something waits for."""
        return [key for key, model in self._models.items() if model.items]

    def forget(self, key: ModelKey) -> None:
        """Forget what was learned of a version that nothing waits for."""
        self.limits_by_model.pop(key, None)
        if not self.waits_for(key):
            self._models.pop(key, None)

    def waits_for(self, key: ModelKey) -> bool:
        model = self._models.get(key)
        return model is not None and model.items > 0

    def take(self, condition: Callable[[ReceivedWork], bool]) -> list[ReceivedWork]:
        # Judged once each: the answer may change meanwhile.
        return [self._remove(entry) for entry in [one for one in self._entries.values() if condition(one.work)]]

    def take_expired(self, now_ms: int) -> list[ReceivedWork]:
        """Remove what can no longer be answered in time, before it costs anything."""
        self._expire(now_ms)
        expired, self._expired = self._expired, []
        return [self._remove(entry) for entry in expired if entry.standing is Standing.EXPIRED]

    def limits_of(self, key: ModelKey) -> BatchLimits:
        """The bounds of a model's batches at present, those that its memory sets included."""
        limits = self.limits_by_model.get(key, self.limits)
        model = self._models.get(key)
        return limits if model is None else model.safe.bounded(limits)

    def largest(self, keys: Iterable[ModelKey]) -> BatchLimits:
        """The configured bounds of the largest batch of any of these models; those of the deployment without any."""
        limits = [self.limits_by_model.get(key, self.limits) for key in keys] or [self.limits]
        items, tokens = max(one.max_items for one in limits), max(one.max_tokens for one in limits)
        return BatchLimits(items, tokens, self.limits.timeout_ms)

    def ran(self, key: ModelKey, items: int, tokens: int, seconds: float, *, padding_tokens: int | None = None) -> None:
        """A run of a model came back, after so long. ``tokens`` is the cost of its items as the dispatcher estimated
        it, which is what is known of those that wait; ``padding_tokens`` is the padding that the engine computed,
        None if unknown."""
        if items <= 0 or tokens <= 0:
            return
        model, limits = self._model(key), self.limits_by_model.get(key, self.limits)
        model.times.ran(tokens, seconds)
        model.safe.ran(items, tokens, limits)
        model.size_for(tokens / items).ran(items, tokens, seconds, self.limits_of(key).max_items)
        if padding_tokens is not None:
            model.padding.ran(items, padding_tokens)

    def out_of_memory(self, key: ModelKey, items: int, tokens: int) -> None:
        """A run of a model had not enough memory: from now on batches hold half of that, until more proves safe."""
        self._model(key).safe.out_of_memory(items, tokens)

    def due_at_ms(self, *, idle: bool, runnable: Set[ModelKey] | None = None) -> int | None:
        """When the next batch closes at the latest: at the time bound of the oldest item, or the latest start of the
        most urgent. None when nothing waits for these models."""
        return min((self._due_at_ms(model, idle=idle) for model in self._waiting(runnable)), default=None)

    def next_batch(self, now_ms: int, *, idle: bool, runnable: Set[ModelKey] | None = None) -> MicroBatch | None:
        """The batch to run now, of one of these models (None: of any); None while it pays to wait for more."""
        self._expire(now_ms)
        waiting = list(self._waiting(runnable))
        for model in waiting:
            model.judge(now_ms)
        ready = [model for model in waiting if self._is_ready(model, now_ms, idle=idle)]
        if not ready:
            return None
        leader, before_ms = self._leader(ready, waiting, now_ms)
        return self._batch(leader, now_ms, before_ms)

    def take_for(self, key: ModelKey, now_ms: int, max_items: int, max_tokens: int) -> list[ReceivedWork]:
        """What may join a continuous engine that has so much room: nothing waits for company there, and no length for
        its like. An item above the model's token bound joins when the engine has all its room."""
        self._expire(now_ms)
        model = self._models.get(key)
        taken: list[ReceivedWork] = []
        if model is None:
            return taken
        model.judge(now_ms)
        bound = self.limits_of(key).max_tokens
        for standing in WAITING:
            while len(taken) < max_items:
                heads = {entry.priority: entry for entry in model.firsts((standing,))}
                if not heads:
                    break
                entry = heads[model.turns.next(heads)]
                alone = not taken and entry.cost_tokens > bound and max_tokens >= bound
                if entry.cost_tokens > max_tokens and not alone:
                    # A smaller one is not let past: under load a large one would wait for ever.
                    return taken
                max_tokens -= entry.cost_tokens
                model.turns.took(entry.priority)
                taken.append(self._remove(entry))
        return taken

    def _model(self, key: ModelKey) -> ModelQueue:
        model = self._models.get(key)
        if model is None:
            model = self._models[key] = ModelQueue(key)
        return model

    def _waiting(self, runnable: Set[ModelKey] | None) -> Iterator[ModelQueue]:
        return (model for key, model in self._models.items() if model.items and (runnable is None or key in runnable))

    def _remove(self, entry: QueuedItem) -> ReceivedWork:
        work = entry.work
        del self._entries[entry.number]
        self._items[entry.priority] -= 1
        self._bytes[entry.priority] -= work.size_bytes
        request = (work.item.tenant, work.request_id)
        self._requests[request] -= 1
        if not self._requests[request]:
            del self._requests[request]
        self.cost_tokens -= entry.cost_tokens
        if entry.standing in WAITING:
            self._models[work.model_key].remove(entry, Standing.GONE)
        entry.standing = Standing.GONE
        return work

    def _expire(self, now_ms: int) -> None:
        while (entry := self._by_deadline.first()) is not None and entry.deadline_at_ms < now_ms:
            self._models[entry.work.model_key].remove(entry, Standing.EXPIRED)
            self._expired.append(entry)

    def _due_at_ms(self, model: ModelQueue, *, idle: bool) -> int:
        timeout_ms = 0 if idle else model.worth_waiting_ms(self.limits_of(model.key).timeout_ms)
        due_at_ms = min(entry.work.received_at_ms for entry in model.firsts()) + timeout_ms
        urgent = model.most_urgent()
        return due_at_ms if urgent is None else min(due_at_ms, urgent[0])

    def _is_ready(self, model: ModelQueue, now_ms: int, *, idle: bool) -> bool:
        limits = self.limits_of(model.key)
        # What would be wanted if enough waited: there is no sense in waiting for more than that.
        wanted = model.size_for(model.cost_tokens / model.items).wanted(limits.max_items, limits.max_items)
        full = model.items >= wanted or model.cost_tokens >= limits.max_tokens
        return full or self._due_at_ms(model, idle=idle) <= now_ms

    def _leader(self, ready: list[ModelQueue], waiting: list[ModelQueue], now_ms: int) -> tuple[QueuedItem, int | None]:
        """Who leads the next batch, and by when that must be done for the sake of the one whose turn it was."""
        for standing in WAITING:
            heads: dict[str, QueuedItem] = {}
            for model in ready:
                for entry in model.firsts((standing,)):
                    head = heads.get(entry.priority)
                    if head is None or entry.arrival < head.arrival:
                        heads[entry.priority] = entry
            if heads:
                break
        leader = heads[self._turns.next(heads)]
        if leader.standing is Standing.HOPEFUL:
            rival = self._rival(leader, waiting, now_ms)
            if rival is not None:
                self._turns.jumped(rival.priority)
                return rival, self._models[leader.work.model_key].latest_start_ms(leader)
        self._turns.took(leader.priority)
        return leader, None

    def _rival(self, leader: QueuedItem, waiting: list[ModelQueue], now_ms: int) -> QueuedItem | None:
        """Who would be too late behind the leader's batch, when the leader would not be behind theirs."""
        urgent = [(*most, model) for model in waiting if (most := model.most_urgent(leader)) is not None]
        if not urgent:
            return None
        start_ms, rival, model = min(urgent, key=lambda one: (one[0], one[1].number))
        own = self._models[leader.work.model_key]
        limits = self.limits_of(own.key)
        size = own.size_for(leader.cost_tokens).wanted(own.items, limits.max_items)
        tokens = min(own.cost_tokens, limits.max_tokens, size * leader.cost_tokens)
        if start_ms >= now_ms + own.predicted_ms(max(tokens, leader.cost_tokens)):
            return None
        if now_ms + model.predicted_ms(rival.cost_tokens) > own.latest_start_ms(leader):
            return None
        return rival if self._turns.may_jump(rival.priority) else None

    def _batch(self, leader: QueuedItem, now_ms: int, before_ms: int | None) -> MicroBatch:
        """The leader and who joins it. The room that is left goes to its own priority, then to the others in their
        order; within each to the nearest lengths, and the oldest of them."""
        key = leader.work.model_key
        model, limits = self._models[key], self.limits_of(key)
        size = model.size_for(leader.cost_tokens)
        waiting = model.items
        wanted = size.wanted(waiting, limits.max_items)
        room = _BatchRoom(wanted, limits.max_tokens, now_ms, model.times, model.padding, before_ms)
        room.take(leader)
        taken = [self._remove(leader)]
        nearest = sorted(model.cells, key=lambda cell: cell.cell.distance(leader.cell))
        others = (priority for priority in PRIORITY_WEIGHTS if priority != leader.priority)
        for standing, priority in product(WAITING, (leader.priority, *others)):
            for cell in nearest:
                taken.extend(self._join(room, cell, standing, priority))
        size.asked(wanted, waiting)
        model.padding.made(room.shape)
        return MicroBatch(key, tuple(taken))

    def _join(self, room: _BatchRoom, cell: CellLines, standing: Standing, priority: str) -> Iterator[ReceivedWork]:
        entry = cell.first(standing, priority)
        if entry is None or room.is_full:
            return
        anyway = room.is_worth_padding(cell.shape)
        while entry is not None and room.has_place_for(entry, anyway=anyway):
            room.take(entry)
            yield self._remove(entry)
            entry = cell.first(standing, priority)
