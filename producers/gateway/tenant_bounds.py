"""Bounds over all tenants and per tenant: a map that evicts from the largest, and concurrency slots. Pure."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from producers.openai_api.errors import GatewayError

ValueT = TypeVar("ValueT")


class TenantMap(Generic[ValueT]):
    """At most ``most`` values by name, each of one tenant; a name is of one tenant only. Beyond ``most``, the tenant
    with the most values loses its oldest. Every operation is O(1), however many tenants there are."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: dict[Hashable, tuple[str, ValueT]] = {}
        self._names: dict[str, OrderedDict[Hashable, None]] = {}
        """Names by tenant, oldest first."""
        self._of_size: dict[int, OrderedDict[str, None]] = {}
        """Tenants by number of values."""
        self._largest = 0

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._values)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._values

    def get(self, name: Hashable) -> ValueT | None:
        """The value, or None."""
        found = self._values.get(name)
        return None if found is None else found[1]

    def put(self, tenant: str, name: Hashable, value: ValueT) -> ValueT | None:
        """Store the value as the newest of its tenant. Returns the evicted value, if any."""
        self.pop(name)
        self._values[name] = tenant, value
        names = self._names.setdefault(tenant, OrderedDict())
        names[name] = None
        self._resized(tenant, len(names) - 1, len(names))
        if len(self._values) <= self._most:
            return None
        largest = next(reversed(self._of_size[self._largest]))
        return self.pop(next(iter(self._names[largest])))

    def pop(self, name: Hashable) -> ValueT | None:
        """Remove and return the value; None if there is none."""
        found = self._values.pop(name, None)
        if found is None:
            return None
        tenant, value = found
        names = self._names[tenant]
        del names[name]
        self._resized(tenant, len(names) + 1, len(names))
        if not names:
            del self._names[tenant]
        return value

    def _resized(self, tenant: str, before: int, after: int) -> None:
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
