"""Detects a share of dead letters so high that the engine or the topic must be the cause. Pure.

Every tenant has a window of its own and counts the same, however much it sends; the tenant with the largest share does
not count at all. So no single tenant can end a consumer. Limitation: with a single active tenant, a broken engine does
not end the consumer; its health reports and the alarm on dead letters show it. Unreadable records belong to no tenant
and are counted apart.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field

_WINDOW_ITEMS = 200
"""The latest items of all, for what cannot be read."""

_TENANT_ITEMS = 20
"""The latest items of one tenant."""

LEAST_ITEMS = 10
"""Fewer say nothing."""

MAX_AGE_MS = 600_000
"""Tenants without items for this long are forgotten."""

MAX_TENANTS = 1_000
"""Beyond it the tenant with the oldest latest item is forgotten."""


@dataclass(slots=True)
class _Latest:
    """A tenant's latest items; ``heard_at_ms`` is the time of the last."""

    dead: deque[bool]
    heard_at_ms: int = 0

    @property
    def share(self) -> float:
        return sum(self.dead) / len(self.dead)


@dataclass(slots=True)
class DeadLetterShare:
    """Share of dead letters in recent work; above ``max_share`` the engine or the topic is at fault. Not
    thread-safe."""

    max_share: float
    _tenants: OrderedDict[str, _Latest] = field(default_factory=OrderedDict)
    _unreadable: deque[bool] = field(default_factory=lambda: deque(maxlen=_WINDOW_ITEMS))

    def settled(self, tenant: str | None, *, dead: bool, now_ms: int) -> None:
        """Another item is settled; None for the tenant of what cannot be read."""
        self._unreadable.append(tenant is None and dead)
        if tenant is None:
            return
        latest = self._tenants.get(tenant)
        if latest is None:
            latest = self._tenants[tenant] = _Latest(deque(maxlen=_TENANT_ITEMS))
        latest.dead.append(dead)
        latest.heard_at_ms = now_ms
        self._tenants.move_to_end(tenant)
        oldest = next(iter(self._tenants.values()))
        while len(self._tenants) > MAX_TENANTS or oldest.heard_at_ms < now_ms - MAX_AGE_MS:
            self._tenants.popitem(last=False)
            oldest = next(iter(self._tenants.values()))

    def exceeded(self) -> str | None:
        """The error message when the share is too high; None otherwise."""
        unreadable = sum(self._unreadable)
        if len(self._unreadable) >= LEAST_ITEMS and unreadable > self.max_share * len(self._unreadable):
            return f"{unreadable} of the latest {len(self._unreadable)} items could not be read"
        counted = sorted(self._tenants.values(), key=lambda latest: (latest.share, len(latest.dead)))[:-1]
        items = sum(len(latest.dead) for latest in counted)
        if items < LEAST_ITEMS or sum(latest.share for latest in counted) <= self.max_share * len(counted):
            return None
        dead = sum(sum(latest.dead) for latest in counted)
        return f"{dead} of the latest {items} items of all tenants but the worst went to the dead letters"
