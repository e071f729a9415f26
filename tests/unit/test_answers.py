"""What becomes of work: the records of every outcome."""

from dataclasses import replace

import pytest

from fairlane import headers, names
from fairlane.kafka import MAX_MESSAGE_BYTES
from fairlane.outcomes import Code, FinishReason, Outcome
from fairlane.ownership import Claim, PartitionId
from fairlane.records import (
    InferenceReply,
    InferenceRequest,
    Output,
    Passage,
    PassageReference,
    RequestInput,
    SourceCoordinate,
    TokenUsage,
    UsageEvent,
    WorkItem,
)
from fairlane.schema_files import default_codec
from fairlane.transactions import Settlement
from inference_consumers.answers import AnswerWriter, EngineRun
from inference_consumers.engines.protocol import Failure, ItemOutcome, Success
from inference_consumers.micro_batch import ReceivedWork

SECRET = "a prompt nobody may see"
CODEC = default_codec()
WRITER = AnswerWriter(CODEC)
CLAIM = Claim(PartitionId("priority.pool.high", 2), 17, 1)
RUN = EngineRun("simulated", 4, 1_500, 1_750)
ITEM = WorkItem(
    request=InferenceRequest("id-1", "words", "generate", RequestInput(prompt=SECRET)),
    tenant="acme",
    pool="pool",
    model_version="3",
    priority_class="high",
    cost_tokens=21,
    submitted_at_ms=1_000,
    admitted_at_ms=1_010,
    dispatched_at_ms=1_020,
    deadline_at_ms=2_000,
    reply_topic="replies.acme.search",
    dispatcher_id="dispatcher-1",
    source=SourceCoordinate("requests.acme", 0, 5),
    degradations=("capped",),
    passages=(Passage("p-1", SECRET, 0.5),),
)
WORK = ReceivedWork(CLAIM, ITEM, 300, 1_100, b"the key", b"the bytes", 1_025)
OK = Success(Output(text="yes"), TokenUsage(3, 1, 0), FinishReason.STOP)


def reply_and_usage(settlement: Settlement) -> tuple[InferenceReply, UsageEvent]:
    reply, usage = settlement.outputs[:2]
    assert (reply.topic, reply.key) == ("replies.acme.search", b"id-1")
    assert (usage.topic, usage.key) == (names.LEDGER_USAGE, b"acme")
    return CODEC.decode_as(InferenceReply, reply.value), CODEC.decode_as(UsageEvent, usage.value)


def test_an_answer_says_where_it_came_from() -> None:
    settlement = WRITER.answered(WORK, OK, RUN)
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
    )


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (Code.INVALID, Outcome.REJECTED),
        (Code.UNKNOWN_MODEL, Outcome.REJECTED),
        (Code.CONTEXT_TOO_LONG, Outcome.FAILED),
        (Code.ENGINE_ERROR, Outcome.FAILED),
        (Code.POISON, Outcome.FAILED),
        (Code.RETRIES_EXHAUSTED, Outcome.FAILED),
    ],
)
def test_what_an_engine_cannot_answer(code: Code, outcome: Outcome) -> None:
    settlement = WRITER.answered(WORK, Failure(code, "because", "input"), RUN)
    reply, usage = reply_and_usage(settlement)
    assert (reply.outcome, reply.code, reply.field, reply.message) == (outcome, code, "input", "because")
    assert reply.output is None
    assert (usage.outcome, usage.code) == (outcome, code)
    assert len(settlement.outputs) == (3 if code == Code.POISON else 2)


def test_poison_is_kept_as_it_was_read() -> None:
    letter = WRITER.answered(WORK, Failure(Code.POISON, "RuntimeError"), RUN).outputs[2]
    assert (letter.topic, letter.key, letter.value) == (names.DEAD_LETTER_WORK, b"the key", b"the bytes")
    assert dict(letter.headers) == {
        headers.DLT_ORIGINAL_TOPIC: b"priority.pool.high",
        headers.DLT_ORIGINAL_PARTITION: b"2",
        headers.DLT_ORIGINAL_OFFSET: b"17",
        headers.DLT_ORIGINAL_TIMESTAMP: b"1025",
        headers.DLT_EXCEPTION_CLASS: b"inference_consumers.answers.PoisonError",
        headers.DLT_EXCEPTION_MESSAGE: b"RuntimeError",
    }


def test_an_answer_too_long_for_the_log_is_a_failure() -> None:
    reply, usage = reply_and_usage(WRITER.answered(WORK, replace(OK, output=Output(text="x" * MAX_MESSAGE_BYTES)), RUN))
    assert (reply.outcome, reply.code) == (Outcome.FAILED, Code.ENGINE_ERROR)
    assert "bytes" in (reply.message or "")
    assert usage.outcome == Outcome.FAILED


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
    settlement = WRITER.answered(WORK, OK, RUN)
    kept = WRITER.unpublishable(settlement, "UNKNOWN_TOPIC_OR_PART")
    (letter,) = kept.outputs
    assert (kept.claim, letter.topic, letter.value) == (CLAIM, names.DEAD_LETTER_WORK, settlement.outputs[0].value)
    assert b"UNKNOWN_TOPIC_OR_PART" in dict(letter.headers)[headers.DLT_EXCEPTION_MESSAGE]


OUTCOMES: tuple[ItemOutcome, ...] = (OK, Failure(Code.POISON, "RuntimeError"), Failure(Code.CONTEXT_TOO_LONG, "long"))


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_no_prompt_leaves_with_a_reply_or_a_header(outcome: ItemOutcome) -> None:
    for output in WRITER.answered(WORK, outcome, RUN).outputs:
        assert SECRET not in repr(output.headers)
        if output.topic != names.DEAD_LETTER_WORK:
            assert SECRET.encode() not in output.value
