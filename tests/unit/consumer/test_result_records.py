"""What becomes of work: the records of every outcome."""

from dataclasses import replace

import pytest
from msgspec import structs

from fairlane import cloud_events, headers, names
from fairlane.kafka_config import MAX_MESSAGE_BYTES
from fairlane.outcomes import Code, Decision, FinishReason, Outcome
from fairlane.ownership import Claim, PartitionId
from fairlane.records import (
    AuditEvent,
    ConversationTurn,
    Cost,
    HistoryUse,
    InferenceReply,
    Message,
    ModelPrices,
    Output,
    PassageReference,
    Price,
    RequestInput,
    SourceCoordinate,
    TokenUsage,
    UsageEvent,
    WorkItem,
)
from fairlane.schema_files import default_codec
from fairlane_server.costs.price_book import NO_PRICES, PriceBook
from fairlane_server.kafka.transactions import Settlement
from inference_consumers.batching.received_work import ReceivedWork
from inference_consumers.engines.protocol import CancelledItem, Failure, ItemOutcome, Success
from inference_consumers.results.records import AnswerWriter
from inference_consumers.results.retries import requeued_item
from inference_consumers.results.settled import EngineRun
from tests.kit.finished_item import ITEM, SECRET

CODEC = default_codec()
WRITER = AnswerWriter(CODEC, "consumer-1")
CLAIM = Claim(PartitionId("priority.pool.high", 2), 17, 1)
RUN = EngineRun("simulated", 4, 1_500, 1_750)
WORK = ReceivedWork(CLAIM, ITEM, 300, 1_100, b"the key", b"the bytes", 1_025)
OK = Success(Output(text="yes"), TokenUsage(3, 1, 0), FinishReason.STOP)


def reply_and_usage(settlement: Settlement) -> tuple[InferenceReply, UsageEvent]:
    reply, usage = settlement.outputs[:2]
    assert (reply.topic, reply.key) == ("replies.acme.search", b"id-1")
    assert (usage.topic, usage.key) == (names.LEDGER_USAGE, b"acme")
    return CODEC.decode_as(InferenceReply, reply.value), CODEC.decode_as(UsageEvent, usage.value)


def answered(work: ReceivedWork, outcome: ItemOutcome, run: EngineRun) -> Settlement:
    return WRITER.answered(work, outcome, run).settlement


def test_an_answer_says_where_it_came_from() -> None:
    settlement = answered(WORK, OK, RUN)
    assert settlement.claim == CLAIM
    assert len(settlement.outputs) == 2
    reply, usage = reply_and_usage(settlement)
    assert (reply.outcome, reply.code, reply.output, reply.finish_reason) == ("ok", None, OK.output, "stop")
    assert (reply.model, reply.model_version, reply.task, reply.engine) == ("words", "3", "generate", "simulated")
    assert (reply.batch_size, reply.usage, reply.degradations) == (4, OK.usage, ("capped",))
    assert reply.passages == (PassageReference("p-1", 0.5),)
    assert (reply.source, reply.replayed) == (ITEM.source, False)
    timings = reply.timings
    assert (timings.submitted_at_ms, timings.admitted_at_ms, timings.dispatched_at_ms) == (1_000, 1_010, 1_020)
    assert (timings.received_at_ms, timings.engine_started_at_ms, timings.engine_finished_at_ms) == (
        1_100,
        1_500,
        1_750,
    )
    assert usage == UsageEvent(
        request_id="id-1",
        tenant="acme",
        pool="pool",
        model="words",
        model_version="3",
        priority_class="high",
        outcome="ok",
        code=None,
        prompt_tokens=3,
        completion_tokens=1,
        cached_tokens=0,
        cost_tokens=21,
        engine_ms=250,
        occurred_at_ms=1_750,
        work=SourceCoordinate("priority.pool.high", 2, 17),
        batch_size=4,
        requested_by="key:0123456789abcdef",
    )


PRICES = PriceBook(
    [
        ModelPrices(
            "words",
            "XTS",
            (
                Price(
                    1_000, None, input_nanos=2_000_000, output_nanos=8_000_000, engine_second_nanos=400, image_nanos=50
                ),
            ),
        )
    ]
)
PRICED = AnswerWriter(CODEC, "consumer-1", prices=lambda: PRICES)
# 3 tokens at 2 nanos, 1 at 8, and a quarter of 250 ms at 400 nanos a second.
COST = Cost(6 + 8 + 25, "XTS")


def test_reply_and_usage_carry_the_same_cost_and_it_follows_from_the_usage() -> None:
    reply, usage = reply_and_usage(PRICED.answered(WORK, OK, RUN).settlement)
    assert reply.cost == usage.cost == COST == PRICES.cost_of(usage)


@pytest.mark.parametrize("code", list(Code)[-5:])
def test_a_run_that_failed_costs_nothing(code: Code) -> None:
    reply, usage = reply_and_usage(PRICED.answered(WORK, Failure(code, "because"), RUN).settlement)
    assert reply.cost == usage.cost == Cost(0, "XTS") == PRICES.cost_of(usage)


def test_what_expired_was_cancelled_while_it_waited_or_was_handed_back_costs_nothing() -> None:
    picture = replace(ITEM, request=replace(ITEM.request, input=RequestInput(image=b"i"), task="classify"))
    work, idle = replace(WORK, item=picture), EngineRun("none", 0, 1_500, 1_500)
    expired = reply_and_usage(PRICED.expired(work, 2_300))
    dropped = reply_and_usage(PRICED.answered(work, CancelledItem(TokenUsage()), idle).settlement)
    for reply, usage in (expired, dropped):
        assert reply.cost == usage.cost == Cost(0, "XTS") == PRICES.cost_of(usage)
        assert (usage.images, usage.batch_size) == (0, 0)
    returned = requeued_item(ITEM, Code.OVERLOADED)
    assert returned is not None
    handed = PRICED.handed_back(WORK, returned, Failure(Code.OVERLOADED, "no memory"), RUN)
    assert CODEC.decode_as(UsageEvent, handed.outputs[1].value).cost == Cost(0, "XTS")
    reply, usage = reply_and_usage(PRICED.unpublishable(handed, "UNKNOWN_TOPIC_OR_PART"))
    assert reply.cost == usage.cost == Cost(0, "XTS")


def test_a_picture_that_was_looked_at_costs_the_price_of_one() -> None:
    picture = replace(ITEM, request=replace(ITEM.request, input=RequestInput(image=b"i"), task="classify"))
    reply, usage = reply_and_usage(PRICED.answered(replace(WORK, item=picture), OK, RUN).settlement)
    assert usage.images == 1
    assert reply.cost == usage.cost == Cost(COST.nanos + 50, "XTS")


def test_an_answer_too_long_for_the_log_costs_nothing() -> None:
    long = structs.replace(OK, output=Output(text="x" * MAX_MESSAGE_BYTES))
    reply, usage = reply_and_usage(PRICED.answered(WORK, long, RUN).settlement)
    assert reply.cost == usage.cost == Cost(0, "XTS")


def test_without_a_price_no_cost_is_written() -> None:
    early = EngineRun("simulated", 4, 500, 999)
    for writer, run in ((WRITER, RUN), (PRICED, early)):
        reply, usage = reply_and_usage(writer.answered(WORK, OK, run).settlement)
        assert (reply.cost, usage.cost) == (None, None)


def test_the_price_that_is_published_when_the_usage_is_written_counts() -> None:
    published = [NO_PRICES]
    writer = AnswerWriter(CODEC, "consumer-1", prices=lambda: published[0])
    assert writer.answered(WORK, OK, RUN).reply.cost is None
    published[0] = PRICES
    assert writer.answered(WORK, OK, RUN).reply.cost == COST


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (Code.INVALID, Outcome.REJECTED),
        (Code.UNKNOWN_MODEL, Outcome.REJECTED),
        (Code.OVERLOADED, Outcome.REJECTED),
        (Code.CONTEXT_TOO_LONG, Outcome.FAILED),
        (Code.ENGINE_ERROR, Outcome.FAILED),
        (Code.POISON, Outcome.FAILED),
        (Code.RETRIES_EXHAUSTED, Outcome.FAILED),
    ],
)
def test_what_an_engine_cannot_answer(code: Code, outcome: Outcome) -> None:
    settlement = answered(WORK, Failure(code, "because", "input"), RUN)
    reply, usage = reply_and_usage(settlement)
    assert (reply.outcome, reply.code, reply.field, reply.message) == (outcome, code, "input", "because")
    assert reply.output is None
    assert (usage.outcome, usage.code) == (outcome, code)
    assert len(settlement.outputs) == (3 if code in {Code.POISON, Code.OVERLOADED} else 2)


def test_poison_is_kept_as_it_was_read() -> None:
    letter = answered(WORK, Failure(Code.POISON, "RuntimeError"), RUN).outputs[2]
    assert (letter.topic, letter.key, letter.value) == (names.DEAD_LETTER_WORK, b"the key", b"the bytes")
    assert dict(letter.headers) == {
        headers.DLT_ORIGINAL_TOPIC: b"priority.pool.high",
        headers.DLT_ORIGINAL_PARTITION: b"2",
        headers.DLT_ORIGINAL_OFFSET: b"17",
        headers.DLT_ORIGINAL_TIMESTAMP: b"1025",
        headers.DLT_EXCEPTION_CLASS: b"inference_consumers.results.records.PoisonError",
        headers.DLT_EXCEPTION_MESSAGE: b"RuntimeError",
        headers.INSTANCE_ID: b"consumer-1",
        headers.TENANT: b"acme",
        headers.MODEL: b"words",
    }


def test_an_answer_too_long_for_the_log_is_a_failure() -> None:
    reply, usage = reply_and_usage(
        answered(WORK, structs.replace(OK, output=Output(text="x" * MAX_MESSAGE_BYTES)), RUN)
    )
    assert (reply.outcome, reply.code) == (Outcome.FAILED, Code.ENGINE_ERROR)
    assert "bytes" in (reply.message or "")
    assert usage.outcome == Outcome.FAILED


def conversing(given: RequestInput, conversation_id: str | None = "c-1") -> ReceivedWork:
    request = replace(ITEM.request, input=given, conversation_id=conversation_id)
    use = HistoryUse(2, "shortened", 5)
    history = (Message("user", "before"), Message("assistant", "then"))
    return replace(WORK, item=replace(ITEM, request=request, history=history, history_use=use))


CHAT = (Message("system", "Be brief."), Message("user", "Who?"), Message("assistant", "I"), Message("user", "And?"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (RequestInput(messages=CHAT), CHAT[1:]),
        (RequestInput(prompt="Who?"), (Message("user", "Who?"),)),
        (RequestInput(messages=(), prompt="Who?"), (Message("user", "Who?"),)),
        (RequestInput(messages=(CHAT[1], CHAT[0])), (CHAT[1],)),
    ],
)
def test_a_reply_that_goes_on_a_conversation_says_what_was_added(
    given: RequestInput, said: tuple[Message, ...]
) -> None:
    reply, _ = reply_and_usage(answered(conversing(given), OK, RUN))
    assert reply.turn == ConversationTurn("c-1", said), "what was said before is there already"
    assert reply.history_use == HistoryUse(2, "shortened", 5)


def test_no_turn_without_a_conversation_an_answer_or_a_word() -> None:
    chat = RequestInput(messages=CHAT)
    failed, _ = reply_and_usage(answered(conversing(chat), Failure(Code.CONTEXT_TOO_LONG, "long"), RUN))
    assert (failed.turn, failed.history_use) == (None, HistoryUse(2, "shortened", 5))
    outside, _ = reply_and_usage(answered(conversing(chat, None), OK, RUN))
    silent, _ = reply_and_usage(answered(conversing(RequestInput(messages=CHAT[:1])), OK, RUN))
    vectors = Success(Output(embeddings=((1.0,),)), TokenUsage(3))
    textless, _ = reply_and_usage(answered(conversing(chat), vectors, RUN))
    assert [outside.turn, silent.turn, textless.turn] == [None] * 3


def test_a_turn_that_makes_the_reply_too_large_is_left_out() -> None:
    """Rather a conversation with a gap than no answer."""
    work = conversing(RequestInput(prompt="x" * (MAX_MESSAGE_BYTES // 2)))
    long = structs.replace(OK, output=Output(text="y" * (MAX_MESSAGE_BYTES // 2)))
    made = WRITER.answered(work, long, RUN)
    reply, usage = reply_and_usage(made.settlement)
    assert (reply.outcome, usage.outcome, reply.output, reply.turn) == ("ok", "ok", long.output, None)
    assert (made.reply, made.turn_left_out) == (reply, True)
    made = WRITER.answered(work, OK, RUN)
    assert (made.reply.turn is not None, made.turn_left_out) == (True, False)


def handed_back(work: ReceivedWork = WORK) -> Settlement:
    returned = requeued_item(work.item, Code.OVERLOADED)
    assert returned is not None
    return WRITER.handed_back(work, returned, Failure(Code.OVERLOADED, "no memory"), RUN)


def test_what_is_handed_back_is_the_item_its_usage_and_its_audit() -> None:
    settlement = handed_back(replace(WORK, trace_headers=((headers.TRACE_PARENT, b"00-trace"),)))
    returned, usage_record, audit_record = settlement.outputs
    assert settlement.claim == CLAIM
    assert (returned.topic, returned.key) == ("returned.pool", b"id-1")
    assert tuple(returned.headers) == ((headers.TRACE_PARENT, b"00-trace"),)
    assert CODEC.decode_as(WorkItem, returned.value) == replace(ITEM, handed_back=1)
    usage = CODEC.decode_as(UsageEvent, usage_record.value)
    assert (usage.outcome, usage.code) == (Outcome.REJECTED, Code.OVERLOADED)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cost_tokens) == (0, 0, 21)
    assert usage.work == SourceCoordinate("priority.pool.high", 2, 17)
    assert (audit_record.topic, audit_record.key) == (names.LEDGER_AUDIT, b"acme")
    audit = CODEC.decode_as(AuditEvent, audit_record.value)
    assert (audit.decision, audit.code, audit.actor) == (Decision.HANDED_BACK, Code.OVERLOADED, "consumer-1")
    assert (audit.request_id, audit.source, audit.occurred_at_ms) == ("id-1", ITEM.source, RUN.finished_at_ms)
    assert audit.inputs["work"] == "priority.pool.high-2@17"
    assert audit.inputs["handed_back"] == "1"
    for record in (usage_record, audit_record):
        assert SECRET.encode() not in record.value


@pytest.mark.parametrize(("engine_ms", "least_ms"), [(20, 1_000), (4_000, 8_000), (3_600_000, 200_000)])
def test_who_found_no_memory_may_come_again_after_two_batches(engine_ms: int, least_ms: int) -> None:
    run = replace(RUN, finished_at_ms=RUN.started_at_ms + engine_ms)
    times = []
    for number in range(20):
        item = replace(ITEM, request=replace(ITEM.request, request_id=f"id-{number}"), handed_back=1)
        settlement = answered(replace(WORK, item=item), Failure(Code.OVERLOADED, "no memory"), run)
        times.append(CODEC.decode_as(InferenceReply, settlement.outputs[0].value).retry_after_ms or 0)
    assert least_ms <= min(times) < max(times) <= 1.5 * least_ms
    assert len(set(times)) > 10


def test_work_that_is_too_large_again_is_refused_as_overloaded() -> None:
    work = replace(WORK, item=replace(ITEM, handed_back=1))
    settlement = answered(work, Failure(Code.OVERLOADED, "no memory"), RUN)
    reply, usage = reply_and_usage(settlement)
    assert (reply.outcome, reply.code, reply.message) == (Outcome.REJECTED, Code.OVERLOADED, "no memory")
    assert 1_000 <= (reply.retry_after_ms or 0) <= 1_500
    assert (usage.outcome, usage.code) == (Outcome.REJECTED, Code.OVERLOADED)
    audit = CODEC.decode_as(AuditEvent, settlement.outputs[2].value)
    assert (len(settlement.outputs), audit.decision) == (3, Decision.REFUSED)


def test_work_that_cannot_be_handed_back_is_refused_at_once() -> None:
    handed = handed_back()
    kept = WRITER.unpublishable(handed, "UNKNOWN_TOPIC_OR_PART")
    reply, usage = reply_and_usage(kept)
    assert kept.claim == CLAIM
    assert (reply.outcome, reply.code, reply.source) == (Outcome.REJECTED, Code.OVERLOADED, ITEM.source)
    assert 1_000 <= (reply.retry_after_ms or 0) <= 1_500
    assert "UNKNOWN_TOPIC_OR_PART" in (reply.message or "")
    assert usage == CODEC.decode_as(UsageEvent, handed.outputs[1].value)
    audit = CODEC.decode_as(AuditEvent, kept.outputs[2].value)
    assert (len(kept.outputs), audit.decision) == (3, Decision.REFUSED)


def test_expired_work_costs_nothing() -> None:
    reply, usage = reply_and_usage(WRITER.expired(WORK, 2_300))
    assert (reply.outcome, reply.code, reply.batch_size) == (Outcome.EXPIRED, None, 0)
    assert "300 ms" in (reply.message or "")
    assert reply.timings.engine_started_at_ms is None
    assert (usage.outcome, usage.engine_ms, usage.prompt_tokens, usage.cost_tokens) == (Outcome.EXPIRED, 0, 0, 21)


def test_a_record_that_is_no_work_is_kept() -> None:
    settlement = WRITER.unreadable(CLAIM, None, None, 1_025, "empty: no bytes")
    (letter,) = settlement.outputs
    assert (settlement.claim, letter.topic, letter.key, letter.value) == (CLAIM, names.DEAD_LETTER_WORK, None, b"")
    assert dict(letter.headers)[headers.DLT_EXCEPTION_MESSAGE] == b"empty: no bytes"


def test_a_reply_that_cannot_be_written_is_kept_for_an_operator() -> None:
    settlement = answered(WORK, OK, RUN)
    kept = WRITER.unpublishable(settlement, "UNKNOWN_TOPIC_OR_PART")
    letter, usage = kept.outputs
    assert usage == settlement.outputs[1], "what was spent is booked all the same"
    assert (kept.claim, letter.topic, letter.value) == (CLAIM, names.DEAD_LETTER_WORK, settlement.outputs[0].value)
    assert b"UNKNOWN_TOPIC_OR_PART" in dict(letter.headers)[headers.DLT_EXCEPTION_MESSAGE]


OUTCOMES: tuple[ItemOutcome, ...] = (OK, Failure(Code.POISON, "RuntimeError"), Failure(Code.CONTEXT_TOO_LONG, "long"))


@pytest.mark.parametrize("outcome", [*OUTCOMES, None])
def test_every_reply_is_an_event_in_the_trace_of_its_request(outcome: ItemOutcome | None) -> None:
    trace = ((headers.TRACE_PARENT, b"00-trace"), (headers.TRACE_STATE, b"vendor=1"))
    work = replace(WORK, trace_headers=trace)
    settlement = WRITER.expired(work, 9_000) if outcome is None else answered(work, outcome, RUN)
    reply = CODEC.decode_as(InferenceReply, settlement.outputs[0].value)
    assert tuple(settlement.outputs[0].headers) == (*cloud_events.of_reply(reply), *trace)
    assert [record.headers for record in settlement.outputs[1:] if record.topic == names.LEDGER_USAGE] == [()]


def test_what_cannot_be_handed_back_is_refused_in_the_trace_of_its_request() -> None:
    trace = ((headers.TRACE_PARENT, b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),)
    refused = WRITER.unpublishable(handed_back(replace(WORK, trace_headers=trace)), "no such topic")
    reply = CODEC.decode_as(InferenceReply, refused.outputs[0].value)
    assert tuple(refused.outputs[0].headers) == (*cloud_events.of_reply(reply), *trace)


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_no_prompt_leaves_with_a_reply_or_a_header(outcome: ItemOutcome) -> None:
    for output in answered(WORK, outcome, RUN).outputs:
        assert SECRET not in repr(output.headers)
        if output.topic != names.DEAD_LETTER_WORK:
            assert SECRET.encode() not in output.value
