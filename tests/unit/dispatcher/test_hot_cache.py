"""The cache in memory: its bounds, and whose entries go."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fairlane_server.caching.entries import CacheKey, CacheName, cache_key
from stream_processors.dispatcher.response_cache.hot_cache import HotCache

LATER = 1_000


def key(tenant: str, number: int) -> CacheKey:
    return cache_key(CacheName.RETRIEVAL, tenant, number)


def hold(cache: HotCache[str], tenant: str, size_bytes: int, count: int) -> list[CacheKey]:
    keys = [key(tenant, number) for number in range(count)]
    for one in keys:
        cache.put(one, tenant, size_bytes, LATER, 0)
    return keys


def tenant_bytes(cache: HotCache[Any], tenant: str) -> int:
    return int(cache._tenants[tenant].currsize) if tenant in cache._tenants else 0


def held(cache: HotCache[str], keys: list[CacheKey]) -> list[CacheKey]:
    return [one for one in keys if cache.get(one, 0) is not None]


def test_what_was_put_is_there_until_its_time_is_over() -> None:
    cache: HotCache[str] = HotCache(most_bytes=100, most_tenant_share=0.6, most_tenants=3)
    assert cache.get(key("a", 1), 0) is None
    cache.put(key("a", 1), "one", 10, ends_at_ms=5, now_ms=0)
    assert cache.get(key("a", 1), 4) == "one"
    assert cache.get(key("a", 1), 5) is None
    cache.put(key("a", 2), "two", 20, ends_at_ms=9, now_ms=5)
    assert cache.size_bytes == 20


def test_what_is_put_again_takes_its_place_once() -> None:
    cache: HotCache[str] = HotCache(most_bytes=100, most_tenant_share=0.6, most_tenants=3)
    for size_bytes in (10, 30, 20):
        cache.put(key("a", 1), str(size_bytes), size_bytes, LATER, 0)
    assert cache.size_bytes == tenant_bytes(cache, "a") == 20
    assert cache.get(key("a", 1), 0) == "20"
    cache.put(key("a", 1), "too large", 61, LATER, 0)
    assert cache.get(key("a", 1), 0) is None, "what stood there is not what was put last"


def test_the_least_recently_used_goes_first() -> None:
    cache: HotCache[str] = HotCache(most_bytes=100, most_tenant_share=0.6, most_tenants=3)
    keys = hold(cache, "a", 20, 3)
    assert cache.get(keys[0], 0) == "a"
    new = key("a", 99)
    cache.put(new, "new", 20, LATER, 0)
    assert held(cache, [*keys, new]) == [keys[0], keys[2], new]


def test_a_flood_of_one_tenant_takes_nothing_from_those_that_hold_less() -> None:
    cache: HotCache[str] = HotCache(most_bytes=100, most_tenant_share=0.6, most_tenants=3)
    keys = hold(cache, "small", 10, 4)
    hold(cache, "flood", 10, 1_000)
    assert held(cache, keys) == keys
    assert tenant_bytes(cache, "flood") == 60


def test_who_has_least_takes_from_who_has_most() -> None:
    cache: HotCache[str] = HotCache(most_bytes=100, most_tenant_share=0.6, most_tenants=3)
    rich, middle = hold(cache, "rich", 10, 6), hold(cache, "middle", 10, 4)
    poor = hold(cache, "poor", 10, 2)
    assert held(cache, middle) == middle
    assert len(held(cache, rich)) == 4
    assert held(cache, poor) == poor


def test_the_tenant_that_was_away_longest_is_forgotten() -> None:
    cache: HotCache[str] = HotCache(most_bytes=100, most_tenant_share=0.6, most_tenants=3)
    keys = {tenant: hold(cache, tenant, 10, 1)[0] for tenant in "abc"}
    cache.get(keys["a"], 0)
    hold(cache, "d", 10, 1)
    assert [tenant for tenant in "abcd" if tenant_bytes(cache, tenant)] == ["a", "c", "d"]
    assert cache.size_bytes == 30


class HotCacheMachine(RuleBasedStateMachine):
    """Any order of questions and answers of four tenants."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: HotCache[tuple[CacheKey, int]] = HotCache(most_bytes=100, most_tenant_share=0.5, most_tenants=8)
        self.puts = 0
        self.latest: dict[CacheKey, int] = {}
        self.now_ms = 0

    @rule(later_ms=st.integers(1, 10))
    def time_passes(self, later_ms: int) -> None:
        self.now_ms += later_ms

    @rule(tenant=st.sampled_from("abcd"), number=st.integers(0, 8))
    def get(self, tenant: str, number: int) -> None:
        one = key(tenant, number)
        found = self.cache.get(one, self.now_ms)
        if found is not None:
            assert found == (one, self.latest[one]), "the latest that was put under this key, or nothing"

    @rule(
        tenant=st.sampled_from("abcd"), number=st.integers(0, 8), size_bytes=st.integers(0, 70), ms=st.integers(-2, 20)
    )
    def put(self, tenant: str, number: int, size_bytes: int, ms: int) -> None:
        one = key(tenant, number)
        self.cache.get(one, self.now_ms)  # it is that late
        before = {other: tenant_bytes(self.cache, other) for other in "abcd"}
        self.puts += 1
        self.latest[one] = self.puts
        self.cache.put(one, (one, self.puts), size_bytes, self.now_ms + ms, self.now_ms)
        assert (self.cache.get(one, self.now_ms) is None) or (size_bytes <= 50 and ms > 0)
        for other in set("abcd") - {tenant}:
            if tenant_bytes(self.cache, other) != before[other]:
                assert before[other] >= tenant_bytes(self.cache, tenant), "it took from one that has less than it now"

    @invariant()
    def its_bounds_hold(self) -> None:
        sizes = [tenant_bytes(self.cache, tenant) for tenant in "abcd"]
        assert sum(sizes) == self.cache.size_bytes <= 100
        assert max(sizes) <= 50


TestHotCache = HotCacheMachine.TestCase
TestHotCache.settings = settings(stateful_step_count=60)
