"""Shadow and copies in the dispatcher: a copy is in the settlement of its original, runs when nothing else waits, and
ends exactly once."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane import names
from fairlane.evaluation_records import EvaluationMark, Shadow
from fairlane.records import (
    ClassLoad,
    DispatchReport,
    InferenceRequest,
    PoolLoad,
    SourceCoordinate,
    TenantSpec,
    UsageEvent,
    WorkItem,
)
from fairlane.schema_files import default_codec
from fairlane_server.evaluation.copies import copy_id, copy_of, end_of
from fairlane_server.models.catalog import ModelCatalog, route_of_one
from stream_processors.dispatcher.evaluation.stage import MOST_WAITING
from stream_processors.dispatcher.queued_request import QueuedRequest
from stream_processors.dispatcher.scheduling.scheduler import COPIES_PART
from tests.kit.dispatcher_bench import MODEL, NOW_MS, Bench, handed_back, request

CANDIDATE = replace(MODEL, version="2", path="words-2")
SHADOW = Shadow("words-2-1", "2", 100.0, 100, 1.0, 600_000, 0, sticky_by="request")
ALLOWED, DENIED = TenantSpec("acme", evaluation="allowed"), TenantSpec("acme")
WORK, REPLIES = names.EVALUATION_WORK, names.EVALUATION_REPLIES


class CopyBench(Bench):
    """A bench that can be given more records of a topic."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"max_undecided": 1_000} | settings)
        self.assign(WORK, "returned.pool")
        self.read: Counter[str] = Counter()
        register(self, shadowed(None))

    def give(self, *values: bytes | InferenceRequest | WorkItem, topic: str = "requests.acme") -> None:
        """It reads these, and decides them."""
        self.new_loop()

        async def turn() -> None:
            for value in values:
                raw = value if isinstance(value, bytes) else default_codec().encode(value)
                await self.write(self.read[topic], raw, topic=topic)
                self.read[topic] += 1
            await self.decide()

        asyncio.run(turn())

    def read_in(self, one: InferenceRequest) -> QueuedRequest:
        """As intake hands it on; nothing else happens with it."""
        self._read = self.read["requests.acme"]
        self.read["requests.acme"] += 1
        return self.queued(one)


def shadowed(shadow: Shadow | None = SHADOW, *, stopped: tuple[str, ...] = ()) -> ModelCatalog:
    route = replace(route_of_one(MODEL), shadow=shadow, stopped=stopped)
    return ModelCatalog((MODEL, CANDIDATE), (route,))


def register(bench: Bench, catalog: ModelCatalog, *tenants: TenantSpec) -> None:
    bench.dispatcher.set_registry({spec.tenant: spec for spec in tenants or (ALLOWED,)}, catalog, {})


def loaded(bench: Bench, *versions: str, rate: float = 1_000.0) -> None:
    bench.report(rate, partitions=(0,), versions=versions or ("words/1", "words/2"))
    bench.dispatcher.follow_loaded()


def made(shadow: Shadow | None = SHADOW, *tenants: TenantSpec, **settings: Any) -> CopyBench:
    bench = CopyBench(**settings)
    register(bench, shadowed(shadow), *tenants)
    loaded(bench)
    return bench


def mark(number: int = 1, tenant: str = "acme") -> EvaluationMark:
    return EvaluationMark("shadow", SHADOW.run, "candidate", tenant, request(number).request_id)


def copied(number: int = 1, max_age_ms: int = 600_000, **fields: Any) -> WorkItem:
    original = replace(handed_back(), request=request(number), source=SourceCoordinate("requests.acme", 0, number))
    return replace(copy_of(original, mark(number), "2", NOW_MS, max_age_ms), **fields)


def ends(bench: Bench) -> list[str]:
    return [end_of(reply) for reply in bench.decoded(REPLIES)]


# --- copies that a shadow makes


def test_the_copy_of_a_dispatched_request_is_in_its_settlement() -> None:
    bench = made()
    bench.give(request(1))
    (settlement,) = bench.transactions.settlements
    work, audit, copy = settlement.outputs
    assert [work.topic, audit.topic, copy.topic] == ["priority.pool.normal", names.LEDGER_AUDIT, WORK]
    assert copy.is_optional
    item, of_copy = (default_codec().decode_as(WorkItem, one.value) for one in (work, copy))
    assert of_copy == copy_of(item, mark(1), "2", NOW_MS, SHADOW.max_age_ms)
    assert copy.key == of_copy.request.request_id.encode()
    (event,) = bench.audit()
    assert (event.inputs["shadow_run"], event.inputs["shadow"]) == (SHADOW.run, "copied")


def test_a_request_without_a_shadow_is_as_before() -> None:
    bench = made(None)
    bench.give(request(1))
    (settlement,) = bench.transactions.settlements
    assert len(settlement.outputs) == 2
    (event,) = bench.audit()
    assert "shadow" not in event.inputs


@pytest.mark.parametrize(
    ("shadow", "tenant", "versions", "result"),
    [
        (SHADOW, DENIED, ("words/1", "words/2"), "not_allowed"),
        (SHADOW, ALLOWED, ("words/1",), "not_loaded"),
        (SHADOW, replace(ALLOWED, models=("words",)), ("words/1", "words/2"), "copied"),
        (replace(SHADOW, max_tokens_per_s=1e-9), ALLOWED, ("words/1", "words/2"), "copied"),
        (replace(SHADOW, stopped_at_ms=1), ALLOWED, ("words/1", "words/2"), None),
        (replace(SHADOW, arm="canary"), ALLOWED, ("words/1", "words/2"), None),
    ],
)
def test_what_is_not_copied_is_audited_with_its_reason(
    shadow: Shadow, tenant: TenantSpec, versions: tuple[str, ...], result: str | None
) -> None:
    bench = made(shadow, tenant)
    loaded(bench, *versions)
    bench.now_ms += 20_000
    loaded(bench, *versions)
    bench.give(request(1, timeout_ms=60_000))
    (event,) = (one for one in bench.audit() if one.decision == "dispatched")
    assert event.inputs.get("shadow") == result
    assert len(bench.decoded(WORK)) == (result == "copied")


def test_a_stopped_candidate_gets_no_copies() -> None:
    bench = made()
    register(bench, shadowed(stopped=("2",)))
    bench.give(request(1))
    assert not bench.decoded(WORK)


def test_the_candidates_own_requests_and_copies_are_not_copied() -> None:
    bench = made()
    bench.give(request(1, model="words/2"))
    assert not bench.decoded(WORK)
    bench = made()
    bench.give(copied(1), topic=WORK)
    assert len(bench.decoded("priority.pool.low")) == 1
    assert not bench.decoded(WORK)


def test_a_request_that_was_handed_back_was_copied_before() -> None:
    bench = made()
    bench.give(handed_back(), topic="returned.pool")
    assert len(bench.decoded("priority.pool.normal")) == 1
    assert not bench.decoded(WORK)


def test_copying_pauses_while_the_pool_is_behind_its_target() -> None:
    bench = made(target_queue_ms=100)
    bench.give(request(1, timeout_ms=600_000))
    # Far more than the window takes.
    bench.give(*(request(number, timeout_ms=600_000) for number in range(2, 400)))
    results = [one.inputs["shadow"] for one in bench.audit() if one.decision == "dispatched"]
    assert results[0] == "copied"
    assert set(results[1:]) == {"load"}
    assert len(bench.decoded(WORK)) == 1


# --- copies that wait


def test_a_copy_runs_for_evaluation_on_its_version_in_the_lowest_class() -> None:
    bench = made()
    bench.give(copied(1), topic=WORK)
    (item,) = bench.decoded("priority.pool.low")
    assert (item.tenant, item.model_version, item.arm) == (names.EVALUATION_TENANT, "2", "version")
    assert (item.reply_topic, item.evaluation) == (REPLIES, mark(1))
    assert item.source == SourceCoordinate("requests.acme", 0, 1), "that of the original"
    assert item.cache_answer is False
    work = next(out for out in bench.transactions.outputs if out.topic == "priority.pool.low")
    headers = dict(work.headers)
    assert headers["fairlane-tenant"] == names.EVALUATION_TENANT.encode()
    assert headers["fairlane-source-topic"] == WORK.encode(), "by which its dispatcher knows it again"
    (event,) = bench.audit()
    assert (event.tenant, event.decision) == (names.EVALUATION_TENANT, "dispatched")


def test_copies_wait_while_a_request_waits_and_count_in_no_prediction() -> None:
    bench = made(None)
    loaded(bench, rate=10.0)
    scheduler = bench.dispatcher.scheduler
    bench.give(*(request(number, timeout_ms=3_600_000) for number in range(1, 120)))
    waiting, queued = -1, bench.read_in(request(900, timeout_ms=3_600_000))
    while waiting != len(scheduler):
        waiting = len(scheduler)
        bench.dispatcher.dispatch()
    assert waiting > 0
    before = scheduler.predict(queued)
    for number in range(1_000, 1_050):
        bench._read = bench.read[WORK]
        bench.read[WORK] += 1
        bench.dispatcher.evaluation.copies.push(bench.queued(copied(number), WORK))
    bench.dispatcher.dispatch()
    assert len(bench.dispatcher.evaluation.copies) == 50
    assert not bench.decoded("priority.pool.low")
    assert (len(scheduler), scheduler.predict(queued)) == (waiting, before)


def test_copies_fill_a_part_of_the_window_and_leave_the_rest() -> None:
    bench = made(None)
    bench.give(*(copied(number) for number in range(1, 101)), topic=WORK)
    scheduler = bench.dispatcher.scheduler
    held = scheduler.in_flight.copies("pool")
    assert not scheduler.in_flight.held("pool").items
    (view,) = [view for _, _, _, view, _ in scheduler.pool_views()]
    assert 0 < held.items <= COPIES_PART * view.window_items
    assert held.tokens <= COPIES_PART * view.window_tokens
    assert len(bench.dispatcher.evaluation.copies) == 100 - held.items
    # A request finds room at once, and is admitted as if they were not there.
    queued = bench.read_in(request(900))
    assert scheduler.predict(queued)[0].in_flight_tokens == 0
    bench.give(request(901))
    assert len(bench.decoded("priority.pool.normal")) == 1


@pytest.mark.parametrize(
    "copies",
    [[copied(number) for number in range(1, 101)], [copied(1, cost_tokens=20_000, prompt_tokens=100)]],
    ids=["many", "a large one"],
)
def test_copies_in_flight_take_no_room_of_requests(copies: list[WorkItem]) -> None:
    """A consumer runs none of them while a request waits: their room would not come back."""

    def sent(first: list[WorkItem]) -> int:
        bench = made(None)
        bench.give(*first, topic=WORK)
        assert bool(bench.decoded("priority.pool.low")) == bool(first)
        bench.give(*(request(1_000 + number, timeout_ms=3_600_000) for number in range(200)))
        return len(bench.decoded("priority.pool.normal"))

    assert sent(copies) == sent([]) > 0


def test_a_copy_larger_than_its_part_of_the_window_goes_alone() -> None:
    bench = made(None)
    large = copied(1, cost_tokens=1_900, prompt_tokens=100)
    bench.give(large, replace(copied(2), cost_tokens=1_900), topic=WORK)
    assert len(bench.decoded("priority.pool.low")) == 1
    assert len(bench.dispatcher.evaluation.copies) == 1


def test_a_copy_waits_for_a_live_consumer_that_has_its_version() -> None:
    bench = CopyBench()
    bench.give(copied(1), topic=WORK)
    assert not bench.decoded("priority.pool.low"), "no consumer has ever reported"
    loaded(bench, "words/1")
    bench.dispatcher.dispatch()
    assert not bench.decoded("priority.pool.low")
    loaded(bench)
    bench.dispatcher.dispatch()
    assert len(bench.decoded("priority.pool.low")) == 1


def test_a_copy_that_has_waited_too_long_is_dropped_and_nobody_is_answered() -> None:
    bench = CopyBench()
    bench.give(copied(1, max_age_ms=5_000), topic=WORK)
    bench.now_ms += 5_001
    bench.dispatcher.sweep()
    bench.dispatcher.sweep()
    (reply,) = bench.decoded(REPLIES)
    assert (reply.outcome, reply.tenant, reply.evaluation) == ("expired", names.EVALUATION_TENANT, mark(1))
    assert reply.source == SourceCoordinate("requests.acme", 0, 1)
    assert ends(bench) == ["dropped"]
    assert not bench.decoded("replies.acme")


def test_a_version_that_nobody_loads_fails_its_copies() -> None:
    bench = CopyBench()
    loaded(bench, "words/1")
    bench.give(copied(1), topic=WORK)
    for _ in range(62):
        bench.now_ms += 5_000
        loaded(bench, "words/1")
        bench.dispatcher.sweep()
    (reply,) = bench.decoded(REPLIES)
    assert (reply.code, end_of(reply)) == ("unknown_model", "failed")


@pytest.mark.parametrize(
    ("tenants", "catalog", "end"),
    [
        ((DENIED,), shadowed(None), "dropped"),
        ((TenantSpec("globex"),), shadowed(None), "dropped"),
        ((replace(ALLOWED, models=("other",)),), shadowed(None), "dropped"),
        ((ALLOWED,), shadowed(None, stopped=("2",)), "failed"),
        ((ALLOWED,), ModelCatalog((MODEL,), (route_of_one(MODEL),)), "failed"),
    ],
)
@pytest.mark.parametrize("waits", [False, True], ids=["when it is read", "while it waits"])
def test_a_copy_that_nothing_serves_any_more_ends(
    waits: bool, tenants: tuple[TenantSpec, ...], catalog: ModelCatalog, end: str
) -> None:
    bench = CopyBench()
    if waits:
        bench.give(copied(1), topic=WORK)
        assert not bench.transactions.settlements
        register(bench, catalog, *tenants)
    else:
        register(bench, catalog, *tenants)
        bench.give(copied(1), topic=WORK)
    assert ends(bench) == [end]
    (settlement,) = bench.transactions.settlements
    assert settlement.claim.partition.topic == WORK


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"evaluation": None}, "tenant"),
        ({"tenant": "acme"}, "tenant"),
        ({"reply_topic": "replies.acme"}, "reply_topic"),
        ({"handed_back": 1}, "handed_back"),
        ({"evaluation": mark(1, "globex")}, "evaluation.tenant"),
        ({"source": SourceCoordinate("elsewhere", 0, 1)}, "source"),
        ({"priority_class": "high"}, "priority_class"),
    ],
)
def test_a_copy_that_no_service_can_have_made_is_passed_over_without_a_dead_letter(
    fields: dict[str, Any], fault: str
) -> None:
    bench = made(None)
    bench.give(copied(1, **fields), b"\x00 no record", topic=WORK)
    assert [one.outputs for one in bench.transactions.settlements] == [(), ()], fault


def test_a_copy_that_a_consumer_hands_back_waits_again_with_its_context() -> None:
    bench = made(None)
    returned = replace(copied(1), handed_back=1, unserved=1, pool="pool")
    bench.give(returned, topic="returned.pool")
    (item,) = bench.decoded("priority.pool.low")
    assert (item.evaluation, item.handed_back, item.tenant) == (mark(1), 1, names.EVALUATION_TENANT)
    assert not item.degradations


def test_a_copy_in_the_requeue_topic_of_another_pool_is_none() -> None:
    bench = made(None)
    bench.give(replace(copied(1), handed_back=1, pool="elsewhere"), topic="returned.pool")
    assert not bench.decoded("priority.pool.low")


def test_enough_waiting_copies_pause_their_topic() -> None:
    bench = CopyBench(max_span=10 * MOST_WAITING)
    queued = [bench.queued(copied(number), WORK) for number in range(1, MOST_WAITING + 1)]
    for one in queued[:-1]:
        bench.dispatcher.evaluation.copies.push(one)
    assert not bench.dispatcher.paused_backfill()
    bench.dispatcher.evaluation.copies.push(queued[-1])
    assert {one.topic for one in bench.dispatcher.paused_backfill()} == {WORK}


def test_usage_of_a_copy_makes_room_and_teaches_nothing_about_requests() -> None:
    bench = made(replace(SHADOW, max_concurrent=1))
    bench.give(request(1), request(2))
    assert [one.inputs["shadow"] for one in bench.audit()] == ["copied", "concurrency"]
    usage = UsageEvent(
        request_id=copy_id(SHADOW.run, "candidate", "acme", request(1).request_id),
        tenant=names.EVALUATION_TENANT,
        pool="pool",
        model="words",
        model_version="2",
        priority_class="low",
        outcome="ok",
        code=None,
        prompt_tokens=5,
        completion_tokens=4,
        cached_tokens=0,
        cost_tokens=13,
        engine_ms=1_000_000,
        occurred_at_ms=NOW_MS,
        work=SourceCoordinate("priority.pool.low", 0, 0),
    )
    costs = bench.dispatcher.registry.costs
    before = costs.estimate("acme", MODEL, 100, 4)
    bench.dispatcher.updates.learn([usage])
    assert costs.estimate("acme", MODEL, 100, 4) == before
    bench.give(request(3))
    (last,) = (one for one in bench.audit() if one.request_id == request(3).request_id)
    assert last.inputs["shadow"] == "copied"


STEPS = st.lists(
    st.sampled_from(
        ["copies", "requests", "time", "report", "candidate gone", "denied", "allowed", "stopped", "resumed"]
    ),
    max_size=12,
)


@given(STEPS)
def test_every_copy_ends_once_whatever_happens(steps: Sequence[str]) -> None:
    """Dispatched, or answered: one settlement each, and none without one once its time is over."""
    bench, number, wanted = CopyBench(), 0, set()
    for step in steps:
        if step == "copies":
            items = [replace(copied(number + more), deadline_at_ms=bench.now_ms + 60_000) for more in range(1, 4)]
            wanted |= {one.request.request_id for one in items}
            number += 3
            bench.give(*items, topic=WORK)
        elif step == "requests":
            number += 1
            bench.give(request(number, timeout_ms=3_000))
        elif step == "time":
            bench.now_ms += 25_000
        elif step in ("report", "candidate gone"):
            loaded(bench, *(("words/1",) if step == "candidate gone" else ()))
        elif step in ("denied", "allowed"):
            register(bench, shadowed(None), DENIED if step == "denied" else ALLOWED)
        elif step in ("stopped", "resumed"):
            register(bench, shadowed(None, stopped=("2",) if step == "stopped" else ()))
        bench.commit()
        bench.dispatcher.evaluation.sweep(bench.now_ms)
    bench.now_ms += 61_000
    bench.dispatcher.evaluation.sweep(bench.now_ms)
    ended = Counter(one.request.request_id for one in bench.decoded("priority.pool.low") if one.evaluation is not None)
    ended += Counter(one.request_id for one in bench.decoded(REPLIES))
    assert ended == Counter(wanted)
    assert not {one.request_id for one in bench.decoded("replies.acme")} & wanted


def test_copies_wait_while_a_request_waits_at_another_dispatcher() -> None:
    bench = made(None)
    load = PoolLoad("pool", 1_000, 1.0, 0, (ClassLoad("normal", 1.0, 3, 30),))
    bench.dispatcher.updates.learn([DispatchReport("dispatcher-2", 0, bench.now_ms, draining=False, pools=(load,))])
    bench.give(copied(1), topic=WORK)
    assert not bench.decoded("priority.pool.low")
    bench.dispatcher.updates.learn(
        [DispatchReport("dispatcher-2", 0, bench.now_ms, draining=False, pools=(replace(load, classes=()),))]
    )
    bench.dispatcher.dispatch()
    assert len(bench.decoded("priority.pool.low")) == 1
