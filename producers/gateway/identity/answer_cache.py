"""Bounded cache of store answers: fresh for a moment, usable longer while the store is unavailable. Pure."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from producers.gateway.tenant_bounds import TenantMap

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class Freshness:
    """Validity of an answer in milliseconds since the store was asked.

    Attributes:
        fresh_ms: without asking again.
        grace_ms: if the store cannot be asked.
    """

    fresh_ms: int
    grace_ms: int


class Recent(Generic[ValueT]):
    """At most ``most`` answers. Beyond it, the tenant with the most answers loses the one asked for least recently, so
    that a tenant with few loses none."""

    def __init__(self, freshness: Freshness, most: int) -> None:
        self._freshness = freshness
        self._known: TenantMap[tuple[ValueT, int]] = TenantMap(most)
        self._tenants: dict[Hashable, str] = {}
        """Tenant of each name."""

    def fresh(self, name: Hashable, now_ms: int) -> ValueT | None:
        """The answer, if it need not be asked for again."""
        return self.within(name, now_ms, self._freshness.fresh_ms)

    def in_grace(self, name: Hashable, now_ms: int) -> ValueT | None:
        """The answer, if it counts while the store cannot be asked."""
        return self.within(name, now_ms, self._freshness.grace_ms)

    def within(self, name: Hashable, now_ms: int, span_ms: int) -> ValueT | None:
        """The answer, if the store was asked less than ``span_ms`` ago."""
        known = self._get(name)
        if known is None:
            return None
        value, asked_at_ms = known
        return value if now_ms - asked_at_ms < span_ms else None

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

    def _get(self, name: Hashable) -> tuple[ValueT, int] | None:
        tenant = self._tenants.get(name)
        return None if tenant is None else self._known.get(tenant, name)
