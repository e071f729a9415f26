"""Requests that opted in are answered with what was answered before: once, and only with their own tenant's."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from fairlane import names
from fairlane.outcomes import CacheMode, Decision, Outcome
from fairlane.records import (
    CacheUse,
    CancelRequest,
    Parameters,
    SourceCoordinate,
    TenantSpec,
    TokenUsage,
)
from fairlane_server.caching.responses import response_key
from stream_processors.dispatcher.deduplication.duplicates import RecentResult
from tests.kit.dispatcher_bench import MODEL, NOW_MS, PARTITION, Bench
from tests.kit.response_cache_kit import (
    ANSWER,
    asking,
    bytes_of,
    going,
    keep,
    replies,
    work,
)


def test_a_kept_answer_is_given_again_in_one_settlement() -> None:
    bench = Bench()
    bench.report()
    keep(bench)
    settled = bench.run(bytes_of(asking(1)))
    assert [settlement.claim.offset for settlement in settled] == [0]
    (reply,) = replies(bench)
    assert (reply.request_id, reply.outcome) == (asking().request_id, Outcome.OK)
    assert (reply.output, reply.usage, reply.finish_reason) == (ANSWER.output, ANSWER.usage, "stop")
    assert reply.source == SourceCoordinate(*PARTITION, 0)
    assert reply.cache_use == CacheUse(CacheMode.EXACT, ANSWER.request_id, 1)
    (usage,) = bench.decoded(names.LEDGER_USAGE)
    assert usage.cached
    assert (usage.work, usage.cost_tokens, usage.engine_ms, usage.outcome) == (reply.source, 0, 0, Outcome.OK)
    (audit,) = bench.audit()
    assert (audit.decision, audit.request_id, audit.inputs["answer_of"]) == (
        Decision.CACHED,
        reply.request_id,
        ANSWER.request_id,
    )
    assert work(bench) == []
    assert len(bench.dispatcher.scheduler) == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"cache": None},
        {"cache": CacheMode.NONE},
        {"parameters": Parameters(4, temperature=0.5)},
        {"conversation_id": "c-1"},
        {"parameters": Parameters(5)},
    ],
    ids=["not asked for", "not wanted", "by chance", "a conversation", "another request"],
)
def test_what_has_no_answer_before_it_is_served(fields: dict[str, Any]) -> None:
    bench = Bench()
    bench.report()
    keep(bench)
    bench.run(bytes_of(asking(1, **fields)))
    assert len(work(bench)) == 1
    assert replies(bench) == []
    assert bench.decoded(names.LEDGER_USAGE) == []


def test_a_tenant_may_have_it_for_all_its_requests_and_a_request_without() -> None:
    bench = Bench()
    bench.register([TenantSpec("acme", cache=CacheMode.EXACT)])
    bench.report()
    keep(bench)
    bench.run(bytes_of(asking(1, cache=None)), bytes_of(asking(2, cache=CacheMode.NONE)))
    assert [reply.request_id for reply in replies(bench)] == [asking(1).request_id]
    assert [item.request.request_id for item in work(bench)] == [asking(2).request_id]
    assert [item.cache_answer for item in work(bench)] == [False]


def test_another_tenants_answer_is_none() -> None:
    bench = Bench()
    bench.report()
    keep(bench, "globex")
    bench.run(bytes_of(asking(1)))
    assert replies(bench) == []
    (item,) = work(bench)
    assert item.cache_answer


def test_what_cannot_be_given_again_is_answered_anew() -> None:
    bench = Bench()
    bench.report()
    key = response_key("acme", asking(), MODEL.version, None)
    assert key is not None
    bench.kept.answers[key] = replace(ANSWER, usage=TokenUsage(2**63, 3))
    bench.run(bytes_of(asking(1)))
    assert replies(bench) == []
    assert len(work(bench)) == 1


@pytest.mark.parametrize("change", ["version", "withdrawn", "bound"])
def test_an_answer_is_given_only_if_it_would_be_made_now(change: str) -> None:
    bench = Bench()
    bench.report()
    bench.kept.hangs = asyncio.Event()
    keep(bench)

    def changed() -> None:
        spec = TenantSpec("acme", max_prompt_tokens=6 if change == "bound" else None)
        models = {"version": [replace(MODEL, version="2")], "withdrawn": [replace(MODEL, model="others")]}
        bench.register([spec], models.get(change, [MODEL]))
        assert bench.kept.hangs is not None
        bench.kept.hangs.set()

    if change == "bound":
        bench.register([TenantSpec("acme", max_prompt_tokens=6)])
    going(bench, lambda: bench.write(0, bytes_of(asking(1))), changed)
    assert [reply.outcome for reply in replies(bench)] == ([Outcome.REJECTED] if change == "withdrawn" else [])
    assert len(work(bench)) == (0 if change == "withdrawn" else 1)


def test_an_id_that_is_sent_again_is_known_to_be_answered_or_under_way() -> None:
    bench = Bench()
    bench.report()
    keep(bench)
    bench.run(bytes_of(asking(1)))
    results = bench.dispatcher.response_cache.recent_results
    assert results.get(("acme", asking(1).request_id)) is None
    bench.commit()
    assert results.get(("acme", asking(1).request_id)) is RecentResult.ANSWERED

    waiting = Bench()
    waiting.kept.hangs = asyncio.Event()

    async def run() -> None:
        await waiting.write(0, bytes_of(asking(1)))
        await waiting.decide()
        assert waiting.dispatcher.deduplication._is_under_way(SourceCoordinate(*PARTITION, 0))
        await waiting.dispatcher.response_cache.close()

    asyncio.run(run())


def test_a_request_is_admitted_when_its_look_up_has_ended() -> None:
    bench = Bench()
    bench.report()
    bench.kept.hangs = asyncio.Event()

    def later() -> None:
        bench.now_ms += 300
        assert bench.kept.hangs is not None
        bench.kept.hangs.set()

    going(bench, lambda: bench.write(0, bytes_of(asking(1))), later)
    (item,) = work(bench)
    assert (item.submitted_at_ms, item.admitted_at_ms) == (NOW_MS, NOW_MS + 300)


def test_a_cancel_finds_what_is_looked_up() -> None:
    bench = Bench()
    bench.report()
    bench.kept.hangs = asyncio.Event()
    keep(bench)

    def open_it() -> None:
        assert bench.kept.hangs is not None
        bench.kept.hangs.set()

    going(
        bench,
        lambda: bench.write(0, bytes_of(asking(1))),
        lambda: bench.write(1, bytes_of(CancelRequest(asking(1).request_id))),
        open_it,
    )
    (reply,) = replies(bench)
    assert (reply.outcome, reply.source) == (Outcome.CANCELLED, SourceCoordinate(*PARTITION, 0))
    assert len(bench.dispatcher.response_cache) == 0


def test_what_moved_on_is_forgotten() -> None:
    bench = Bench()
    bench.report()
    bench.kept.hangs = asyncio.Event()
    keep(bench)

    async def revoke() -> None:
        bench.ownership.revoke(bench.partitions)
        await bench.dispatcher.on_revoked()
        assert bench.kept.hangs is not None
        bench.kept.hangs.set()

    going(bench, lambda: bench.write(0, bytes_of(asking(1))), revoke)
    assert bench.transactions.settlements == []
    assert len(bench.dispatcher.response_cache) == 0


def test_a_late_answer_is_none() -> None:
    bench = Bench()
    bench.report()
    bench.kept.hangs = asyncio.Event()
    keep(bench)

    def later() -> None:
        bench.now_ms += 2_000
        assert bench.kept.hangs is not None
        bench.kept.hangs.set()

    going(bench, lambda: bench.write(0, bytes_of(asking(1, timeout_ms=1_000))), later)
    (reply,) = replies(bench)
    assert reply.outcome == Outcome.EXPIRED


def test_beyond_the_bounds_requests_are_served_without_a_look() -> None:
    bench = Bench()
    bench.report(rate=100_000.0, tokens=100_000)
    bench.kept.hangs = asyncio.Event()
    bench.dispatcher.response_cache.max_held = 8
    keep(bench)

    async def write() -> None:
        for number in range(5):
            await bench.write(number, bytes_of(asking(number + 1)))

    going(bench, write)
    # A quarter of the room is one tenant's.
    assert bench.kept.finds == 1
    assert len(work(bench)) == 3


def test_a_broken_look_up_costs_the_look_up_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.report()

    async def broken(_question: object) -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(bench.kept, "find", broken)
    bench.run(bytes_of(asking(1)))
    assert len(work(bench)) == 1


def test_an_answer_of_another_model_version_is_not_asked_for() -> None:
    bench = Bench()
    bench.register([TenantSpec("acme")], [replace(MODEL, version="2")])
    bench.report()
    keep(bench)
    bench.run(bytes_of(asking(1)))
    assert replies(bench) == []
    assert len(work(bench)) == 1
