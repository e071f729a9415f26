"""Fair shares by tokens over classes, tenants and groups: deficit round robin and virtual token counters. Pure.

The mechanism and its bound are derived in fair_queue.py.
"""

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from heapq import heappush
from typing import TypeVar

from stream_processors.dispatcher.scheduling.backlog_statistics import BacklogStatistics, Waiting, checked_class_weights
from stream_processors.dispatcher.scheduling.deadline_heap import EXPEDITED
from stream_processors.dispatcher.scheduling.share_node import Node, Rings
from stream_processors.dispatcher.scheduling.shares import DEFAULT_CLASS_WEIGHTS, NO_GROUP, Share

ItemT = TypeVar("ItemT", bound=Waiting)

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

    def pop(self, room_tokens: float, is_late: Callable[[ItemT], bool]) -> tuple[ItemT, bool] | None:
        """Remove the next request; returns it and whether it is late: a late one needs no room and is not charged. None
        when empty, or when the next one costs more than ``room_tokens``: no other overtakes it."""
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
        if not late and item.cost_tokens > room_tokens:
            return None
        heap.pop()
        if not late:
            self._rings.serve(node, item.cost_tokens if self._charges_output else item.prompt_tokens)
        del self._waiting[item.claim]
        is_leaving = self._subtract(node.sums, item)
        if not heap.entries:
            self._emptied(node, is_leaving=is_leaving)
        return item, late

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
        """Account for ``items`` removed from the queue of ``node``."""
        is_leaving = False
        for item in items:
            del self._waiting[item.claim]
            is_leaving = self._subtract(node.sums, item)
        if not node.heap.entries:
            self._emptied(node, is_leaving=is_leaving)

    def _emptied(self, node: Node[ItemT], *, is_leaving: bool) -> None:
        """Handle the end of the backlog of ``node``."""
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
