"""Claims of several instances in one Redis, which may lose them or go away."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from fairlane_server.redis.availability import RedisAvailability
from producers.gateway.idempotency import Idempotency, RedisClaims
from tests.kit.claim_store_suite import ClaimStoreSuite, OpenStore
from tests.kit.openai_kit import ScriptedSubmitter
from tests.kit.waiting import PATIENCE_S


class SwapRedis:
    """Runs the one script that claims need."""

    def __init__(self) -> None:
        self.stored: dict[str, str] = {}
        self.is_away = False
        self.asked = 0

    def register_script(self, _script: str) -> Callable[..., Awaitable[list[bytes]]]:
        async def swap(keys: list[str], args: list[Any]) -> list[bytes]:
            self.asked += 1
            if self.is_away:
                raise RedisConnectionError("away")
            there = self.stored.get(keys[0], "")
            if there == args[0]:
                there = self.stored[keys[0]] = args[1]
                if not there:
                    del self.stored[keys[0]]
            return [there.encode(), b""]

        return swap

    async def ping(self) -> bool:
        if self.is_away:
            raise RedisConnectionError("away")
        return True


class World:
    """Two instances."""

    def __init__(self) -> None:
        self.redis = SwapRedis()
        self._watches = [RedisAvailability(self.redis) for _ in range(2)]  # type: ignore[arg-type]  # the part that is used
        self.one, self.other = (
            RedisClaims(self.redis, watch, timeout_s=PATIENCE_S, most=10_000)  # type: ignore[arg-type]  # the part that is used
            for watch in self._watches
        )

    async def close(self) -> None:
        for watch in self._watches:
            await watch.close()


class TestRedisClaimsInMemory(ClaimStoreSuite):
    @pytest.fixture
    def open_store(self) -> OpenStore:
        @asynccontextmanager
        async def opened() -> Any:
            world = World()
            yield world.one
            await world.close()

        return opened


def run(test: Callable[[World], Awaitable[None]]) -> None:
    async def within() -> None:
        world = World()
        try:
            await test(world)
        finally:
            await world.close()

    asyncio.run(within())


def test_a_key_that_its_own_instance_gave_back_is_free_everywhere() -> None:
    async def test(world: World) -> None:
        assert await world.one.swap("acme", "k", None, "first") == "first"
        assert await world.other.swap("acme", "k", None, "second") == "first"
        assert await world.one.swap("acme", "k", "first", None) is None
        assert await world.other.swap("acme", "k", None, "second") == "second"

    run(test)


def test_what_another_instance_claimed_counts_while_redis_is_away() -> None:
    async def test(world: World) -> None:
        await world.one.swap("acme", "k", None, "first")
        await world.other.swap("acme", "k", None, "second")
        world.redis.is_away = True
        assert await world.other.swap("acme", "k", None, "second") == "first"
        assert await world.other.swap("acme", "k", None, "third") == "first"

    run(test)


def test_what_redis_lost_counts_with_who_claimed_it() -> None:
    async def test(world: World) -> None:
        await world.one.swap("acme", "k", None, "first")
        world.redis.stored.clear()
        assert await world.one.swap("acme", "k", None, "second") == "first"
        assert await world.one.swap("acme", "k", "first", "confirmed") == "confirmed"
        assert await world.other.swap("acme", "k", None, "second") == "confirmed"

    run(test)


def test_a_key_whose_call_was_refused_elsewhere_takes_another_body() -> None:
    async def test(world: World) -> None:
        submitter = ScriptedSubmitter()
        one, other = (Idempotency(store, submitter.find_reply) for store in (world.one, world.other))
        first = await one.begin("acme", "/v1/requests", "k", b"first", "r-1")
        with pytest.raises(Exception, match="in flight"):
            await other.begin("acme", "/v1/requests", "k", b"first", "r-2")
        await first.give_back()
        assert (await other.begin("acme", "/v1/requests", "k", b"second", "r-3")).request_id == "r-3"

    run(test)
