"""In-flight tracking: dispatched and unsettled work of all pools and the whole fleet. Pure: events in, tokens out.

Work is counted from the log: an item read back from ``priority.*`` counts until its UsageEvent is read, or until the
pool's group has committed past it, whichever comes first. The three events come from different partitions, in any
order; every order ends at nothing in flight. An own dispatch is reserved before its transaction commits; the
reservation ends when the item is read back. A dispatch that waits for its transaction, however long a topic refuses it,
keeps its room: otherwise the room would be filled with more that waits.

No leak: an item is counted only if its offset was not read before and is not known to be done, and leaves when its
offset is below the group's committed offset or in the group's done set, which are polled once a second. Settlements
that come before their item, and items committed before their settlement, are remembered up to a bound and never
counted: a lost entry costs one cost correction.

The set of partitions asked for changes rarely (when a consumer comes, goes or is assigned others), the work on them
with every request: so the sum over the last set is kept as well.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from fairlane.frozen import frozen_dataclass
from fairlane.names import EVALUATION_TENANT, pool_of_priority
from fairlane.records import SourceCoordinate, UsageEvent

ANY_PARTITION = -1
"""Partition number while the topic's partitions are unknown: the producer chooses."""


class Held:
    """Work in flight of all dispatchers, and the part of it that this one dispatched. Mutable: it follows the work."""

    __slots__ = ("items", "own_items", "own_tokens", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.items = 0
        self.own_tokens = 0
        self.own_items = 0

    def add(self, tokens: int, items: int, *, is_own: bool) -> None:
        self.tokens += tokens
        self.items += items
        if is_own:
            self.own_tokens += tokens
            self.own_items += items

    def merge(self, other: "Held") -> None:
        self.tokens += other.tokens
        self.items += other.items
        self.own_tokens += other.own_tokens
        self.own_items += other.own_items


class ConsumerLoad(NamedTuple):
    """Work in flight of one consumer.

    Attributes:
        since_ms: when its present run began, as far as can be seen: when the one before was settled, or when it got
        work
            after it had none.
        chosen: number of the choice that last fell on it.
    """

    tokens: int
    items: int
    since_ms: int
    chosen: int


class InFlightLedger:
    """The sums of one pool. O(1) each, except for ``choose``, ``consumer_loads``, and for a call with another set of
    partitions."""

    __slots__ = (
        *("_among", "_by_partition", "_chosen", "_chosen_at", "_loads", "_run_since_ms", "_this_round", "_within"),
        "total",
    )

    def __init__(self) -> None:
        self.total = Held()
        self._by_partition: dict[int, Held] = {}
        self._among: frozenset[int] | None = None
        self._within = self.total
        self._loads: defaultdict[int, int] = defaultdict(int)
        """Tokens by partition."""
        self._chosen = 0
        self._chosen_at: defaultdict[int, int] = defaultdict(int)
        """By partition, the number of the choice that last fell on it."""
        self._this_round: set[int] = set()
        self._run_since_ms: defaultdict[int, int] = defaultdict(int)
        """By partition."""

    def consumer_loads(self, by_consumer: Iterable[frozenset[int]]) -> list[ConsumerLoad]:
        """The work in flight of each consumer, given its partitions."""
        held_by, since_ms, chosen_at = self._by_partition, self._run_since_ms, self._chosen_at
        found = []
        for partitions in by_consumer:
            tokens = items = since = chosen = 0
            for partition in partitions:
                held = held_by.get(partition)
                if held is not None:
                    tokens += held.tokens
                    items += held.items
                since = max(since, since_ms[partition])
                chosen = max(chosen, chosen_at[partition])
            found.append(ConsumerLoad(tokens, items, since, chosen))
        return found

    def began(self, partition: int, now_ms: int) -> None:
        """The consumer of this partition began a run."""
        self._run_since_ms[partition] = now_ms

    def count(self, partition: int, tokens: int, items: int, *, is_own: bool) -> None:
        """Add work on this partition; negative numbers remove it."""
        self.total.add(tokens, items, is_own=is_own)
        among = self._among
        if among is not None and (partition in among or partition == ANY_PARTITION):
            self._within.add(tokens, items, is_own=is_own)
        held = self._by_partition.get(partition)
        if held is None:
            held = self._by_partition[partition] = Held()
        held.add(tokens, items, is_own=is_own)
        if not held.items and not held.tokens:
            del self._by_partition[partition]
        self._loads[partition] = held.tokens

    def within(self, partitions: frozenset[int] | None) -> Held:
        """Work in flight on these partitions (None: all of them), and work without a partition yet."""
        if partitions is None:
            return self.total
        if partitions is not self._among:
            if partitions != self._among:
                self._within = Held()
                for partition, held in self._by_partition.items():
                    if partition in partitions or partition == ANY_PARTITION:
                        self._within.merge(held)
            self._among = partitions
        return self._within

    def start_round(self) -> None:
        """Start a round of choices, which are probably committed together."""
        self._this_round.clear()

    def choose(self, count: int, by_consumer: Iterable[frozenset[int]] | None) -> int:
        """The partition of 0 to ``count`` - 1 for the next item: one of the consumer with the least in flight.

        In one round all items for a consumer go to one partition, since every further partition of a transaction costs
        the broker a request and a marker; in the next round to its least loaded one. Among equals, the one chosen
        longest ago. ``by_consumer``: the partitions of each consumer; where none of them exists, or they are unknown,
        each partition counts as a consumer's only one.
        """
        consumers = [
            owned for one in by_consumer or () if (owned := [partition for partition in one if partition < count])
        ] or [[partition] for partition in range(count)]
        loads, chosen_at = self._loads, self._chosen_at
        _, _, owned = min(
            (sum(loads[one] for one in partitions), max(chosen_at[one] for one in partitions), partitions)
            for partitions in consumers
        )
        partition = next((one for one in owned if one in self._this_round), -1)
        if partition < 0:
            partition = min(owned, key=lambda one: (loads[one], chosen_at[one], one))
            self._this_round.add(partition)
        self._chosen += 1
        chosen_at[partition] = self._chosen
        return partition


RESERVATION_TTL_MS = 30_000
"""A committed reservation not read back for this long is dropped: something else was committed in its place."""

NOTHING_HELD = Held()
"""For a pool that never had work in flight."""

ValueT = TypeVar("ValueT")


class WorkId(NamedTuple):
    """Coordinate of a work item on its priority topic."""

    topic: str
    partition: int
    offset: int


@frozen_dataclass(frozen=True, slots=True)
class Reserved:
    """An own dispatch. ``partition`` is that of the priority topic."""

    pool: str
    priority_class: str
    partition: int
    tenant: str
    group: str
    cost_tokens: int
    prompt_tokens: int
    model: str
    input_bytes: int = 0
    most_output_tokens: int = 0


@frozen_dataclass(frozen=True, slots=True)
class Dispatched:
    """Headers of a work item: the source of its request, tenant, dispatcher and cost. ``reserved_nanos`` is its
    estimated cost in money, None for a tenant without budgets; ``is_batch``: of a row of a batch job."""

    source: SourceCoordinate
    tenant: str
    dispatcher_id: str
    cost_tokens: int
    reserved_nanos: int | None = None
    requested_by: str | None = None
    is_batch: bool = False


@frozen_dataclass(frozen=True, slots=True)
class SettledWork:
    """Work that is done. ``own`` is its reservation, if made here; ``usage`` its actual cost."""

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
    """One partition of a priority topic: its work in flight, the read position, and the group's progress."""

    pool: str
    work: dict[int, _Work] = field(default_factory=dict)
    read_up_to: int = 0
    committed: int = 0
    done: Container[int] = ()

    def is_done(self, offset: int) -> bool:
        return offset < self.committed or offset in self.done


class InFlight:
    """Work in flight as one dispatcher sees it. ``dispatcher_id`` identifies its own work, including that of a
    predecessor with the same id. Remembers at most ``max_unmatched`` settlements without work, and as much work without
    its settlement."""

    def __init__(self, dispatcher_id: str, max_unmatched: int = 10_000) -> None:
        self._dispatcher_id = dispatcher_id
        self._max_unmatched = max_unmatched
        self._partitions: dict[tuple[str, int], _Partition] = {}
        self._partition_counts: dict[str, int] = {}
        self._reservations: dict[SourceCoordinate, _Work] = {}
        self._committed: OrderedDict[SourceCoordinate, int] = OrderedDict()
        """Commit times of reservations, oldest first."""
        self._early: OrderedDict[WorkId, UsageEvent | None] = OrderedDict()
        """Settlements that came before their work was read."""
        self._unbilled: OrderedDict[WorkId, _Work] = OrderedDict()
        """Own work that the group committed before its settlement was read. No longer in flight."""
        self._ledgers: dict[str, InFlightLedger] = {}
        self._own_tenant_tokens: dict[tuple[str, str], int] = {}
        self._copies: dict[str, InFlightLedger] = {}
        """By pool, of copies for evaluation. Apart: a consumer runs them when it has no request, so they take no room
        of requests."""

    # Events

    def reserve(self, source: SourceCoordinate, work: Reserved) -> None:
        """Count an own dispatch before its transaction commits. It replaces an earlier one of the same source."""
        self.release(source)
        made = self._reservations[source] = _Work(
            work.pool, work.partition, work.tenant, work.cost_tokens, True, source, work
        )
        self._count(made, 1)

    def add_input(self, source: SourceCoordinate, more_bytes: int) -> None:
        """Add the bytes of enrichment to the input of a reservation, from which the cost model learns. Ignored without
        a reservation."""
        work = self._reservations.get(source)
        if work is not None and work.own is not None and work.own.input_bytes:
            work.own = replace(work.own, input_bytes=work.own.input_bytes + more_bytes)

    def change_cost(self, source: SourceCoordinate, cost_tokens: int, prompt_tokens: int) -> None:
        """Change the cost of a reservation. Ignored without one."""
        work = self._reservations.get(source)
        if work is not None and work.own is not None:
            self._count(work, -1)
            work.cost_tokens = cost_tokens
            work.own = replace(work.own, cost_tokens=cost_tokens, prompt_tokens=prompt_tokens)
            self._count(work, 1)

    def committed_own(self, source: SourceCoordinate, now_ms: int) -> None:
        """Note the commit of a reservation: its item is about to be read back, or it expires. Ignored without one."""
        if source in self._reservations:
            self._committed.setdefault(source, now_ms)

    def release(self, source: SourceCoordinate) -> None:
        """Drop a reservation whose transaction will never commit. Ignored without one."""
        self._take_reservation(source)

    def release_all(self) -> None:
        """Drop all reservations: no open transaction will commit. Items of one that did are read back."""
        for source in list(self._reservations):
            self._take_reservation(source)

    def dispatched(self, work: WorkId, seen: Dispatched) -> SettledWork | None:
        """Count an item read back, in order of offsets; one that was read before is ignored.

        Returns the settled work if its settlement came first.
        """
        partition = self._partition(work)
        if work.offset < partition.read_up_to:
            return None
        partition.read_up_to = work.offset + 1
        # A source is dispatched only once: whichever dispatcher did it, the reservation is not coming any more.
        reserved = self._take_reservation(seen.source)
        is_own = seen.dispatcher_id == self._dispatcher_id
        own = reserved.own if reserved is not None and is_own else None
        entry = _Work(partition.pool, work.partition, seen.tenant, seen.cost_tokens, is_own, seen.source, own)
        if work in self._early:
            return SettledWork(entry.source, entry.own, self._early.pop(work))
        if partition.is_done(work.offset):
            self._remember_unbilled(work, entry)
            return None
        partition.work[work.offset] = entry
        self._count(entry, 1)
        return None

    def settled(self, work: WorkId, usage: UsageEvent | None = None) -> SettledWork | None:
        """Apply a UsageEvent. Returns the settled work; None when it was settled already, or when the item was not read
        yet (then ``dispatched`` returns it)."""
        partition = self._partition(work)
        entry = partition.work.pop(work.offset, None)
        if entry is not None:
            self._count(entry, -1)
            return SettledWork(entry.source, entry.own, usage)
        entry = self._unbilled.pop(work, None)
        if entry is not None:
            return SettledWork(entry.source, entry.own, usage)
        if work.offset >= partition.read_up_to:
            _remember(self._early, work, usage, self._max_unmatched)
        return None

    def committed(self, topic: str, partition: int, offset: int, done: Container[int] = ()) -> None:
        """Apply the group's progress: everything below ``offset`` and every offset in ``done`` is done."""
        place = self._partition(WorkId(topic, partition, offset))
        place.committed, place.done = offset, done
        for known in [known for known in place.work if place.is_done(known)]:
            entry = place.work.pop(known)
            self._count(entry, -1)
            self._remember_unbilled(WorkId(topic, partition, known), entry)

    def restart(self, topic: str, partition: int) -> None:
        """Forget a partition whose log was replaced: old offsets are void."""
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
        """Drop the reservations not read back within RESERVATION_TTL_MS of their commit. Returns their number."""
        expired = 0
        while self._committed:
            source, committed_at_ms = next(iter(self._committed.items()))
            if committed_at_ms > now_ms - RESERVATION_TTL_MS:
                break
            self._take_reservation(source)
            expired += 1
        return expired

    def set_partitions(self, topic: str, count: int) -> None:
        self._partition_counts[topic] = count

    # Queries

    def held(self, pool: str, partitions: frozenset[int] | None = None) -> Held:
        """Work in flight in a pool but for copies, own reservations included; only on these ``partitions`` if given,
        plus work without a partition yet. A live object; O(1) as long as the partitions stay the same."""
        ledger = self._ledgers.get(pool)
        return NOTHING_HELD if ledger is None else ledger.within(partitions)

    def copies(self, pool: str, partitions: frozenset[int] | None = None) -> Held:
        """Copies for evaluation in flight in a pool, as ``held``."""
        ledger = self._copies.get(pool)
        return NOTHING_HELD if ledger is None else ledger.within(partitions)

    def tokens(self, pool: str) -> int:
        return self.held(pool).tokens

    def own_tokens(self, pool: str) -> int:
        return self.held(pool).own_tokens

    def own_tenant_tokens(self, tenant: str, pool: str) -> int:
        return self._own_tenant_tokens.get((tenant, pool), 0)

    def sources(self) -> list[SourceCoordinate]:
        """Source coordinates of all work in flight: of requests, or of requeued work."""
        seen = (work.source for place in self._partitions.values() for work in place.work.values())
        return [*self._reservations, *seen]

    def pools(self) -> list[str]:
        return [pool for pool, ledger in self._ledgers.items() if ledger.total.tokens]

    def consumer_loads(
        self, pool: str, by_consumer: Sequence[frozenset[int]], *, with_copies: bool = False
    ) -> list[ConsumerLoad]:
        """The work in flight of each consumer of the pool, given its partitions. O(partitions)."""
        loads = self._ledger_of(pool).consumer_loads(by_consumer)
        copies = self._copies.get(pool) if with_copies else None
        if copies is None:
            return loads
        both = zip(loads, copies.consumer_loads(by_consumer), strict=True)
        return [load._replace(tokens=load.tokens + own.tokens, items=load.items + own.items) for load, own in both]

    def began(self, pool: str, partition: int, now_ms: int) -> None:
        """A run began at the consumer of this partition: something of it was settled, or it had nothing to do."""
        self._ledger_of(pool).began(partition, now_ms)

    def start_round(self, pool: str) -> None:
        """Start a round of choices of this pool; see ``choose_partition``."""
        self._ledger_of(pool).start_round()

    def choose_partition(self, topic: str, by_consumer: Iterable[frozenset[int]] | None = None) -> int:
        """The partition of a priority topic for the next item, see ``InFlightLedger.choose``. ANY_PARTITION while its
        partitions are unknown. O(partitions).

        One consumer owns the same partition in all classes of a pool, so work of all classes counts.
        """
        count = self._partition_counts.get(topic, 0)
        if not count:
            return ANY_PARTITION
        pool, _ = pool_of_priority(topic)
        return self._ledger_of(pool).choose(count, by_consumer)

    # Internals

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
            # Zero sums are deleted, since tenants come and go.
            key = work.tenant, work.pool
            tokens = self._own_tenant_tokens.pop(key, 0) + change
            if tokens:
                self._own_tenant_tokens[key] = tokens
        ledgers = self._copies if work.tenant == EVALUATION_TENANT else self._ledgers
        _ledger_in(ledgers, work.pool).count(work.partition, change, sign, is_own=work.is_own)

    def _ledger_of(self, pool: str) -> InFlightLedger:
        return _ledger_in(self._ledgers, pool)


def _ledger_in(ledgers: dict[str, InFlightLedger], pool: str) -> InFlightLedger:
    ledger = ledgers.get(pool)
    if ledger is None:
        ledger = ledgers[pool] = InFlightLedger()
    return ledger


def _remember(memory: OrderedDict[WorkId, ValueT], work: WorkId, value: ValueT, bound: int) -> None:
    memory[work] = value
    if len(memory) > bound:
        memory.popitem(last=False)
