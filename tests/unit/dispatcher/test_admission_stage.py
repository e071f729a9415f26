"""How a valid request is taken: within its quota, degraded if it must be, or shed with a reason and a time."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from fairlane import names
from fairlane.outcomes import Code, Decision, Degradation, Outcome
from fairlane.records import (
    AuditEvent,
    InferenceReply,
    InferenceRequest,
    Message,
    ModelVersion,
    Parameters,
    Passage,
    RequestInput,
    Retrieval,
    SourceCoordinate,
    TenantSpec,
)
from fairlane_server.admission_rule import CAPACITY_TTL_MS
from fairlane_server.kafka.transactions import OutputRecord
from stream_processors.dispatcher.admission.quotas import Charge, Exceeded, Quota
from stream_processors.dispatcher.output.stage import Admission
from stream_processors.dispatcher.output.tenant_counters import TenantCounters
from stream_processors.dispatcher.queued_request import Candidate, QueuedRequest, ReceivedRecord
from stream_processors.dispatcher.scheduling.in_flight import Reserved
from tests.kit.dispatcher_bench import MODEL, NOW_MS, SECRET, Bench, request

SMALLER = ModelVersion("few-words", "3", "small-pool", "simulated", ("generate",), "few-words", 4_096, 512)
WITH_SMALLER = replace(MODEL, smaller_model=SMALLER.model)
CHAT = RequestInput(messages=tuple(Message(("user", "assistant")[n % 2], f"{SECRET} {n}") for n in range(9)))


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.assign("requests.other", "backfill.acme")
    return bench


def climb(bench: Bench, level: int, pool: str = "pool", tenant: str = "acme") -> None:
    """Press until the ladder stands on this level."""
    while bench.admission.ladder.present_level(pool, tenant, bench.now_ms) < level:
        bench.now_ms += 500
        bench.admission.ladder.level(pool, tenant, 10.0, bench.now_ms)


def busy(bench: Bench, tokens: int, pool: str = "pool") -> None:
    """So much is in flight in a pool that does 1,000 tokens a second."""
    bench.report(1_000.0, pool=pool)
    source = SourceCoordinate(f"requests.{pool}", 0, bench.dispatcher.scheduler.in_flight.tokens(pool))
    bench.dispatcher.scheduler.in_flight.reserve(source, Reserved(pool, "normal", 0, "z", "", tokens, 1, "words"))


def press(bench: Bench, level: int, pool: str = "pool") -> None:
    """The ladder stands on this level, and a request of acme that may take a minute is pressed enough to feel it."""
    busy(bench, 40_000, pool)
    climb(bench, level, pool)


def admit(bench: Bench, one: InferenceRequest | QueuedRequest, topic: str = "requests.acme") -> Admission:
    verdict = judged(bench, one, topic)
    assert isinstance(verdict, Admission), bench.decoded_all(verdict)
    return verdict


def judged(
    bench: Bench, one: InferenceRequest | QueuedRequest, topic: str = "requests.acme"
) -> Admission | tuple[OutputRecord, ...]:
    queued = one if isinstance(one, QueuedRequest) else bench.queued(one, topic)
    bench.dispatcher.scheduler.refresh(bench.now_ms)
    return bench.admission.decide(queued, None, bench.now_ms)


def refused(bench: Bench, verdict: Admission | Sequence[OutputRecord]) -> tuple[InferenceReply, AuditEvent]:
    assert not isinstance(verdict, Admission)
    reply, audit = bench.decoded_all(verdict)
    assert (reply.outcome, audit.decision) == (Outcome.REJECTED, Decision.REFUSED)
    assert (reply.code, reply.message) == (audit.code, audit.message)
    assert not reply.degradations, "nothing was taken from what is not served"
    assert reply.source == audit.source
    return reply, audit


# Quotas


def quota_answers(bench: Bench, *requests: QueuedRequest) -> list[Exceeded | None]:
    return asyncio.run(bench.charges.charge(requests))


def audits(bench: Bench, taken: Admission) -> list[AuditEvent]:
    """What is told of an admission that has to wait."""
    accepted = bench.dispatcher.output.writer.accepted(taken.queued, taken.inputs, bench.now_ms)
    return bench.decoded_all((accepted, *taken.degraded))


def test_what_is_beyond_a_quota_is_refused_with_the_time_it_takes(bench: Bench) -> None:
    bench.register([TenantSpec("acme", requests_per_s=1.0, burst_requests=2)])
    queued = [bench.queued(request(number)) for number in (1, 2, 3)]
    *granted, exceeded = quota_answers(bench, *queued)
    assert granted == [None, None]
    assert exceeded is not None
    assert exceeded.which == Quota.REQUESTS_PER_S
    verdict = bench.admission.decide(queued[2], exceeded, bench.now_ms)
    reply, audit = refused(bench, verdict)
    assert reply.code == Code.QUOTA_EXCEEDED
    assert exceeded.retry_after_ms == 1_001
    assert 1_001 <= (reply.retry_after_ms or 0) <= 1_502, "later, and never sooner, than it can pass"
    assert audit.inputs == {
        "pool": "pool",
        "priority_class": "normal",
        "quota": "requests_per_s",
        "limit": "1.0",
        "cost_tokens": str(queued[2].cost_tokens),
        "submitted_at_ms": str(NOW_MS),
        "deadline_at_ms": str(NOW_MS + 60_000),
        "retry_after_ms": str(reply.retry_after_ms),
    }
    bench.now_ms += reply.retry_after_ms or 0
    assert quota_answers(bench, queued[2]) == [None]


def test_a_request_larger_than_its_quota_is_told_not_to_come_again(bench: Bench) -> None:
    bench.register([TenantSpec("acme", tokens_per_minute=10)])
    queued = bench.queued(request())
    (exceeded,) = quota_answers(bench, queued)
    assert exceeded is not None
    reply, audit = refused(bench, bench.admission.decide(queued, exceeded, bench.now_ms))
    assert (reply.code, reply.retry_after_ms) == (Code.QUOTA_EXCEEDED, None)
    assert (audit.inputs["quota"], audit.inputs["limit"]) == ("tokens_per_minute", "10")


def test_who_exceeds_a_quota_together_does_not_return_together(bench: Bench) -> None:
    bench.register([TenantSpec("acme", tokens_per_day=20)])
    queued = [bench.queued(request(number)) for number in range(20)]
    _, *refusals = zip(queued, quota_answers(bench, *queued), strict=True)
    times = []
    for one, exceeded in refusals:
        assert exceeded is not None
        reply, _ = refused(bench, bench.admission.decide(one, exceeded, bench.now_ms))
        times.append(reply.retry_after_ms or 0)
    assert len(set(times)) == 19
    assert min(times) >= 86_400_000 // 20, "a day's quota is not there again in minutes"


def test_a_tenant_that_is_read_in_part_has_that_part_of_its_quota(bench: Bench) -> None:
    bench.register(
        [TenantSpec("acme", requests_per_s=8.0), TenantSpec("other", requests_per_s=8.0)], parts={"acme": 0.5}
    )
    for topic, granted in (("requests.acme", 4), ("requests.other", 8)):
        answers = quota_answers(bench, *(bench.queued(request(number), topic) for number in range(20)))
        assert answers.count(None) == granted


def test_what_is_given_back_may_be_taken_again(bench: Bench) -> None:
    bench.register([TenantSpec("acme", tokens_per_day=20)])
    first, second = bench.queued(request(1)), bench.queued(request(2))
    assert quota_answers(bench, first) == [None]
    assert quota_answers(bench, second) != [None]
    asyncio.run(bench.charges.refund([first]))
    assert quota_answers(bench, second) == [None]


def test_what_was_degraded_is_given_back_as_it_was_taken(bench: Bench) -> None:
    bench.register([TenantSpec("acme", tokens_per_day=805)])
    queued = bench.queued(request(parameters=Parameters(400)))
    assert queued.cost_tokens == 805
    assert quota_answers(bench, queued) == [None]
    bench.dispatcher.scheduler.push(replace(queued, cost_tokens=261))
    bench.ownership.revoke_all()
    asyncio.run(bench.dispatcher.on_revoked())
    assert quota_answers(bench, queued) == [None], "the whole quota is there again"


def test_quotas_of_one_tenant_are_not_anothers(bench: Bench) -> None:
    bench.register([TenantSpec("acme", requests_per_s=1.0), TenantSpec("other", requests_per_s=1.0)])
    mine = [bench.queued(request(number)) for number in (1, 2)]
    theirs = bench.queued(request(3), "requests.other")
    answers = quota_answers(bench, *mine, theirs)
    assert [answer is None for answer in answers] == [True, False, True]


def test_tenants_without_quotas_cost_no_round_trip(bench: Bench) -> None:
    class Unasked:
        async def take(self, asks: Sequence[Charge]) -> list[Exceeded | None]:
            raise AssertionError(asks)

        async def give_back(self, asks: Sequence[Charge]) -> None:
            raise AssertionError(asks)

        async def hand_over(self, asks: Sequence[Charge]) -> None:
            raise AssertionError(asks)

    bench.charges.quotas = Unasked()
    queued = bench.queued(request())
    assert quota_answers(bench, queued) == [None]
    asyncio.run(bench.charges.refund([queued]))
    asyncio.run(bench.charges.hand_over([queued]))


# Admission


def test_an_admission_is_audited_with_what_it_was_made_from(bench: Bench) -> None:
    busy(bench, 500)
    taken = admit(bench, bench.queued(request()))
    (event,) = audits(bench, taken)
    assert (event.decision, event.tenant, event.source) == (Decision.ACCEPTED, "acme", taken.queued.source)
    assert event.inputs["predicted_wait_ms"] == "500"
    assert event.inputs["predicted_service_ms"] == "13"
    assert event.inputs["in_flight_tokens"] == "500"
    assert (event.inputs["rank_at_most"], event.inputs["pool"], event.inputs["capacity"]) == ("1", "pool", "live")
    assert (event.inputs["consumers"], event.inputs["own_share"]) == ("1", "1.0")
    assert SECRET not in str(event)


def test_the_rank_counts_those_that_may_go_before_it(bench: Bench) -> None:
    for number in (1, 2):
        bench.dispatcher.scheduler.push(admit(bench, request(number)).queued)
    (event,) = audits(bench, admit(bench, request(3)))
    assert (event.inputs["rank_at_most"], event.inputs["capacity"]) == ("3", "never")


def test_what_cannot_be_served_in_time_is_refused_at_once(bench: Bench) -> None:
    busy(bench, 10_000)
    bench.register([TenantSpec("acme", forbidden_degradations=tuple(Degradation))])
    reply, audit = refused(bench, judged(bench, request(timeout_ms=5_000)))
    assert reply.code == Code.DEADLINE_UNMEETABLE
    assert 100 <= (reply.retry_after_ms or 0) <= 300_000
    assert audit.inputs["predicted_wait_ms"] == "10000"
    assert reply.timings.submitted_at_ms == NOW_MS


def test_a_full_queue_refuses_as_overloaded() -> None:
    bench = Bench(max_queue_size=4)
    busy(bench, 1_000)
    codes = []
    for number in range(1, 6):
        verdict = judged(bench, request(number))
        if isinstance(verdict, Admission):
            bench.dispatcher.scheduler.push(verdict.queued)
        else:
            reply, _ = refused(bench, verdict)
            assert reply.retry_after_ms is not None
            codes.append(reply.code)
    assert set(codes) == {Code.OVERLOADED}


def test_when_a_late_one_may_come_again(bench: Bench) -> None:
    """Soon to an idle pool, after a while to a busy one; never is another answer."""
    queued = bench.queued(request(timeout_ms=2_000))
    bench.report(1_000.0)
    bench.now_ms += 1_999
    bench.dispatcher.scheduler.refresh(bench.now_ms)
    soon_ms = bench.dispatcher.output.retry_after_ms(queued, bench.now_ms)
    assert soon_ms is not None
    assert 100 <= soon_ms <= 150
    busy(bench, 60_000)
    bench.dispatcher.scheduler.refresh(bench.now_ms)
    later_ms = bench.dispatcher.output.retry_after_ms(queued, bench.now_ms)
    assert later_ms is not None
    assert later_ms > 10_000


@pytest.mark.parametrize("order", ["by turns", "one after another"])
def test_a_batch_of_many_tenants_is_admitted_up_to_their_target_together(order: str) -> None:
    """Requests of 1,000 tokens at 10,000 a second: at a target of 5 s the queue is one of 5 s, not of 5 s each."""
    tenants = [f"t{number}" for number in range(8)]
    bench = Bench(latency_target_ms="normal=5000")
    bench.assign(*(f"requests.{tenant}" for tenant in tenants))
    bench.register([TenantSpec(tenant) for tenant in tenants])
    bench.report(10_000.0)
    numbers = range(8 * 200)
    senders = [tenants[n % 8] if order == "by turns" else tenants[n // 200] for n in numbers]
    sent = [
        bench.queued(request(n, timeout_ms=20_000, parameters=Parameters(500)), f"requests.{sender}")
        for n, sender in zip(numbers, senders, strict=True)
    ]
    record = cast("ReceivedRecord", None)
    asyncio.run(bench.admission.submit([Candidate(one, record) for one in sent]))
    waiting_s = sum(queue.total.tokens for _, queue, *_ in bench.dispatcher.scheduler.pool_views()) / 10_000
    # One after another, the first is alone until the second comes, which is then served half as fast, and so on.
    assert waiting_s < (6 if order == "by turns" else 5 * sum(1 / (n + 1) for n in range(8)))


# Degradation


def degraded(bench: Bench, taken: Admission) -> AuditEvent:
    """The audit of a degradation, which comes after that of the admission."""
    accepted, event = audits(bench, taken)
    assert (accepted.decision, event.decision) == (Decision.ACCEPTED, Decision.DEGRADED)
    assert SECRET not in str(event) + str(accepted)
    assert isinstance(event, AuditEvent)
    return event


def test_without_pressure_nothing_is_taken_away(bench: Bench) -> None:
    bench.report()
    queued = bench.queued(request(input=CHAT))
    taken = admit(bench, queued)
    assert taken.queued is queued
    assert not taken.degraded


def test_pressure_takes_away_what_the_level_says(bench: Bench) -> None:
    press(bench, 6)
    whole = bench.queued(request(input=CHAT, retrieval=Retrieval("docs", 8), parameters=Parameters(400)))
    taken = admit(bench, whole)
    event = degraded(bench, taken)
    steps = (Degradation.NO_RETRIEVAL, Degradation.SHORTER_CONTEXT)
    assert taken.queued.degradations == steps
    assert event.inputs == {"steps": " ".join(steps), "pressure": "0.676", "level": "6"}
    assert taken.queued.request.retrieval is None
    assert taken.queued.request.parameters.max_tokens == 400
    assert len(taken.queued.request.input.messages or ()) < 9
    assert taken.queued.input_bytes < whole.input_bytes
    assert taken.queued.cost_tokens < whole.cost_tokens


def test_pressure_alone_moves_the_ladder(bench: Bench) -> None:
    """A wait of 6 s of the 10 s allowed is above the first threshold, once."""
    busy(bench, 6_000)
    taken = admit(bench, request(retrieval=Retrieval("docs", 8), timeout_ms=10_000))
    assert taken.queued.degradations == (Degradation.FEWER_PASSAGES,)
    assert degraded(bench, taken).inputs["level"] == "1"


def test_the_patient_are_served_whole_beside_the_impatient(bench: Bench) -> None:
    """A second is in flight: most of the time of the one, nothing beside that of the other."""
    busy(bench, 1_000)
    patient: list[QueuedRequest] = []
    for _ in range(60):
        bench.now_ms += 100
        judged(bench, request(input=CHAT, timeout_ms=1_050))
        patient.append(admit(bench, request(input=CHAT, timeout_ms=600_000)).queued)
    assert bench.admission.ladder.present_level("pool", "acme", bench.now_ms) == 9
    assert all(queued.degradations == () and queued.request.input == CHAT for queued in patient)


def test_one_tenants_pressure_is_not_anothers(bench: Bench) -> None:
    bench.register([TenantSpec("acme"), TenantSpec("other")])
    press(bench, 9)
    assert admit(bench, request(input=CHAT), "requests.other").queued.degradations == ()


def test_a_forbidden_step_is_left_out(bench: Bench) -> None:
    bench.register([TenantSpec("acme", forbidden_degradations=(Degradation.SHORTER_CONTEXT,))])
    press(bench, 7)
    taken = admit(bench, request(input=CHAT, parameters=Parameters(400)))
    assert taken.queued.request.input == CHAT
    assert taken.queued.degradations == (Degradation.CAPPED_MAX_TOKENS,)


def test_a_tenant_that_forbids_everything_is_taken_as_it_is(bench: Bench) -> None:
    bench.register([TenantSpec("acme", forbidden_degradations=tuple(Degradation))], [WITH_SMALLER, SMALLER])
    press(bench, 9)
    queued = bench.queued(request(input=CHAT, parameters=Parameters(400)))
    assert admit(bench, queued).queued is queued


def test_a_smaller_model_answers_on_its_own_pool(bench: Bench) -> None:
    bench.register([TenantSpec("acme")], [WITH_SMALLER, SMALLER])
    press(bench, 8)
    bench.report(1_000.0)
    bench.report(1_000.0, pool="small-pool")
    taken = admit(bench, request())
    assert (taken.queued.model, taken.queued.pool) == (SMALLER, "small-pool")
    assert taken.queued.request.model == "few-words"
    assert taken.queued.degradations == (Degradation.SMALLER_MODEL,)
    accepted, _ = audits(bench, taken)
    assert accepted.inputs["pool"] == "small-pool"


def test_no_smaller_model_answers_a_request_that_names_its_version(bench: Bench) -> None:
    bench.register([TenantSpec("acme")], [WITH_SMALLER, SMALLER])
    press(bench, 8)
    bench.report(1_000.0)
    bench.report(1_000.0, pool="small-pool")
    taken = admit(bench, request(model=f"{WITH_SMALLER.model}/{WITH_SMALLER.version}"))
    assert (taken.queued.model, taken.queued.arm) == (WITH_SMALLER, "version")
    assert Degradation.SMALLER_MODEL not in taken.queued.degradations


def never_reported(_bench: Bench) -> None: ...


def lost(bench: Bench) -> None:
    bench.report(1_000.0, pool="small-pool")
    bench.now_ms += CAPACITY_TTL_MS + 1


def busier(bench: Bench) -> None:
    busy(bench, 300_000, "small-pool")


@pytest.mark.parametrize("make", [never_reported, lost, busier])
def test_a_smaller_model_that_is_no_sooner_is_not_asked(bench: Bench, make: Callable[[Bench], None]) -> None:
    """The request is served where it would have been without the ladder, and is not refused because of it."""
    bench.register([TenantSpec("acme")], [WITH_SMALLER, SMALLER])
    press(bench, 8)
    make(bench)
    bench.report(1_000.0)
    taken = admit(bench, request(input=CHAT))
    assert (taken.queued.model, taken.queued.pool) == (WITH_SMALLER, "pool")
    assert taken.queued.degradations == (Degradation.SHORTER_CONTEXT,)


@pytest.mark.parametrize(
    ("spec", "smaller"),
    [
        (TenantSpec("acme", models=("words",)), SMALLER),
        (TenantSpec("acme", pool="pool"), SMALLER),
        (TenantSpec("acme"), None),
        (TenantSpec("acme"), replace(SMALLER, tasks=("embed",))),
    ],
    ids=["may not use it", "not on its pool", "is not there", "does something else"],
)
def test_a_smaller_model_that_cannot_take_it(bench: Bench, spec: TenantSpec, smaller: ModelVersion | None) -> None:
    bench.register([spec], [WITH_SMALLER, *([] if smaller is None else [smaller])])
    press(bench, 8)
    assert admit(bench, request()).queued.degradations == ()


def test_a_smaller_model_on_anothers_pool_is_not_used(bench: Bench) -> None:
    bench.register([TenantSpec("acme"), TenantSpec("other", pool="small-pool")], [WITH_SMALLER, SMALLER])
    press(bench, 8)
    taken = admit(bench, request())
    assert (taken.queued.pool, taken.queued.degradations) == ("pool", ())


def test_a_smaller_model_on_the_tenants_own_pool(bench: Bench) -> None:
    smaller = replace(SMALLER, dedicated_pools=("mine",))
    bench.register([TenantSpec("acme", pool="mine")], [replace(WITH_SMALLER, dedicated_pools=("mine",)), smaller])
    press(bench, 8, "mine")
    taken = admit(bench, request())
    assert (taken.queued.model, taken.queued.pool) == (smaller, "mine")


def test_what_is_refused_even_with_less_gave_up_nothing(bench: Bench) -> None:
    """What was tried is told in the audit; nothing is counted, and the reply names the model that was asked for."""
    bench.register([TenantSpec("acme")], [WITH_SMALLER, SMALLER])
    busy(bench, 100_000)
    climb(bench, 8)
    bench.report(1_000.0)
    busy(bench, 90_000, "small-pool")
    bench.dispatcher.output.counts = TenantCounters()
    reply, audit = refused(bench, judged(bench, request(input=CHAT, timeout_ms=1_000)))
    assert (reply.code, reply.model) == (Code.DEADLINE_UNMEETABLE, "words")
    assert (audit.inputs["tried_steps"], audit.inputs["pool"]) == ("shorter_context smaller_model", "small-pool")
    expected = TenantCounters()
    expected.decided("acme", Decision.REFUSED, Code.DEADLINE_UNMEETABLE)
    assert bench.dispatcher.output.counts == expected


def test_what_is_taken_with_less_counts(bench: Bench) -> None:
    press(bench, 6)
    bench.dispatcher.output.counts = TenantCounters()
    admit(bench, request(input=CHAT))
    expected = TenantCounters()
    expected.decided("acme", Decision.ACCEPTED)
    expected.degraded("acme", [Degradation.SHORTER_CONTEXT])
    assert bench.dispatcher.output.counts == expected


# Work that was handed back


def test_what_was_handed_back_is_taken_with_less_context(bench: Bench) -> None:
    bench.dispatcher.output.counts = TenantCounters()
    passages = tuple(Passage(str(number), SECRET, 1.0) for number in range(4))
    whole = replace(
        bench.queued(request(input=CHAT, retrieval=Retrieval("docs", 8))),
        passages=passages,
        degradations=(Degradation.FEWER_PASSAGES, Degradation.CAPPED_MAX_TOKENS),
        handed_back=1,
    )
    reduced, notes = bench.admission.reduced(whole, bench.now_ms)
    assert (reduced.passages, reduced.request.retrieval) == (passages[:2], Retrieval("docs", 4))
    assert len(reduced.request.input.messages or ()) < 4
    assert reduced.degradations == (*whole.degradations, Degradation.SHORTER_CONTEXT)
    (event,) = bench.decoded_all(notes)
    assert (event.decision, event.source) == (Decision.DEGRADED, whole.source)
    assert event.inputs == {"steps": "fewer_passages shorter_context", "handed_back": "1"}
    assert SECRET not in str(event)
    expected = TenantCounters()
    expected.degraded("acme", [Degradation.FEWER_PASSAGES, Degradation.SHORTER_CONTEXT])
    assert bench.dispatcher.output.counts == expected


def test_what_was_handed_back_keeps_what_its_tenant_forbids_to_take(bench: Bench) -> None:
    bench.register([TenantSpec("acme", forbidden_degradations=(Degradation.FEWER_PASSAGES,))])
    passages = (Passage("1", "text", 1.0), Passage("2", "text", 1.0))
    whole = replace(bench.queued(request()), passages=passages, handed_back=1)
    assert bench.admission.reduced(whole, bench.now_ms) == (whole, ())


# Backfill


def backfill(bench: Bench, **fields: Any) -> QueuedRequest:
    return bench.queued(request(**fields), names.backfill_topic("acme"))


def test_backfill_is_deferred_at_the_last_step(bench: Bench) -> None:
    climb(bench, 9)
    whole = backfill(bench, input=CHAT)
    taken = admit(bench, whole)
    assert taken.queued.priority_class == "low"
    assert taken.queued.request == replace(whole.request, priority="low")
    assert taken.queued.degradations == (Degradation.DEFERRED,)
    assert degraded(bench, taken).inputs["steps"] == "deferred"


def test_backfill_that_is_low_already_is_left_alone(bench: Bench) -> None:
    climb(bench, 9)
    whole = backfill(bench, input=CHAT, priority="low")
    assert admit(bench, whole).queued is whole


def test_backfill_puts_no_pressure_on_the_ladder(bench: Bench) -> None:
    busy(bench, 1_000_000)
    for _ in range(5):
        bench.now_ms += 1_000
        bench.report()
        admit(bench, backfill(bench, timeout_ms=1_000))
    assert bench.admission.ladder.present_level("pool", "acme", bench.now_ms) == 0


def test_backfill_is_taken_whatever_waits() -> None:
    bench = Bench(max_queue_size=2)
    bench.assign("backfill.acme")
    busy(bench, 1_000_000)
    for number in range(1, 6):
        taken = admit(bench, bench.queued(request(number), "backfill.acme"))
        bench.dispatcher.scheduler.push(taken.queued)
    assert bench.dispatcher.paused_backfill() == {
        partition for partition in bench.partitions if partition.topic == "backfill.acme"
    }


# Latency targets


def asking(number: int, what: int | None = None) -> InferenceRequest:
    """A request with this number, and a content of its own."""
    return request(number, input=RequestInput(prompt=f"question {number if what is None else what}"))


def test_who_was_refused_gets_in_at_its_slot_before_others() -> None:
    bench = Bench(latency_target_ms="normal=1000")
    busy(bench, 1)
    bench.report(100.0)
    number, waiting = 0, []
    while isinstance(verdict := judged(bench, asking(number := number + 1)), Admission):
        bench.dispatcher.scheduler.push(verdict.queued)
        waiting.append(verdict.queued)
    assert len(waiting) > 4
    reply, _ = refused(bench, verdict)
    assert reply.code == Code.OVERLOADED
    assert reply.retry_after_ms is not None
    other, _ = refused(bench, judged(bench, asking(number + 1)))
    assert other.retry_after_ms is not None
    service_ms = 10 * waiting[0].cost_tokens
    assert other.retry_after_ms >= reply.retry_after_ms + service_ms, "one after another"

    bench.dispatcher.scheduler.discard([one.claim for one in waiting[:2]])
    bench.now_ms += reply.retry_after_ms
    bench.report(100.0)
    fresh, _ = refused(bench, judged(bench, asking(number + 2)))
    assert fresh.message is not None
    assert "refused before" in fresh.message
    assert isinstance(judged(bench, asking(number + 3, what=number)), Admission), "under another id"
    assert not isinstance(judged(bench, asking(number + 4, what=number)), Admission), "once"


def test_what_could_not_be_in_time_anyway_gets_no_slot() -> None:
    bench = Bench()
    busy(bench, 90_000)
    reply, _ = refused(bench, judged(bench, request(1)))
    assert reply.code == Code.DEADLINE_UNMEETABLE
    assert len(bench.admission.retry_slots) == 0


def test_own_backfill_is_not_in_the_way_of_online_requests() -> None:
    bench = Bench(latency_target_ms="normal=1000")
    bench.assign("backfill.acme")
    busy(bench, 1)
    bench.report(100.0)
    for number in range(1, 200):
        bench.dispatcher.scheduler.push(admit(bench, bench.queued(request(number), "backfill.acme")).queued)
    assert isinstance(judged(bench, request(500)), Admission)
