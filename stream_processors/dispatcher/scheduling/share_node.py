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
"""Entries of earlier turns that a ring carries along at least before it is rebuilt without them."""


class Node(Generic[ItemT]):
    """The root, a class, a tenant in a class, or a group of one: it has children, or a line of requests.

    ``spent`` is what it was charged in tokens divided by its weight, on the scale of its parent. ``turn`` names its
    entry in the parent's ring, 0 while nothing waits below it.
    """

    __slots__ = (
        "children",
        "is_listed",
        "level",
        "line",
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
        """(round, turn, child) of the children below which something waits; the head is the one that goes next."""
        self.shadows = 0
        """Entries of the ring that are not a child's turn any more; never the head."""
        self.level: float = 0.0
        """As it was last looked up; ask ``Rings.level``."""
        self.children: dict[str, Node[ItemT]] = {}
        self.line: DeadlineHeap[ItemT] = DeadlineHeap()
        if sums is not None:
            self.sums = sums
            """Only of a tenant and its groups: what waits of the tenant in its class."""
        self.routes: dict[str, Node[ItemT]] | None = None
        """Of a tenant with groups: where the requests of each group stand; those of no group under the empty name."""
        self.resting: deque[Node[ItemT]] | None = None
        """Of a class: tenants that may be forgotten once nothing of theirs waits and their debt is paid."""
        self.is_listed = False
        """Whether this tenant is in ``resting`` of its class."""


class Rings(Generic[ItemT]):
    """What is done with rings: begin and end to wait, be charged, be given another weight. ``quantum_tokens`` is what a
    child of weight 1 gets in a round."""

    def __init__(self, quantum_tokens: float) -> None:
        self._quantum = quantum_tokens
        self._turns = 0

    def wake(self, node: Node[ItemT]) -> None:
        """Something waits below ``node``: it enters its parent's ring, and so do those above it."""
        while not node.turn and (parent := node.parent) is not None:
            node.spent = max(node.spent, self.level(parent))
            self._enter(node, parent)
            node = parent

    def rest(self, node: Node[ItemT]) -> None:
        """Nothing waits below ``node`` any more: it leaves its parent's ring, and so do those above that it empties."""
        while node.turn and (parent := node.parent) is not None:
            node.turn = 0
            parent.shadows += 1
            self._settle(parent)
            if parent.ring:
                return
            _begin_anew(parent, node)
            node = parent

    def serve(self, node: Node[ItemT], tokens: float) -> None:
        """Charge ``tokens`` to the line whose turn it was, after its head left, and to every node above it.

        The same as ``charge`` and then, if the line is empty, ``rest``; in one pass, because here every node on the
        path is the head of its ring, and nothing but ``spent`` changes while it goes on in its round.
        """
        quantum = self._quantum
        is_empty = not node.line.entries
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
        """Charge ``tokens`` (negative: refund) to ``node`` and to every node above it, whoever's turn it is."""
        while (parent := node.parent) is not None:
            self._set_spent(node, parent, node.spent + tokens * node.per_token)
            node = parent

    def reweigh(self, node: Node[ItemT], weight: float) -> None:
        """Give ``node`` another weight. What it owes (or was refunded) stays the same in tokens: a weight that goes up
        and down, as those of the classes do with what other dispatchers have waiting, neither forgives nor adds."""
        parent = node.parent
        if parent is None or weight == node.weight:
            return
        level = self.level(parent)
        self._set_spent(node, parent, level + (node.spent - level) * node.weight / weight)
        node.weight = weight
        node.per_token = 1.0 / weight

    def level(self, parent: Node[ItemT]) -> float:
        """What a child that begins to wait now has at least spent: where the round that is served begins. Looked up
        before anything that could move the head of the ring back, so that it never goes back itself."""
        if parent.ring:
            parent.level = max(parent.level, parent.ring[0][0] * self._quantum)
        return parent.level

    def _set_spent(self, node: Node[ItemT], parent: Node[ItemT], spent: float) -> None:
        """Move ``node`` to the round where it belongs then, if it is another."""
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
        """Remove entries of earlier turns from the head; all of them when they are more than half."""
        ring = parent.ring
        while ring and ring[0][1] != ring[0][2].turn:
            heappop(ring)
            parent.shadows -= 1
        if parent.shadows > _COMPACTED_FROM and 2 * parent.shadows > len(ring):
            parent.ring = [entry for entry in ring if entry[1] == entry[2].turn]
            heapify(parent.ring)
            parent.shadows = 0


def _begin_anew(parent: Node[ItemT], last: Node[ItemT]) -> None:
    """Nobody waits any more: the next begins where the last one ended, so that those that come one after another owe
    each other nothing."""
    parent.level = max(parent.level, last.spent)
