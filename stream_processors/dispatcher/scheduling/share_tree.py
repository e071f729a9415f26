"""Fair shares by tokens over classes, tenants and groups: deficit round robin and virtual token counters. Pure.

The mechanism and its bound are derived in fair_queue.py.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

from stream_processors.dispatcher.scheduling.backlog_statistics import (
    DEFAULT_CLASS_WEIGHTS,
    NO_GROUP,
    BacklogStatistics,
    Queueable,
    Share,
    TenantSums,
    checked_class_weights,
)

ItemT = TypeVar("ItemT", bound=Queueable)
EntryT = TypeVar("EntryT")

_COMPACTED_FROM = 16
"""Outdated entries kept before a heap or a ring is rebuilt without them."""

EXPEDITED = -(1 << 63)
"""Deadline that sorts before every epoch time in milliseconds."""


class DeadlineHeap(Generic[EntryT]):
    """A heap of ``(deadline_at_ms, arrival, item)``; arrivals are unique, so ties leave in order of arrival.

    An entry with the deadline EXPEDITED goes before all others, and of two such the one pushed first. A removal out of
    turn only marks the entry; it is deleted when it reaches the head, or when more than half of the entries are marked.
    The head is never marked. Push, pop and remove are O(log n), amortised.
    """

    __slots__ = ("_gone", "entries")

    def __init__(self) -> None:
        self.entries: list[tuple[int, int, EntryT]] = []
        """``entries[0]`` is the head. Public: the queue reads it in its hot path."""
        self._gone: set[int] = set()

    def push(self, entry: tuple[int, int, EntryT]) -> None:
        heappush(self.entries, entry)

    def pop(self) -> EntryT:
        """Remove and return the head. IndexError when empty."""
        item = heappop(self.entries)[2]
        if self._gone:
            self._prune()
        return item

    def remove(self, arrival: int) -> None:
        """Remove the entry with this arrival number, which must be present."""
        self._gone.add(arrival)
        self._prune()
        if len(self._gone) > _COMPACTED_FROM and 2 * len(self._gone) > len(self.entries):
            self.entries = [entry for entry in self.entries if entry[1] not in self._gone]
            heapify(self.entries)
            self._gone.clear()

    def take_late(self, is_late: Callable[[EntryT], bool]) -> list[EntryT]:
        """Remove late entries from the head until the head is not late; expedited entries that are not late stay."""
        gone: list[EntryT] = []
        passed: list[tuple[int, int, EntryT]] = []
        while self.entries:
            entry = self.entries[0]
            if is_late(entry[2]):
                gone.append(self.pop())
            elif entry[0] == EXPEDITED:
                passed.append(entry)
                self.pop()
            else:
                break
        for entry in passed:
            self.push(entry)
        return gone

    def __iter__(self) -> Iterator[tuple[int, int, EntryT]]:
        return (entry for entry in self.entries if entry[1] not in self._gone)

    def __len__(self) -> int:
        return len(self.entries) - len(self._gone)

    def _prune(self) -> None:
        entries, gone = self.entries, self._gone
        while entries and entries[0][1] in gone:
            gone.discard(heappop(entries)[1])


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
        self.quantum_tokens = quantum_tokens
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
        quantum = self.quantum_tokens
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
            parent.level = max(parent.level, parent.ring[0][0] * self.quantum_tokens)
        return parent.level

    def _set_spent(self, node: Node[ItemT], parent: Node[ItemT], spent: float) -> None:
        """Set ``spent``, and move ``node`` if it then belongs to another round."""
        before, node.spent = node.spent, spent
        if node.turn and spent // self.quantum_tokens != before // self.quantum_tokens:
            self.level(parent)
            self._enter(node, parent)
            parent.shadows += 1
            self._settle(parent)

    def _enter(self, node: Node[ItemT], parent: Node[ItemT]) -> None:
        self._turns = node.turn = turn = self._turns + 1
        heappush(parent.ring, (node.spent // self.quantum_tokens, turn, node))

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


RESTING_TENANTS = 1_024
"""Idle tenants of a class that are kept at least, for late corrections of their cost."""


class ShareTree(BacklogStatistics[ItemT]):
    """Classes share the pool by their weights, tenants their class, groups their tenant; within a queue the earliest
    deadline goes first.

    With ``charges_output`` False only the prompt tokens are charged when a request is popped; ``charge`` adds the rest.
    """

    def __init__(self, quantum_tokens: float, *, charges_output: bool) -> None:
        super().__init__(DEFAULT_CLASS_WEIGHTS)
        self._charges_output = charges_output
        self._rings: Rings[ItemT] = Rings(quantum_tokens)
        self._root: Node[ItemT] = Node("", None, 1.0)
        for name, weight in DEFAULT_CLASS_WEIGHTS.items():
            self._root.children[name] = Node(name, self._root, weight)
            self._root.children[name].resting = deque()
        self._arrivals = 0
        self._waiting: dict[Hashable, tuple[int, int, ItemT]] = {}
        self._blocked: list[Node[ItemT]] = []
        """Queues that rest although they have requests."""

    def push(self, item: ItemT) -> None:
        """Add a request. Raises ValueError for an unknown class and for a claim already queued."""
        of_class = self._root.children.get(item.priority_class)
        node = None if of_class is None else of_class.children.get(item.tenant)
        if node is None or node.routes is not None:
            node = self._leaf(item.tenant, item.group, item.priority_class)
        self._arrivals = arrival = self._arrivals + 1
        entry = (item.deadline_at_ms, arrival, item)
        if self._waiting.setdefault(item.claim, entry) is not entry:
            raise ValueError(f"waits already: {item.claim}")
        self._add(node.sums, item)
        heappush(node.heap.entries, entry)
        if not node.turn:
            self._rings.wake(node)

    def pop(
        self,
        room_tokens: float,
        is_late: Callable[[ItemT], bool],
        is_placed: Callable[[ItemT], bool] | None = None,
    ) -> tuple[ItemT, bool] | None:
        """Remove the next request; returns it and whether it is late: a late one needs no room and is not charged. None
        when empty, or when the next one costs more than ``room_tokens``: no other overtakes it.

        A queue whose first request is not ``is_placed`` rests until ``unblock``, as one without a backlog does: it
        holds up no other queue and earns no credit.
        """
        while True:
            node = self._root
            ring = node.ring
            if not ring:
                return None
            while ring:
                node = ring[0][2]
                ring = node.ring
            heap = node.heap
            item = heap.entries[0][2]
            late = is_late(item)
            if not late:
                if item.cost_tokens > room_tokens:
                    return None
                if is_placed is not None and not is_placed(item):
                    self._rings.rest(node)
                    self._blocked.append(node)
                    continue
            heap.pop()
            if not late:
                self._rings.serve(node, item.cost_tokens if self._charges_output else item.prompt_tokens)
            del self._waiting[item.claim]
            is_leaving = self._subtract(node.sums, item)
            if not heap.entries:
                self._emptied(node, is_leaving=is_leaving)
            return item, late

    def unblock(self) -> None:
        """Let the queues that ``pop`` blocked have their turns again. O(blocked queues)."""
        blocked, self._blocked = self._blocked, []
        for node in blocked:
            if node.heap.entries and not node.turn:
                self._rings.wake(node)

    def take_late(self, is_late: Callable[[ItemT], bool]) -> list[ItemT]:
        """Remove, uncharged, late requests from the head of every queue until no head is late. O(queues)."""
        gone: list[ItemT] = []
        inner = [self._root]
        while inner:
            for _, turn, node in list(inner.pop().ring):
                if turn != node.turn:
                    continue
                if node.ring:
                    inner.append(node)
                    continue
                if late := node.heap.take_late(is_late):
                    self._left(node, late)
                    gone.extend(late)
        return gone

    def remove(self, item: ItemT, *, charge: bool) -> bool:
        """Remove a request out of turn; ``charge``: it is dispatched. False when it is not queued."""
        entry = self._waiting.get(item.claim)
        if entry is None:
            return False
        _, arrival, item = entry
        node = self._leaf(item.tenant, item.group, item.priority_class)
        node.heap.remove(arrival)
        if charge:
            self._rings.charge(node, item.cost_tokens if self._charges_output else item.prompt_tokens)
        self._left(node, [item])
        return True

    def expedite(self, item: ItemT) -> bool:
        """Move a request to the head of its queue, behind those expedited before. False when it is not queued."""
        entry = self._waiting.get(item.claim)
        if entry is None:
            return False
        deadline_at_ms, arrival, item = entry
        if deadline_at_ms != EXPEDITED:
            heap = self._leaf(item.tenant, item.group, item.priority_class).heap
            self._arrivals += 1
            self._waiting[item.claim] = entry = (EXPEDITED, self._arrivals, item)
            heap.push(entry)
            heap.remove(arrival)
        return True

    def charge(self, tenant: str, group: str, priority_class: str, tokens: float) -> None:
        """Charge the cost of work beyond its estimate; negative: a refund. With or without a backlog."""
        of_class = self._root.children.get(priority_class)
        if of_class is None:
            return
        if tokens > 0 or tenant in of_class.children:
            node = self._leaf(tenant, group, priority_class)
            self._rings.charge(node, tokens)
            self._list_resting(node)
        else:
            self._rings.charge(of_class, tokens)

    def debt_tokens(self, tenant: str, priority_class: str) -> float:
        """The tokens that a tenant was served beyond its turns, as far as they are more than one quantum."""
        of_class = self._root.children.get(priority_class)
        node = None if of_class is None else of_class.children.get(tenant)
        if of_class is None or node is None:
            return 0.0
        return max(0.0, node.weight * (node.spent - self._rings.level(of_class) - self._rings.quantum_tokens))

    def set_share(self, tenant: str, share: Share | None) -> None:
        """Set a tenant's weight and groups; None: forget them once it has no backlog."""
        before = self.share(tenant)
        is_kept = self._keep_share(tenant, share)
        after = self.share(tenant)
        if not is_kept or after == before:
            return
        for of_class in self._root.children.values():
            node = of_class.children.get(tenant)
            if node is None:
                continue
            self._rings.reweigh(node, after.weight)
            if after.structure == before.structure:
                weights = {group.group: group.weight for group in after.groups}
                for below in _below(node):
                    self._rings.reweigh(below, weights.get(below.name, 1.0))
            else:
                self._rebuild(node, after)

    def set_class_weights(self, weights: Mapping[str, float]) -> None:
        """Set the weights of the classes. A class that is missing or has weight 0 keeps its weight. Raises ValueError
        for an unknown class and for a weight that is negative or not finite."""
        for name, weight in checked_class_weights(weights, self._root.children).items():
            self._rings.reweigh(self._root.children[name], weight)

    def __len__(self) -> int:
        return len(self._waiting)

    def _leaf(self, tenant: str, group: str, priority_class: str) -> Node[ItemT]:
        """The node whose queue holds such requests; made if missing."""
        of_class = self._root.children.get(priority_class)
        if of_class is None:
            raise ValueError(f"unknown class: {priority_class}")
        node = of_class.children.get(tenant)
        if node is None:
            share = self.share(tenant)
            sums = self._sums(tenant, priority_class)
            node = of_class.children[tenant] = Node(tenant, of_class, share.weight, sums)
            if share.groups:
                _grow(node, share)
        if node.routes is None:
            return node
        return node.routes.get(group) or node.routes[NO_GROUP]

    def _left(self, node: Node[ItemT], items: list[ItemT]) -> None:
        is_leaving = False
        for item in items:
            del self._waiting[item.claim]
            is_leaving = self._subtract(node.sums, item)
        if not node.heap.entries:
            self._emptied(node, is_leaving=is_leaving)

    def _emptied(self, node: Node[ItemT], *, is_leaving: bool) -> None:
        self._rings.rest(node)
        self._list_resting(node)
        if is_leaving:
            self.set_share(node.sums.tenant, None)

    def _list_resting(self, node: Node[ItemT]) -> None:
        """Forget the longest idle tenants without debt: returning is then the same as being new."""
        while (of_class := node.parent) is not None and of_class.resting is None:
            node = of_class
        if of_class is None or of_class.resting is None or node.turn:
            return
        resting = of_class.resting
        if not node.is_listed:
            node.is_listed = True
            resting.append(node)
        # Two for each added one, so the list shrinks as long as debts are paid.
        for _ in range(min(2, len(resting) - RESTING_TENANTS)):
            oldest = resting.popleft()
            oldest.is_listed = False
            if oldest.turn:
                continue
            if oldest.spent <= self._rings.level(of_class):
                del of_class.children[oldest.name]
            else:
                oldest.is_listed = True
                resting.append(oldest)

    def _rebuild(self, node: Node[ItemT], share: Share) -> None:
        """Queue a tenant's requests anew after a change of its groups. ``spent`` of the groups is forgotten, that of
        the tenant is not."""
        waiting = [entry for below in (node, *_below(node)) for entry in below.heap]
        node.heap, node.ring, node.shadows, node.level = type(node.heap)(), [], 0, 0.0
        node.children, node.routes = {}, None
        if share.groups:
            _grow(node, share)
        for entry in waiting:
            at = self._leaf(node.name, entry[2].group, entry[2].priority_class)
            at.heap.push(entry)
            self._rings.wake(at)


def _grow(node: Node[ItemT], share: Share) -> None:
    """Make the nodes of a tenant's groups. A node with children gets one more, unnamed, for its own requests."""
    nodes = {NO_GROUP: node}
    waiting_for_parent = list(share.groups)
    while waiting_for_parent:
        group = waiting_for_parent.pop(0)
        parent = nodes.get(group.parent or NO_GROUP)
        if parent is None:
            waiting_for_parent.append(group)
            continue
        nodes[group.group] = parent.children[group.group] = Node(group.group, parent, group.weight, node.sums)
    node.routes = {}
    for name, inner in nodes.items():
        if inner.children:
            inner.children[NO_GROUP] = Node(NO_GROUP, inner, 1.0, node.sums)
            node.routes[name] = inner.children[NO_GROUP]
        else:
            node.routes[name] = inner


def _below(node: Node[ItemT]) -> list[Node[ItemT]]:
    found = list(node.children.values())
    for child in found:
        found.extend(child.children.values())
    return found
