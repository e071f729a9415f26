"""Requests with retrieval at the dispatcher: looked up while they wait, sent on within the budget whatever happens."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from fairlane.outcomes import Code, Degradation, Outcome, RetrievalMode, RetrievalReason
from fairlane.records import CancelRequest, Parameters, RequestInput, Retrieval, RetrievalUse, TenantSpec, WorkItem
from fairlane_server.retrieval.embedder import EmbedderError
from fairlane_server.store_error import StoreError
from stream_processors.dispatcher.intake.validation import size_of_input
from stream_processors.dispatcher.queued_request import QueuedRequest
from stream_processors.dispatcher.scheduling.scheduler import Scheduler
from tests.kit.dispatcher_bench import MODEL, PARTITION, Bench, encoded, handed_back, request
from tests.kit.fake_passages import collection, hit
from tests.kit.waiting import eventually_async

RETRIEVAL = Retrieval("handbook", 2)
WORK = "priority.pool.normal"


@pytest.fixture
def bench() -> Bench:
    made = Bench(retrieval_budget_ms=200)
    made.passages.add(collection())
    made.passages.nearest = (hit("a"), hit("b"), hit("c"))
    made.passages.matching = (hit("c"),)
    return made


def given(number: int = 1, **fields: Any) -> bytes:
    return encoded(number, **{"retrieval": RETRIEVAL, **fields})


def work(bench: Bench) -> list[WorkItem]:
    return bench.decoded(WORK)


def taken(bench: Bench) -> int:
    """Cost in flight, reserved ones included."""
    return bench.dispatcher.scheduler.in_flight.held("pool", None).tokens


def test_a_request_whose_turn_is_at_once_is_sent_on_with_its_passages(bench: Bench) -> None:
    bench.run(given())
    (item,) = work(bench)
    assert [(one.passage_id, one.text) for one in item.passages] == [("c", "the text of c"), ("a", "the text of a")]
    assert item.retrieval_use == RetrievalUse("handbook", RetrievalMode.HYBRID, None, 1)
    assert item.degradations == ()
    (inputs,) = [event.inputs for event in bench.audit() if event.decision == "dispatched"]
    assert (inputs["collection"], inputs["retrieval_mode"], inputs["passages"]) == ("handbook", "hybrid", "2")


def test_at_the_step_of_a_shorter_retrieval_it_has_half_of_the_budget() -> None:
    bench = Bench(retrieval_budget_ms=10_000)
    bench.passages.add(collection())
    whole = bench.queued(request(1, retrieval=RETRIEVAL))
    other = bench.queued(request(2, retrieval=RETRIEVAL, input=RequestInput(prompt="something else")))

    async def look_up() -> None:
        bench.new_loop()
        stage = bench.dispatcher.enrichment
        stage.begin(whole)
        stage.begin(replace(other, degradations=(Degradation.SHORTER_RETRIEVAL,)))
        await eventually_async(lambda: len(bench.passages.searches) == 2)
        await stage.close()

    asyncio.run(look_up())
    assert 9 < bench.passages.timeouts_s[0] <= 10
    assert 4 < bench.passages.timeouts_s[1] <= 5


def test_one_without_retrieval_waits_for_nothing(bench: Bench) -> None:
    bench.passages.hangs = True
    bench.run(encoded(1), given(2))
    (item,) = work(bench)
    assert item.request.request_id == request(1).request_id
    assert item.retrieval_use is None


def test_passages_are_looked_up_while_it_waits(bench: Bench) -> None:
    bench.report(rate=10.0, tokens=10)
    bench.run(*(encoded(number) for number in range(2, 40)), given(1, timeout_ms=80_000_000))
    assert len(bench.passages.searches) == 1
    assert request(1).request_id not in {item.request.request_id for item in work(bench)}
    bench.passages.hangs = True
    bench.report(rate=1e9, tokens=1_000_000)
    bench.dispatcher.dispatch()
    assert [len(item.passages) for item in work(bench) if item.request.retrieval] == [2]
    assert len(bench.passages.searches) == 1


@pytest.mark.parametrize("trouble", ["late", "away", "no full text"])
def test_what_goes_wrong_takes_something_away_and_says_why(bench: Bench, trouble: str) -> None:
    if trouble == "late":
        bench.passages.hangs = True
    elif trouble == "away":
        bench.passages.failures.append(StoreError("away"))
    else:
        bench.passages.matching = None

    async def run() -> None:
        await bench.write(0, given())
        running = asyncio.create_task(bench.dispatcher.run())
        await bench.eventually(lambda: work(bench))
        running.cancel()

    asyncio.run(run())
    (item,) = work(bench)
    assert item.retrieval_use is not None
    reason = item.retrieval_use.reason
    if trouble == "no full text":
        assert (item.degradations, reason) == ((Degradation.VECTOR_ONLY,), RetrievalReason.LATE)
        assert len(item.passages) == 2
    else:
        expected = RetrievalReason.LATE if trouble == "late" else RetrievalReason.UNAVAILABLE
        assert (item.degradations, reason) == ((Degradation.NO_RETRIEVAL,), expected)
        assert item.passages == ()


@pytest.fixture
def refunded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of requests whose charge in the fair queue was taken back."""
    ids: list[str] = []
    refund = Scheduler.refund

    def note(self: Scheduler[QueuedRequest], item: QueuedRequest) -> None:
        ids.append(item.request_id)
        refund(self, item)

    monkeypatch.setattr(Scheduler, "refund", note)
    return ids


def test_a_collection_that_is_not_there_is_named_and_nothing_stays_in_flight(bench: Bench, refunded: list[str]) -> None:
    bench.run(given(retrieval=Retrieval("other")))
    (reply,) = bench.decoded("replies.acme")
    assert (reply.outcome, reply.code, reply.field) == (Outcome.REJECTED, Code.INVALID, "retrieval.collection")
    assert reply.degradations == ()
    assert work(bench) == []
    assert taken(bench) == 0
    assert refunded == [request(1).request_id]
    assert [event.decision for event in bench.audit()] == ["accepted", "refused"]


def test_one_that_is_looked_up_counts_as_in_flight(bench: Bench) -> None:
    bench.passages.hangs = True
    bench.run(given())
    assert work(bench) == []
    assert taken(bench) > 0


def test_what_moves_on_while_it_is_looked_up_is_left_to_its_new_owner(bench: Bench) -> None:
    bench.passages.hangs = True

    async def run() -> None:
        await bench.write(0, given())
        await bench.decide()
        bench.ownership.revoke([PARTITION])
        await bench.dispatcher.on_revoked()
        bench.dispatcher.sweep()
        bench.passages.hangs = False
        await bench.dispatcher.enrichment.close()

    asyncio.run(run())
    assert bench.transactions.settlements == []
    assert taken(bench) == 0


def test_what_is_cancelled_while_it_waits_is_forgotten(bench: Bench) -> None:
    bench.report(rate=10.0, tokens=10)

    async def run() -> None:
        await bench.write(0, encoded(2))
        await bench.write(1, encoded(3))
        await bench.write(2, given(1))
        await bench.decide()
        assert len(bench.dispatcher.enrichment) == 1
        cancel = bench.classifier.codec.encode(CancelRequest(request(1).request_id))
        await bench.write(3, cancel)
        await bench.decide()
        bench.dispatcher.sweep()
        assert len(bench.dispatcher.enrichment) == 0

    asyncio.run(run())


def test_what_fails_when_passages_come_ends_delivery_and_with_it_the_process(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("cannot be encoded")

    async def run() -> None:
        running = asyncio.create_task(bench.dispatcher.run())
        delivering = asyncio.create_task(bench.dispatcher.deliver())
        monkeypatch.setattr(type(bench.dispatcher.output.writer), "dispatched", broken)
        await bench.write(0, given())
        with pytest.raises(RuntimeError, match="cannot be encoded"):
            await asyncio.wait_for(delivering, 10)
        running.cancel()

    asyncio.run(run())


def test_backfill_is_looked_up_when_its_turn_has_come(bench: Bench) -> None:
    bench.assign("backfill.acme")
    bench.report(rate=10.0, tokens=10)
    bench.run(encoded(2), encoded(3))
    bench.run(given(1), topic="backfill.acme")
    assert bench.passages.searches == []


def test_passages_leave_room_for_the_answer(bench: Bench) -> None:
    small = replace(MODEL, max_context_tokens=200)
    bench.register(list(bench.dispatcher.registry.tenants.values()), [small])
    bench.passages.nearest = (hit("long", 500), hit("short", 20))
    bench.passages.matching = ()
    bench.run(given(parameters=Parameters(50)))
    (item,) = work(bench)
    assert [one.passage_id for one in item.passages] == ["short"]
    assert item.degradations == (Degradation.FEWER_PASSAGES,)


def test_passages_of_which_none_fits_are_no_retrieval(bench: Bench) -> None:
    bench.register(list(bench.dispatcher.registry.tenants.values()), [replace(MODEL, max_context_tokens=200)])
    bench.passages.nearest, bench.passages.matching = (hit("long", 500),), ()
    bench.run(given(parameters=Parameters(50)))
    (item,) = work(bench)
    assert item.passages == ()
    assert item.retrieval_use is not None
    assert (item.retrieval_use.reason, item.degradations) == (RetrievalReason.NO_ROOM, (Degradation.NO_RETRIEVAL,))


def test_a_tenants_bound_on_prompts_holds_for_passages(bench: Bench) -> None:
    bench.register([replace(spec, max_prompt_tokens=120) for spec in bench.dispatcher.registry.tenants.values()])
    bench.passages.nearest, bench.passages.matching = (hit("long", 100), hit("short", 20)), ()
    bench.run(given())
    (item,) = work(bench)
    assert [one.passage_id for one in item.passages] == ["short"]


def test_passages_cost_what_they_take_and_teach_nothing_wrong(bench: Bench) -> None:
    bench.run(encoded(2), given(1))
    plain, grounded = sorted(work(bench), key=lambda item: len(item.passages))
    assert grounded.prompt_tokens - plain.prompt_tokens == 2 * (12 + 12)
    assert grounded.cost_tokens - plain.cost_tokens == 2 * (12 + 12)
    source = grounded.source
    reserved = bench.dispatcher.scheduler.in_flight._reservations[source].own
    assert reserved is not None
    assert reserved.input_bytes == size_of_input(request(1).input) + len("the text of a") + len("the text of c")


@pytest.mark.parametrize("trouble", ["away", "embedder"])
def test_what_failed_while_it_waited_is_tried_again_when_its_turn_has_come(bench: Bench, trouble: str) -> None:
    bench.report(rate=10.0, tokens=10)
    if trouble == "away":
        bench.passages.failures.append(StoreError("away"))
    else:
        bench.embedder.failures.append(EmbedderError("not loaded"))
    waiting = (encoded(number) for number in range(2, 40))

    async def run() -> None:
        for offset, value in enumerate((*waiting, given(1, timeout_ms=80_000_000))):
            await bench.write(offset, value)
        await bench.decide()
        bench.report(rate=1e9, tokens=1_000_000)
        bench.dispatcher.dispatch()
        await bench.eventually(lambda: [item for item in work(bench) if item.request.retrieval])

    asyncio.run(run())
    (item,) = [item for item in work(bench) if item.request.retrieval]
    assert len(item.passages) == 2
    assert item.retrieval_use is not None
    assert item.retrieval_use.reason is None


def test_one_tenant_keeps_a_part_of_the_room_and_no_more_text_than_there_is(bench: Bench) -> None:
    bench.register([TenantSpec("acme"), TenantSpec("globex")])
    bench.assign("requests.globex")
    bench.passages.add(collection("globex"))
    bench.report(rate=10.0, tokens=10)
    enrichment = bench.dispatcher.enrichment
    enrichment.max_kept = 8
    patience = {"timeout_ms": 80_000_000}
    bench.run(encoded(90), encoded(91), *(given(number, **patience) for number in range(1, 20)))
    assert len(enrichment) == 2
    bench.run(*(given(number, **patience) for number in range(30, 50)), topic="requests.globex")
    assert len(enrichment) == 4
    enrichment.max_kept_bytes = 1
    bench.run(*(given(number, **patience) for number in range(60, 61)), topic="requests.globex")
    assert enrichment._bytes <= 4 * 2 * len("the text of a")


def test_one_that_is_cancelled_while_it_is_looked_up_is_answered_and_sent_to_nobody(
    bench: Bench, refunded: list[str]
) -> None:
    bench.passages.hangs = True

    async def run() -> None:
        await bench.write(0, given(1))
        await bench.decide()
        assert taken(bench) > 0
        await bench.write(1, bench.classifier.codec.encode(CancelRequest(request(1).request_id)))
        await bench.decide()
        bench.passages.hangs = False
        await bench.dispatcher.enrichment.close()

    asyncio.run(run())
    assert work(bench) == []
    assert [reply.outcome for reply in bench.decoded("replies.acme")] == [Outcome.CANCELLED]
    assert taken(bench) == 0
    assert refunded == [request(1).request_id]


def test_one_that_waits_in_line_is_let_in_or_goes_without_when_its_turn_has_come(bench: Bench) -> None:
    """Every place is taken by searches that hang; its budget ends the wait."""
    bench.passages.hangs = True
    bench.dispatcher.enrichment.limiter.limit = 1
    bench.report(rate=10.0, tokens=10)
    patience = {"timeout_ms": 80_000_000}

    async def run() -> None:
        await bench.write(0, given(5))
        await bench.write(1, encoded(2))
        for number in (1, 3, 4):
            await bench.write(number + 1, given(number, **patience))
        await bench.decide()
        bench.report(rate=1e9, tokens=1_000_000)
        bench.dispatcher.dispatch()
        await bench.eventually(lambda: len(work(bench)) == 5)

    asyncio.run(run())
    reasons = {item.retrieval_use.reason for item in work(bench) if item.retrieval_use is not None}
    assert RetrievalReason.BUSY in reasons
    assert reasons <= {RetrievalReason.BUSY, RetrievalReason.LATE}


def test_work_that_was_handed_back_keeps_its_passages(bench: Bench) -> None:
    use = RetrievalUse("handbook", RetrievalMode.HYBRID, None, 1)
    back = handed_back(request=request(1, retrieval=RETRIEVAL), retrieval_use=use)
    bench.assign("returned.pool")
    bench.run(bench.classifier.codec.encode(back), topic="returned.pool")
    assert bench.passages.searches == []
    (item,) = work(bench)
    assert item.retrieval_use == use
