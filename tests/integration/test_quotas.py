"""One behaviour of quotas, whoever keeps them; and what becomes of it when Redis hangs or dies."""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from time import monotonic

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from deploy.local.ports import PortClaims
from fairlane.records import SourceCoordinate, TenantSpec
from fairlane_server.redis.availability import RedisAvailability
from fairlane_server.token_bucket import LONGEST_WAIT_MS
from stream_processors.dispatcher.admission.quotas import Charge, Exceeded, LocalQuotas, Quota, Quotas
from stream_processors.dispatcher.admission.redis_quotas import RedisQuotas
from tests.kit.nobody_is_asked import NobodyIsAsked
from tests.kit.own_redis import OwnRedis
from tests.kit.waiting import eventually_async

pytestmark = pytest.mark.broker

START_MS = 1_700_000_000_000
TIMEOUT_S = 0.25
CLIENT_TIMEOUT_S = 30.0
"""Of the connection: who waits as long was not left to the quotas' own."""


class Clock:
    def __init__(self) -> None:
        self.now_ms = START_MS

    def __call__(self) -> int:
        return self.now_ms


OpenQuotas = Callable[[Clock], AbstractAsyncContextManager[Quotas]]


@pytest.fixture(params=["local", "redis"])
def open_quotas(request: pytest.FixtureRequest) -> OpenQuotas:
    """Every implementation, with a clock of the test's."""

    @asynccontextmanager
    async def local(clock: Clock) -> AsyncIterator[Quotas]:
        yield LocalQuotas(clock)

    if request.param == "local":
        return local
    url: str = request.getfixturevalue("redis_url")

    @asynccontextmanager
    async def shared(clock: Clock) -> AsyncIterator[Quotas]:
        async with Redis.from_url(url) as redis:
            yield RedisQuotas(redis, NobodyIsAsked(), RedisAvailability(redis), clock, timeout_s=10.0)

    return shared


def ask(spec: TenantSpec, tokens: int = 1) -> Charge:
    return Charge(spec.tenant, spec, tokens)


def test_requests_have_a_burst_and_a_rate(open_quotas: OpenQuotas, unique: str) -> None:
    spec = TenantSpec(unique, requests_per_s=2.0, burst_requests=3)

    async def run() -> None:
        clock = Clock()
        async with open_quotas(clock) as quotas:
            refused = Exceeded(Quota.REQUESTS_PER_S, 501)
            assert await quotas.take([ask(spec)] * 5) == [None] * 3 + [refused] * 2
            clock.now_ms += 400
            (soon,) = await quotas.take([ask(spec)])
            assert soon is not None
            assert soon.retry_after_ms in {100, 101}
            clock.now_ms += soon.retry_after_ms
            assert (await quotas.take([ask(spec)] * 2)).count(None) == 1
            clock.now_ms += 3_600_000
            assert (await quotas.take([ask(spec)] * 5)).count(None) == 3, "no more than the burst after an idle hour"

    asyncio.run(run())


def test_all_or_nothing_per_ask(open_quotas: OpenQuotas, unique: str) -> None:
    spec = TenantSpec(unique, requests_per_s=1.0, burst_requests=3, tokens_per_minute=60, tokens_per_day=1_000)

    async def run() -> None:
        async with open_quotas(Clock()) as quotas:
            sizes = (50, 20, 61, 10, 0, 0)
            assert await quotas.take([ask(spec, size) for size in sizes]) == [
                None,
                Exceeded(Quota.TOKENS_PER_MINUTE, 10_001),
                Exceeded(Quota.TOKENS_PER_MINUTE, None),
                None,
                None,
                Exceeded(Quota.REQUESTS_PER_S, 1_001),
            ], "three requests: the refused ones took none of the burst"

    asyncio.run(run())


def test_a_wait_fits_where_it_is_told(open_quotas: OpenQuotas, unique: str) -> None:
    spec = TenantSpec(unique, requests_per_s=1e-20)

    async def run() -> list[Exceeded | None]:
        async with open_quotas(Clock()) as quotas:
            return await quotas.take([ask(spec), ask(spec)])

    assert asyncio.run(run()) == [None, Exceeded(Quota.REQUESTS_PER_S, LONGEST_WAIT_MS)]


def test_tenants_do_not_share(open_quotas: OpenQuotas, unique: str) -> None:
    first = TenantSpec(unique, tokens_per_minute=10)
    second = TenantSpec(f"{unique}-2", tokens_per_day=10)
    free = TenantSpec(f"{unique}-3")

    async def run() -> None:
        async with open_quotas(Clock()) as quotas:
            asks = [ask(first, 10), ask(free, 10**9), ask(second, 10), ask(first, 1), ask(second, 1), ask(free, 1)]
            assert [answer is None for answer in await quotas.take(asks)] == [True, True, True, False, False, True]
            assert await quotas.take([]) == []
            assert await quotas.take([ask(free, 10**9)]) == [None]

    asyncio.run(run())


def test_what_is_given_back_can_be_taken_again(open_quotas: OpenQuotas, unique: str) -> None:
    spec = TenantSpec(unique, requests_per_s=1.0, burst_requests=2, tokens_per_minute=60)

    async def run() -> None:
        async with open_quotas(Clock()) as quotas:
            assert await quotas.take([ask(spec, 30)] * 2) == [None, None]
            await quotas.give_back([ask(spec, 30), ask(TenantSpec(f"{unique}-2"), 5)])
            assert (await quotas.take([ask(spec, 30)] * 2)).count(None) == 1
            for _ in range(3):
                await quotas.give_back([ask(spec, 30)] * 2)
            assert (await quotas.take([ask(spec, 30)] * 5)).count(None) == 2, "no bucket gets more than full"
            await quotas.give_back([])

    asyncio.run(run())


def test_quotas_that_change_count_from_then_on(open_quotas: OpenQuotas, unique: str) -> None:
    async def run() -> None:
        async with open_quotas(Clock()) as quotas:
            wide, narrow = TenantSpec(unique, tokens_per_minute=600), TenantSpec(unique, tokens_per_minute=60)
            wider = TenantSpec(unique, tokens_per_minute=600, requests_per_s=1.0)
            assert await quotas.take([ask(wide, 500)]) == [None]
            assert await quotas.take([ask(narrow, 61)]) == [Exceeded(Quota.TOKENS_PER_MINUTE, None)]
            assert await quotas.take([ask(narrow, 60)]) == [None]
            assert await quotas.take([ask(wider, 1)]) == [Exceeded(Quota.TOKENS_PER_MINUTE, 101)]

    asyncio.run(run())


def test_a_clock_that_goes_back_gives_nothing_away(open_quotas: OpenQuotas, unique: str) -> None:
    spec = TenantSpec(unique, tokens_per_minute=60)

    async def run() -> None:
        clock = Clock()
        async with open_quotas(clock) as quotas:
            assert await quotas.take([ask(spec, 60)]) == [None]
            clock.now_ms -= 10_000
            assert await quotas.take([ask(spec, 1)]) == [Exceeded(Quota.TOKENS_PER_MINUTE, 11_001)]
            clock.now_ms += 11_001
            assert (await quotas.take([ask(spec, 1)] * 2)).count(None) == 1

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(5))
def test_redis_decides_as_memory_does(redis_url: str, unique: str, seed: int) -> None:
    chance = random.Random(seed)

    def spec_of(index: int) -> TenantSpec:
        return TenantSpec(
            f"{unique}-{index}",
            requests_per_s=chance.choice((None, 0.3, 5.0, 50.0)),
            burst_requests=chance.choice((None, 7)),
            tokens_per_minute=chance.choice((None, 60, 7_001)),
            tokens_per_day=chance.choice((None, 50_000)),
        )

    specs = [spec_of(index) for index in range(6)]
    offsets = itertools.count()

    async def run() -> None:
        clock = Clock()
        local = LocalQuotas(clock)
        async with Redis.from_url(redis_url) as redis:
            shared = RedisQuotas(redis, NobodyIsAsked(), RedisAvailability(redis), clock, timeout_s=10.0)
            for _ in range(60):
                clock.now_ms += chance.choice((0, 3, 250, 4_000))
                if chance.random() < 0.2:
                    changed = chance.randrange(6)
                    specs[changed] = spec_of(changed)
                asks = [ask(chance.choice(specs), chance.choice((0, 1, 40, 900))) for _ in range(12)]
                # Every other one is remembered by its record; that changes nothing for who asks once.
                asks[::2] = [
                    replace(one, record=SourceCoordinate("requests", 0, next(offsets)), until_ms=clock.now_ms)
                    for one in asks[::2]
                ]
                answers = await local.take(asks)
                assert await shared.take(asks) == answers
                granted = [one for one, answer in zip(asks, answers, strict=True) if answer is None]
                await local.give_back(granted[::3])
                await shared.give_back(granted[::3])

    asyncio.run(run())


def test_dispatchers_share_one_quota_by_the_clock_of_redis(redis_url: str, unique: str) -> None:
    spec = TenantSpec(unique, tokens_per_day=1_000)

    async def run() -> None:
        async with Redis.from_url(redis_url) as redis:
            both = [RedisQuotas(redis, NobodyIsAsked(), RedisAvailability(redis), timeout_s=10.0) for _ in range(2)]
            answers = await asyncio.gather(*(quotas.take([ask(spec, 10)] * 60) for quotas in both))
            assert sum(answer is None for answer in [*answers[0], *answers[1]]) == 100
            key = f"quota:{unique}"
            # It takes a day to be full again, and then there is nothing to remember.
            assert 86_300_000 < await redis.pttl(key) <= 86_400_000
            await both[0].give_back([ask(spec, 10)] * 101)
            assert not await redis.exists(key)

    asyncio.run(run())


def test_a_key_of_somebody_else_is_no_reason_to_fail(redis_url: str, unique: str) -> None:
    spec = TenantSpec(unique, tokens_per_minute=10)

    async def run() -> None:
        async with Redis.from_url(redis_url) as redis:
            await redis.set(f"quota:{unique}", "mine", ex=60)
            quotas = RedisQuotas(redis, LocalQuotas(Clock()), RedisAvailability(redis), timeout_s=10.0)
            assert [answer is None for answer in await quotas.take([ask(spec, 10)] * 2)] == [True, False]
            assert not quotas.available

    asyncio.run(run())


# --- Redis that stops in the middle


def client(url: str) -> "Redis":
    """As the dispatcher has it, but with time-outs so long that only those of the quotas count."""
    return Redis.from_url(
        url, socket_timeout=CLIENT_TIMEOUT_S, socket_connect_timeout=CLIENT_TIMEOUT_S, retry=Retry(NoBackoff(), 0)
    )


@pytest.mark.alone
@pytest.mark.parametrize("fault", ["hang", "kill"])
def test_redis_stops_in_the_middle(own_redis: OwnRedis, unique: str, fault: str) -> None:
    """No ask raises, none waits longer than the time-out, all but one do not wait, and local quotas hold meanwhile."""
    spec = TenantSpec(unique, tokens_per_day=100)

    async def run() -> None:
        spent_s: list[float] = []

        async def take(count: int) -> int:
            begun = monotonic()
            answers = await quotas.take([ask(spec, 10)] * count)
            spent_s.append(monotonic() - begun)
            return answers.count(None)

        async with client(own_redis.url) as redis:
            watch = RedisAvailability(redis)
            quotas = RedisQuotas(redis, LocalQuotas(Clock()), watch, timeout_s=TIMEOUT_S)

            def is_available() -> bool:
                return quotas.available

            assert await take(4) == 4
            assert is_available()

            own_redis.hang() if fault == "hang" else own_redis.kill()
            assert await take(6) == 6
            assert not is_available()
            assert max(spent_s) < CLIENT_TIMEOUT_S / 2
            spent_s.clear()
            assert [await take(1) for _ in range(200)] == [1] * 4 + [0] * 196, "the whole local quota, and no more"
            await quotas.give_back([ask(spec, 10)] * 2)
            assert await take(5) == 2
            assert await take(1) == 0
            assert not watch.is_up
            assert sum(one_s >= TIMEOUT_S for one_s in spent_s) <= 2, "a Redis that failed is left alone"

            own_redis.go_on() if fault == "hang" else own_redis.start()
            await eventually_async(lambda: watch.is_up, what="Redis")
            assert not is_available(), "not asked yet"
            granted = await take(20)
            assert is_available()
            assert max(spent_s) < CLIENT_TIMEOUT_S / 2
            # It remembers the first four, one that died too; what a hanging one was sent it may have done later.
            assert 0 <= granted <= 6 if fault == "hang" else granted == 6

    asyncio.run(run())


def test_giving_back_to_a_redis_that_hangs_waits_no_longer_than_the_timeout(own_redis: OwnRedis, unique: str) -> None:
    spec = TenantSpec(unique, tokens_per_day=100)

    async def run() -> None:
        async with client(own_redis.url) as redis:
            quotas = RedisQuotas(redis, LocalQuotas(Clock()), RedisAvailability(redis), timeout_s=TIMEOUT_S)
            assert await quotas.take([ask(spec, 10)]) == [None]
            own_redis.hang()
            begun = monotonic()
            await quotas.give_back([ask(spec, 10)])
            assert monotonic() - begun < CLIENT_TIMEOUT_S / 2
            own_redis.go_on()

    asyncio.run(run())


def test_there_never_was_a_redis(unique: str) -> None:
    spec = TenantSpec(unique, tokens_per_day=100)

    async def run() -> None:
        ports = PortClaims()
        port = ports.take("nobody")
        async with client(f"redis://127.0.0.1:{port}/0") as redis:
            quotas = RedisQuotas(redis, LocalQuotas(Clock()), RedisAvailability(redis), timeout_s=TIMEOUT_S)
            assert (await quotas.take([ask(spec, 10)] * 20)).count(None) == 10
            assert not quotas.available
        ports.close()

    asyncio.run(run())
