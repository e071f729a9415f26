"""In-memory cache of recently used entries, fair between tenants. Pure: the time is an argument."""

from typing import Generic, NamedTuple, TypeVar

from cachetools import LRUCache, TLRUCache

from fairlane_server.caching.entries import CacheKey

ValueT = TypeVar("ValueT")


class _Entry(NamedTuple, Generic[ValueT]):
    value: ValueT
    size_bytes: int
    ends_at_ms: int


class HotCache(Generic[ValueT]):
    """Least recently used entries are evicted first: those of the same tenant beyond its share, those of the tenant
    that holds most when the cache is full. So a flood evicts its own entries.

    Args:
        most_bytes: of all entries together, by the sizes given to ``put``.
        most_tenant_share: the fraction of it that one tenant may hold, above 0 and at most 1.
        most_tenants: beyond it the least recently active tenant is evicted.
    """

    def __init__(self, most_bytes: int = 33_554_432, most_tenant_share: float = 0.5, most_tenants: int = 1_024) -> None:
        self._most_bytes = most_bytes
        self._most_tenant_bytes = int(most_bytes * most_tenant_share)
        self._now_ms = 0
        self._tenants: LRUCache[str, TLRUCache[bytes, _Entry[ValueT]]] = LRUCache(most_tenants)

    @property
    def size_bytes(self) -> int:
        """Bytes of the entries that had not expired at the last call."""
        return sum(int(entries.currsize) for entries in self._tenants.values())

    def get(self, key: CacheKey, now_ms: int) -> ValueT | None:
        """The value, or None if it is missing or expired."""
        entries, self._now_ms = self._tenants.get(key.tenant), now_ms
        entry = None if entries is None else entries.get(key.digest)
        return None if entry is None else entry.value

    def put(self, key: CacheKey, value: ValueT, size_bytes: int, ends_at_ms: int, now_ms: int) -> None:
        """Store the value, unless it is larger than the tenant's share. The key's old value is removed either way."""
        entries, self._now_ms = self._tenants.get(key.tenant), now_ms
        if entries is None:
            entries = self._tenants[key.tenant] = TLRUCache(
                self._most_tenant_bytes,
                ttu=lambda _digest, entry, _now_ms: entry.ends_at_ms,
                timer=lambda: self._now_ms,
                getsizeof=lambda entry: entry.size_bytes,
            )
        entries.pop(key.digest, None)
        if size_bytes <= entries.maxsize:
            entries[key.digest] = _Entry(value, size_bytes, ends_at_ms)
        while self.size_bytes > self._most_bytes:
            max(self._tenants.values(), key=lambda one: one.currsize).popitem()
