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
    """

    def __init__(self, most: int, most_of_tenant: int, full: Callable[[], GatewayError]) -> None:
        self._most = most
        self._most_of_tenant = most_of_tenant
        self._full = full
        self._taken: Counter[str] = Counter()
        self._total = 0

    @property
    def total(self) -> int:
        """Those that are taken."""
        return self._total

    def check(self, tenant: str) -> None:
        """Raises GatewayError: there is none left for this tenant."""
        if self._total >= self._most or self._taken[tenant] >= self._most_of_tenant:
            raise self._full()

    @contextmanager
    def taken(self, tenant: str) -> Iterator[None]:
        """One is taken for the while of this block. Raises GatewayError as ``check``."""
        self.check(tenant)
        self._taken[tenant] += 1
        self._total += 1
        try:
            yield
        finally:
            self._total -= 1
            self._taken[tenant] -= 1
            if not self._taken[tenant]:
                del self._taken[tenant]
