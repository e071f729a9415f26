"""A Redis that is full: the one for caches evicts and takes no state with it, the one for state refuses and ends
nothing."""

import asyncio
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from deploy.local.redis import CACHE_NAME, NAME
from fairlane.records import SourceCoordinate
from fairlane_server.caching.entries import CacheName, request_key
from fairlane_server.redis.availability import RedisAvailability
from fairlane_server.redis.cache import RedisCache
from fairlane_server.redis.state import report_state
from producers.gateway.idempotency import RedisClaims
from producers.gateway.limits.rate_buckets import RatePolicy
from producers.gateway.limits.rate_limits import LocalRateLimits, RedisRateLimits
from stream_processors.dispatcher.deduplication.accepted_ids import RedisAcceptedIds
from tests.kit.own_redis import OwnRedis, own_redis_server
from tests.kit.pipeline import Pipeline
from tests.kit.waiting import eventually_async

pytestmark = pytest.mark.broker

HERE, THERE = SourceCoordinate("requests.acme", 0, 7), SourceCoordinate("requests.acme", 0, 9)
PATIENCE_S = 5.0


@pytest.fixture
def state(tmp_path: Path) -> Iterator[OwnRedis]:
    with own_redis_server(tmp_path / "state", NAME) as server:
        yield server


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[OwnRedis]:
    with own_redis_server(tmp_path / "cache", CACHE_NAME) as server:
        yield server


async def fill(redis: "Redis") -> None:
    """Until a write is refused."""
    await redis.config_set("maxmemory", 8 * 1024 * 1024)

    async def write_for_ever() -> None:
        for number in count():
            await redis.set(f"filler:{number}", b"x" * 65_536)

    with pytest.raises(ResponseError, match="maxmemory"):
        await write_for_ever()
    # Buffers of connections come and go: a little less than what is used, so that nothing fits whatever they do.
    await redis.config_set("maxmemory", 6 * 1024 * 1024)


def refused(kind: str, reason: str = "memory") -> float:
    labels = {"kind": kind, "reason": reason}
    return REGISTRY.get_sample_value("fairlane_redis_refused_writes_total", labels) or 0.0


def ids(*numbers: int, place: SourceCoordinate = HERE) -> list[tuple[str, str, SourceCoordinate]]:
    return [("acme", f"id-{number}", place) for number in numbers]


def test_caches_that_evict_take_no_state_with_them(state: OwnRedis, cache: OwnRedis) -> None:
    async def run() -> None:
        async with Redis.from_url(state.url) as state_redis, Redis.from_url(cache.url) as cache_redis:
            index = RedisAcceptedIds(state_redis, 3_600, RedisAvailability(state_redis), 10_000)
            numbers = range(2_000)
            assert await index.first_seen(ids(*numbers)) == [None] * 2_000
            await cache_redis.config_set("maxmemory", 4 * 1024 * 1024)
            kept = RedisCache(cache_redis, 3_600, PATIENCE_S)
            for number in range(300):
                assert await kept.put(request_key(CacheName.RESULT, "acme", str(number)), b"x" * 65_536)
            assert (await cache_redis.info())["evicted_keys"] > 0
            assert await index.first_seen(ids(*numbers, place=THERE)) == [HERE] * 2_000
            assert (await state_redis.info())["evicted_keys"] == 0

    asyncio.run(run())


def test_a_full_state_refuses_what_is_new_and_knows_what_it_knew(state: OwnRedis) -> None:
    async def run() -> None:
        async with Redis.from_url(state.url) as redis:
            watch = RedisAvailability(redis)
            index = RedisAcceptedIds(redis, 3_600, watch, 10_000)
            claims = RedisClaims(redis, watch, PATIENCE_S, 10_000)
            other = RedisClaims(redis, watch, PATIENCE_S, 10_000)
            limits = RedisRateLimits(redis, LocalRateLimits(lambda: 0), watch, PATIENCE_S)
            await index.first_seen(ids(1, 2, 3))
            assert await claims.swap("acme", "known", None, "claim") == "claim"
            await fill(redis)
            before = {kind: refused(kind) for kind in ("seen_ids", "idempotency_keys", "rate_limits")}

            assert await index.first_seen(ids(1, 4, place=THERE) + ids(2)) == [HERE, None, None]
            assert await index.first_seen(ids(4)) == [None], "it could not be remembered"
            assert refused("seen_ids") == before["seen_ids"] + 2

            assert await other.swap("acme", "known", None, "late") == "claim", "another instance still finds it"
            assert await claims.swap("acme", "new", None, "claim") == "claim"
            assert await claims.swap("acme", "new", None, "again") == "claim", "its own instance knows"
            assert refused("idempotency_keys") == before["idempotency_keys"] + 1

            assert (await limits.take(["acme"], RatePolicy(1.0, 2))).retry_after_ms == 0
            assert refused("rate_limits") == before["rate_limits"] + 1
            assert watch.is_up

            # Deleting makes room, and all is as before.
            await index.forget(ids(1))
            await redis.flushdb()
            assert await index.first_seen(ids(5)) == [None]
            assert await index.first_seen(ids(5, place=THERE)) == [HERE]

    asyncio.run(run())


def test_what_was_seen_survives_a_kill(state: OwnRedis) -> None:
    async def run() -> None:
        async with Redis.from_url(state.url) as redis:
            index = RedisAcceptedIds(redis, 3_600, RedisAvailability(redis), 10_000)
            await index.first_seen(ids(1, 2))

            async def is_synced() -> bool:
                info = await redis.info("persistence")
                return bool(info["aof_pending_bio_fsync"] == 0 and info["aof_buffer_length"] == 0)

            assert (await redis.info("persistence"))["aof_enabled"] == 1
            assert await is_synced()
        state.kill()
        state.start()
        async with Redis.from_url(state.url) as redis:
            index = RedisAcceptedIds(redis, 3_600, RedisAvailability(redis), 10_000)
            assert await index.first_seen(ids(1, 2, place=THERE)) == [HERE, HERE]

    asyncio.run(run())


def gauge(name: str) -> float:
    return REGISTRY.get_sample_value(name) or 0.0


def test_a_server_that_may_forget_is_an_alarm(state: OwnRedis, cache: OwnRedis) -> None:
    async def shown(url: str, unsafe: int) -> None:
        async with Redis.from_url(url) as redis:
            report = asyncio.create_task(report_state(redis))
            await eventually_async(lambda: gauge("fairlane_redis_state_unsafe") == unsafe, what="the report")
            report.cancel()
            await asyncio.wait([report])

    asyncio.run(shown(cache.url, 2))
    asyncio.run(shown(state.url, 0))
    assert 0 < gauge("fairlane_redis_state_memory_share") < 1
    assert gauge("fairlane_redis_state_evicted_keys") == 0


def test_requests_go_on_while_the_state_is_full(broker: str, unique: str, tmp_path: Path, state: OwnRedis) -> None:
    async def fill_it() -> None:
        async with Redis.from_url(state.url) as redis:
            await fill(redis)

    asyncio.run(fill_it())
    with Pipeline(broker, tmp_path / "pipeline", unique, tenants=("a",), redis_url=state.url) as pipeline:
        pipeline.start()
        replies = pipeline.replies()
        requests = [pipeline.request() for _ in range(20)]
        pipeline.publish("a", *requests)
        found = replies.wait([request.request_id for request in requests])
        assert [reply.outcome for reply in found.values()] == ["ok"] * 20
        dispatcher = pipeline.processes["dispatcher-1"]
        assert dispatcher.metric("fairlane_redis_refused_writes_total", kind="seen_ids", reason="memory") == 20
        assert dispatcher.alive
