"""How much is under way, of all tenants and of each: calls, transfers, bytes. Pure."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from producers.gateway.errors import GatewayError


class TenantSlots:
    """A bound of all, and one of each tenant.

    Args:
        most: of all tenants.
        most_of_tenant: of each of them.
        full: what is raised where there is none left.
        tenant_full: what is raised where the tenant has as many as it may; None: the same.
        has_reserve: a tenant may have no more than are free at the time, so that it takes several tenants to come near
            the bound of all, and the last slots go to tenants that have none (Choudhury and Hahne 1998, dynamic
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
        """Those that are taken."""
        return self._total

    def check(self, tenant: str, count: int = 1) -> None:
        """Raises GatewayError: there are not so many left for this tenant."""
        taken, free = self._taken[tenant], self._most - self._total
        if taken + count > self._most_of_tenant:
            raise self._tenant_full()
        if count > free or (self._has_reserve and taken and taken + count > free):
            raise self._full()

    def take(self, tenant: str, count: int = 1) -> None:
        """Take so many, to be given back. Raises GatewayError as ``check``; then nothing was taken."""
        self.check(tenant, count)
        self._taken[tenant] += count
        self._total += count

    def give_back(self, tenant: str, count: int = 1) -> None:
        """So many that were taken are free again."""
        self._total -= count
        self._taken[tenant] -= count
        if not self._taken[tenant]:
            del self._taken[tenant]

    @contextmanager
    def taken(self, tenant: str) -> Iterator[None]:
        """One is taken for the while of this block. Raises GatewayError as ``check``."""
        self.take(tenant)
        try:
            yield
        finally:
            self.give_back(tenant)
