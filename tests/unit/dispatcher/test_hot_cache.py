"""The cache in memory: its bounds, whose entries go, and what popularity is worth."""

from collections import Counter
from dataclasses import replace
from hashlib import blake2b
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fairlane_server.caching.keys import CacheKey, CacheName, cache_key
from stream_processors.dispatcher.response_cache.frequency_sketch import FrequencySketch
from stream_processors.dispatcher.response_cache.hot_cache import HotCache, HotPolicy

POLICY = HotPolicy(most_bytes=100, most_tenant_share=0.6, most_tenants=3, sketch_width=64)
LATER = 1_000


def key(tenant: str, number: int) -> CacheKey:
    return cache_key(CacheName.RETRIEVAL, tenant, number)


def ask(cache: HotCache[str], of: CacheKey, times: int, now_ms: int = 0) -> None:
    for _ in range(times):
        cache.get(of, now_ms)


def hold(cache: HotCache[str], tenant: str, size_bytes: int, count: int, asked: int = 1) -> list[CacheKey]:
    """Entries of this size, as long as there is room."""
    keys = [key(tenant, number) for number in range(count)]
    for one in keys:
        ask(cache, one, asked)
        assert cache.put(one, tenant, size_bytes, LATER)
    return keys


def held(cache: HotCache[str], keys: list[CacheKey]) -> list[CacheKey]:
    return [one for one in keys if cache.get(one, 0) is not None]


def test_what_was_put_is_there_until_its_time_is_over() -> None:
    cache: HotCache[str] = HotCache(POLICY)
    assert cache.get(key("a", 1), 0) is None
    assert cache.put(key("a", 1), "one", 10, ends_at_ms=5)
    assert cache.get(key("a", 1), 4) == "one"
    assert cache.get(key("a", 1), 5) is None
    assert cache.size_bytes == 0


def test_what_is_put_again_takes_its_place_once() -> None:
    cache: HotCache[str] = HotCache(POLICY)
    for size_bytes in (10, 30, 20):
        assert cache.put(key("a", 1), str(size_bytes), size_bytes, LATER)
    assert cache.size_bytes == cache.tenant_bytes("a") == 20
    assert cache.get(key("a", 1), 0) == "20"
    assert not cache.put(key("a", 1), "too large", 61, LATER)
    assert cache.get(key("a", 1), 0) is None, "what stood there is not what was put last"


def test_a_newcomer_must_be_asked_for_more_often_than_what_goes_for_it() -> None:
    cache: HotCache[str] = HotCache(POLICY)
    keys = hold(cache, "a", 20, 3, asked=3)
    new = key("a", 99)
    ask(cache, new, 3)
    assert not cache.put(new, "new", 20, LATER)
    ask(cache, new, 1)
    assert cache.put(new, "new", 20, LATER)
    assert held(cache, [*keys, new]) == [*keys[1:], new], "the least recently used went"


def test_a_large_newcomer_must_be_worth_all_that_go_for_it() -> None:
    cache: HotCache[str] = HotCache(POLICY)
    keys = hold(cache, "a", 20, 3, asked=3)
    new = key("a", 99)
    ask(cache, new, 6)
    assert not cache.put(new, "new", 40, LATER)
    ask(cache, new, 1)
    assert cache.put(new, "new", 40, LATER)
    assert held(cache, [*keys, new]) == [keys[2], new]


def test_a_flood_leaves_what_is_asked_for_again() -> None:
    """A scan: every key is asked for once. Without admission it would leave nothing."""
    cache: HotCache[str] = HotCache(replace(POLICY, sketch_width=1_024))
    keys = hold(cache, "a", 20, 3, asked=5)
    for number in range(100, 1_100):
        one = key("a", number)
        ask(cache, one, 1)
        cache.put(one, "flood", 20, LATER)
    assert held(cache, keys) == keys


def test_who_has_least_takes_from_who_has_most_however_popular_that_is() -> None:
    cache: HotCache[str] = HotCache(POLICY)
    rich, middle = hold(cache, "rich", 10, 6, asked=15), hold(cache, "middle", 10, 4, asked=1)
    poor = hold(cache, "poor", 10, 2, asked=2)
    assert len(held(cache, middle)) == 4
    assert len(held(cache, rich)) == 4
    assert held(cache, poor) == poor


def test_what_was_asked_for_once_takes_nothing_from_others() -> None:
    cache: HotCache[str] = HotCache(POLICY)
    hold(cache, "rich", 10, 6), hold(cache, "middle", 10, 4)
    once = key("poor", 1)
    ask(cache, once, 1)
    assert not cache.put(once, "once", 10, LATER)
    ask(cache, once, 1)
    assert cache.put(once, "twice", 10, LATER)


def test_the_tenant_that_was_away_longest_is_forgotten() -> None:
    cache: HotCache[str] = HotCache(POLICY)
    keys = {tenant: hold(cache, tenant, 10, 1)[0] for tenant in "abc"}
    cache.get(keys["a"], 0)
    hold(cache, "d", 10, 1)
    assert [tenant for tenant in "acd" if cache.tenant_bytes(tenant)] == ["a", "c", "d"]
    assert cache.tenant_bytes("b") == 0
    assert cache.size_bytes == 30


class HotCacheMachine(RuleBasedStateMachine):
    """Any order of questions and answers of four tenants."""

    policy = HotPolicy(most_bytes=100, most_tenant_share=0.5, most_tenants=8, sketch_width=64)

    def __init__(self) -> None:
        super().__init__()
        self.cache: HotCache[tuple[CacheKey, int]] = HotCache(self.policy)
        self.puts = 0
        self.latest: dict[CacheKey, int] = {}

    @rule(tenant=st.sampled_from("abcd"), number=st.integers(0, 8), now_ms=st.integers(0, 20))
    def get(self, tenant: str, number: int, now_ms: int) -> None:
        one = key(tenant, number)
        found = self.cache.get(one, now_ms)
        if found is not None:
            assert found == (one, self.latest[one]), "the latest that was put under this key, or nothing"

    @rule(
        tenant=st.sampled_from("abcd"),
        number=st.integers(0, 8),
        size_bytes=st.integers(0, 70),
        ends_at_ms=st.integers(0, 20),
    )
    def put(self, tenant: str, number: int, size_bytes: int, ends_at_ms: int) -> None:
        one = key(tenant, number)
        before = {other: self.cache.tenant_bytes(other) for other in "abcd"}
        self.puts += 1
        self.latest[one] = self.puts
        was_kept = self.cache.put(one, (one, self.puts), size_bytes, ends_at_ms)
        assert was_kept <= (size_bytes <= 50)
        for other in set("abcd") - {tenant}:
            if self.cache.tenant_bytes(other) < before[other]:
                assert was_kept
                assert before[other] > self.cache.tenant_bytes(tenant), "it took from one that has less than it now"
            else:
                assert self.cache.tenant_bytes(other) == before[other]

    @invariant()
    def its_bounds_hold(self) -> None:
        sizes = [self.cache.tenant_bytes(tenant) for tenant in "abcd"]
        assert sum(sizes) == self.cache.size_bytes <= self.policy.most_bytes
        assert max(sizes) <= self.policy.most_bytes * self.policy.most_tenant_share


TestHotCache = HotCacheMachine.TestCase
TestHotCache.settings = settings(stateful_step_count=60)


def test_on_a_stream_of_popular_questions_admission_beats_the_least_recently_used() -> None:
    """A tenth of the questions fits; popularity falls with the rank (Zipf, exponent 0.9)."""
    random = Random(1)
    ranks = random.choices(range(2_000), [1 / rank**0.9 for rank in range(1, 2_001)], k=20_000)
    keys = [key("a", rank) for rank in range(2_000)]
    hits = {}
    for name, admits in (("lru", False), ("popular", True)):
        cache: HotCache[int] = HotCache(HotPolicy(most_bytes=200, most_tenant_share=1.0))
        hits[name] = 0
        for rank in ranks:
            if cache.get(keys[rank], 0) is not None:
                hits[name] += 1
                continue
            if not admits and cache.size_bytes == 200:
                shelf = cache._shelves["a"]
                cache._drop(shelf, next(iter(shelf.items)))
            cache.put(keys[rank], rank, 1, LATER)
    assert hits["popular"] > 1.15 * hits["lru"]


# --- the sketch


def digest(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "big"), digest_size=32).digest()


@given(st.lists(st.integers(0, 40), max_size=200))
def test_a_sketch_never_says_less_than_it_counted(numbers: list[int]) -> None:
    sketch = FrequencySketch(256)
    for number in numbers:
        sketch.count(digest(number))
    for number, times in Counter(numbers).items():
        assert sketch.estimate(digest(number)) >= min(times, 15)


def test_a_sketch_says_little_more_than_it_counted() -> None:
    sketch = FrequencySketch(1_024)
    for number in range(250):
        for _ in range(number % 5):
            sketch.count(digest(number))
    wrong = sum(sketch.estimate(digest(number)) != number % 5 for number in range(250))
    assert wrong <= 5
    assert sum(sketch.estimate(digest(number)) > 0 for number in range(1_000, 2_000)) <= 50


def test_old_fame_fades() -> None:
    sketch = FrequencySketch(64)
    for _ in range(15):
        sketch.count(digest(0))
    assert sketch.estimate(digest(0)) == 15
    for number in range(1, 2_000):
        sketch.count(digest(number % 50 + 1))
    assert sketch.estimate(digest(0)) < 15


@pytest.mark.parametrize("width", [0, -8, 3, 100])
def test_a_width_is_a_power_of_two(width: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        FrequencySketch(width)
