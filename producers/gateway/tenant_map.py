"""Bounded map by tenant and name that evicts from the tenant with the most values. Pure."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

ValueT = TypeVar("ValueT")


class TenantMap(Generic[ValueT]):
    """Values by tenant and name. Beyond the bound, the tenant with the most values loses its oldest. Every operation is
    O(1), however many tenants there are.

    Args:
        most: bound over all tenants.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._of_tenant: dict[str, OrderedDict[Hashable, ValueT]] = {}
        self._of_size: dict[int, OrderedDict[str, None]] = {}
        """Tenants by number of values."""
        self._largest = 0
        self._total = 0

    def __len__(self) -> int:
        return self._total

    def get(self, tenant: str, name: Hashable) -> ValueT | None:
        """The value, or None."""
        values = self._of_tenant.get(tenant)
        return None if values is None else values.get(name)

    def put(self, tenant: str, name: Hashable, value: ValueT) -> Hashable | None:
        """Store the value as the newest of its tenant. Returns the name of the evicted value, if any."""
        self.pop(tenant, name)
        values = self._of_tenant.setdefault(tenant, OrderedDict())
        values[name] = value
        self._resized(tenant, len(values) - 1, len(values))
        if self._total > self._most:
            largest = next(reversed(self._of_size[self._largest]))
            lost = next(iter(self._of_tenant[largest]))
            self.pop(largest, lost)
            return lost
        return None

    def pop(self, tenant: str, name: Hashable) -> ValueT | None:
        """Remove and return the value; None if there is none."""
        values = self._of_tenant.get(tenant)
        if values is None or name not in values:
            return None
        value = values.pop(name)
        self._resized(tenant, len(values) + 1, len(values))
        if not values:
            del self._of_tenant[tenant]
        return value

    def _resized(self, tenant: str, before: int, after: int) -> None:
        self._total += after - before
        if before:
            del self._of_size[before][tenant]
            if not self._of_size[before]:
                del self._of_size[before]
        if after:
            self._of_size.setdefault(after, OrderedDict())[tenant] = None
        # A size changes by one: if no tenant has the largest any more, one has the next smaller.
        self._largest = max(self._largest, after)
        if self._largest not in self._of_size:
            self._largest -= 1
