"""One behaviour of rate limits, whoever keeps them; and what becomes of it when Redis hangs or dies."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from time import monotonic

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from fairlane.clock import monotonic_ms
from fairlane_server.redis.availability import RedisAvailability
from producers.gateway.limits.rate_buckets import Allowance, RatePolicy
from producers.gateway.limits.rate_limits import MOST_CALLS, PACE_S, LocalRateLimits, RedisRateLimits
from tests.kit.identity_kit import Clock
from tests.kit.own_redis import OwnRedis
from tests.kit.waiting import eventually_async

CLIENT_TIMEOUT_S = 30.0
"""Of the connection: who waits as long was not left to the limits' own."""


class NobodyIsAsked(LocalRateLimits):
    """Stands in for the local limits where Redis must answer."""

    def __init__(self) -> None:
        super().__init__(monotonic_ms)

    async def take(self, owners: Sequence[str], policy: RatePolicy) -> Allowance:
        raise AssertionError("Redis was there")


OpenLimits = Callable[[Clock], AbstractAsyncContextManager[LocalRateLimits | RedisRateLimits]]


@pytest.fixture(params=["local", "redis"])
def open_limits(request: pytest.FixtureRequest) -> OpenLimits:
    """Every implementation, with a clock of the test's."""

    @asynccontextmanager
    async def local(clock: Clock) -> AsyncIterator[LocalRateLimits | RedisRateLimits]:
        yield LocalRateLimits(clock)

    if request.param == "local":
        return local
    url: str = request.getfixturevalue("redis_url")

    @asynccontextmanager
    async def shared(clock: Clock) -> AsyncIterator[LocalRateLimits | RedisRateLimits]:
        async with Redis.from_url(url) as redis:
            yield RedisRateLimits(redis, NobodyIsAsked(), RedisAvailability(redis), timeout_s=20.0, clock=clock)

    return shared


def test_a_burst_and_then_the_rate(open_limits: OpenLimits, unique: str) -> None:
    policy = RatePolicy(rate_per_s=2.0, burst=3)

    async def run() -> None:
        clock = Clock()
        async with open_limits(clock) as limits:
            found = [await limits.take([unique], policy) for _ in range(4)]
            assert found == [
                Allowance(3, 2, 500, 0),
                Allowance(3, 1, 1_000, 0),
                Allowance(3, 0, 1_500, 0),
                Allowance(3, 0, 1_500, 501),
            ]
            clock.now_ms += 501
            assert (await limits.take([unique], policy)).is_granted
            clock.now_ms += 3_600_000
            granted = [(await limits.take([unique], policy)).is_granted for _ in range(5)]
            assert granted == [True] * 3 + [False] * 2, "no more than the burst after an idle hour"

    asyncio.run(run())


def test_a_call_takes_from_all_its_buckets_or_from_none(open_limits: OpenLimits, unique: str) -> None:
    policy = RatePolicy(rate_per_s=1.0, burst=3)
    key, user = f"{unique}-key", f"{unique}-user"

    async def run() -> None:
        async with open_limits(Clock()) as limits:
            assert await limits.take([user], policy) == Allowance(3, 2, 1_000, 0)
            assert await limits.take([key, user], policy) == Allowance(3, 1, 2_000, 0), "of the one with least"
            assert await limits.take([key, user], policy) == Allowance(3, 0, 3_000, 0)
            for _ in range(3):
                assert await limits.take([key, user], policy) == Allowance(3, 0, 3_000, 1_001)
            assert await limits.take([key], policy) == Allowance(3, 0, 3_000, 0), "a refused call took nothing"

    asyncio.run(run())


def test_a_clock_that_goes_back_gives_nothing_away(open_limits: OpenLimits, unique: str) -> None:
    policy = RatePolicy(rate_per_s=1.0, burst=1)

    async def run() -> None:
        clock = Clock()
        async with open_limits(clock) as limits:
            assert (await limits.take([unique], policy)).is_granted
            clock.now_ms -= 10_000
            assert (await limits.take([unique], policy)).retry_after_ms == 11_001
            clock.now_ms += 11_001
            assert (await limits.take([unique], policy)).is_granted

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(3))
def test_redis_decides_as_memory_does(redis_url: str, unique: str, seed: int) -> None:
    chance = random.Random(seed)
    # So slow that no key ends by Redis's own clock meanwhile, whatever else the machine does; and without rounding: a
    # call in 8, 131 or 2,097 s.
    policy = RatePolicy(1_000 / chance.choice((2**13, 2**17, 2**21)), chance.choice((1, 7, 20)))

    async def run() -> None:
        clock = Clock()
        local = LocalRateLimits(clock)
        async with Redis.from_url(redis_url) as redis:
            shared = RedisRateLimits(redis, NobodyIsAsked(), RedisAvailability(redis), timeout_s=20.0, clock=clock)
            for _ in range(200):
                clock.now_ms += chance.choice((0, 0, 0, 3_000, 250_000, 4_000_000))
                owners = [f"{unique}-{one}" for one in chance.sample(range(3), chance.choice((1, 2)))]
                assert await shared.take(owners, policy) == await local.take(owners, policy)

    asyncio.run(run())


def test_instances_share_one_limit_by_the_clock_of_redis(redis_url: str, unique: str) -> None:
    policy = RatePolicy(rate_per_s=0.001, burst=50)

    async def run() -> None:
        async with Redis.from_url(redis_url) as redis:
            both = [RedisRateLimits(redis, NobodyIsAsked(), RedisAvailability(redis), timeout_s=20.0) for _ in range(2)]
            found = await asyncio.gather(*(both[call % 2].take([unique], policy) for call in range(120)))
            assert sum(one.is_granted for one in found) == 50
            (key,) = await redis.keys(f"*{unique}*")
            # Full again after 50,000 s; then there is nothing to remember.
            assert 49_000_000 < await redis.pttl(key) <= 50_000_000

    asyncio.run(run())


def test_a_key_of_somebody_else_is_no_reason_to_fail(redis_url: str, unique: str) -> None:
    policy = RatePolicy(rate_per_s=1.0, burst=1)

    async def run() -> None:
        async with Redis.from_url(redis_url) as redis:
            await redis.set(f"calls:{unique}", "mine", ex=60)
            limits = RedisRateLimits(redis, LocalRateLimits(Clock()), RedisAvailability(redis), timeout_s=20.0)
            found = [await limits.take([unique], policy) for _ in range(2)]
            assert [one.is_granted for one in found] == [True, False]
            assert not limits.available

    asyncio.run(run())


def test_commands_do_not_follow_each_other_faster_than_they_are_worth(redis_url: str, unique: str) -> None:
    async def run() -> None:
        async with Redis.from_url(redis_url) as redis:
            limits = RedisRateLimits(redis, NobodyIsAsked(), RedisAvailability(redis), timeout_s=20.0)
            began_s = monotonic()
            for _ in range(11):
                assert (await limits.take([unique], RatePolicy(1.0, 100))).is_granted
            # The event loop's timers are exact to a millisecond.
            assert monotonic() - began_s >= 10 * (PACE_S - 0.001)

    asyncio.run(run())


def test_calls_that_come_together_are_decided_one_after_the_other(redis_url: str, unique: str) -> None:
    """As memory decides them, however many go in one command, and whoever does not wait for the answer."""
    chance = random.Random(7)
    # So slow that no key ends by Redis's own clock meanwhile, whatever else the machine does.
    policies = (RatePolicy(0.01, 40), RatePolicy(0.05, 3))

    async def run() -> None:
        clock = Clock()
        local = LocalRateLimits(clock)
        async with Redis.from_url(redis_url) as redis:
            shared = RedisRateLimits(redis, NobodyIsAsked(), RedisAvailability(redis), timeout_s=20.0, clock=clock)
            for _ in range(5):
                clock.now_ms += 70_000
                asks = [
                    ([f"{unique}-{which}-{one}" for one in chance.sample(range(3), chance.choice((1, 2)))], which)
                    for which in (chance.randrange(2) for _ in range(MOST_CALLS + 20))
                ]
                found = await asyncio.gather(*(shared.take(owners, policies[which]) for owners, which in asks))
                assert found == [await local.take(owners, policies[which]) for owners, which in asks]
            calls = [asyncio.create_task(shared.take([f"{unique}-leaves"], policies[0])) for _ in range(10)]
            await asyncio.sleep(0)
            for call in calls[::2]:
                call.cancel()
            stayed = await asyncio.gather(*calls[1::2])
            assert [one.is_granted for one in stayed] == [True] * 5

    asyncio.run(run())


@pytest.mark.parametrize("fault", ["hang", "kill"])
def test_redis_stops_in_the_middle(own_redis: OwnRedis, unique: str, fault: str) -> None:
    """No call fails, hardly one waits, and the limits of the instance hold meanwhile."""
    policy = RatePolicy(rate_per_s=0.001, burst=10)

    async def run() -> None:
        spent_s: list[float] = []
        retry = Retry(NoBackoff(), 0)
        async with Redis.from_url(
            own_redis.url, socket_timeout=CLIENT_TIMEOUT_S, socket_connect_timeout=CLIENT_TIMEOUT_S, retry=retry
        ) as redis:
            watch = RedisAvailability(redis)
            # Generous, so that a busy machine is not taken for a Redis that hangs.
            limits = RedisRateLimits(redis, LocalRateLimits(Clock()), watch, timeout_s=2.0)

            async def granted(calls: int) -> int:
                count = 0
                for _ in range(calls):
                    begun = monotonic()
                    count += (await limits.take([unique], policy)).is_granted
                    spent_s.append(monotonic() - begun)
                return count

            def is_available() -> bool:
                return limits.available

            assert await granted(4) == 4
            assert is_available()
            own_redis.hang() if fault == "hang" else own_redis.kill()
            assert await granted(100) == 10, "the whole limit of this instance, and no more"
            assert not is_available()
            assert sum(one_s >= 2.0 for one_s in spent_s) <= 2, "a Redis that failed is left alone"
            own_redis.go_on() if fault == "hang" else own_redis.start()
            await eventually_async(lambda: watch.is_up, what="Redis")
            # It remembers the first four, one that died too; what a hanging one was sent it may have done later.
            again = await granted(20)
            assert is_available()
            assert again in ((5, 6) if fault == "hang" else (6,))
            await watch.close()

    asyncio.run(run())
