"""The caches on a real Redis: what is stored there, and what becomes of a look-up when it hangs or dies."""

import asyncio
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from deploy.local.redis import CACHE_NAME
from fairlane_server.caching.entries import MOST_ENTRY_BYTES, CacheKey, CacheName, cache_key, seal
from fairlane_server.caching.responses import answer_of, encode_answer, semantic_group
from fairlane_server.redis.cache import LookUpResult, RedisCache
from tests.kit.cache_kit import COLLECTION, HITS, MODEL_VERSION, Caches, caches_over, reply, request, work
from tests.kit.own_redis import OwnRedis, own_redis_server

pytestmark = pytest.mark.broker

PATIENT_S = 10.0
TIMEOUT_S = 0.25
CLIENT_TIMEOUT_S = 30.0


def make(redis: "Redis", timeout_s: float = PATIENT_S) -> Caches:
    return caches_over(RedisCache(redis, 300, timeout_s))


def run(test: Coroutine[Any, Any, None]) -> None:
    async def within() -> None:
        async with asyncio.timeout(60):
            await test

    asyncio.run(within())


def test_passages_are_there_for_another_process_and_for_their_time(redis_url: str, unique: str) -> None:
    async def test() -> None:
        async with Redis.from_url(redis_url) as redis:
            here, there = make(redis), make(redis)
            collection = replace(COLLECTION, tenant=unique)
            assert await here.passages.get(collection, "hybrid", 10, "text") is None
            await here.passages.put(collection, "hybrid", 10, "text", HITS)
            await here.redis.settle()
            assert await there.passages.get(collection, "hybrid", 10, "text") == HITS
            (name,) = [one async for one in redis.scan_iter(f"cache:*:{unique}:*")]
            assert name.startswith(f"cache:retrieval:{unique}:".encode())
            assert 269_000 < await redis.pttl(name) <= 300_000

    run(test())


def test_an_answer_and_what_means_the_same(redis_url: str, unique: str) -> None:
    async def test() -> None:
        async with Redis.from_url(redis_url) as redis:
            caches = make(redis)
            done = work(request("Which wire goes left?"), unique)
            kept = answer_of(done, reply(done))
            group = semantic_group(unique, done.request, MODEL_VERSION, None, "static")
            assert kept is not None
            assert group is not None
            key, answer = kept
            entry = seal(key, encode_answer(answer))
            assert entry is not None
            await redis.set(key.name, entry, px=10_000)
            assert await caches.answer(key) == answer
            vectors = np.eye(384, dtype=np.float32)
            for number in range(1, 300):
                caches.semantic.remember(group, vectors[number], replace(key, digest=bytes(32)))
                await caches.redis.settle()
            caches.semantic.remember(group, vectors[0], key)
            await caches.redis.settle()
            assert await redis.llen(group.name) == 256
            assert 0 < await redis.pttl(group.name) <= 300_000
            found = await caches.semantic.find(group, vectors[0])
            assert found is not None
            assert found[0] == answer
            assert await caches.semantic.find(group, vectors[299]) is None

    run(test())


def test_what_somebody_else_put_there_is_poisoned(redis_url: str, unique: str) -> None:
    async def test() -> None:
        async with Redis.from_url(redis_url) as redis:
            cache = RedisCache(redis, 300, PATIENT_S)
            key = cache_key(CacheName.RETRIEVAL, unique, "text")
            await redis.set(key.name, bytes(8 * MOST_ENTRY_BYTES), ex=60)
            assert (await cache.look_up(key, bytes)).result is LookUpResult.POISONED
            await redis.delete(key.name)
            await redis.hset(key.name, "somebody", "else's")
            assert (await cache.look_up(key, bytes)).result is LookUpResult.POISONED
            assert await cache.rows(key, 3) is LookUpResult.POISONED
            assert await cache.put(key, b"found"), "what stood there goes"
            assert (await cache.look_up(key, bytes)).value == b"found"
            assert await cache.rows(key, 3) is LookUpResult.POISONED
            rows = cache_key(CacheName.SEMANTIC, unique, "text")
            await redis.lpush(rows.name, bytes(8 * MOST_ENTRY_BYTES))
            assert await cache.add_row(rows, b"row", 3)
            assert await cache.rows(rows, 3) == [b"row", None]

    run(test())


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[OwnRedis]:
    """One for caches, which keeps nothing when it is killed."""
    with own_redis_server(tmp_path / "redis", CACHE_NAME) as server:
        yield server


@pytest.mark.alone
@pytest.mark.parametrize("fault", ["gone", "hung"])
def test_a_redis_that_stops_costs_a_timeout_now_and_then(own_redis: OwnRedis, unique: str, fault: str) -> None:
    async def test() -> None:
        now_s = 0.0
        # With time-outs of its own so long that only those of the cache count.
        client = Redis.from_url(
            own_redis.url,
            socket_timeout=CLIENT_TIMEOUT_S,
            socket_connect_timeout=CLIENT_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )
        async with client as redis:
            cache = RedisCache(redis, 300, TIMEOUT_S, clock_s=lambda: now_s)
            keys = [cache_key(CacheName.RETRIEVAL, unique, number) for number in range(50)]

            async def look_up(one: CacheKey) -> tuple[LookUpResult, float]:
                begun = monotonic()
                looked = await cache.look_up(one, bytes)
                assert looked.value in (None, one.digest), "an answer to another question"
                return looked.result, monotonic() - begun

            for one in keys:
                assert await RedisCache(redis, 300, PATIENT_S).put(one, one.digest)
            own_redis.kill() if fault == "gone" else own_redis.hang()
            found = [await look_up(one) for one in keys]
            assert {result for result, _ in found} == {LookUpResult.UNAVAILABLE}
            assert max(spent_s for _, spent_s in found) < CLIENT_TIMEOUT_S / 2
            # A machine that does something else for a moment may delay one of them or two as well.
            assert sum(spent_s >= TIMEOUT_S for _, spent_s in found) <= 3 + 2, "left alone after three"
            now_s += 60
            together = await asyncio.gather(*map(look_up, keys))
            assert sum(spent_s >= TIMEOUT_S for _, spent_s in together) <= 1 + 2 + len(keys) * (fault == "gone")
            own_redis.start() if fault == "gone" else own_redis.go_on()
            patient = RedisCache(redis, 300, PATIENT_S)
            for one in keys:
                assert (await patient.look_up(one, bytes)).value == (one.digest if fault == "hung" else None)
            now_s += 60
            assert (await look_up(keys[0]))[0] is (LookUpResult.HIT if fault == "hung" else LookUpResult.MISS)

    run(test())


def test_cancelled_look_ups_leave_no_answer_for_others(redis_url: str, unique: str) -> None:
    """A connection whose reader left in the middle must not be used for the next question."""

    async def test() -> None:
        async with Redis.from_url(redis_url, max_connections=4) as redis:
            cache = RedisCache(redis, 300, PATIENT_S)
            keys = [cache_key(CacheName.RETRIEVAL, unique, number) for number in range(8)]
            for one in keys:
                assert await cache.put(one, one.digest)
            for number in range(200):
                tasks = [asyncio.create_task(cache.look_up(one, bytes)) for one in keys[:2]]
                for _ in range(number % 7):
                    await asyncio.sleep(0)
                tasks[0].cancel()
                await asyncio.wait(tasks)
                assert tasks[0].cancelled() or tasks[0].result().value == keys[0].digest
                assert tasks[1].result().value == keys[1].digest
                one = keys[number % 8]
                assert (await cache.look_up(one, bytes)).value == one.digest

    run(test())
