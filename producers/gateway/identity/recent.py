"""What a store said of late: to be believed for a moment, and a while longer when the store is away. Pure."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from producers.gateway.tenant_map import TenantMap

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class Freshness:
    """For how long, in milliseconds from when the store was asked.

    Attributes:
        fresh_ms: it need not be asked again.
        grace_ms: what it said counts if it cannot be asked.
    """

    fresh_ms: int
    grace_ms: int


class Recent(Generic[ValueT]):
    """At most ``most`` answers. Beyond it the tenant with most of them loses the one that was asked for least recently,
    so that none pushes out another's."""

    def __init__(self, freshness: Freshness, most: int) -> None:
        self._freshness = freshness
        self._known: TenantMap[tuple[ValueT, int]] = TenantMap(most)
        self._tenants: dict[Hashable, str] = {}
        """Whose each name is."""

    def fresh(self, name: Hashable, now_ms: int) -> ValueT | None:
        """What need not be asked again."""
        return self.within(name, now_ms, self._freshness.fresh_ms)

    def in_grace(self, name: Hashable, now_ms: int) -> ValueT | None:
        """What counts if the store cannot be asked."""
        return self.within(name, now_ms, self._freshness.grace_ms)

    def within(self, name: Hashable, now_ms: int, span_ms: int) -> ValueT | None:
        """What the store said no longer ago than this."""
        known = self._get(name)
        if known is None:
            return None
        value, asked_at_ms = known
        return value if now_ms - asked_at_ms < span_ms else None

    def __contains__(self, name: Hashable) -> bool:
        """Whether the store knew it once, however long ago."""
        return name in self._tenants

    def put(self, name: Hashable, value: ValueT, asked_at_ms: int, tenant: str = "") -> None:
        """The store says so of what is this tenant's; it was asked then."""
        self.forget(name)
        self._tenants[name] = tenant
        evicted = self._known.put(tenant, name, (value, asked_at_ms))
        if evicted is not None:
            del self._tenants[evicted]

    def forget(self, name: Hashable) -> None:
        """The store knows no such thing."""
        if (tenant := self._tenants.pop(name, None)) is not None:
            self._known.pop(tenant, name)

    def __len__(self) -> int:
        return len(self._known)

    def _get(self, name: Hashable) -> tuple[ValueT, int] | None:
        tenant = self._tenants.get(name)
        return None if tenant is None else self._known.get(tenant, name)
