"""In-memory cache of popular entries, fair between tenants (TinyLFU). Pure: the time is an argument."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from fairlane_server.caching.keys import CacheKey
from stream_processors.dispatcher.response_cache.frequency_sketch import FrequencySketch

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class HotPolicy:
    """Bounds of a hot cache.

    Attributes:
        most_bytes: of all entries together, by the sizes given to ``put``.
        most_tenant_share: the fraction of it that one tenant may hold, above 0 and at most 1.
        most_tenants: beyond it the least recently active tenant is evicted.
        sketch_width: counters per row of each tenant's four-row sketch; a power of two.
        least_asked: least access count of an entry before it may evict another tenant's.
    """

    most_bytes: int = 33_554_432
    most_tenant_share: float = 0.5
    most_tenants: int = 1_024
    sketch_width: int = 1_024
    least_asked: int = 2


@dataclass(frozen=True, slots=True)
class _Item(Generic[ValueT]):
    value: ValueT
    size_bytes: int
    ends_at_ms: int


@dataclass(slots=True)
class _Shelf(Generic[ValueT]):
    """One tenant's entries, least recently used first."""

    popularity: FrequencySketch
    items: OrderedDict[bytes, _Item[ValueT]] = field(default_factory=OrderedDict)
    size_bytes: int = 0

    def drop(self, digest: bytes) -> None:
        self.size_bytes -= self.items.pop(digest).size_bytes


class HotCache(Generic[ValueT]):
    """Bounded cache with admission by popularity: a new entry evicts others of its tenant only if it is accessed more
    often than they are together (TinyLFU, see ``FrequencySketch``; sizes count as in Einziger, Eytan, Friedman and
    Manes, "Lightweight Robust Size Aware Cache Management", 2021).

    Popularity is compared within a tenant only. When the cache is full, a tenant may evict entries of the tenant that
    holds most, but never so that it then holds more than that tenant does: more requests do not gain a larger share. An
    entry accessed fewer than ``least_asked`` times evicts nothing of other tenants.
    """

    def __init__(self, policy: HotPolicy) -> None:
        self._policy = policy
        self._most_tenant_bytes = int(policy.most_bytes * policy.most_tenant_share)
        self._shelves: OrderedDict[str, _Shelf[ValueT]] = OrderedDict()
        """By tenant, least recently active first."""
        self._size_bytes = 0

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def tenant_bytes(self, tenant: str) -> int:
        """Bytes held by one tenant."""
        shelf = self._shelves.get(tenant)
        return 0 if shelf is None else shelf.size_bytes

    def get(self, key: CacheKey, now_ms: int) -> ValueT | None:
        """Count an access. The value, or None if it is missing or expired."""
        shelf = self._shelf(key.tenant)
        shelf.popularity.count(key.digest)
        item = shelf.items.get(key.digest)
        if item is None:
            return None
        if now_ms >= item.ends_at_ms:
            self._drop(shelf, key.digest)
            return None
        shelf.items.move_to_end(key.digest)
        return item.value

    def put(self, key: CacheKey, value: ValueT, size_bytes: int, ends_at_ms: int) -> bool:
        """Store the value if it is popular enough; returns whether it was stored. The key's old value is removed either
        way."""
        shelf = self._shelf(key.tenant)
        if key.digest in shelf.items:
            self._drop(shelf, key.digest)
        if size_bytes < 0 or size_bytes > self._most_tenant_bytes:
            return False
        victims = self._victims(key, shelf, size_bytes)
        if victims is None:
            return False
        for other, digest in victims:
            self._drop(other, digest)
        shelf.items[key.digest] = _Item(value, size_bytes, ends_at_ms)
        shelf.size_bytes += size_bytes
        self._size_bytes += size_bytes
        return True

    def _victims(
        self, key: CacheKey, shelf: _Shelf[ValueT], size_bytes: int
    ) -> list[tuple[_Shelf[ValueT], bytes]] | None:
        """The entries to evict for the new one; None if it is not popular enough to evict them."""
        asked = shelf.popularity.estimate(key.digest)
        beyond_share = shelf.size_bytes + size_bytes - self._most_tenant_bytes
        own, freed, lost = [], 0, 0
        for digest, item in shelf.items.items():
            if freed >= beyond_share:
                break
            own.append((shelf, digest))
            freed += item.size_bytes
            lost += shelf.popularity.estimate(digest)
        missing = self._size_bytes + size_bytes - freed - self._policy.most_bytes
        others: list[tuple[_Shelf[ValueT], bytes]] = []
        if missing > 0:
            holds_then = shelf.size_bytes + size_bytes - freed
            richest = max(self._shelves.values(), key=lambda one: one.size_bytes)
            if richest is not shelf and richest.size_bytes - missing >= holds_then:
                if asked < self._policy.least_asked:
                    return None
                others = _oldest(richest, missing)
            else:
                for digest in list(shelf.items)[len(own) :]:
                    if missing <= 0:
                        break
                    own.append((shelf, digest))
                    missing -= shelf.items[digest].size_bytes
                    lost += shelf.popularity.estimate(digest)
                if missing > 0:
                    return None
        if own and asked <= lost:
            return None
        return own + others

    def _shelf(self, tenant: str) -> _Shelf[ValueT]:
        shelf = self._shelves.get(tenant)
        if shelf is None:
            shelf = self._shelves[tenant] = _Shelf(FrequencySketch(self._policy.sketch_width))
            if len(self._shelves) > self._policy.most_tenants:
                _, gone = self._shelves.popitem(last=False)
                self._size_bytes -= gone.size_bytes
        self._shelves.move_to_end(tenant)
        return shelf

    def _drop(self, shelf: _Shelf[ValueT], digest: bytes) -> None:
        before = shelf.size_bytes
        shelf.drop(digest)
        self._size_bytes -= before - shelf.size_bytes


def _oldest(shelf: _Shelf[ValueT], missing_bytes: int) -> list[tuple[_Shelf[ValueT], bytes]]:
    """The least recently used entries that together free ``missing_bytes``."""
    found = []
    for digest, item in shelf.items.items():
        if missing_bytes <= 0:
            break
        found.append((shelf, digest))
        missing_bytes -= item.size_bytes
    return found
