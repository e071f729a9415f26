"""Waiting for a turn that is not recorded yet: it takes no place, no turns are read for it, and not without end."""

import asyncio
import time
from typing import Any

import pytest

from fairlane.outcomes import HistoryReason
from fairlane.records import Retrieval, TenantSpec, WorkItem
from fairlane_server.circuit_breaker import BreakerPolicy
from stream_processors.dispatcher.enrichment.concurrency_limiter import (
    FairConcurrencyLimiter,
    NoPermitError,
    Urgency,
)
from stream_processors.dispatcher.enrichment.context import ReadHistory
from stream_processors.dispatcher.enrichment.history import HistoryReader
from tests.kit.dispatcher_bench import Bench, encoded
from tests.kit.fake_passages import collection
from tests.kit.fake_turns import FakeTurns, turn, turn_id
from tests.kit.waiting import eventually_async

BUDGET_S = 0.5
MISSING = turn_id(99)
FAILURES = BreakerPolicy().failures


def talked() -> FakeTurns:
    turns = FakeTurns()
    for tenant in ("acme", "globex"):
        turns.add(tenant, "talk", turn(1), turn(2))
    return turns


async def remember(
    reader: HistoryReader, after: str | None = MISSING, tenant: str = "acme", budget_s: float = BUDGET_S, **more: Any
) -> ReadHistory:
    return await reader.read(tenant, "talk", after, 1_000, budget_s, lambda: True, **more)


def test_turns_are_read_once_however_often_it_is_asked_whether_one_is_there() -> None:
    turns = talked()
    turns.coming = [("acme", "talk", turn(number)) for number in (3, 4, 5)]
    reader = HistoryReader(turns, lambda: 1_000)
    came = asyncio.run(remember(reader, turn_id(5), budget_s=30))
    assert (came.reason, len(came.turns.turns), turns.reads) == (None, 5, 1)
    asks = len(turns.asked)
    assert asks == 4
    behind = asyncio.run(remember(reader))
    assert (behind.reason, len(behind.turns.turns), turns.reads) == (HistoryReason.BEHIND, 5, 2)
    assert len(turns.asked) > asks + 1


def test_no_turn_is_waited_for_longer_than_its_askers_patience() -> None:
    started = time.monotonic()
    found = asyncio.run(remember(HistoryReader(talked(), lambda: 1_000), budget_s=30.0, max_wait_s=0.1))
    assert time.monotonic() - started < 10
    assert (found.reason, len(found.turns.turns)) == (HistoryReason.BEHIND, 2)


def test_a_tenant_whose_turns_do_not_come_is_not_waited_for_for_a_while() -> None:
    turns = talked()
    now_ms = 1_000
    reader = HistoryReader(turns, lambda: now_ms)

    async def asks(after: str = MISSING, tenant: str = "acme", budget_s: float = 0.05) -> int:
        before = len(turns.asked)
        found = await remember(reader, after, tenant, budget_s)
        assert len(found.turns.turns) >= 2
        assert (found.reason is None) == (after != MISSING)
        return len(turns.asked) - before

    async def run() -> None:
        nonlocal now_ms
        for _ in range(FAILURES):
            assert await asks() > 1
        # It has what there is at once; nobody else is told from it.
        assert await asks() == 1
        assert await asks(tenant="globex") > 1
        # Another try, and only one, and a longer rest.
        now_ms += 250
        assert await asks() > 1
        assert await asks() == 1
        # One that comes in time: the tenant is waited for as before.
        now_ms += 2_000
        turns.coming = [("acme", "talk", turn(number)) for number in (3, 4)]
        assert await asks(turn_id(4), budget_s=30) == 3
        assert await asks() > 1
        assert await asks() > 1

    asyncio.run(run())


def test_who_had_hardly_time_to_wait_and_who_gives_up_say_nothing_about_the_others() -> None:
    turns = talked()
    reader = HistoryReader(turns, lambda: 1_000)

    async def run() -> None:
        for _ in range(FAILURES):
            await remember(reader, budget_s=0.02, max_wait_s=0.2)
        for _ in range(FAILURES):
            turns.asked.clear()
            waiting = asyncio.create_task(remember(reader, budget_s=30))
            await eventually_async(lambda: len(turns.asked) > 1)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        turns.asked.clear()
        await remember(reader)
        assert len(turns.asked) > 1

    asyncio.run(run())


def test_that_a_turn_is_not_there_does_not_show_that_turns_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = talked()
    reader = HistoryReader(turns, lambda: 1_000)

    async def late(*_: object) -> None:
        turns.reads += 1
        raise TimeoutError

    monkeypatch.setattr(turns, "turns", late)

    async def run() -> None:
        for _ in range(FAILURES):
            assert (await remember(reader, budget_s=0.05)).reason == HistoryReason.LATE
        assert turns.reads == FAILURES
        assert (await remember(reader, budget_s=0.05)).reason == HistoryReason.UNAVAILABLE
        assert turns.reads == FAILURES

    asyncio.run(run())


def decided(bench: Bench, *written: tuple[str, bytes]) -> list[WorkItem]:
    """What becomes of these, in the order in which it does."""

    def work() -> list[WorkItem]:
        return [item for level in ("normal", "low") for item in bench.decoded(f"priority.pool.{level}")]

    async def run() -> None:
        for offset, (topic, value) in enumerate(written):
            await bench.write(offset, value, topic=topic)
        running = asyncio.create_task(bench.dispatcher.run())
        await bench.eventually(lambda: len(work()) == len(written))
        running.cancel()

    asyncio.run(run())
    return work()


def given(number: int, **fields: Any) -> bytes:
    return encoded(number, **{"conversation_id": "talk", **fields})


def made_bench(budget_ms: int) -> Bench:
    bench = Bench(retrieval_budget_ms=budget_ms)
    bench.register([TenantSpec("acme"), TenantSpec("globex")])
    bench.assign("requests.globex")
    bench.turns.conversations = talked().conversations
    bench.passages.add(collection())
    bench.dispatcher.enrichment.limiter.limit = 1
    return bench


def test_who_waits_for_a_turn_keeps_nobody_else_waiting() -> None:
    bench = made_bench(500)
    waits, goes_on = given(1, conversation_after=MISSING), given(2)
    items = decided(bench, ("requests.acme", waits), ("requests.globex", goes_on))
    uses = [(item.tenant, item.history_use and item.history_use.reason) for item in items]
    assert uses == [("globex", None), ("acme", HistoryReason.BEHIND)]
    assert len(bench.dispatcher.enrichment.limiter) == 0


def test_backfill_waits_no_longer_for_a_turn_than_others() -> None:
    bench = made_bench(200)
    bench.assign("backfill.acme")
    started = time.monotonic()
    (item,) = decided(bench, ("backfill.acme", given(1, conversation_after=MISSING)))
    # Its whole budget is 4 s.
    assert time.monotonic() - started < 2
    assert item.history_use is not None
    assert (item.history_use.reason, len(item.history)) == (HistoryReason.BEHIND, 4)


def test_it_asks_in_the_place_that_its_own_search_holds() -> None:
    bench = made_bench(300)
    bench.passages.hangs = True
    wanted = given(1, conversation_after=turn_id(3), retrieval=Retrieval("handbook", 2))
    bench.turns.coming = [("acme", "talk", turn(3))]
    (item,) = decided(bench, ("requests.acme", wanted))
    assert item.history_use is not None
    assert item.retrieval_use is not None
    assert (item.history_use.reason, item.retrieval_use.reason) == (None, "late")
    assert len(bench.dispatcher.enrichment.limiter) == 0


def test_a_place_is_shared_given_back_and_taken_again() -> None:
    async def run() -> None:
        limiter = FairConcurrencyLimiter(1, 1)
        place = limiter.permit("acme", Urgency.TURN_NORMAL)
        place.queries = 2
        now_s = asyncio.get_running_loop().time()
        async with place.asking(now_s):
            pass
        assert len(limiter) == 1, "the other question has not begun"
        async with place.asking(now_s), place.asking(now_s):
            assert len(limiter) == 1
        assert len(limiter) == 0
        other = limiter.permit("globex", Urgency.WAITS)
        with pytest.raises(NoPermitError):
            async with place.asking(now_s + 0.01):
                pass
        asks = asyncio.create_task(place.asking(now_s + 60).__aenter__())
        await asyncio.sleep(0)
        asks.cancel()
        await asyncio.gather(asks, return_exceptions=True)
        limiter.leave(other)
        assert len(limiter) == 0
        async with place.asking(now_s + 60):
            assert len(limiter) == 1
            limiter.leave(place)
            limiter.leave(place)
            assert len(limiter) == 0
        assert len(limiter) == 0

    asyncio.run(run())
