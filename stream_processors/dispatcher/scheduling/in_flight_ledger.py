"""Running sums of one pool's work in flight, by partition. Pure.

The set of partitions asked for changes rarely (when a consumer comes, goes or is assigned others), the work on them
with every request: so the sum over the last set is kept as well, and so is the order of its partitions by load.
"""

from heapq import heapify, heappop, heappush

ANY_PARTITION = -1
"""Partition number while the topic's partitions are unknown: the producer chooses."""

_COMPACTED_FROM = 64
"""Outdated entries kept before an order is rebuilt without them."""


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


class InFlightLedger:
    """The sums of one pool. O(log n) each, except for the first call with another set of partitions."""

    __slots__ = ("_among", "_by_partition", "_orders", "_within", "total")

    def __init__(self) -> None:
        self.total = Held()
        self._by_partition: dict[int, Held] = {}
        self._among: frozenset[int] | None = None
        self._within = self.total
        self._orders: dict[int, _LoadOrder] = {}

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
        for order in self._orders.values():
            order.moved(partition, held.tokens)

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

    def least_loaded(self, count: int, among: frozenset[int] | None) -> int:
        """The partition of 0 to ``count`` - 1 with the least in flight; among equals the one chosen longest ago. Only
        of ``among``, if given and any of them exists."""
        order = self._orders.get(count)
        if order is None or order.among is not among:
            if order is None or order.among != among:
                loads = {partition: held.tokens for partition, held in self._by_partition.items()}
                order = self._orders[count] = _LoadOrder(count, among, loads, order)
            order.among = among
        return order.take()


class _LoadOrder:
    """Partitions by work in flight: a heap whose outdated entries are deleted when they reach its head."""

    __slots__ = ("_candidates", "_heap", "_loads", "_turn", "_turns", "among")

    def __init__(
        self, count: int, among: frozenset[int] | None, loads: dict[int, int], before: "_LoadOrder | None"
    ) -> None:
        everyone = range(count)
        chosen = everyone if among is None else [partition for partition in everyone if partition in among]
        self.among = among
        self._candidates = frozenset(chosen or everyone)
        self._loads = {partition: loads.get(partition, 0) for partition in self._candidates}
        self._turns: dict[int, int] = {} if before is None else before._turns
        self._turn = max(self._turns.values(), default=0)
        self._heap: list[tuple[int, int, int]] = []
        self._rebuild()

    def moved(self, partition: int, tokens: int) -> None:
        """Set the tokens in flight on a partition."""
        if partition in self._candidates:
            self._loads[partition] = tokens
            self._enter(partition)

    def take(self) -> int:
        """The least loaded partition."""
        heap = self._heap
        while True:
            load, turn, partition = heap[0]
            if load == self._loads[partition] and turn == self._turns.get(partition, 0):
                break
            heappop(heap)
        self._turn += 1
        self._turns[partition] = self._turn
        self._enter(partition)
        return partition

    def _enter(self, partition: int) -> None:
        heappush(self._heap, (self._loads[partition], self._turns.get(partition, 0), partition))
        if len(self._heap) > 2 * len(self._candidates) + _COMPACTED_FROM:
            self._rebuild()

    def _rebuild(self) -> None:
        self._heap = [(self._loads[partition], self._turns.get(partition, 0), partition) for partition in self._loads]
        heapify(self._heap)
