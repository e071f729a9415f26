"""How much is under way, of all tenants and of each. Pure."""

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
    """

    def __init__(
        self,
        most: int,
        most_of_tenant: int,
        full: Callable[[], GatewayError],
        tenant_full: Callable[[], GatewayError] | None = None,
    ) -> None:
        self._most = most
        self._most_of_tenant = most_of_tenant
        self._full = full
        self._tenant_full = tenant_full or full
        self._taken: Counter[str] = Counter()
        self._total = 0

    @property
    def total(self) -> int:
        """Those that are taken."""
        return self._total

    def check(self, tenant: str) -> None:
        """Raises GatewayError: there is none left for this tenant."""
        if self._taken[tenant] >= self._most_of_tenant:
            raise self._tenant_full()
        if self._total >= self._most:
            raise self._full()

    def take(self, tenant: str) -> None:
        """Take one, to be given back. Raises GatewayError as ``check``."""
        self.check(tenant)
        self._taken[tenant] += 1
        self._total += 1

    def give_back(self, tenant: str) -> None:
        """One that was taken is free again."""
        self._total -= 1
        self._taken[tenant] -= 1
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
