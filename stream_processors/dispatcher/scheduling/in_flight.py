"""Dispatched work that is not settled, of all pools and the whole fleet. Pure: events in, tokens out.

What is in flight is counted once, from the log: work read back from ``priority.*`` counts until its UsageEvent is
read, or until the pool's group committed past it, whichever is seen first. The three come from different partitions, so
they may be seen in any order; each order ends at nothing in flight. A dispatch of our own is reserved before its
transaction commits, and its reservation goes when the work itself is read back. As long as a dispatch waits for its
transaction, however long a topic refuses it, it holds its room: the room would only be filled with more that waits.

Why nothing leaks: work enters the count only with an offset that was not read before and is not known to be done, and
whatever is counted leaves when its offset is below the group's committed offset or in the group's done set, which is
looked at once a second. The memory for settlements that come before their work, and for work that was committed before
its settlement came, holds a bounded number of each and is never counted: losing an entry of it costs one correction.
"""

from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from fairlane.names import pool_of_priority
from fairlane.records import SourceCoordinate, UsageEvent
from stream_processors.dispatcher.scheduling.in_flight_ledger import ANY_PARTITION, Held, InFlightLedger

RESERVATION_TTL_MS = 30_000
"""What was committed and not read back for so long is not coming: something else was committed in its place."""

NOTHING_HELD = Held()
"""Of a pool in which nothing ever was in flight."""

ValueT = TypeVar("ValueT")


class WorkId(NamedTuple):
    """Where a work item stands on its priority topic."""

    topic: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class Reserved:
    """What this dispatcher knows of work that it dispatches itself. ``partition`` is that of the priority topic."""

    pool: str
    priority_class: str
    partition: int
    tenant: str
    group: str
    cost_tokens: int
    prompt_tokens: int
    model: str
    input_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Dispatched:
    """What the headers of a work item say: the request it came from, whose it is, who dispatched it, what it costs."""

    source: SourceCoordinate
    tenant: str
    dispatcher_id: str
    cost_tokens: int


@dataclass(frozen=True, slots=True)
class Settled:
    """Work that is done. ``own`` is what was reserved for it, if it was reserved here; ``usage`` is what it cost."""

    work: WorkId
    pool: str
    tenant: str
    cost_tokens: int
    source: SourceCoordinate
    own: Reserved | None
    usage: UsageEvent | None


@dataclass(slots=True)
class _Work:
    pool: str
    partition: int
    tenant: str
    cost_tokens: int
    is_own: bool
    source: SourceCoordinate
    own: Reserved | None


@dataclass(slots=True)
class _Partition:
    """One partition of a priority topic: its work in flight, how far it was read, and what its group has done."""

    pool: str
    work: dict[int, _Work] = field(default_factory=dict)
    read_up_to: int = 0
    committed: int = 0
    done: Container[int] = ()

    def is_done(self, offset: int) -> bool:
        return offset < self.committed or offset in self.done


class InFlight:
    """What is in flight, as one dispatcher sees it. ``dispatcher_id`` tells its own work, that of its predecessor under
    the same id included. At most ``max_unmatched`` settlements without work, and as much work without its settlement,
    are remembered."""

    def __init__(self, dispatcher_id: str, max_unmatched: int = 10_000) -> None:
        self._dispatcher_id = dispatcher_id
        self._max_unmatched = max_unmatched
        self._partitions: dict[tuple[str, int], _Partition] = {}
        self._partition_counts: dict[str, int] = {}
        self._reservations: dict[SourceCoordinate, _Work] = {}
        self._committed: OrderedDict[SourceCoordinate, int] = OrderedDict()
        """When the transactions of reservations committed, the oldest first."""
        self._early: OrderedDict[WorkId, UsageEvent | None] = OrderedDict()
        """Settlements that came before their work was read."""
        self._unbilled: OrderedDict[WorkId, _Work] = OrderedDict()
        """Own work that the group committed before its settlement was read. Not in flight any more."""
        self._books: dict[str, InFlightLedger] = {}
        self._own_tenant_tokens: dict[tuple[str, str], int] = {}

    # What happens

    def reserve(self, source: SourceCoordinate, work: Reserved) -> None:
        """Count an own dispatch from before its transaction commits. A second one of the same source replaces the first
        one."""
        self.release(source)
        made = self._reservations[source] = _Work(
            work.pool, work.partition, work.tenant, work.cost_tokens, True, source, work
        )
        self._count(made, 1)

    def add_input(self, source: SourceCoordinate, more_bytes: int) -> None:
        """What is reserved for this source got a longer prompt, which its cost is to be learned from. Does nothing
        without a reservation."""
        work = self._reservations.get(source)
        if work is not None and work.own is not None and work.own.input_bytes:
            work.own = replace(work.own, input_bytes=work.own.input_bytes + more_bytes)

    def change_cost(self, source: SourceCoordinate, cost_tokens: int, prompt_tokens: int) -> None:
        """What is reserved for this source costs so much. Does nothing without a reservation."""
        work = self._reservations.get(source)
        if work is not None and work.own is not None:
            self._count(work, -1)
            work.cost_tokens = cost_tokens
            work.own = replace(work.own, cost_tokens=cost_tokens, prompt_tokens=prompt_tokens)
            self._count(work, 1)

    def committed_own(self, source: SourceCoordinate, now_ms: int) -> None:
        """The transaction that settles this source committed: what was reserved for it is about to be read back, or
        expires. Does nothing without a reservation."""
        if source in self._reservations:
            self._committed.setdefault(source, now_ms)

    def release(self, source: SourceCoordinate) -> None:
        """The transaction of this reservation will never commit. Does nothing without a reservation."""
        self._take_reservation(source)

    def release_all(self) -> None:
        """No open transaction of ours will commit. Where one just did, the work itself is read back."""
        for source in list(self._reservations):
            self._take_reservation(source)

    def dispatched(self, work: WorkId, seen: Dispatched) -> Settled | None:
        """Work was read back, in the order of its offsets; what was read before changes nothing.

        Returns what was settled by it, when its settlement came before it.
        """
        partition = self._partition(work)
        if work.offset < partition.read_up_to:
            return None
        partition.read_up_to = work.offset + 1
        # The source can be dispatched only once: whoever did it, what was reserved for it is not coming any more.
        reserved = self._take_reservation(seen.source)
        is_own = seen.dispatcher_id == self._dispatcher_id
        own = reserved.own if reserved is not None and is_own else None
        entry = _Work(partition.pool, work.partition, seen.tenant, seen.cost_tokens, is_own, seen.source, own)
        if work in self._early:
            return _settled(work, entry, self._early.pop(work))
        if partition.is_done(work.offset):
            self._remember_unbilled(work, entry)
            return None
        partition.work[work.offset] = entry
        self._count(entry, 1)
        return None

    def settled(self, work: WorkId, usage: UsageEvent | None = None) -> Settled | None:
        """A UsageEvent was read. Returns what is settled by it; None when that was known, or when the work itself was
        not read yet (then ``dispatched`` returns it)."""
        partition = self._partition(work)
        entry = partition.work.pop(work.offset, None)
        if entry is not None:
            self._count(entry, -1)
            return _settled(work, entry, usage)
        entry = self._unbilled.pop(work, None)
        if entry is not None:
            return _settled(work, entry, usage)
        if work.offset >= partition.read_up_to:
            _remember(self._early, work, usage, self._max_unmatched)
        return None

    def committed(self, topic: str, partition: int, offset: int, done: Container[int] = ()) -> None:
        """The pool's group has done everything below ``offset`` and every offset in ``done``."""
        place = self._partition(WorkId(topic, partition, offset))
        place.committed, place.done = offset, done
        for known in [known for known in place.work if place.is_done(known)]:
            entry = place.work.pop(known)
            self._count(entry, -1)
            self._remember_unbilled(WorkId(topic, partition, known), entry)

    def restart(self, topic: str, partition: int) -> None:
        """The log of this partition was replaced by another one: nothing known of its offsets holds."""
        place = self._partitions.pop((topic, partition), None)
        if place is not None:
            for entry in place.work.values():
                self._count(entry, -1)
        memories: tuple[OrderedDict[WorkId, UsageEvent | None] | OrderedDict[WorkId, _Work], ...]
        memories = (self._early, self._unbilled)
        for memory in memories:
            for work in [work for work in memory if work[:2] == (topic, partition)]:
                del memory[work]

    def expire(self, now_ms: int) -> int:
        """Release the reservations that were not read back within RESERVATION_TTL_MS of their commit. Returns how
        many."""
        expired = 0
        while self._committed:
            source, committed_at_ms = next(iter(self._committed.items()))
            if committed_at_ms > now_ms - RESERVATION_TTL_MS:
                break
            self._take_reservation(source)
            expired += 1
        return expired

    def set_partitions(self, topic: str, count: int) -> None:
        """How many partitions a priority topic has."""
        self._partition_counts[topic] = count

    # What is so

    def held(self, pool: str, partitions: frozenset[int] | None = None) -> Held:
        """What is in flight in a pool: everybody's work and our own reservations. Of these ``partitions`` only, if
        given, and of what has no partition yet. It goes on changing; O(1) as long as the partitions stay the same."""
        books = self._books.get(pool)
        return NOTHING_HELD if books is None else books.within(partitions)

    def tokens(self, pool: str) -> int:
        """Cost tokens in flight in a pool, whosesoever."""
        return self.held(pool).tokens

    def own_tokens(self, pool: str) -> int:
        """The part of ``tokens`` that this dispatcher dispatched."""
        return self.held(pool).own_tokens

    def own_tenant_tokens(self, tenant: str, pool: str) -> int:
        """The part of ``own_tokens`` that is a tenant's."""
        return self._own_tenant_tokens.get((tenant, pool), 0)

    def sources(self) -> list[SourceCoordinate]:
        """Where all that is in flight came from: requests, or work that was handed back."""
        seen = (work.source for place in self._partitions.values() for work in place.work.values())
        return [*self._reservations, *seen]

    def pools(self) -> list[str]:
        """Those with anything in flight."""
        return [pool for pool, books in self._books.items() if books.total.tokens]

    def least_loaded_partition(self, topic: str, among: frozenset[int] | None = None) -> int:
        """The partition of a priority topic with the least cost in flight; equals take turns. ANY_PARTITION when its
        partitions are not known yet. Only ``among`` these, if given and the topic has any of them. O(log n).

        One consumer holds the same partition of all the pool's classes, so what is in flight in any of them counts.
        """
        count = self._partition_counts.get(topic, 0)
        if not count:
            return ANY_PARTITION
        pool, _ = pool_of_priority(topic)
        return self._books_of(pool).least_loaded(count, among)

    # How

    def _partition(self, work: WorkId) -> _Partition:
        key = work[:2]
        found = self._partitions.get(key)
        if found is None:
            found = self._partitions[key] = _Partition(pool_of_priority(work.topic)[0])
        return found

    def _take_reservation(self, source: SourceCoordinate) -> _Work | None:
        reserved = self._reservations.pop(source, None)
        if reserved is None:
            return None
        self._committed.pop(source, None)
        self._count(reserved, -1)
        return reserved

    def _remember_unbilled(self, work: WorkId, entry: _Work) -> None:
        if entry.own is not None:
            _remember(self._unbilled, work, entry, self._max_unmatched)

    def _count(self, work: _Work, sign: int) -> None:
        change = sign * work.cost_tokens
        if work.is_own:
            _add(self._own_tenant_tokens, (work.tenant, work.pool), change)
        self._books_of(work.pool).count(work.partition, change, sign, is_own=work.is_own)

    def _books_of(self, pool: str) -> InFlightLedger:
        books = self._books.get(pool)
        if books is None:
            books = self._books[pool] = InFlightLedger()
        return books


KeyT = TypeVar("KeyT")


def _add(sums: dict[KeyT, int], key: KeyT, change: int) -> None:
    """Keeps no zeros: tenants and pools come and go."""
    total = sums.get(key, 0) + change
    if total:
        sums[key] = total
    else:
        sums.pop(key, None)


def _remember(memory: OrderedDict[WorkId, ValueT], work: WorkId, value: ValueT, bound: int) -> None:
    memory[work] = value
    if len(memory) > bound:
        memory.popitem(last=False)


def _settled(work: WorkId, entry: _Work, usage: UsageEvent | None) -> Settled:
    return Settled(work, entry.pool, entry.tenant, entry.cost_tokens, entry.source, entry.own, usage)
