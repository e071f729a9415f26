"""Duplicates awaiting look-up, in one queue per tenant, and the recent results of requests. Pure."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from cachetools import LRUCache

from fairlane.names import is_returned
from fairlane.outcomes import Code, Outcome
from fairlane.records import SourceCoordinate
from stream_processors.dispatcher.queued_request import Candidate, QueuedRequest
from stream_processors.dispatcher.scheduling.in_flight import SettledWork
from stream_processors.dispatcher.scheduling.tenant_occupancy import RequestIndex

_CROWDED_PART = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Duplicate:
    """A request whose id was first seen at ``first``. Waiting since ``since_ms``, due for look-up at ``due_ms``."""

    candidate: Candidate
    first: SourceCoordinate
    since_ms: int
    tries: int = 0
    due_ms: float = 0.0

    @property
    def queued(self) -> QueuedRequest:
        return self.candidate.queued


@dataclass(slots=True)
class _Queue:
    """A tenant's duplicates in order of arrival, by object identity: a request id may repeat any number of times."""

    items: OrderedDict[int, Duplicate] = field(default_factory=OrderedDict)
    bytes: int = 0


@dataclass(slots=True)
class DuplicateQueues:
    """Tenants take turns; within a tenant the earliest due duplicate goes first. When full, the newest of the tenant
    that holds most is evicted, so a flood evicts only its own."""

    most_per_tenant: int = 1_000
    most: int = 10_000
    most_bytes: int = 64 * 1024 * 1024
    _queues: OrderedDict[str, _Queue] = field(default_factory=OrderedDict)
    _ids: RequestIndex[QueuedRequest] = field(default_factory=RequestIndex)
    _items: int = 0
    _bytes: int = 0

    def __len__(self) -> int:
        return self._items

    def __iter__(self) -> Iterator[Duplicate]:
        return (duplicate for queue in self._queues.values() for duplicate in queue.items.values())

    @property
    def next_due_ms(self) -> float:
        """The earliest due time; 0 when none waits."""
        return min((duplicate.due_ms for duplicate in self), default=0.0)

    def put(self, duplicate: Duplicate) -> list[Duplicate]:
        """Append to its tenant's queue. Returns the duplicates evicted, which may include this one."""
        queue = self._queues.setdefault(duplicate.queued.tenant, _Queue())
        queue.items[id(duplicate)] = duplicate
        queue.bytes += duplicate.queued.size_bytes
        self._ids.add(duplicate.queued)
        self._items += 1
        self._bytes += duplicate.queued.size_bytes
        pushed_out = []
        if len(queue.items) > self.most_per_tenant:
            pushed_out.append(duplicate)
            self.remove(duplicate)
        while self._items > self.most or self._bytes > self.most_bytes:
            last = next(reversed(max(self._queues.values(), key=self._part).items.values()))
            pushed_out.append(last)
            self.remove(last)
        return pushed_out

    def find(self, tenant: str, request_id: str) -> tuple[QueuedRequest, ...]:
        return self._ids.find(tenant, request_id)

    def take(self, now_ms: int) -> Duplicate | None:
        """Remove and return the next due duplicate; its tenant moves behind all others."""
        for tenant, queue in self._queues.items():
            duplicate = next((duplicate for duplicate in queue.items.values() if duplicate.due_ms <= now_ms), None)
            if duplicate is not None:
                self._queues.move_to_end(tenant)
                self.remove(duplicate)
                return duplicate
        return None

    def take_older(self, since_ms: int) -> list[Duplicate]:
        return self.take_where(lambda duplicate: duplicate.since_ms <= since_ms)

    def take_where(self, condition: Callable[[Duplicate], bool]) -> list[Duplicate]:
        taken = [duplicate for duplicate in self if condition(duplicate)]
        for duplicate in taken:
            self.remove(duplicate)
        return taken

    def remove(self, duplicate: Duplicate) -> None:
        tenant = duplicate.queued.tenant
        queue = self._queues[tenant]
        del queue.items[id(duplicate)]
        queue.bytes -= duplicate.queued.size_bytes
        self._ids.remove(duplicate.queued)
        if not queue.items:
            del self._queues[tenant]
        self._items -= 1
        self._bytes -= duplicate.queued.size_bytes

    def crowded(self) -> set[str]:
        """Tenants that hold at least half of their bound."""
        bound = _CROWDED_PART * min(self.most_per_tenant, self.most)
        return {tenant for tenant, queue in self._queues.items() if len(queue.items) >= bound}

    def _part(self, queue: _Queue) -> float:
        return max(len(queue.items) / self.most, queue.bytes / self.most_bytes)


class RecentResult(Enum):
    """The outcome of a request."""

    ANSWERED = auto()
    REFUSED_FOR_NOW = auto()
    """Rejected with a code after which the sender may retry."""


class RecentResults(LRUCache[tuple[str, str], RecentResult]):
    """The latest outcomes by tenant and request id, for duplicates whose reply cannot be looked up."""

    def __init__(self, maxsize: int = 20_000) -> None:
        super().__init__(maxsize)

    def note(self, settled: SettledWork) -> None:
        """Record the outcome of settled work. A requeued item settles as OVERLOADED although its request goes on, so
        that code counts only for an item read from a requeue topic, which consumers do not requeue for it again. Work
        whose version was not loaded settles as UNKNOWN_MODEL, which says nothing. A check that could not be made is a
        refusal before the run, and a failure after it."""
        usage = settled.usage
        if usage is None or usage.code == Code.UNKNOWN_MODEL:
            return
        is_refused = usage.code in (Code.OVERLOADED, Code.GUARDRAIL_UNAVAILABLE) and usage.outcome == Outcome.REJECTED
        if usage.code == Code.OVERLOADED and not is_returned(settled.source.topic):
            return
        result = RecentResult.REFUSED_FOR_NOW if is_refused else RecentResult.ANSWERED
        self[usage.tenant, usage.request_id] = result
