"""First-in-first-out queue over all tenants: the baseline of the other policies. Pure."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

from stream_processors.dispatcher.scheduling.backlog_statistics import BacklogStatistics, Waiting, checked_class_weights
from stream_processors.dispatcher.scheduling.shares import DEFAULT_CLASS_WEIGHTS, Share

ItemT = TypeVar("ItemT", bound=Waiting)


class ArrivalOrder(BacklogStatistics[ItemT]):
    """One line for all classes, tenants and groups, whatever their weights, costs and deadlines."""

    def __init__(self) -> None:
        super().__init__(DEFAULT_CLASS_WEIGHTS)
        self._waiting: OrderedDict[Hashable, ItemT] = OrderedDict()

    def push(self, item: ItemT) -> None:
        """Let it wait. Raises ValueError for a class that is not known and for a claim that waits already."""
        sums = self._sums(item.tenant, item.priority_class)
        if self._waiting.setdefault(item.claim, item) is not item:
            raise ValueError(f"waits already: {item.claim}")
        self._add(sums, item)

    def pop(self, room_tokens: float, is_late: Callable[[ItemT], bool]) -> tuple[ItemT, bool] | None:
        """The one that came first, and whether it is late. None when nothing waits or it costs more than the room."""
        if not self._waiting:
            return None
        item = next(iter(self._waiting.values()))
        late = is_late(item)
        if not late and item.cost_tokens > room_tokens:
            return None
        self.remove(item, charge=not late)
        return item, late

    def take_late(self, is_late: Callable[[ItemT], bool]) -> list[ItemT]:
        """Remove whatever is late. O(n)."""
        gone = [item for item in self._waiting.values() if is_late(item)]
        for item in gone:
            self.remove(item, charge=False)
        return gone

    def remove(self, item: ItemT, *, charge: bool) -> bool:  # noqa: ARG002 - nothing is charged here
        """Take it out of turn. False when it does not wait."""
        found = self._waiting.pop(item.claim, None)
        if found is None:
            return False
        if self._subtract(self._sums(found.tenant, found.priority_class), found):
            self.set_share(found.tenant, None)
        return True

    def expedite(self, item: ItemT) -> bool:  # noqa: ARG002 - nobody is
        """False, and nothing is done: there is one line for all, and its head would overtake other tenants. What came
        first goes first here anyway."""
        return False

    def charge(self, tenant: str, group: str, priority_class: str, tokens: float) -> None:
        """Nobody is charged here."""

    def set_share(self, tenant: str, share: Share | None) -> None:
        """The weight counts in ``backlogged_weight`` and nowhere else; None: forget it as soon as nothing waits."""
        self._keep_share(tenant, share)

    def set_class_weights(self, weights: Mapping[str, float]) -> None:
        """They change nothing here. Raises ValueError as the other policies do."""
        checked_class_weights(weights, DEFAULT_CLASS_WEIGHTS)

    def __len__(self) -> int:
        return len(self._waiting)
