"""What a record was granted is remembered in Redis: read again after a crash or a rebalance, it takes nothing more."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from time import monotonic

import pytest
from redis.asyncio import Redis

from deploy.local.ports import PortClaims
from fairlane.clock import ClockMs, now_ms
from fairlane.outcomes import Code
from fairlane.records import SourceCoordinate, TenantSpec
from fairlane_server.redis.availability import RedisAvailability
from stream_processors.dispatcher.admission.quotas import Charge, LocalQuotas
from stream_processors.dispatcher.admission.redis_quotas import RedisQuotas
from tests.kit.dispatcher_bench import NOW_MS, Bench, encoded
from tests.kit.nobody_is_asked import NobodyIsAsked

pytestmark = pytest.mark.broker

COST_TOKENS = 13
"""Of the bench's request."""


@asynccontextmanager
async def dispatchers(
    url: str, clock: ClockMs | None = None
) -> AsyncIterator[tuple[RedisQuotas, RedisQuotas, "Redis"]]:
    """The quotas of one dispatcher, of the one that comes after it, and what both are kept in."""
    async with Redis.from_url(url) as redis:
        first, second = (
            RedisQuotas(redis, NobodyIsAsked(), RedisAvailability(redis), clock, timeout_s=10.0) for _ in range(2)
        )
        yield first, second, redis


def ask(spec: TenantSpec, offset: int, tokens: int = 10, within_ms: int = 60_000) -> Charge:
    record = SourceCoordinate(f"requests.{spec.tenant}", 0, offset)
    return Charge(spec.tenant, spec, tokens, record, now_ms() + within_ms)


async def left(quotas: RedisQuotas, spec: TenantSpec) -> int:
    """How many tokens the quota still grants. Takes none of them."""
    one = Charge(spec.tenant, spec, 1)
    granted = (await quotas.take([one] * 200)).count(None)
    await quotas.give_back([one] * granted)
    return granted


def on_redis(url: str, unique: str, story: Callable[[RedisQuotas, RedisQuotas, TenantSpec], Awaitable[None]]) -> None:
    async def run() -> None:
        async with dispatchers(url) as (first, second, _):
            await story(first, second, TenantSpec(unique, tokens_per_day=100))

    asyncio.run(run())


def test_a_record_that_is_read_again_takes_nothing_more(redis_url: str, unique: str) -> None:
    async def story(first: RedisQuotas, second: RedisQuotas, spec: TenantSpec) -> None:
        asks = [ask(spec, offset) for offset in range(10)]
        assert await first.take(asks) == [None] * 10
        # Its estimate may be another one by now.
        again = [ask(spec, offset, tokens=99) for offset in range(10)]
        assert await second.take(again) == [None] * 10
        assert await left(second, spec) == 0
        assert await second.take([ask(spec, 10)]) != [None], "another record is another matter"

    on_redis(redis_url, unique, story)


def test_a_refused_record_is_asked_for_anew(redis_url: str, unique: str) -> None:
    async def story(first: RedisQuotas, second: RedisQuotas, spec: TenantSpec) -> None:
        assert [answer is None for answer in await first.take([ask(spec, 0, 95), ask(spec, 1)])] == [True, False]
        assert await second.take([ask(spec, 1)]) != [None]
        await second.give_back([ask(spec, 0)])
        assert await second.take([ask(spec, 1)]) == [None]
        assert await left(second, spec) == 90

    on_redis(redis_url, unique, story)


def test_what_is_given_back_is_what_was_taken_and_may_be_taken_again(redis_url: str, unique: str) -> None:
    async def story(first: RedisQuotas, second: RedisQuotas, spec: TenantSpec) -> None:
        assert await first.take([ask(spec, 0, 40), ask(spec, 1, 30)]) == [None, None]
        await second.give_back([ask(spec, 0, 7)])
        assert await left(second, spec) == 70
        await second.give_back([ask(spec, 0, 7)])
        await second.give_back([ask(spec, 2, 7)])
        assert await left(second, spec) == 70, "once, and only what was taken"
        assert await first.take([ask(spec, 0, 50)]) == [None]
        assert await left(first, spec) == 20

    on_redis(redis_url, unique, story)


def test_what_is_handed_over_stays_granted(redis_url: str, unique: str) -> None:
    async def story(first: RedisQuotas, second: RedisQuotas, spec: TenantSpec) -> None:
        assert await first.take([ask(spec, 0, 100)]) == [None]
        await first.hand_over([ask(spec, 0, 100)])
        assert await second.take([ask(spec, 0, 100)]) == [None]
        assert await left(second, spec) == 0

    on_redis(redis_url, unique, story)


def test_a_grant_is_remembered_until_the_deadline_and_a_while_longer(redis_url: str, unique: str) -> None:
    spec = TenantSpec(unique, tokens_per_day=100)

    async def run() -> None:
        async with dispatchers(redis_url) as (quotas, _, redis):
            await quotas.take([ask(spec, 0, within_ms=30_000), ask(spec, 1, within_ms=-600_000), ask(spec, 2, 1_000)])
            keys = [f"granted:{unique}:requests.{unique}|0|{offset}" for offset in range(3)]
            assert 60_000 < await redis.pttl(keys[0]) <= 90_000
            # Nobody asks for what is long over; a refused one is not remembered at all.
            assert await redis.pttl(keys[1]) <= 1
            assert not await redis.exists(keys[2])

    asyncio.run(run())


def test_without_redis_the_next_reader_asks_its_own_quotas(unique: str) -> None:
    spec = TenantSpec(unique, tokens_per_day=100)

    async def run() -> None:
        ports = PortClaims()
        async with Redis.from_url(f"redis://127.0.0.1:{ports.take('nobody')}/0") as redis:
            quotas = RedisQuotas(redis, LocalQuotas(now_ms), RedisAvailability(redis))
            assert await quotas.take([ask(spec, 0, 100)]) == [None]
            await quotas.hand_over([ask(spec, 0, 100)])
            assert await quotas.take([ask(spec, 0, 100)]) == [None]
        ports.close()

    asyncio.run(run())


# --- Dispatchers that come after one another


class Successive(Bench):
    """A dispatcher of one tenant with quotas, whose consumers are all gone: what is accepted waits."""

    def __init__(self, spec: TenantSpec, quotas: RedisQuotas) -> None:
        super().__init__()
        self.tenant = spec.tenant
        self.assign(f"requests.{self.tenant}", f"backfill.{self.tenant}")
        self.register([spec])
        self.report()
        self.report(draining=True)
        self.charges.quotas = quotas

    async def reads(self, count: int, topic: str = "requests") -> None:
        """Records 0, 1, 2, … of the tenant, until all were decided."""
        for offset in range(count):
            await self.write(offset, encoded(offset), topic=f"{topic}.{self.tenant}")

        async def decided() -> bool:
            return len(self.audit()) >= count

        await self.run_until(decided)

    async def run_until(self, done: Callable[[], Awaitable[bool]]) -> None:
        task = asyncio.create_task(self.dispatcher.run())
        give_up_at = monotonic() + 10
        try:
            while not await done():
                assert monotonic() < give_up_at
                await asyncio.sleep(0.005)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def waiting(self) -> list[int]:
        return sorted(claim.offset for claim in self.dispatcher.scheduler.claims())


@pytest.mark.parametrize("end", ["killed", "revoked"])
def test_what_was_accepted_is_accepted_by_the_next_reader(redis_url: str, unique: str, end: str) -> None:
    """Even if it is more by now than the quota could ever hold."""
    spec = TenantSpec(unique, requests_per_s=0.001, burst_requests=20)
    narrower = TenantSpec(unique, requests_per_s=0.001, burst_requests=5)

    async def run() -> None:
        async with dispatchers(redis_url, lambda: NOW_MS) as (first, second, _):
            one = Successive(spec, first)
            await one.reads(20)
            assert one.waiting() == list(range(20))
            if end == "revoked":
                one.ownership.revoke_all()
                await one.dispatcher.on_revoked()
            other = Successive(narrower, second)
            await other.reads(21)
            assert other.waiting() == list(range(20))
            (refused,) = other.decoded(f"replies.{unique}")
            assert refused.code == Code.QUOTA_EXCEEDED, "nothing was given away either"

    asyncio.run(run())


def test_what_expires_at_the_next_reader_is_given_back(redis_url: str, unique: str) -> None:
    spec = TenantSpec(unique, tokens_per_day=10 * COST_TOKENS)

    async def run() -> None:
        async with dispatchers(redis_url, lambda: NOW_MS) as (first, second, _):
            await Successive(spec, first).reads(10)
            assert await left(first, spec) == 0
            other = Successive(spec, second)
            await other.reads(10)
            other.now_ms += 1_000_000
            other.dispatcher.sweep()

            async def is_whole() -> bool:
                return await left(second, spec) == 10 * COST_TOKENS

            await other.run_until(is_whole)

    asyncio.run(run())


def test_a_debt_is_paid_once(redis_url: str, unique: str) -> None:
    spec = TenantSpec(unique, tokens_per_day=2 * COST_TOKENS)
    at_ms = NOW_MS

    async def run() -> None:
        nonlocal at_ms
        async with dispatchers(redis_url, lambda: at_ms) as (first, second, _):
            one = Successive(spec, first)
            await one.reads(4, "backfill")
            assert one.charges.debts.tenants() == {unique}
            at_ms += 86_400_000
            one.now_ms = at_ms
            await one.dispatcher.pay_debts()
            assert not one.charges.debts.tenants()
            assert await left(first, spec) == 0
            other = Successive(spec, second)
            await other.reads(4, "backfill")
            assert other.waiting() == [0, 1, 2, 3]
            assert not other.charges.debts.tenants()

    asyncio.run(run())
