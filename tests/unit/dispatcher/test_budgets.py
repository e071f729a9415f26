"""Budgets in the dispatcher's pipeline: refusals, notices, degradation, reservations."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from fairlane import headers, names
from fairlane.outcomes import Code, Degradation, Outcome
from fairlane.records import (
    Budget,
    BudgetNotice,
    Cost,
    InferenceReply,
    ModelPrices,
    Price,
    SourceCoordinate,
    TenantSpec,
    UsageEvent,
    WorkItem,
)
from fairlane_server.budgets.budgets import CLOCKS_WITHIN_MS
from fairlane_server.costs.price_book import PriceBook
from stream_processors.dispatcher.budgets.accounts import Spending
from stream_processors.dispatcher.budgets.ledger import GRACE_MS, ReadUsage, SpendingBase
from stream_processors.dispatcher.budgets.reservations import MISSED_AFTER_MS
from stream_processors.dispatcher.feedback.work_records import (
    FeedEvent,
    UsageRead,
    UsageStarted,
    WorkSeen,
    dispatched_from,
)
from stream_processors.dispatcher.queued_request import Candidate, ReceivedRecord
from stream_processors.dispatcher.scheduling.in_flight import WorkId
from tests.kit.cpu_time import cpu_time
from tests.kit.dispatcher_bench import MODEL, NOW_MS, PARTITION, Bench, encoded, handed_back, request
from tests.kit.response_cache_kit import asking, bytes_of, keep, replies

DAY_MS = 86_400_000
UNIT = 10**9
# 1 nano for each token. The prompt of the tests has 5 tokens, the answer at most 4.
PRICE = Price(0, None, input_nanos=10**6, output_nanos=10**6, cached_answer_nanos=50)
PRICES = [ModelPrices("words", "XTS", (PRICE,)), ModelPrices("few-words", "XTS", (PRICE,))]
ESTIMATE = 9
HARD = Budget("tenant", "day", "XTS", hard_nanos=100)
SOFT = Budget("tenant", "day", "XTS", soft_nanos=0, degrade=True)
WITH_SMALLER = replace(MODEL, smaller_model="few-words")
SMALLER = replace(MODEL, model="few-words", pool="small-pool")


def bench_with(*budgets: Budget, spent: Sequence[Spending] = (), known: bool = True, **spec: Any) -> Bench:
    bench = Bench()
    bench.prices = PriceBook(PRICES)
    bench.report()
    bench.dispatcher.updates.learn([UsageStarted(0, 0)])
    bench.register([TenantSpec("acme", budgets=budgets, **spec)], [WITH_SMALLER, SMALLER])
    if known:
        assert bench.dispatcher.output.budgets.ledger.load("acme", SpendingBase({}, spent), NOW_MS)
    return bench


def spent(nanos: int) -> list[Spending]:
    return [Spending(None, 0, nanos)]


def reserved(bench: Bench) -> tuple[int, int]:
    (load,) = bench.dispatcher.output.budgets.loads()
    return load.queued_nanos, load.in_flight_nanos


def work(bench: Bench, priority: str = "normal", pool: str = "pool") -> list[WorkItem]:
    return bench.decoded(names.priority_topic(pool, priority))


def refused(bench: Bench) -> InferenceReply:
    (reply,) = replies(bench)
    assert reply.outcome == Outcome.REJECTED
    return reply


def test_a_request_beyond_a_hard_budget_is_refused_until_it_renews() -> None:
    bench = bench_with(HARD, spent=spent(92))
    bench.run(encoded())
    reply = refused(bench)
    assert reply.code == Code.INSUFFICIENT_QUOTA
    assert reply.retry_after_ms is not None
    assert 0 <= reply.retry_after_ms - (DAY_MS - NOW_MS) - CLOCKS_WITHIN_MS <= 10_000
    assert reply.message == (
        "the day budget of the tenant is used up: 0.000000092 spent and 0 reserved of 0.0000001 XTS; "
        "it renews at 1970-01-02T00:00:00Z"
    )
    assert reply.budget is not None
    assert (reply.budget.limit, reply.budget.spent_nanos, reply.budget.renews_at_ms) == ("hard", 92, DAY_MS)
    (audited,) = bench.audit()
    assert audited.inputs["spent_nanos"] == "92"
    assert bench.seen.forgotten == [request().request_id], "the same id may try again"


def test_what_fits_is_dispatched_with_its_reservation_in_a_header() -> None:
    bench = bench_with(HARD, spent=spent(91))
    bench.run(encoded(requested_by="user:ä"))
    (output,) = [one for one in bench.transactions.outputs if names.is_priority(one.topic)]
    found = dispatched_from(dict(output.headers))
    assert (found.reserved_nanos, found.requested_by) == (ESTIMATE, "user:ä")
    assert reserved(bench) == (0, ESTIMATE)
    assert work(bench)[0].budget is None


def test_without_budgets_no_header_is_written() -> None:
    bench = Bench()
    bench.report()
    bench.run(encoded())
    (output,) = [one for one in bench.transactions.outputs if names.is_priority(one.topic)]
    assert headers.RESERVED_NANOS not in dict(output.headers)


def test_a_reservation_is_settled_by_the_usage_that_is_read_back() -> None:
    bench = bench_with(HARD)
    bench.run(encoded())
    place = WorkId(names.priority_topic("pool", "normal"), 0, 0)
    (output,) = [one for one in bench.transactions.outputs if names.is_priority(one.topic)]
    usage = UsageEvent(
        *("id", "acme", "pool", "words", "1", "normal", "ok", None, 7, 3, 0, 13, 5, NOW_MS),
        work=SourceCoordinate(*place),
        cost=Cost(97, "XTS"),
    )
    seen = WorkSeen(place, dispatched_from(dict(output.headers)))
    feed: list[FeedEvent] = [seen, usage, UsageRead((ReadUsage(0, 4, usage),))]
    bench.dispatcher.updates.learn(feed)
    bench.dispatcher.updates.learn(feed)
    assert reserved(bench) == (0, 0)
    assert bench.dispatcher.output.budgets.ledger.judge("acme", None, 4, NOW_MS).refused is not None


def test_a_request_is_judged_again_when_its_turn_comes() -> None:
    bench = bench_with(HARD)
    queued = bench.queued(request())
    verdict = bench.admission.decide(queued, None, NOW_MS)
    assert not isinstance(verdict, tuple)
    bench.dispatcher.scheduler.push(verdict.queued)
    budgets = bench.dispatcher.output.budgets
    budgets.reserve(verdict.queued, NOW_MS)
    other = UsageEvent(
        *("id", "acme", "pool", "words", "1", "normal", "ok", None, 7, 3, 0, 13, 5, NOW_MS),
        work=SourceCoordinate("priority.pool.normal", 0, 9),
        cost=Cost(95, "XTS"),
    )
    bench.dispatcher.updates.learn([UsageRead((ReadUsage(0, 0, other),))])
    bench.dispatcher.deliverable.set()
    bench.run()
    assert refused(bench).code == Code.INSUFFICIENT_QUOTA
    assert work(bench) == []
    assert reserved(bench) == (0, 0)
    assert bench.dispatcher.scheduler.in_flight.tokens("pool") == 0


def test_a_soft_budget_is_noted_in_the_work_and_asks_for_a_smaller_model_in_a_lower_class() -> None:
    bench = bench_with(SOFT)
    bench.report(pool="small-pool")
    bench.run(encoded())
    (item,) = work(bench, "low", "small-pool")
    assert item.request.model == "few-words"
    assert item.degradations == (Degradation.SMALLER_MODEL, Degradation.LOWER_CLASS)
    assert item.budget is not None
    assert (item.budget.limit, item.budget.limit_nanos) == ("soft", 0)
    assert bench.audit()[1].inputs["budget"] == "day budget of the tenant"


@pytest.mark.parametrize(
    ("spec", "steps", "priority", "pool"),
    [
        ({"forbidden_degradations": ("smaller_model",)}, (Degradation.LOWER_CLASS,), "low", "pool"),
        ({"forbidden_degradations": ("lower_class",)}, (Degradation.SMALLER_MODEL,), "normal", "small-pool"),
        ({"classes": ("high", "normal")}, (Degradation.SMALLER_MODEL,), "normal", "small-pool"),
        ({"models": ("words",)}, (Degradation.LOWER_CLASS,), "low", "pool"),
        ({"forbidden_degradations": tuple(Degradation)}, (), "normal", "pool"),
    ],
)
def test_only_what_the_tenant_allows_is_reduced(
    spec: dict[str, Any], steps: tuple[Degradation, ...], priority: str, pool: str
) -> None:
    bench = bench_with(SOFT, **spec)
    bench.report(pool="small-pool")
    bench.run(encoded())
    (item,) = work(bench, priority, pool)
    assert item.degradations == steps
    assert item.budget is not None


def test_a_smaller_model_whose_pool_has_no_consumers_is_not_used() -> None:
    bench = bench_with(SOFT)
    bench.run(encoded())
    (item,) = work(bench, "low")
    assert item.degradations == (Degradation.LOWER_CLASS,)


def test_a_soft_budget_that_only_warns_changes_nothing_else() -> None:
    bench = bench_with(replace(SOFT, degrade=False))
    bench.run(encoded())
    (item,) = work(bench)
    assert item.degradations == ()
    assert item.budget is not None


def test_while_spending_is_unknown_hard_budgets_refuse_and_soft_ones_do_nothing() -> None:
    bench = bench_with(SOFT, known=False)
    bench.run(encoded())
    assert work(bench)[0].budget is None
    bench = bench_with(HARD, known=False)
    bench.now_ms += GRACE_MS
    bench.run(encoded())
    reply = refused(bench)
    assert reply.code == Code.BUDGET_UNKNOWN
    assert reply.retry_after_ms is not None
    assert 2_000 <= reply.retry_after_ms <= 4_000


def test_a_request_that_expires_or_loses_its_partition_releases_its_reservation() -> None:
    bench = bench_with(HARD)
    bench.report(draining=True)
    bench.run(encoded(1, timeout_ms=60_000))
    assert reserved(bench)[0] == ESTIMATE
    bench.now_ms += 60_001
    bench.dispatcher.sweep()
    bench.run()
    assert reserved(bench) == (0, 0)

    bench = bench_with(HARD)
    bench.report(draining=True)
    bench.run(encoded(1, timeout_ms=60_000))
    bench.ownership.revoke_all()
    asyncio.run(bench.dispatcher.on_revoked())
    assert reserved(bench) == (0, 0)


def test_work_that_was_handed_back_is_reserved_again_and_not_judged() -> None:
    bench = bench_with(HARD, spent=spent(100))
    bench.report(draining=True)
    bench.assign(names.returned_topic("pool"))
    queued = bench.queued(handed_back(), names.returned_topic("pool"))
    record = ReceivedRecord(PARTITION, 0, NOW_MS, b"", b"")
    bench.admission.requeue([Candidate(queued, record)])
    assert reserved(bench)[0] > 0


@pytest.mark.parametrize("source_topic", ["requests.acme", "backfill.acme"])
def test_work_that_was_handed_back_is_reserved_once_until_it_is_settled(source_topic: str) -> None:
    bench = bench_with(HARD)
    returned = names.returned_topic("pool")
    bench.assign(returned)
    notice = BudgetNotice("soft", "tenant", "day", "XTS", 5, 6, 0, DAY_MS)
    bench.run(bytes_of(handed_back(source=SourceCoordinate(source_topic, 0, 41), budget=notice)), topic=returned)
    budgets = bench.dispatcher.output.budgets
    budgets.ledger.promise("acme", {None: 50}, NOW_MS)
    assert work(bench)[0].budget == notice
    (output,) = [one for one in bench.transactions.outputs if names.is_priority(one.topic)]
    place = WorkId(output.topic, 0, 0)
    found = dispatched_from(dict(output.headers))
    assert found.reserved_nanos == ESTIMATE
    of_job = source_topic == "backfill.acme"
    for _ in range(2):
        assert reserved(bench) == (0, ESTIMATE)
        free = 50 if of_job else 50 - ESTIMATE
        assert budgets.ledger.judge("acme", None, free, NOW_MS).refused is None, "of its job, if it has one"
        assert budgets.ledger.judge("acme", None, free + 1, NOW_MS).refused is not None
        bench.dispatcher.updates.learn([WorkSeen(place, found)])
    assert budgets.ledger.expire(NOW_MS + MISSED_AFTER_MS) == 0, "nothing is missed"
    usage = UsageEvent(
        *("id", "acme", "pool", "words", "1", "normal", "ok", None, 7, 3, 0, 13, 5, NOW_MS),
        work=SourceCoordinate(*place),
    )
    bench.dispatcher.updates.learn([UsageRead((ReadUsage(0, 0, usage),))])
    assert reserved(bench) == (0, 0)


def test_an_answer_from_the_cache_that_has_a_price_needs_a_budget_too() -> None:
    for already, outcome in ((50, Outcome.OK), (51, Outcome.REJECTED)):
        bench = bench_with(replace(HARD, hard_nanos=100), spent=spent(already))
        keep(bench)
        bench.run(bytes_of(asking(1)))
        found = replies(bench)
        if outcome == Outcome.OK:
            assert [reply.outcome for reply in found] == [Outcome.OK]
            assert reserved(bench) == (0, 50)
        else:
            assert Outcome.OK not in [reply.outcome for reply in found]


@pytest.mark.parametrize("nanos", [50, 0])
def test_an_answer_from_the_cache_has_the_notice_of_a_soft_budget(nanos: int) -> None:
    for soft, is_noticed in ((60, False), (45, True)):
        bench = bench_with(
            replace(SOFT, soft_nanos=soft, hard_nanos=None if nanos else 45), spent=spent(45 if is_noticed else 0)
        )
        bench.prices = PriceBook([ModelPrices("words", "XTS", (replace(PRICE, cached_answer_nanos=nanos),))])
        keep(bench)
        bench.run(bytes_of(asking(1)))
        (reply,) = replies(bench)
        assert (reply.outcome, reply.cache_use is not None) == (Outcome.OK, True)
        assert (reply.budget is not None) == is_noticed
        if reply.budget is not None:
            assert (reply.budget.limit, reply.budget.spent_nanos) == ("soft", 45)


def test_a_row_that_is_answered_from_the_cache_is_in_the_reservation_of_its_job() -> None:
    bench = bench_with(HARD)
    bench.assign("backfill.acme")
    keep(bench)
    bench.dispatcher.output.budgets.ledger.promise("acme", {None: 90}, NOW_MS)
    bench.run(bytes_of(asking(1)), topic="backfill.acme")
    (reply,) = replies(bench)
    assert reply.outcome == Outcome.OK
    assert reserved(bench) == (0, 50)
    assert bench.dispatcher.output.budgets.ledger.judge("acme", None, 10, NOW_MS).refused is None, "not twice"


def test_the_gauge_shows_the_part_that_is_spent() -> None:
    bench = bench_with(HARD, replace(SOFT, period="month", soft_nanos=50), spent=spent(40))
    bench.dispatcher.sweep()

    def part(period: str, limit: str) -> float | None:
        labels = {"tenant": "acme", "of": "tenant", "period": period, "limit": limit}
        return REGISTRY.get_sample_value("fairlane_budget_spent_ratio", labels)

    assert (part("day", "hard"), part("month", "soft")) == (0.4, 0.8)
    bench.register([TenantSpec("acme")])
    bench.now_ms += 5_000
    bench.dispatcher.sweep()
    assert part("day", "hard") is None


def test_a_tenant_without_budgets_pays_next_to_nothing() -> None:
    bench = Bench()
    queued = bench.queued(request())
    budgets = bench.dispatcher.output.budgets

    with cpu_time() as taken:
        for _ in range(10_000):
            budgets.judge(queued, NOW_MS)
            budgets.reserve(queued, NOW_MS)
            budgets.dispatch(queued, NOW_MS)
    assert taken.spent_s / 10_000 < 10e-6, "three look-ups for each request"
