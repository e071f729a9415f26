"""The repeats that wait for their look-up, in a line per tenant. Pure."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fairlane.records import SourceCoordinate
from stream_processors.dispatcher.arrival import Arrival
from stream_processors.dispatcher.queued_request import QueuedRequest
from stream_processors.dispatcher.scheduling.request_index import RequestIndex

_CROWDED_PART = 0.5


@dataclass(frozen=True, slots=True)
class Bounds:
    """How many repeats may wait, of a tenant and in total, and how many bytes of records in total."""

    tenant_items: int = 1_000
    items: int = 10_000
    bytes: int = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, eq=False)
class Repeat:
    """A request whose id was seen at ``first``. It waits since ``since_ms``, and is looked up from ``due_ms`` on."""

    arrival: Arrival
    queued: QueuedRequest
    first: SourceCoordinate
    since_ms: int
    tries: int = 0
    due_ms: float = 0.0


@dataclass(slots=True)
class _Line:
    """A tenant's, in the order of arrival. Keyed by identity: an id may be repeated any number of times."""

    repeats: OrderedDict[int, Repeat] = field(default_factory=OrderedDict)
    bytes: int = 0


class RepeatLines:
    """Tenants take turns; within a tenant the earliest that is due. When all is full, the line that holds most gives
    way, so that a flood pushes out its own only."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._lines: OrderedDict[str, _Line] = OrderedDict()
        self._ids: RequestIndex[QueuedRequest] = RequestIndex()
        self._items = 0
        self._bytes = 0

    def __len__(self) -> int:
        return self._items

    def __iter__(self) -> Iterator[Repeat]:
        return (repeat for line in self._lines.values() for repeat in line.repeats.values())

    @property
    def next_due_ms(self) -> float:
        """When the next one may be looked up; 0 when none waits."""
        return min((repeat.due_ms for repeat in self), default=0.0)

    def put(self, repeat: Repeat) -> list[Repeat]:
        """Add it at the end of its tenant's line. Returns those that found no place, or lost theirs."""
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
        """What waits of this id."""
        return self._ids.find(tenant, request_id)

    def take(self, now_ms: int) -> Repeat | None:
        """Remove the next one whose look-up is due; its tenant's turn comes again after all others'."""
        for tenant, line in self._lines.items():
            repeat = next((repeat for repeat in line.repeats.values() if repeat.due_ms <= now_ms), None)
            if repeat is not None:
                self._lines.move_to_end(tenant)
                self.remove(repeat)
                return repeat
        return None

    def take_older(self, since_ms: int) -> list[Repeat]:
        """Remove those that wait since then or for longer."""
        return self.take_where(lambda repeat: repeat.since_ms <= since_ms)

    def take_where(self, condition: Callable[[Repeat], bool]) -> list[Repeat]:
        """Remove those of which it holds."""
        taken = [repeat for repeat in self if condition(repeat)]
        for repeat in taken:
            self.remove(repeat)
        return taken

    def remove(self, repeat: Repeat) -> None:
        """It waits no more."""
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
        """Tenants that have half of what they may have."""
        bound = _CROWDED_PART * min(self._bounds.tenant_items, self._bounds.items)
        return {tenant for tenant, line in self._lines.items() if len(line.repeats) >= bound}

    def _part(self, line: _Line) -> float:
        return max(len(line.repeats) / self._bounds.items, line.bytes / self._bounds.bytes)
