"""Bounded cache of store answers with the time at which the store was asked. Pure."""

from collections.abc import Hashable
from typing import Generic, TypeVar

from producers.gateway.tenant_bounds import TenantMap

ValueT = TypeVar("ValueT")


class Recent(Generic[ValueT]):
    """At most ``most`` answers. Beyond it, the tenant with the most answers loses the one asked for least recently, so
    that a tenant with few loses none."""

    def __init__(self, most: int) -> None:
        self._known: TenantMap[tuple[ValueT, int]] = TenantMap(most)
        self._tenants: dict[Hashable, str] = {}
        """Tenant of each name."""

    def within(self, name: Hashable, now_ms: int, span_ms: int) -> ValueT | None:
        """The answer, if the store was asked less than ``span_ms`` ago."""
        tenant = self._tenants.get(name)
        known = None if tenant is None else self._known.get(tenant, name)
        return known[0] if known is not None and now_ms - known[1] < span_ms else None

    def __contains__(self, name: Hashable) -> bool:
        """Whether an answer is cached, however old."""
        return name in self._tenants

    def put(self, name: Hashable, value: ValueT, asked_at_ms: int, tenant: str = "") -> None:
        """Cache an answer of this tenant; the store was asked at ``asked_at_ms``."""
        self.forget(name)
        self._tenants[name] = tenant
        evicted = self._known.put(tenant, name, (value, asked_at_ms))
        if evicted is not None:
            del self._tenants[evicted]

    def forget(self, name: Hashable) -> None:
        """Drop the answer: the store does not know the name."""
        if (tenant := self._tenants.pop(name, None)) is not None:
            self._known.pop(tenant, name)

    def __len__(self) -> int:
        return len(self._known)
