"""Running sums of one pool's work in flight, by partition. Pure.

Which partitions count changes rarely (when a consumer comes, goes or is given others), what is in flight on them with
every request: so the sum over the partitions that were asked for last is kept as well, and so is their order by load.
"""

from heapq import heapify, heappop, heappush

ANY_PARTITION = -1
"""In the place of a partition: its topic's partitions are not known yet, and the producer chooses."""

_COMPACTED_FROM = 64
"""Outdated entries an order carries along at least before it is rebuilt without them."""


class Held:
    """What is in flight: everybody's and, as a part of it, what this dispatcher dispatched. It changes as work goes and
    comes."""

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
    """The sums of one pool. O(log n) each, but for the first call after the partitions in question are others."""

    __slots__ = ("_among", "_by_partition", "_orders", "_within", "total")

    def __init__(self) -> None:
        self.total = Held()
        self._by_partition: dict[int, Held] = {}
        self._among: frozenset[int] | None = None
        self._within = self.total
        self._orders: dict[int, _LoadOrder] = {}

    def count(self, partition: int, tokens: int, items: int, *, is_own: bool) -> None:
        """Work of so many tokens came to this partition; negative: it went."""
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
        """What is in flight on these, and what has no partition yet; on all of them if None."""
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
        """Of the partitions 0 to ``count`` - 1 the one with the least in flight; of equals the one whose turn was the
        longest ago. Only ``among`` these, if given and any of them is there."""
        order = self._orders.get(count)
        if order is None or order.among is not among:
            if order is None or order.among != among:
                loads = {partition: held.tokens for partition, held in self._by_partition.items()}
                order = self._orders[count] = _LoadOrder(count, among, loads, order)
            order.among = among
        return order.take()


class _LoadOrder:
    """Partitions by what is in flight on them: a heap whose outdated entries go when they reach its head."""

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
        """So much is in flight there now."""
        if partition in self._candidates:
            self._loads[partition] = tokens
            self._enter(partition)

    def take(self) -> int:
        """The partition whose turn it is."""
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
