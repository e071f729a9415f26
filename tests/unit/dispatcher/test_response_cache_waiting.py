"""Equal requests wait for the first of them: who for whom, how long, and how many."""

import asyncio

import pytest

from fairlane.outcomes import CacheMode, Outcome
from fairlane.records import (
    CacheUse,
    CancelRequest,
    InferenceRequest,
    Parameters,
    SourceCoordinate,
    TenantSpec,
)
from stream_processors.dispatcher.response_cache.lookup import CacheHit, CacheQuery
from tests.kit.dispatcher_bench import PARTITION, Bench
from tests.kit.response_cache_kit import (
    answered_once,
    answers_of,
    asking,
    bytes_of,
    going,
    keep,
    replies,
    until,
    without_consumers,
    work,
)


def test_equal_requests_wait_for_the_first_and_are_answered_with_its_answer() -> None:
    bench = Bench()
    bench.report()

    def first_is_answered() -> None:
        keep(bench)
        answered_once(bench)

    going(
        bench,
        lambda: bench.write(0, bytes_of(asking(1))),
        lambda: bench.write(1, bytes_of(asking(2))),
        lambda: bench.write(2, bytes_of(asking(3, parameters=Parameters(9)))),
        bench.commit,
        first_is_answered,
    )
    assert [item.request.request_id for item in work(bench)] == [asking(1).request_id, asking(3).request_id]
    (reply,) = replies(bench)
    assert (reply.request_id, reply.source) == (asking(2).request_id, SourceCoordinate(*PARTITION, 1))


def test_when_the_first_leaves_no_answer_the_others_are_served_at_once() -> None:
    bench = Bench()
    bench.report(rate=100_000.0, tokens=100_000)

    async def soon() -> None:
        while len(work(bench)) < 3:
            await bench.decide()
            await asyncio.sleep(0.001)

    async def run() -> None:
        for offset in range(3):
            await bench.write(offset, bytes_of(asking(offset + 1)))
            await bench.decide()
        assert len(work(bench)) == 1
        bench.commit()
        answered_once(bench)
        await asyncio.wait_for(soon(), 5)
        assert len(bench.dispatcher.response_cache) == 0
        await bench.dispatcher.response_cache.close()

    asyncio.run(run())
    assert replies(bench) == []


@pytest.mark.parametrize("why", ["no cache", "no time", "long ago"])
def test_nobody_waits_for_what_brings_no_answer(why: str) -> None:
    bench = Bench()
    bench.report()

    async def run() -> None:
        await bench.write(0, bytes_of(asking(1)))
        await bench.decide()
        bench.kept.is_available = why != "no cache"
        await bench.write(1, bytes_of(asking(2, timeout_ms=1_000 if why == "no time" else None)))
        await bench.decide()
        if why == "long ago":
            assert len(work(bench)) == 1
            bench.now_ms += bench.dispatcher.response_cache.max_wait_ms + 1
            bench.dispatcher.response_cache.sweep()
        await until(bench, lambda: not bench.dispatcher.response_cache)
        await bench.dispatcher.response_cache.close()

    asyncio.run(run())
    assert answers_of(bench, 2) in ([], [Outcome.EXPIRED])
    assert len(work(bench)) == (1 if why == "long ago" else 2)


@pytest.mark.parametrize("how", ["expired", "cancelled"])
def test_what_ends_without_work_releases_those_who_wait_for_it(how: str) -> None:
    bench = without_consumers()

    async def run() -> None:
        await bench.write(0, bytes_of(asking(1)))
        await bench.decide()
        await bench.write(1, bytes_of(asking(2, timeout_ms=600_000)))
        await bench.decide()
        assert (len(bench.dispatcher.scheduler), len(bench.dispatcher.response_cache)) == (1, 1)
        if how == "expired":
            bench.now_ms += 61_000
            # Not by the clock: its end is what they wait for.
            bench.dispatcher.response_cache.max_wait_ms = 10**9
            bench.dispatcher.dispatch()
            bench.dispatcher._answer_late(bench.dispatcher.scheduler.take_late(bench.now_ms), bench.now_ms)
        else:
            await bench.write(2, bytes_of(CancelRequest(asking(1).request_id)))
        await bench.decide()
        bench.commit()
        await until(bench, lambda: not bench.dispatcher.response_cache)
        await bench.dispatcher.response_cache.close()

    asyncio.run(run())
    assert answers_of(bench, 1) == [Outcome.EXPIRED if how == "expired" else Outcome.CANCELLED]
    assert answers_of(bench, 2) == []
    assert len(bench.dispatcher.scheduler) == 1


def test_a_cancel_of_the_first_releases_those_who_wait_for_it_at_once() -> None:
    bench = without_consumers()
    bench.kept.hangs = asyncio.Event()

    async def run() -> None:
        await bench.write(0, bytes_of(asking(1)))
        await bench.decide()
        await bench.write(1, bytes_of(asking(2)))
        await bench.decide()
        await bench.write(2, bytes_of(CancelRequest(asking(1).request_id)))
        await bench.decide()
        await until(bench, lambda: not bench.dispatcher.response_cache)
        await bench.dispatcher.response_cache.close()

    asyncio.run(run())
    assert answers_of(bench, 1) == [Outcome.CANCELLED]
    assert (answers_of(bench, 2), len(bench.dispatcher.scheduler)) == ([], 1)


def test_an_answer_that_is_stored_a_moment_after_its_commit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.report()

    async def late(question: CacheQuery) -> CacheHit | None:
        bench.kept.finds += 1
        if bench.kept.finds == 3:
            keep(bench)
        answer = bench.kept.answers.get(question.key)
        return None if answer is None else CacheHit(answer, CacheUse(CacheMode.EXACT, answer.request_id, 1))

    async def run() -> None:
        monkeypatch.setattr(bench.kept, "find", late)
        await bench.write(0, bytes_of(asking(1)))
        await bench.decide()
        for number in (2, 3):
            await bench.write(number - 1, bytes_of(asking(number)))
        await bench.decide()
        bench.commit()
        answered_once(bench)
        await until(bench, lambda: len(replies(bench)) == 2)
        await bench.dispatcher.response_cache.close()

    asyncio.run(run())
    # The first looked once, and one of the others twice for both.
    assert bench.kept.finds == 3
    assert len(work(bench)) == 1


@pytest.mark.parametrize(
    "other",
    [
        asking(2, cache=CacheMode.SEMANTIC),
        asking(2, priority="high"),
        asking(2, priority="low"),
        asking(2, parameters=Parameters(9)),
    ],
    ids=["content with less", "more urgent", "less urgent", "another"],
)
def test_nobody_waits_for_what_is_not_its_equal(other: InferenceRequest) -> None:
    bench = Bench()
    bench.report(rate=100_000.0, tokens=100_000)
    going(bench, lambda: bench.write(0, bytes_of(asking(1))), lambda: bench.write(1, bytes_of(other)))
    topics = [out.topic for out in bench.transactions.outputs if out.topic.startswith("priority.")]
    assert len(topics) == 2


def test_nobody_waits_for_backfill() -> None:
    bench = Bench()
    bench.assign("backfill.acme")
    bench.report(rate=100_000.0, tokens=100_000)
    going(
        bench,
        lambda: bench.write(0, bytes_of(asking(1)), topic="backfill.acme"),
        lambda: bench.write(0, bytes_of(asking(2))),
    )
    assert len(work(bench)) == 2


@pytest.mark.parametrize("bound", ["max_held", "max_held_bytes", "max_leaders"])
def test_a_tenant_has_a_quarter_of_every_bound(bound: str) -> None:
    bench = Bench()
    bench.register([TenantSpec("acme"), TenantSpec("globex")])
    bench.assign("requests.globex")
    bench.report(rate=100_000.0, tokens=100_000)
    answers = bench.dispatcher.response_cache
    size = len(b"key" + bytes_of(asking(1)))
    setattr(answers, bound, 4 if bound != "max_held_bytes" else 4 * size + 3)

    async def run() -> None:
        bench.kept.hangs = asyncio.Event()
        for number in range(3):
            await bench.write(number, bytes_of(asking(number + 1, parameters=Parameters(number + 1))))
        await bench.decide()
        held = len(answers)
        assert held == (3 if bound == "max_leaders" else 1)
        assert len(answers._leaders) == 1
        await bench.write(0, bytes_of(asking(7)), topic="requests.globex")
        await bench.decide()
        assert (len(answers), len(answers._leaders)) == (held + 1, 2)
        bench.kept.hangs.set()
        await until(bench, lambda: not answers)
        await answers.close()
        assert answers._total_bytes == 0
        assert (answers._held, answers._bytes, answers._ids._by_id) == ({}, {}, {})

    asyncio.run(run())
    assert len(work(bench)) == 4


def test_a_leader_that_is_forgotten_late_takes_nobody_elses_place() -> None:
    """Its partition left and came back, and what stands there now leads as well."""
    bench = Bench()
    bench.report(rate=100_000.0, tokens=100_000)

    async def run() -> None:
        answers = bench.dispatcher.response_cache
        await bench.write(0, bytes_of(asking(1)))
        await bench.decide()
        bench.commit()
        answered_once(bench)
        bench.ownership.revoke(bench.partitions)
        await bench.dispatcher.on_revoked()
        bench.assign()
        await bench.write(0, bytes_of(asking(1, parameters=Parameters(7))))
        await bench.decide()
        (leader,) = [one for one in answers._leaders.values() if not one.ended.is_set()]
        await until(bench, lambda: len(answers._leaders) == 1)
        assert list(answers._led_by.values()) == [leader]
        answers.drop([leader.claim])
        await until(bench, lambda: not answers._led_by)
        assert (answers._leaders, answers._leading) == ({}, {})

    asyncio.run(run())
