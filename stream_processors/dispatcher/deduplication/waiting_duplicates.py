"""Duplicates awaiting look-up, in one queue per tenant. Pure."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fairlane.records import SourceCoordinate
from stream_processors.dispatcher.intake.arrival import ReceivedRecord
from stream_processors.dispatcher.queued_request import QueuedRequest
from stream_processors.dispatcher.scheduling.request_index import RequestIndex

_CROWDED_PART = 0.5


@dataclass(frozen=True, slots=True)
class DuplicateBounds:
    """Most waiting duplicates per tenant and in total, and most bytes of their records in total."""

    tenant_items: int = 1_000
    items: int = 10_000
    bytes: int = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, eq=False)
class Duplicate:
    """A request whose id was first seen at ``first``. Waiting since ``since_ms``, due for look-up at ``due_ms``."""

    arrival: ReceivedRecord
    queued: QueuedRequest
    first: SourceCoordinate
    since_ms: int
    tries: int = 0
    due_ms: float = 0.0


@dataclass(slots=True)
class _Line:
    """A tenant's duplicates in order of arrival, by object identity: a request id may repeat any number of times."""

    repeats: OrderedDict[int, Duplicate] = field(default_factory=OrderedDict)
    bytes: int = 0


class DuplicateQueues:
    """Tenants take turns; within a tenant the earliest due duplicate goes first. When full, the newest of the tenant
    that holds most is evicted, so a flood evicts only its own."""

    def __init__(self, bounds: DuplicateBounds) -> None:
        self._bounds = bounds
        self._lines: OrderedDict[str, _Line] = OrderedDict()
        self._ids: RequestIndex[QueuedRequest] = RequestIndex()
        self._items = 0
        self._bytes = 0

    def __len__(self) -> int:
        return self._items

    def __iter__(self) -> Iterator[Duplicate]:
        return (repeat for line in self._lines.values() for repeat in line.repeats.values())

    @property
    def next_due_ms(self) -> float:
        """The earliest due time; 0 when none waits."""
        return min((repeat.due_ms for repeat in self), default=0.0)

    def put(self, repeat: Duplicate) -> list[Duplicate]:
        """Append to its tenant's queue. Returns the duplicates evicted, which may include this one."""
        line = self._lines.setdefault(repeat.queued.tenant, _Line())
        line.repeats[id(repeat)] = repeat
        line.bytes += repeat.queued.size_bytes
        self._ids.add(repeat.queued)
        self._items += 1
        self._bytes += repeat.queued.size_bytes
        pushed_out = []
        if len(line.repeats) > self._bounds.tenant_items:
            pushed_out.append(repeat)
            self.remove(repeat)
        while self._items > self._bounds.items or self._bytes > self._bounds.bytes:
            last = next(reversed(max(self._lines.values(), key=self._part).repeats.values()))
            pushed_out.append(last)
            self.remove(last)
        return pushed_out

    def find(self, tenant: str, request_id: str) -> tuple[QueuedRequest, ...]:
        """The waiting requests of this id."""
        return self._ids.find(tenant, request_id)

    def take(self, now_ms: int) -> Duplicate | None:
        """Remove and return the next due duplicate; its tenant moves behind all others."""
        for tenant, line in self._lines.items():
            repeat = next((repeat for repeat in line.repeats.values() if repeat.due_ms <= now_ms), None)
            if repeat is not None:
                self._lines.move_to_end(tenant)
                self.remove(repeat)
                return repeat
        return None

    def take_older(self, since_ms: int) -> list[Duplicate]:
        """Remove and return those waiting since ``since_ms`` or earlier."""
        return self.take_where(lambda repeat: repeat.since_ms <= since_ms)

    def take_where(self, condition: Callable[[Duplicate], bool]) -> list[Duplicate]:
        """Remove and return those that satisfy the condition."""
        taken = [repeat for repeat in self if condition(repeat)]
        for repeat in taken:
            self.remove(repeat)
        return taken

    def remove(self, repeat: Duplicate) -> None:
        """Remove this duplicate."""
        tenant = repeat.queued.tenant
        line = self._lines[tenant]
        del line.repeats[id(repeat)]
        line.bytes -= repeat.queued.size_bytes
        self._ids.remove(repeat.queued)
        if not line.repeats:
            del self._lines[tenant]
        self._items -= 1
        self._bytes -= repeat.queued.size_bytes

    def crowded(self) -> set[str]:
        """Tenants that hold at least half of their bound."""
        bound = _CROWDED_PART * min(self._bounds.tenant_items, self._bounds.items)
        return {tenant for tenant, line in self._lines.items() if len(line.repeats) >= bound}

    def _part(self, line: _Line) -> float:
        return max(len(line.repeats) / self._bounds.items, line.bytes / self._bounds.bytes)
