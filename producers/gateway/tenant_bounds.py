"""Bounds over all tenants and per tenant: a map that evicts from the largest, and concurrency slots. Pure."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from producers.openai_api.errors import GatewayError

ValueT = TypeVar("ValueT")


class TenantMap(Generic[ValueT]):
    """At most ``most`` values by tenant and name. Beyond it, the tenant with the most values loses its oldest. Every
    operation is O(1), however many tenants there are."""

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


class TenantSlots:
    """A limit over all tenants, and one per tenant.

    Args:
        most: slots of all tenants.
        most_of_tenant: slots of each tenant.
        full: makes the error when the overall limit is reached.
        tenant_full: makes the error when the tenant's limit is reached; None: ``full``.
        has_reserve: a tenant may hold no more slots than are free at the time: only several tenants together come near
            the overall limit, and the last slots go to tenants that hold none (Choudhury and Hahne 1998, dynamic
            thresholds with alpha 1).
    """

    def __init__(
        self,
        most: int,
        most_of_tenant: int,
        full: Callable[[], GatewayError],
        tenant_full: Callable[[], GatewayError] | None = None,
        *,
        has_reserve: bool = False,
    ) -> None:
        self._most = most
        self._most_of_tenant = most_of_tenant
        self._full = full
        self._tenant_full = tenant_full or full
        self._has_reserve = has_reserve
        self._taken: Counter[str] = Counter()
        self._total = 0

    @property
    def total(self) -> int:
        """Slots taken by all tenants."""
        return self._total

    def check(self, tenant: str, count: int = 1) -> None:
        """Raises GatewayError if fewer than ``count`` slots are left for this tenant."""
        taken, free = self._taken[tenant], self._most - self._total
        if taken + count > self._most_of_tenant:
            raise self._tenant_full()
        if count > free or (self._has_reserve and taken and taken + count > free):
            raise self._full()

    def take(self, tenant: str, count: int = 1) -> None:
        """Take slots, to be released by ``give_back``. Raises GatewayError as ``check``; nothing was taken then."""
        self.check(tenant, count)
        self._taken[tenant] += count
        self._total += count

    def give_back(self, tenant: str, count: int = 1) -> None:
        """Release slots that were taken."""
        self._total -= count
        self._taken[tenant] -= count
        if not self._taken[tenant]:
            del self._taken[tenant]

    @contextmanager
    def taken(self, tenant: str) -> Iterator[None]:
        """Hold one slot for the duration of the block. Raises GatewayError as ``check``."""
        self.take(tenant)
        try:
            yield
        finally:
            self.give_back(tenant)
