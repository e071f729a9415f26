"""First-in-first-out queue over all tenants: the baseline of the other policies. Pure."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

from stream_processors.dispatcher.scheduling.backlog_statistics import BacklogStatistics, Waiting, checked_class_weights
from stream_processors.dispatcher.scheduling.shares import DEFAULT_CLASS_WEIGHTS, Share

ItemT = TypeVar("ItemT", bound=Waiting)


class ArrivalOrder(BacklogStatistics[ItemT]):
    """One queue for all classes, tenants and groups; weights, costs and deadlines do not matter."""

    def __init__(self) -> None:
        super().__init__(DEFAULT_CLASS_WEIGHTS)
        self._waiting: OrderedDict[Hashable, ItemT] = OrderedDict()

    def push(self, item: ItemT) -> None:
        """Add a request. Raises ValueError for an unknown class and for a claim already queued."""
        sums = self._sums(item.tenant, item.priority_class)
        if self._waiting.setdefault(item.claim, item) is not item:
            raise ValueError(f"waits already: {item.claim}")
        self._add(sums, item)

    def pop(self, room_tokens: float, is_late: Callable[[ItemT], bool]) -> tuple[ItemT, bool] | None:
        """Remove the first request; returns it and whether it is late. None when empty or when it exceeds the room."""
        if not self._waiting:
            return None
        item = next(iter(self._waiting.values()))
        late = is_late(item)
        if not late and item.cost_tokens > room_tokens:
            return None
        self.remove(item, charge=not late)
        return item, late

    def take_late(self, is_late: Callable[[ItemT], bool]) -> list[ItemT]:
        """Remove the late requests. O(n)."""
        gone = [item for item in self._waiting.values() if is_late(item)]
        for item in gone:
            self.remove(item, charge=False)
        return gone

    def remove(self, item: ItemT, *, charge: bool) -> bool:  # noqa: ARG002 - nothing is charged here
        """Remove a request out of turn. False when it is not queued."""
        found = self._waiting.pop(item.claim, None)
        if found is None:
            return False
        if self._subtract(self._sums(found.tenant, found.priority_class), found):
            self.set_share(found.tenant, None)
        return True

    def expedite(self, item: ItemT) -> bool:  # noqa: ARG002 - no request is
        """Does nothing and returns False: in a queue shared by all tenants it would overtake other tenants."""
        return False

    def charge(self, tenant: str, group: str, priority_class: str, tokens: float) -> None:
        """Does nothing: this policy charges nobody."""

    def set_share(self, tenant: str, share: Share | None) -> None:
        """Set the weight, which counts only in ``backlogged_weight``; None: forget it once nothing is queued."""
        self._keep_share(tenant, share)

    def set_class_weights(self, weights: Mapping[str, float]) -> None:
        """Checks the weights, which change nothing. Raises ValueError as the other policies do."""
        checked_class_weights(weights, DEFAULT_CLASS_WEIGHTS)

    def __len__(self) -> int:
        return len(self._waiting)
