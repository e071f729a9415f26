"""Claims of idempotency keys in a real Redis, which may go away."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from fairlane_server.redis.availability import RedisAvailability
from producers.gateway.idempotency import RedisClaims
from tests.kit.claim_store_suite import ClaimStoreSuite, OpenStore
from tests.kit.own_redis import own_redis_server
from tests.kit.waiting import eventually_async

# Only bounds a hang.
TIMEOUT_S = 10.0


@asynccontextmanager
async def claims(url: str, ttl_s: int = 60) -> AsyncIterator[RedisClaims]:
    """Of one instance."""
    async with watched_claims(url, ttl_s) as (store, _):
        yield store


@asynccontextmanager
async def watched_claims(url: str, ttl_s: int = 60) -> AsyncIterator[tuple[RedisClaims, RedisAvailability]]:
    async with Redis.from_url(url, retry=Retry(NoBackoff(), 0), socket_connect_timeout=TIMEOUT_S) as redis:
        watch = RedisAvailability(redis, timeout_s=TIMEOUT_S)
        try:
            yield RedisClaims(redis, watch, timeout_s=TIMEOUT_S, most=10_000, ttl_s=ttl_s), watch
        finally:
            await watch.close()


class TestRedisClaims(ClaimStoreSuite):
    @pytest.fixture
    def open_store(self, redis_url: str) -> OpenStore:
        return lambda: claims(redis_url)


def test_instances_share_their_claims(redis_url: str, unique: str) -> None:
    async def run() -> None:
        async with claims(redis_url) as one, claims(redis_url) as other:
            assert await one.swap("acme", unique, None, "first") == "first"
            assert await other.swap("acme", unique, None, "second") == "first"
            # What one gives back, the other is told when it acts on what it saw.
            assert await one.swap("acme", unique, "first", None) is None
            assert await other.swap("acme", unique, "first", None) is None
            assert await other.swap("acme", unique, None, "second") == "second"
            assert await one.swap("acme", unique, None, "third") == "second"

    asyncio.run(run())


def test_a_claim_ends(redis_url: str, unique: str) -> None:
    async def run() -> None:
        async with claims(redis_url, ttl_s=60) as store, Redis.from_url(redis_url) as redis:
            await store.swap("acme", unique, None, "first")
            assert 0 < await redis.pttl(f"idempotency:{unique}") <= 60_000

    asyncio.run(run())


def test_without_redis_an_instance_goes_by_what_it_saw(tmp_path: Path) -> None:
    async def run() -> None:
        with own_redis_server(tmp_path) as server:
            async with watched_claims(server.url) as (store, watch), claims(server.url) as other:
                assert await store.swap("acme", "before", None, "first") == "first"
                server.kill()
                assert await store.swap("acme", "before", None, "second") == "first"
                assert await store.swap("acme", "during", None, "first") == "first"
                assert await store.swap("acme", "during", None, "second") == "first"
                server.start()
                await eventually_async(lambda: watch.is_up, what="Redis")
                # It may have lost all: what was claimed meanwhile is told to it when it is confirmed.
                assert await store.swap("acme", "during", "first", "confirmed") == "confirmed"
                assert await other.swap("acme", "during", None, "third") == "confirmed"

    asyncio.run(run())
