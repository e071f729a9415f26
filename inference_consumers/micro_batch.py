"""Which items run together, and when. Pure: items and ``now`` in, a batch out.

A batch holds one model version. It closes at its item bound, its token bound or its time bound, whichever comes first;
an engine that was idle takes what is there at once. Priorities are picked by smooth weighted round robin, so that high
goes first and low is never starved.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field

from fairlane.outcomes import Priority
from fairlane.ownership import Claim
from fairlane.records import WorkItem

PRIORITY_WEIGHTS: Mapping[str, int] = {Priority.HIGH: 8, Priority.NORMAL: 3, Priority.LOW: 1}

ModelKey = tuple[str, str]
"""Model name and version."""


@dataclass(frozen=True, slots=True)
class ReceivedWork:
    """A work item in memory, with the record it came from."""

    claim: Claim
    item: WorkItem
    size_bytes: int
    received_at_ms: int
    original_key: bytes | None = None
    original_value: bytes = b""
    appended_at_ms: int = 0

    @property
    def model_key(self) -> ModelKey:
        return self.item.request.model, self.item.model_version


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """When a batch is full, and how long it may wait for more. Tokens are the dispatcher's estimate."""

    max_items: int
    max_tokens: int
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Work for one run of one model."""

    model_key: ModelKey
    work: tuple[ReceivedWork, ...]


@dataclass(slots=True)
class MicroBatcher:
    """What was received and not yet run. One thread at a time."""

    limits: BatchLimits
    limits_by_model: Mapping[ModelKey, BatchLimits] = field(default_factory=dict)
    _waiting: dict[str, "OrderedDict[ModelKey, deque[ReceivedWork]]"] = field(
        default_factory=lambda: {priority: OrderedDict() for priority in PRIORITY_WEIGHTS}
    )
    _credit: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PRIORITY_WEIGHTS, 0))
    _items: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PRIORITY_WEIGHTS, 0))
    _bytes: int = 0

    def add(self, work: ReceivedWork) -> None:
        priority = work.item.priority_class
        self._waiting[priority].setdefault(work.model_key, deque()).append(work)
        self._items[priority] += 1
        self._bytes += work.size_bytes

    def count(self, priority: str) -> int:
        return self._items[priority]

    @property
    def size_bytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return sum(self._items.values())

    def discard_stale(self, is_current: Callable[[Claim], bool]) -> int:
        """Drop work whose partition moved on; its new owner reads it again. Returns how many."""
        return len(self._remove(lambda work: not is_current(work.claim)))

    def take_expired(self, now_ms: int) -> list[ReceivedWork]:
        """Remove what can no longer be answered in time, before it costs anything."""
        return self._remove(lambda work: work.item.deadline_at_ms < now_ms)

    def due_at_ms(self, *, idle: bool) -> int | None:
        """When the next batch closes at the latest: the time bound of the oldest item. None when nothing waits."""
        return min(
            (
                queue[0].received_at_ms + (0 if idle else self._limits(key).timeout_ms)
                for models in self._waiting.values()
                for key, queue in models.items()
            ),
            default=None,
        )

    def next_batch(self, now_ms: int, *, idle: bool) -> MicroBatch | None:
        """The batch to run now; None while it pays to wait for more."""
        due = self.due_at_ms(idle=idle)
        if due is None:
            return None
        ready = {key for models in self._waiting.values() for key in models}
        if due > now_ms:
            ready = {key for key in ready if self._is_full(key)}
            if not ready:
                return None
        priority = self._pick_priority(ready)
        key = self._oldest_model(priority, ready)
        return MicroBatch(key, tuple(self._fill(priority, key)))

    def _pick_priority(self, ready: Set[ModelKey]) -> str:
        """Smooth weighted round robin over the priorities with work to run (the algorithm of nginx's upstreams).

        Credit is earned only in rounds that a priority takes part in: one that was away comes back with no burst.
        """
        present = [priority for priority in PRIORITY_WEIGHTS if not ready.isdisjoint(self._waiting[priority])]
        for priority in present:
            self._credit[priority] += PRIORITY_WEIGHTS[priority]
        picked = max(present, key=lambda priority: self._credit[priority])
        self._credit[picked] -= sum(PRIORITY_WEIGHTS[priority] for priority in present)
        return picked

    def _oldest_model(self, priority: str, ready: Set[ModelKey]) -> ModelKey:
        models = self._waiting[priority]
        return min((key for key in models if key in ready), key=lambda key: models[key][0].received_at_ms)

    def _limits(self, key: ModelKey) -> BatchLimits:
        return self.limits_by_model.get(key, self.limits)

    def _is_full(self, key: ModelKey) -> bool:
        limits = self._limits(key)
        items = tokens = 0
        for models in self._waiting.values():
            for work in models.get(key, ()):
                items += 1
                tokens += work.item.cost_tokens
                if items >= limits.max_items or tokens >= limits.max_tokens:
                    return True
        return False

    def _fill(self, first: str, key: ModelKey) -> Iterable[ReceivedWork]:
        """The picked priority's items of this model, then the others' while there is room."""
        limits = self._limits(key)
        items = tokens = 0
        for priority in (first, *(priority for priority in PRIORITY_WEIGHTS if priority != first)):
            queue = self._waiting[priority].get(key)
            while queue:
                cost = queue[0].item.cost_tokens
                if items and (items >= limits.max_items or tokens + cost > limits.max_tokens):
                    return
                work = queue.popleft()
                if not queue:
                    del self._waiting[priority][key]
                self._items[priority] -= 1
                self._bytes -= work.size_bytes
                items += 1
                tokens += cost
                yield work

    def _remove(self, condition: Callable[[ReceivedWork], bool]) -> list[ReceivedWork]:
        removed: list[ReceivedWork] = []
        for priority, models in self._waiting.items():
            for key in list(models):
                # Judged once each: the answer may change meanwhile.
                judged = [(work, condition(work)) for work in models[key]]
                gone = [work for work, matches in judged if matches]
                if not gone:
                    continue
                removed.extend(gone)
                self._items[priority] -= len(gone)
                self._bytes -= sum(work.size_bytes for work in gone)
                kept = deque(work for work, matches in judged if not matches)
                if kept:
                    models[key] = kept
                else:
                    del models[key]
        return removed
