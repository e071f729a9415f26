"""A node of the tree of shares, and the ring in which its children take turns. Pure.

The mechanism and its bound are derived in fair_queue.py.
"""

from collections import deque
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

from stream_processors.dispatcher.scheduling.backlog_statistics import TenantSums
from stream_processors.dispatcher.scheduling.deadline_heap import DeadlineHeap

ItemT = TypeVar("ItemT")

_COMPACTED_FROM = 16
"""Outdated entries kept before a ring is rebuilt without them."""


class Node(Generic[ItemT]):
    """The root, a class, a tenant in a class, or a group of a tenant: it has children, or a queue of requests.

    ``spent`` is the tokens charged, divided by its weight, on the scale of its parent. ``turn`` identifies its entry in
    the parent's ring; 0 while nothing is queued below it.
    """

    __slots__ = (
        "children",
        "heap",
        "is_listed",
        "level",
        "name",
        "parent",
        "per_token",
        "resting",
        "ring",
        "routes",
        "shadows",
        "spent",
        "sums",
        "turn",
        "weight",
    )

    def __init__(self, name: str, parent: "Node[ItemT] | None", weight: float, sums: TenantSums | None = None) -> None:
        self.name = name
        self.parent = parent
        self.weight = weight
        self.per_token = 1.0 / weight
        self.spent: float = 0.0 if parent is None else parent.level
        self.turn = 0
        self.ring: list[tuple[float, int, Node[ItemT]]] = []
        """(round, turn, child) of the backlogged children; the head goes next."""
        self.shadows = 0
        """Outdated entries in the ring; never the head."""
        self.level: float = 0.0
        """As last looked up; use ``Rings.level``."""
        self.children: dict[str, Node[ItemT]] = {}
        self.heap: DeadlineHeap[ItemT] = DeadlineHeap()
        if sums is not None:
            self.sums = sums
            """Of a tenant and its groups only: the tenant's backlog in its class."""
        self.routes: dict[str, Node[ItemT]] | None = None
        """Of a tenant with groups: the node of each group; the empty name is for requests without a group."""
        self.resting: deque[Node[ItemT]] | None = None
        """Of a class: tenants to forget once they have no backlog and no debt."""
        self.is_listed = False
        """Whether this tenant is in ``resting`` of its class."""


class Rings(Generic[ItemT]):
    """Operations on rings: enter, leave, charge, change of weight. A child of weight 1 gets ``quantum_tokens`` per
    round."""

    def __init__(self, quantum_tokens: float) -> None:
        self._quantum = quantum_tokens
        self._turns = 0

    def wake(self, node: Node[ItemT]) -> None:
        """Enter the parent's ring, and likewise every node above: ``node`` has a backlog now."""
        while not node.turn and (parent := node.parent) is not None:
            node.spent = max(node.spent, self.level(parent))
            self._enter(node, parent)
            node = parent

    def rest(self, node: Node[ItemT]) -> None:
        """Leave the parent's ring, and likewise every node above that becomes empty: ``node`` has no backlog now."""
        while node.turn and (parent := node.parent) is not None:
            node.turn = 0
            parent.shadows += 1
            self._settle(parent)
            if parent.ring:
                return
            _begin_anew(parent, node)
            node = parent

    def serve(self, node: Node[ItemT], tokens: float) -> None:
        """Charge ``tokens`` to the queue that was served, after its head left, and to every node above it.

        Equals ``charge`` and then, if the queue is empty, ``rest``; in one pass, because every node on the path is the
        head of its ring.
        """
        quantum = self._quantum
        is_empty = not node.heap.entries
        parent = node.parent
        while parent is not None:
            ring = parent.ring
            spent = node.spent = node.spent + tokens * node.per_token
            if is_empty:
                heappop(ring)
                node.turn = 0
                if parent.shadows:
                    self._settle(parent)
                is_empty = not parent.ring
                if is_empty:
                    _begin_anew(parent, node)
            else:
                key = spent // quantum
                if key != ring[0][0]:
                    self._turns = node.turn = turn = self._turns + 1
                    heapreplace(ring, (key, turn, node))
                    if parent.shadows:
                        self._settle(parent)
            node = parent
            parent = node.parent

    def charge(self, node: Node[ItemT], tokens: float) -> None:
        """Charge ``tokens`` (negative: refund) to ``node`` and to every node above it."""
        while (parent := node.parent) is not None:
            self._set_spent(node, parent, node.spent + tokens * node.per_token)
            node = parent

    def reweigh(self, node: Node[ItemT], weight: float) -> None:
        """Change the weight of ``node``. Its debt or credit stays the same in tokens: a weight that goes up and down,
        as those of the classes do with the backlogs of other dispatchers, neither forgives nor adds debt."""
        parent = node.parent
        if parent is None or weight == node.weight:
            return
        level = self.level(parent)
        self._set_spent(node, parent, level + (node.spent - level) * node.weight / weight)
        node.weight = weight
        node.per_token = 1.0 / weight

    def level(self, parent: Node[ItemT]) -> float:
        """The least ``spent`` of a child that enters now: the start of the round being served. Looked up before any
        change that could move the head of the ring back, so it never decreases."""
        if parent.ring:
            parent.level = max(parent.level, parent.ring[0][0] * self._quantum)
        return parent.level

    def _set_spent(self, node: Node[ItemT], parent: Node[ItemT], spent: float) -> None:
        """Set ``spent``, and move ``node`` if it then belongs to another round."""
        before, node.spent = node.spent, spent
        if node.turn and spent // self._quantum != before // self._quantum:
            self.level(parent)
            self._enter(node, parent)
            parent.shadows += 1
            self._settle(parent)

    def _enter(self, node: Node[ItemT], parent: Node[ItemT]) -> None:
        self._turns = node.turn = turn = self._turns + 1
        heappush(parent.ring, (node.spent // self._quantum, turn, node))

    def _settle(self, parent: Node[ItemT]) -> None:
        """Remove outdated entries from the head; all of them when they are more than half."""
        ring = parent.ring
        while ring and ring[0][1] != ring[0][2].turn:
            heappop(ring)
            parent.shadows -= 1
        if parent.shadows > _COMPACTED_FROM and 2 * parent.shadows > len(ring):
            parent.ring = [entry for entry in ring if entry[1] == entry[2].turn]
            heapify(parent.ring)
            parent.shadows = 0


def _begin_anew(parent: Node[ItemT], last: Node[ItemT]) -> None:
    """The ring is empty: the next child starts where the last one ended, so children that come one after another owe
    each other nothing."""
    parent.level = max(parent.level, last.spent)
