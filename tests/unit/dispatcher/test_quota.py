"""Backfill is never refused for a quota: its rate follows the quota, within what had been fetched already."""

import asyncio
from time import monotonic

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.outcomes import Code
from fairlane.ownership import Claim, PartitionId
from fairlane.records import TenantSpec
from stream_processors.dispatcher.admission.quota_charges import BackfillDebts
from stream_processors.dispatcher.admission.quotas import Charge, LocalQuotas
from tests.kit.dispatcher_bench import PARTITION, Bench, encoded, request

BACKFILL = PartitionId("backfill.acme", 0)
START_MS = 1_000_000
FETCHED = 200
UPKEEP_MS = 200
COST_TOKENS = 13
"""Of the bench's request."""


class Reading:
    """A backlog of backfill that is read, as many at a time as a fetch brings, whenever its partition is not paused."""

    def __init__(self, spec: TenantSpec) -> None:
        self.bench = Bench(max_undecided=100_000, max_span=20_000, max_queue_size=1_000_000)
        self.bench.assign(BACKFILL.topic)
        self.bench.register([spec])
        self.read = 0
        self.left = 0

    async def pass_time(self, rounds: int, online_each: int = 0) -> None:
        """So many turns of the upkeep. What is let in leaves at once."""
        online = 0
        for _ in range(rounds):
            await self.bench.dispatcher.pay_debts()
            if BACKFILL not in self.bench.dispatcher.paused_backfill():
                for _ in range(FETCHED):
                    await self.bench.write(self.read, encoded(self.read), topic=BACKFILL.topic)
                    self.read += 1
            for _ in range(online_each):
                await self.bench.write(online, encoded(1_000_000 + online), topic=PARTITION.topic)
                online += 1
            await self.bench.decide()
            scheduler = self.bench.dispatcher.scheduler
            self.left += len(scheduler.discard(scheduler.claims()))
            self.bench.now_ms += UPKEEP_MS

    def refused(self) -> list[str]:
        return [reply.code for reply in self.bench.decoded("replies.acme")]

    def taken(self) -> int:
        """What was let in: sent on, or waiting until it left."""
        return self.left + len(self.bench.decoded("priority.pool.normal"))


@pytest.mark.parametrize(
    ("spec", "per_s", "burst"),
    [
        (TenantSpec("acme", requests_per_s=50.0), 50.0, 50.0),
        (TenantSpec("acme", requests_per_s=10.0, burst_requests=100), 10.0, 100.0),
        (TenantSpec("acme", tokens_per_minute=60 * 50 * COST_TOKENS), 50.0, 3_000.0),
    ],
    ids=["requests", "burst", "tokens"],
)
def test_the_rate_of_backfill_follows_the_quota(spec: TenantSpec, per_s: float, burst: float) -> None:
    reading = Reading(spec)
    for seconds in (20, 40, 60):
        asyncio.run(reading.pass_time(20 * 1_000 // UPKEEP_MS))
        assert reading.taken() == reading.read, "all that was read is let in"
        assert reading.read <= per_s * seconds + burst + FETCHED
        assert reading.read >= 0.9 * (per_s * seconds + burst) - FETCHED
    assert not reading.refused()


def test_online_requests_and_backfill_share_the_quota() -> None:
    reading = Reading(TenantSpec("acme", requests_per_s=50.0))
    asyncio.run(reading.pass_time(200, online_each=4))
    refused = reading.refused()
    assert set(refused) == {Code.QUOTA_EXCEEDED}
    assert len(refused) + reading.taken() == reading.read + 800
    assert reading.taken() <= 50 * 40 + 50 + FETCHED


def test_backfill_that_its_quota_never_allows_is_refused() -> None:
    reading = Reading(TenantSpec("acme", tokens_per_minute=COST_TOKENS - 1))
    asyncio.run(reading.pass_time(1))
    assert reading.refused() == [Code.QUOTA_EXCEEDED] * FETCHED
    assert not reading.bench.dispatcher.paused_backfill()


@pytest.mark.parametrize("spec", [TenantSpec("acme"), TenantSpec("acme", tokens_per_day=COST_TOKENS - 1)])
def test_a_quota_that_changes_leaves_nobody_paused_for_ever(spec: TenantSpec) -> None:
    """One that is gone, and one below what is owed, which could never be paid."""
    reading = Reading(TenantSpec("acme", tokens_per_day=COST_TOKENS))
    asyncio.run(reading.pass_time(1))
    assert reading.bench.dispatcher.paused_backfill() == {BACKFILL}
    reading.bench.register([spec])
    reading.bench.now_ms += 86_400_000 * FETCHED
    asyncio.run(reading.bench.dispatcher.pay_debts())
    assert not reading.bench.dispatcher.paused_backfill()


def test_what_moves_on_owes_nothing_and_is_given_nothing_back() -> None:
    bench = Bench()
    bench.assign(BACKFILL.topic)
    bench.register([TenantSpec("acme", requests_per_s=1.0)])
    one, other = (bench.queued(request(number), BACKFILL.topic) for number in (1, 2))
    granted, exceeded = asyncio.run(bench.charges.charge([one, other]))
    assert granted is None
    bench.admission.decide(other, exceeded, bench.now_ms)
    assert bench.dispatcher.paused_backfill() == {BACKFILL}
    asyncio.run(bench.charges.refund([other]))
    assert not bench.dispatcher.paused_backfill()
    assert asyncio.run(bench.charges.charge([other])) != [None]


def test_a_small_burst_is_paid_for_as_fast_as_a_large_one() -> None:
    """By the dispatcher's own clock, and the real one: a bucket of one is full again every 10 ms."""
    spec = TenantSpec("acme", requests_per_s=100.0, burst_requests=1)
    reading = Reading(spec)

    async def run() -> None:
        began = monotonic()
        reading.bench.dispatcher.clock = lambda: START_MS + round(1_000 * (monotonic() - began))
        reading.bench.charges.quotas = LocalQuotas(reading.bench.dispatcher.clock)
        intake = asyncio.create_task(reading.bench.dispatcher.run())
        for offset in range(60):
            await reading.bench.write(offset, encoded(offset), topic=BACKFILL.topic)
        async with asyncio.timeout(10):
            while not reading.bench.dispatcher.paused_backfill():
                await asyncio.sleep(0)
            resumed = asyncio.Event()
            reading.bench.dispatcher.on_backfill = resumed.set
            await resumed.wait()
        assert not reading.bench.dispatcher.paused_backfill()
        assert 0.59 <= monotonic() - began < 5
        intake.cancel()
        await asyncio.gather(intake, return_exceptions=True)

    asyncio.run(run())


CLAIMS = st.builds(Claim, st.just(BACKFILL), st.integers(0, 20), st.just(1))
STEPS = st.tuples(st.sampled_from(("owe", "settle", "postpone")), st.sampled_from("ab"), CLAIMS, st.integers(0, 50))


@given(st.lists(STEPS, max_size=60))
def test_a_tenant_is_remembered_while_it_owes(steps: list[tuple[str, str, Claim, int]]) -> None:
    debts, owed = BackfillDebts(), set[tuple[str, Claim]]()
    for what, tenant, claim, number in steps:
        if what == "owe":
            debts.owe(claim, Charge(tenant, TenantSpec(tenant), number), number)
            owed.add((tenant, claim))
        elif what == "settle":
            assert debts.settle(tenant, claim) == ((tenant, claim) in owed)
            owed.discard((tenant, claim))
        else:
            debts.postpone(tenant, number)
        assert debts.tenants() == {tenant for tenant, _ in owed}
        assert (debts.next_due_ms() is None) == (not owed)
        assert {(ask.tenant, claim) for claim, ask in debts.due(50, 100)} == owed
        assert len(list(debts.due(50, 1))) == len(debts.tenants())
