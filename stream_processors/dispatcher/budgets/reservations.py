"""Reservations of budgets: of queued requests by source, of work in flight by its coordinate. Pure."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from fairlane.records import SourceCoordinate, UsageEvent
from stream_processors.dispatcher.budgets.accounts import Amounts
from stream_processors.dispatcher.scheduling.in_flight import WorkId

MISSED_AFTER_MS = 60_000
"""A reservation is dropped if its work is not read back, or the usage of its work not read, for this long after they
were committed."""

_MOST_EARLY = 10_000


@dataclass(slots=True)
class Reservation:
    """The estimate of one request, and the amounts that it counts in."""

    tenant: str
    nanos: int
    counted: tuple[Amounts, ...]
    is_batch: bool = False
    is_in_flight: bool = False
    sent_at_ms: int | None = None

    def add(self, sign: int) -> None:
        for amounts in self.counted:
            if self.is_batch:
                amounts.batch += sign * self.nanos
            if self.is_in_flight:
                amounts.in_flight += sign * self.nanos
            else:
                amounts.queued += sign * self.nanos


class Reservations:
    """Every reservation is of one queued request, or of one work item. For one thread."""

    def __init__(self) -> None:
        self._queued: dict[SourceCoordinate, Reservation] = {}
        self._work: dict[tuple[str, int], dict[int, Reservation]] = {}
        """Of work in flight, by priority topic and partition, and offset."""
        self._read_up_to: dict[tuple[str, int], int] = {}
        self._early: OrderedDict[WorkId, bool] = OrderedDict()
        """Settlements that were read before their work."""
        self._is_done: dict[tuple[str, int], Callable[[int], bool]] = {}
        """Of each partition, which offsets the pool's group has committed."""
        self._done_at_ms: dict[WorkId, int] = {}
        """Work that its group has committed: its usage is about to be read."""

    def queued(self, source: SourceCoordinate) -> Reservation | None:
        return self._queued.get(source)

    def reserve(self, source: SourceCoordinate, made: Reservation) -> None:
        """Add the reservation of a queued request, in place of an earlier one."""
        self.release(source)
        self._queued[source] = made
        made.add(1)

    def release(self, source: SourceCoordinate) -> None:
        """Release the reservation of a request that ended without running. Ignored without one."""
        held = self._queued.pop(source, None)
        if held is not None:
            held.add(-1)

    def release_all(self) -> None:
        """Release the reservations of all queued requests."""
        for source in list(self._queued):
            self.release(source)

    def sent(self, source: SourceCoordinate, now_ms: int) -> int | None:
        """Count a queued request as in flight: it is dispatched. Returns its estimate, None without a reservation."""
        held = self._queued.get(source)
        if held is None:
            return None
        held.add(-1)
        held.is_in_flight, held.sent_at_ms = True, now_ms
        held.add(1)
        return held.nanos

    def seen(self, work: WorkId, source: SourceCoordinate, made: Reservation) -> None:
        """The work of a request was read back; its reservation takes the place of that of the request. Work that was
        read before is ignored. Of work that its group had committed before it is read here, usage may lie before the
        start of reading: it has no reservation."""
        place = work[:2]
        if work.offset < self._read_up_to.get(place, 0):
            return
        self._read_up_to[place] = work.offset + 1
        self.release(source)
        is_done = self._is_done.get(place)
        if self._early.pop(work, False) or (is_done is not None and is_done(work.offset)):
            return
        self._work.setdefault(place, {})[work.offset] = made
        made.add(1)

    def settled(self, event: UsageEvent) -> None:
        """The usage of a request was read."""
        if event.cached:
            # An answer from the cache has no work: it names its source.
            self.release(event.work)
            return
        work = WorkId(event.work.topic, event.work.partition, event.work.offset)
        if not self._release_work(work) and work.offset >= self._read_up_to.get(work[:2], 0):
            self._early[work] = True
            if len(self._early) > _MOST_EARLY:
                self._early.popitem(last=False)

    def committed(self, topic: str, partition: int, is_done: Callable[[int], bool], now_ms: int) -> None:
        """The pool's group has committed these offsets, and with them the usage of their work."""
        self._is_done[topic, partition] = is_done
        for offset in self._work.get((topic, partition), ()):
            if is_done(offset):
                self._done_at_ms.setdefault(WorkId(topic, partition, offset), now_ms)

    def recreated(self, topic: str, partition: int) -> None:
        """Release everything of a partition whose log was replaced."""
        for offset in list(self._work.get((topic, partition), ())):
            self._release_work(WorkId(topic, partition, offset))
        self._read_up_to.pop((topic, partition), None)
        self._is_done.pop((topic, partition), None)

    def forget(self, tenant: str) -> None:
        """Release everything of a tenant that has no budgets any more: what ends now is not told."""
        for source in [source for source, held in self._queued.items() if held.tenant == tenant]:
            self.release(source)
        for place, works in list(self._work.items()):
            for offset in [offset for offset, held in works.items() if held.tenant == tenant]:
                self._release_work(WorkId(*place, offset))

    def expire(self, now_ms: int) -> int:
        """Release reservations whose end was missed. Returns their number."""
        late_ms = now_ms - MISSED_AFTER_MS
        sent = ((source, held.sent_at_ms) for source, held in self._queued.items())
        sources = [source for source, at_ms in sent if at_ms is not None and at_ms <= late_ms]
        works = [work for work, at_ms in self._done_at_ms.items() if at_ms <= late_ms]
        for source in sources:
            self.release(source)
        for work in works:
            self._release_work(work)
        return len(sources) + len(works)

    def _release_work(self, work: WorkId) -> bool:
        self._done_at_ms.pop(work, None)
        place = self._work.get(work[:2])
        held = None if place is None else place.pop(work.offset, None)
        if place is None or held is None:
            return False
        held.add(-1)
        if not place:
            del self._work[work[:2]]
        return True
