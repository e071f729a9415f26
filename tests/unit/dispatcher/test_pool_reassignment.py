"""What waits follows the registry: to the pool that serves it now, or back to its sender."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from fairlane.outcomes import Code, Decision, Outcome
from fairlane.records import ModelVersion, SourceCoordinate, TenantGroup, TenantSpec, WorkItem
from fairlane.schema_files import default_codec
from fairlane_server.models.catalog import catalog_of
from stream_processors.dispatcher.admission.quotas import Charge
from stream_processors.dispatcher.queued_request import QueuedRequest
from stream_processors.dispatcher.registry import Registry, reassigns_pools
from tests.kit.dispatcher_bench import MODEL, NOW_MS, SECRET, Bench, encoded, handed_back, request

ACME, OTHER = TenantSpec("acme"), TenantSpec("other")
MOVED = replace(MODEL, pool="new")
ON_BOTH = replace(MODEL, dedicated_pools=("own",))
SMALL_WINDOW = 5
"""Tokens of a batch: one request of the bench fills the pool."""


def waiting(count: int = 3, topic: str = "requests.acme", **settings: Any) -> Bench:
    """A bench with one request in flight and so many behind it."""
    bench = Bench(**settings)
    bench.assign(topic, "requests.other")
    bench.report(100.0, tokens=SMALL_WINDOW)
    bench.run(*(encoded(number) for number in range(1, count + 2)), topic=topic)
    assert waits_in(bench, "pool") == len(bench.dispatcher.scheduler) == count
    return bench


def waits_in(bench: Bench, pool: str) -> int:
    return sum(len(queue) for name, queue, *_ in bench.dispatcher.scheduler.pool_views() if name == pool)


def dispatched(bench: Bench, pool: str) -> list[WorkItem]:
    """What was sent to a pool after it had room for everything."""
    bench.report(1e6, tokens=100_000, pool=pool)
    bench.dispatcher.dispatch()
    return bench.decoded(f"priority.{pool}.normal")


def answers(bench: Bench) -> list[tuple[str, str | None, str]]:
    """Every reply: outcome, code and field."""
    asyncio.run(bench.decide())
    return [(reply.outcome, reply.code, reply.field) for reply in bench.decoded("replies.acme")]


@pytest.mark.parametrize("topic", ["requests.acme", "backfill.acme"])
def test_what_waits_follows_its_model_to_another_pool(topic: str) -> None:
    bench = waiting(topic=topic)
    bench.register([ACME], [replace(MOVED, version="2")])
    assert (waits_in(bench, "pool"), waits_in(bench, "new")) == (0, 3)
    work = dispatched(bench, "new")
    assert [item.request.request_id for item in work] == [request(number).request_id for number in (2, 3, 4)]
    assert {(item.pool, item.model_version, item.admitted_at_ms) for item in work} == {("new", "2", NOW_MS)}
    assert len(dispatched(bench, "pool")) == 1, "the first, before"
    assert not answers(bench)


def test_what_moves_is_not_judged_again_and_costs_no_quota_twice() -> None:
    """A day's tokens are used up, the queue is full and the new pool is slow."""
    bench = Bench(max_queue_size=6)
    bench.register([replace(ACME, tokens_per_day=39)])
    bench.report(100.0, tokens=SMALL_WINDOW)
    bench.run(*(encoded(number, timeout_ms=2_000) for number in (1, 2, 3)))
    assert waits_in(bench, "pool") == 2
    bench.report(13.0, tokens=SMALL_WINDOW, pool="new")
    bench.register([replace(ACME, tokens_per_day=39)], [MOVED])
    assert waits_in(bench, "new") == 2
    assert not answers(bench)
    assert [event.decision for event in bench.audit()].count(Decision.ACCEPTED) == 2
    bench.register([replace(ACME, tokens_per_day=39)], [])
    assert len(answers(bench)) == 2
    ask = Charge("acme", bench.dispatcher.registry.tenants["acme"], 27)
    assert asyncio.run(bench.charges.quotas.take([ask])) != [None]
    assert asyncio.run(bench.charges.quotas.take([replace(ask, tokens=26)])) == [None], "what it was asked for"


def test_a_tenant_that_is_given_a_pool_takes_what_waits_there() -> None:
    bench = waiting()
    bench.register([ACME], [ON_BOTH])
    assert waits_in(bench, "pool") == 3
    bench.register([replace(ACME, pool="own")], [ON_BOTH])
    assert (waits_in(bench, "pool"), waits_in(bench, "own")) == (0, 3)
    assert len(dispatched(bench, "own")) == 3


def test_a_pool_that_is_given_to_a_tenant_runs_nobody_elses_work() -> None:
    bench = waiting()
    bench.register([ACME, replace(OTHER, pool="pool")])
    assert len(dispatched(bench, "pool")) == 1, "the first, before"
    assert answers(bench) == [(Outcome.REJECTED, Code.FORBIDDEN, "model")] * 3


@pytest.mark.parametrize(
    ("tenants", "models", "code", "field"),
    [
        ([ACME], [], Code.UNKNOWN_MODEL, "model"),
        ([OTHER], [MODEL], Code.FORBIDDEN, "tenant"),
        ([replace(ACME, models=("more",))], [MODEL], Code.FORBIDDEN, "model"),
        ([replace(ACME, pool="own")], [MODEL], Code.UNKNOWN_MODEL, "model"),
    ],
    ids=["model withdrawn", "tenant withdrawn", "model not allowed", "not served by its own pool"],
)
def test_what_nobody_serves_any_more_is_refused_as_a_new_one_would_be(
    tenants: Sequence[TenantSpec], models: Sequence[ModelVersion], code: Code, field: str
) -> None:
    bench = waiting()
    bench.register(tenants, models)
    assert len(bench.dispatcher.scheduler) == 0
    assert not bench.decoded("replies.acme"), "first its id is forgotten, and its quota given back"
    assert answers(bench) == [(Outcome.REJECTED, code, field)] * 3
    ids = [request(number).request_id for number in (2, 3, 4)]
    assert bench.seen.forgotten == ids
    refusals = [event for event in bench.audit() if event.decision == Decision.REFUSED]
    assert [event.request_id for event in refusals] == ids
    assert {(event.code, event.inputs["field"]) for event in refusals} == {(code, field)}
    assert SECRET not in str(refusals)
    new = Bench()
    new.register(tenants, models)
    new.run(encoded(1))
    assert answers(new) == [(Outcome.REJECTED, code, field)]


def test_a_refusal_goes_where_the_reply_was_wanted() -> None:
    """Also when its tenant, whose service that was, is gone."""
    bench = Bench()
    bench.register([replace(ACME, services=("web",))])
    bench.report(100.0, tokens=SMALL_WINDOW)
    bench.run(encoded(1), encoded(2, reply_to="replies.acme.web"))
    bench.register([])
    asyncio.run(bench.decide())
    (reply,) = bench.decoded("replies.acme.web")
    assert (reply.code, reply.source) == (Code.FORBIDDEN, SourceCoordinate("requests.acme", 0, 1))


def test_what_is_admitted_while_the_registry_changes_goes_by_the_new_one() -> None:
    """Redis is asked about its id, and about its quota, between the decisions."""
    bench = Bench()
    bench.seen.meanwhile = lambda: bench.register([ACME], [MOVED])
    bench.run(encoded(1))
    assert [item.pool for item in bench.decoded("priority.new.normal")] == ["new"]

    gone = Bench()
    gone.seen.meanwhile = lambda: gone.register([ACME], [])
    gone.run(encoded(1))
    assert answers(gone) == [(Outcome.REJECTED, Code.UNKNOWN_MODEL, "model")]
    assert gone.seen.forgotten == [request(1).request_id]


@pytest.mark.parametrize(
    ("tenants", "models", "pool"),
    [([ACME], [MOVED], "new"), ([replace(ACME, pool="own")], [ON_BOTH], "own")],
    ids=["the model moved", "the tenant was given a pool"],
)
def test_work_that_came_back_goes_to_the_pool_that_serves_it_now(
    tenants: Sequence[TenantSpec], models: Sequence[ModelVersion], pool: str
) -> None:
    bench = Bench()
    bench.assign("returned.pool")
    bench.register(tenants, models)
    bench.run(default_codec().encode(handed_back(deadline_at_ms=NOW_MS + 60_000)), topic="returned.pool")
    assert [(item.pool, item.cost_tokens) for item in bench.decoded(f"priority.{pool}.normal")] == [(pool, 13)]
    assert not bench.decoded("priority.pool.normal")


def test_work_that_came_back_to_a_pool_that_is_anothers_now_is_refused() -> None:
    bench = Bench()
    bench.assign("returned.pool")
    bench.register([ACME, replace(OTHER, pool="pool")])
    bench.run(default_codec().encode(handed_back(deadline_at_ms=NOW_MS + 60_000)), topic="returned.pool")
    assert answers(bench) == [(Outcome.REJECTED, Code.FORBIDDEN, "model")]
    assert not bench.decoded("priority.pool.normal")


def test_work_that_came_back_and_waits_moves_too() -> None:
    bench = waiting()
    bench.assign("returned.pool")
    bench.run(default_codec().encode(handed_back(deadline_at_ms=NOW_MS + 60_000)), topic="returned.pool")
    assert waits_in(bench, "pool") == 4
    bench.register([ACME], [MOVED])
    assert {(item.pool, item.cost_tokens) for item in dispatched(bench, "new")} == {("new", 13)}
    assert len(bench.dispatcher.scheduler) == 0


@pytest.mark.parametrize(
    ("tenants", "models"),
    [
        ([replace(ACME, weight=3.0, requests_per_s=5.0, groups=(TenantGroup("search"),))], [MODEL]),
        ([ACME, OTHER], [MODEL]),
        ([ACME], [MODEL, replace(MODEL, model="more")]),
        ([ACME], [MODEL]),
    ],
    ids=["weight, quota and groups", "a new tenant", "a new model", "nothing"],
)
def test_nothing_that_waits_is_looked_at_for_what_does_not_move_it(
    monkeypatch: pytest.MonkeyPatch, tenants: Sequence[TenantSpec], models: Sequence[ModelVersion]
) -> None:
    bench = waiting()
    looked_at: list[QueuedRequest] = []

    def watched(_registry: Registry, queued: QueuedRequest, _now_ms: int) -> QueuedRequest:
        looked_at.append(queued)
        return queued

    monkeypatch.setattr(Registry, "as_of_now", watched)
    bench.register(tenants, models)
    assert not looked_at
    bench.register(tenants, [])
    assert len(looked_at) == 3


def test_what_may_move_work() -> None:
    def moves(tenants: Sequence[TenantSpec], models: Sequence[ModelVersion]) -> bool:
        return reassigns_pools(
            {"acme": ACME},
            {spec.tenant: spec for spec in tenants},
            catalog_of(MODEL),
            catalog_of(*models),
        )

    assert not moves([ACME, OTHER], [MODEL, replace(MODEL, model="more")])
    assert moves([ACME, replace(OTHER, pool="pool")], [MODEL])
    assert moves([], [MODEL])
    assert moves([replace(ACME, pool="own")], [MODEL])
    assert moves([replace(ACME, models=("more",))], [MODEL])
    assert moves([ACME], [])
    assert moves([ACME], [replace(MODEL, version="2")])
