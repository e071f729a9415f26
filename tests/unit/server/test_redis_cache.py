"""Entries in a Redis that is there, that is away, that hangs, and that somebody else writes to."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from fairlane_server.caching.entries import MOST_ENTRY_BYTES, CacheKey, CacheName, cache_key, seal
from fairlane_server.redis import cache as redis_cache
from fairlane_server.redis.cache import LookUpResult, RedisCache
from tests.kit.cache_kit import DictRedis
from tests.kit.cache_strategies import hostile, tenants
from tests.kit.metric_counts import counted

KEY = cache_key(CacheName.RETRIEVAL, "acme", "text")
ROWS = cache_key(CacheName.SEMANTIC, "acme", "text")


def make(redis: DictRedis, clock_s: Callable[[], float] = lambda: 0.0) -> RedisCache:
    return RedisCache(redis, 300, timeout_s=5.0, clock_s=clock_s)  # type: ignore[arg-type]  # the part that is used


def text_of(payload: bytes) -> str | None:
    return payload.decode() or None


def run(test: Coroutine[Any, Any, None]) -> None:
    async def within() -> None:
        async with asyncio.timeout(20):
            await test

    asyncio.run(within())


def test_many_are_put_in_one_round_trip() -> None:
    keys = [cache_key(CacheName.RESULT, "acme", number) for number in range(3)]

    async def test() -> None:
        redis = DictRedis()
        cache = RedisCache(redis, 300, timeout_s=5.0, most_entry_bytes=200)  # type: ignore[arg-type]  # what is used
        await cache.put_all([(keys[0], b"one"), (keys[1], bytes(200)), (keys[2], b"three")])
        assert redis.calls == 1
        assert all(270_000 <= ttl_ms <= 300_000 for ttl_ms in redis.lives_ms.values())
        assert [await cache.get(key, text_of) for key in keys] == ["one", None, "three"]
        await cache.put_all([])
        redis.error = RedisConnectionError("away")
        calls = redis.calls
        await cache.put_all([(keys[1], b"two")])
        assert redis.calls == calls + 1
        redis.error = None
        assert await cache.get(keys[1], text_of) is None

    run(test())


def test_what_was_put_is_got_and_lives_no_longer_than_it_may() -> None:
    async def test() -> None:
        redis = DictRedis()
        cache = make(redis)
        before = counted("retrieval", "hit"), counted("retrieval", "miss")
        assert await cache.get(KEY, text_of) is None
        assert await cache.put(KEY, b"found")
        assert await cache.get(KEY, text_of) == "found"
        assert 270_000 <= redis.lives_ms[KEY.name] <= 300_000
        assert (counted("retrieval", "hit"), counted("retrieval", "miss")) == (before[0] + 1, before[1] + 1)

    run(test())


@pytest.mark.parametrize(
    "poison",
    [
        b"\x00",
        b"garbage",
        b"\x02" + (seal(KEY, b"found") or b"")[1:],
        (seal(KEY, b"found") or b"")[:-1],
        seal(cache_key(CacheName.RETRIEVAL, "globex", "text"), b"found"),
        seal(cache_key(CacheName.RESPONSE, "acme", "text"), b"found"),
        seal(cache_key(CacheName.RETRIEVAL, "acme", "other"), b"found"),
        seal(KEY, b""),
        seal(KEY, bytes(2 * MOST_ENTRY_BYTES), most_bytes=4 * MOST_ENTRY_BYTES),
        {"somebody": "else's"},
        [b"row"],
    ],
    ids=repr,
)
def test_whatever_else_stands_there_is_a_miss_and_counted(poison: object) -> None:
    async def test() -> None:
        redis = DictRedis()
        cache = make(redis)
        redis.stored[KEY.name] = poison
        before = counted("retrieval", "poisoned")
        for _ in range(5):
            assert await cache.get(KEY, text_of) is None
        assert counted("retrieval", "poisoned") == before + 5
        assert redis.calls == 5, "it answers, so it is asked"
        assert await cache.put(KEY, b"found")
        assert await cache.get(KEY, text_of) == "found"

    run(test())


def test_what_is_too_large_is_not_stored() -> None:
    async def test() -> None:
        redis = DictRedis()
        assert not await make(redis).put(KEY, bytes(MOST_ENTRY_BYTES))
        assert not await make(redis).add_row(ROWS, bytes(redis_cache.MOST_ROW_BYTES), 4)
        assert not redis.calls

    run(test())


def test_a_list_keeps_its_newest_rows() -> None:
    async def test() -> None:
        redis = DictRedis()
        cache = make(redis)
        assert await cache.rows(ROWS, 3) is LookUpResult.MISS
        for number in range(5):
            assert await cache.add_row(ROWS, bytes([number]), 3)
        assert await cache.rows(ROWS, 3) == [b"\x04", b"\x03", b"\x02"]
        assert redis.lives_ms[ROWS.name] == 300_000

    run(test())


def test_rows_of_others_are_none() -> None:
    async def test() -> None:
        redis = DictRedis()
        cache = make(redis)
        theirs = cache_key(CacheName.SEMANTIC, "globex", "text")
        redis.stored[ROWS.name] = [b"", b"garbage", seal(theirs, b"row"), bytes(20_000), seal(ROWS, b"row")]
        assert await cache.rows(ROWS, 10) == [None, None, None, None, b"row"]
        redis.stored[ROWS.name] = b"a string"
        assert await cache.rows(ROWS, 10) is LookUpResult.POISONED

    run(test())


@pytest.mark.parametrize(
    "error",
    [RedisConnectionError("gone"), RedisTimeoutError("slow"), ResponseError("OOM"), OSError(), TimeoutError()],
    ids=lambda error: type(error).__name__,
)
def test_a_redis_that_fails_is_a_miss_and_is_left_alone_for_a_while(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    async def test() -> None:
        now_s = 100.0
        redis = DictRedis()
        cache = make(redis, lambda: now_s)
        assert await cache.put(KEY, b"found")
        redis.error, redis.calls = error, 0
        before = counted("retrieval", "unavailable")
        for _ in range(50):
            assert await cache.get(KEY, text_of) is None
            assert not await cache.put(KEY, b"found")
            assert await cache.rows(ROWS, 3) is LookUpResult.UNAVAILABLE
            assert not await cache.add_row(ROWS, b"row", 3)
        assert redis.calls == 3
        assert counted("retrieval", "unavailable") == before + 50
        now_s += 60
        assert await cache.get(KEY, text_of) is None
        assert redis.calls == 4, "one tries"
        now_s += 60
        redis.error = None
        assert await cache.get(KEY, text_of) == "found"
        assert await cache.get(KEY, text_of) == "found"

    run(test())
    assert "".join(capsys.readouterr()).count("cache_unavailable") == 1, "said once while it lasts"


def test_a_redis_that_hangs_costs_three_timeouts_and_not_one_for_everybody() -> None:
    async def test() -> None:
        redis = DictRedis()
        cache = RedisCache(redis, 300, timeout_s=0.01, clock_s=lambda: 0.0)  # type: ignore[arg-type]
        redis.before = asyncio.Event().wait
        for _ in range(100):
            assert await cache.get(KEY, text_of) is None
        assert redis.calls == 3

    run(test())


def test_at_once_only_so_many_ask() -> None:
    async def test() -> None:
        redis = DictRedis()
        cache = make(redis)
        under_way, most = 0, 0
        may_end = asyncio.Event()

        async def wait() -> None:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            await may_end.wait()
            under_way -= 1

        redis.before = wait
        tasks = [asyncio.create_task(cache.get(KEY, text_of)) for _ in range(200)]
        while under_way < redis_cache._MOST_CALLS:
            await asyncio.sleep(0)
        may_end.set()
        assert await asyncio.gather(*tasks) == [None] * 200
        assert most == redis_cache._MOST_CALLS

    run(test())


def test_who_asks_may_be_cancelled_and_the_next_is_answered() -> None:
    async def test() -> None:
        redis = DictRedis()
        cache = make(redis)
        redis.error = RedisConnectionError("gone")
        for _ in range(3):
            await cache.get(KEY, text_of)
        redis.error, cache._clock_s = None, lambda: 60.0
        began = asyncio.Event()

        async def hang() -> None:
            began.set()
            await asyncio.Event().wait()

        redis.before = hang
        trying = asyncio.create_task(cache.get(KEY, text_of))
        await began.wait()
        trying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await trying
        redis.before = None
        assert await cache.put(KEY, b"found"), "the next one tries instead"

    run(test())


def test_writes_that_nobody_waits_for_are_done_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_cache, "_MOST_WRITES", 3)

    async def test() -> None:
        redis = DictRedis()
        cache = make(redis)
        keys = [cache_key(CacheName.RETRIEVAL, "acme", number) for number in range(5)]
        for one in keys:
            cache.soon(one, lambda one=one: cache.put(one, b"found"))  # type: ignore[misc]  # a lambda's default
        assert not redis.calls
        await cache.settle()
        assert set(redis.stored) == {one.name for one in keys[:3]}

    run(test())


def test_a_write_that_fails_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    async def test() -> None:
        cache = make(DictRedis())

        async def fail() -> bool:
            raise ZeroDivisionError

        cache.soon(KEY, fail)
        await cache.settle()
        await asyncio.sleep(0)

    run(test())
    said = [line for line in "".join(capsys.readouterr()).splitlines() if "cache_write_failed" in line]
    assert len(said) == 1
    assert "ZeroDivisionError" in said[0]


def test_without_redis_nothing_is_kept() -> None:
    async def test() -> None:
        cache = RedisCache(None, 300)
        assert not await cache.put(KEY, b"found")
        assert await cache.get(KEY, text_of) is None
        assert not await cache.add_row(ROWS, b"row", 3)
        assert await cache.rows(ROWS, 3) is LookUpResult.UNAVAILABLE

    run(test())


@given(tenants, tenants, hostile, st.sampled_from(CacheName))
def test_an_entry_put_under_another_tenants_key_is_a_miss(one: str, other: str, text: str, cache: CacheName) -> None:
    assume(one != other)

    async def test() -> None:
        redis = DictRedis()
        entries = make(redis)
        mine, theirs = cache_key(cache, one, text), cache_key(cache, other, text)
        await entries.put(mine, b"secret")
        assert await entries.look_up(theirs, text_of) == redis_cache.LookUp(LookUpResult.MISS)
        # Whoever may write to Redis puts it there; and once more with a key that mixes the two.
        redis.stored[theirs.name] = redis.stored[mine.name]
        assert (await entries.look_up(theirs, text_of)).result is LookUpResult.POISONED
        mixed = CacheKey(cache, other, mine.digest)
        redis.stored[mixed.name] = redis.stored[mine.name]
        assert (await entries.look_up(mixed, text_of)).result is LookUpResult.POISONED

    run(test())
