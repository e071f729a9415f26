"""Concurrency limits over all tenants and per tenant: calls, transfers, bytes. Pure."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from producers.openai_api.gateway_error import GatewayError


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
