"""Outcomes of each tenant's requests in each pool, for the heartbeat and `fairlane top`. Pure."""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import nlargest

WAITS_LAST_MS = 60_000
"""How long a wait counts."""

QUIET_AFTER_MS = 60_000
"""A tenant without outcomes for this long is forgotten, unless it has a backlog or work in flight."""

_MAX_ENTRIES = 20_000
_WAITS_KEPT = 256
_AGED_AT_ONCE = 500
"""Bounds one call when all tenants become quiet at once; the others follow a second later."""


@dataclass(slots=True)
class TenantCounts:
    """Counts of one tenant in one pool, since it was last quiet."""

    served_tokens: int = 0
    shed: Counter[str] = field(default_factory=Counter)
    last_at_ms: int = 0
    waits: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_WAITS_KEPT))
    """Time and duration of each wait, in milliseconds."""

    def wait_p99_ms(self, now_ms: int) -> float:
        """The 99th percentile of the waits of the last minute, at most 256; 0 without any."""
        waits = self.waits
        while waits and waits[0][0] <= now_ms - WAITS_LAST_MS:
            waits.popleft()
        if not waits:
            return 0.0
        # Nearest rank.
        at_least = len(waits) - -(-99 * len(waits) // 100) + 1
        return float(nlargest(at_least, (wait_ms for _, wait_ms in waits))[-1])


class TenantStats:
    """Counts of recently active tenants; ``age`` forgets the others. At most 20,000 pairs of tenant and pool; beyond it
    the least recently used one is dropped."""

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[str, str], TenantCounts] = OrderedDict()
        self._served: Counter[str] = Counter()

    def served(self, tenant: str, pool: str, tokens: int, now_ms: int) -> None:
        """Count the cost of work that is done."""
        self._touch(tenant, pool, now_ms).served_tokens += tokens
        self._served[pool] += tokens

    def shed(self, tenant: str, pool: str, code: str, now_ms: int) -> None:
        self._touch(tenant, pool, now_ms).shed[code] += 1

    def dispatched(self, tenant: str, pool: str, waited_ms: int, now_ms: int) -> None:
        self._touch(tenant, pool, now_ms).waits.append((now_ms, waited_ms))

    def age(self, now_ms: int, is_busy: Callable[[str, str], bool]) -> None:
        """Forget tenants that are quiet; ``is_busy``: whether a tenant has a backlog or work in flight in a pool.
        Checks at most 500 entries: call it once a second."""
        for _ in range(min(_AGED_AT_ONCE, len(self._entries))):
            (tenant, pool), counts = next(iter(self._entries.items()))
            if counts.last_at_ms > now_ms - QUIET_AFTER_MS:
                return
            if is_busy(tenant, pool):
                self._touch(tenant, pool, now_ms)
            else:
                del self._entries[tenant, pool]

    def items(self) -> Iterator[tuple[str, str, TenantCounts]]:
        """Tenant, pool and counts; most recently used first."""
        for (tenant, pool), counts in reversed(self._entries.items()):
            yield tenant, pool, counts

    def of(self, tenant: str, pool: str) -> TenantCounts:
        """The counts; zeros for an unknown pair."""
        return self._entries.get((tenant, pool)) or TenantCounts()

    def served_in(self, pool: str) -> int:
        """Cost tokens served in this pool since the start, of all tenants."""
        return self._served[pool]

    def _touch(self, tenant: str, pool: str, now_ms: int) -> TenantCounts:
        key = (tenant, pool)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = TenantCounts()
            if len(self._entries) > _MAX_ENTRIES:
                self._entries.popitem(last=False)
        else:
            self._entries.move_to_end(key)
        entry.last_at_ms = now_ms
        return entry
