"""No record that a dispatcher makes of a tenant's is larger than its topic takes."""

from dataclasses import replace
from typing import Any

import pytest

from fairlane import headers, names
from fairlane.codec import DecodeError, DecodeProblem
from fairlane.dead_letters import letter_content
from fairlane.outcomes import Code, Decision, Outcome
from fairlane.ownership import Claim, PartitionId
from fairlane.record_bounds import (
    MAX_KEY_BYTES,
    MAX_RECORD_BYTES,
    MAX_REQUEST_BYTES,
    MAX_REQUEST_HEADER_BYTES,
    MAX_REQUEST_HEADERS,
    MAX_VALUE_BYTES,
)
from fairlane.records import CancelRequest, Message, Passage, RequestInput, RetrievalUse, SourceCoordinate
from fairlane.schema_files import default_codec
from fairlane_server.kafka.transactions import OutputRecord, Settlement
from fairlane_server.topics.families import load_families
from stream_processors.dispatcher.enrichment.context import refusal_of
from stream_processors.dispatcher.queued_request import QueuedRequest, ReceivedRecord
from stream_processors.dispatcher.scheduling.scheduler import Turn, View
from tests.kit.dispatcher_bench import NOW_MS, PARTITION, Bench, encoded, handed_back, request


@pytest.fixture
def bench() -> Bench:
    return Bench(max_input_bytes=2 * MAX_REQUEST_BYTES)


def of_size(size: int) -> bytes:
    """A request that is encoded to so many bytes."""
    around = len(encoded(input=RequestInput(prompt="x" * (MAX_REQUEST_BYTES // 2)))) - MAX_REQUEST_BYTES // 2
    data = encoded(input=RequestInput(prompt="x" * (size - around)))
    assert len(data) == size
    return data


def decided(bench: Bench, value: bytes, given: tuple[tuple[str, bytes], ...] = (), key: bytes = b"k") -> Any:
    claim = Claim(PARTITION, 0, bench.ownership.epoch)
    return bench.classifier.classify(claim, ReceivedRecord(PARTITION, 0, NOW_MS, key, value, given))


def refusal(bench: Bench, verdict: Any) -> tuple[str, str, str]:
    """Topic, field and message of the reply, which the audit says too."""
    assert isinstance(verdict, tuple), verdict
    reply, audit = bench.decoded_all(verdict)
    assert (reply.outcome, reply.code, audit.decision) == (Outcome.REJECTED, Code.INVALID, Decision.REFUSED)
    assert reply.request_id == audit.request_id == request().request_id
    assert audit.inputs["field"] == reply.field
    return verdict[0].topic, reply.field, reply.message


def test_the_topics_are_as_large_as_the_bounds_say() -> None:
    families = {family.name: family for family in load_families()}
    largest = {name: family.max_message_bytes for name, family in families.items()}
    for family in ("requests.{tenant}", "backfill.{tenant}"):
        assert largest[family] == MAX_REQUEST_BYTES
    for family in ("priority.{pool}.{class}", "returned.{pool}", "dead-letter.requests", "replies.{tenant}"):
        assert largest[family] == MAX_RECORD_BYTES


def test_a_request_of_the_largest_size_is_taken(bench: Bench) -> None:
    assert isinstance(decided(bench, of_size(MAX_REQUEST_BYTES)), QueuedRequest)


def test_a_request_of_a_byte_more_is_refused_by_its_id(bench: Bench) -> None:
    topic, field, message = refusal(bench, decided(bench, of_size(MAX_REQUEST_BYTES + 1)))
    assert (topic, field) == ("replies.acme", "request")
    assert message == f"{MAX_REQUEST_BYTES + 1} bytes are more than {MAX_REQUEST_BYTES}"


def test_a_request_with_too_many_items_is_refused_by_its_field(bench: Bench) -> None:
    value = encoded(input=RequestInput(messages=(Message("", ""),) * 4_097))
    assert refusal(bench, decided(bench, value)) == (
        "replies.acme",
        "input.messages",
        "4097 items are more than 4096",
    )


def test_without_an_id_there_is_nobody_to_tell(bench: Bench) -> None:
    value = encoded(request_id="my order", input=RequestInput(texts=("",) * 5_000))
    letter, audit = decided(bench, value)
    assert (letter.topic, letter.value) == (names.DEAD_LETTER_REQUESTS, value)
    (event,) = bench.decoded_all([audit])
    assert event.code == DecodeProblem.TOO_MANY_ITEMS


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((("h", b""),) * (MAX_REQUEST_HEADERS + 1), "65 headers are more than 64"),
        ((("h", bytes(MAX_REQUEST_HEADER_BYTES)),), f"{MAX_REQUEST_HEADER_BYTES + 1} bytes are more than"),
    ],
)
def test_headers_are_bounded(bench: Bench, given: tuple[tuple[str, bytes], ...], message: str) -> None:
    topic, field, said = refusal(bench, decided(bench, encoded(), given))
    assert (topic, field) == ("replies.acme", "headers")
    assert message in said
    (event,) = bench.decoded_all(decided(bench, default_codec().encode(CancelRequest(request().request_id)), given))
    assert event.inputs["field"] == "headers"


def test_as_many_headers_as_are_allowed_pass(bench: Bench) -> None:
    each = MAX_REQUEST_HEADER_BYTES // MAX_REQUEST_HEADERS - 1
    assert isinstance(decided(bench, encoded(), (("h", bytes(each)),) * MAX_REQUEST_HEADERS), QueuedRequest)


@pytest.mark.parametrize("size", [0, 5_000_000, 40_000_000])
def test_a_dead_letter_fits_its_topic(bench: Bench, size: int) -> None:
    letter, audit = decided(bench, b"\xff" * size, (("h", bytes(10_000_000)),), key=bytes(3_000_000))
    assert len(letter.value) == min(size, MAX_VALUE_BYTES - MAX_KEY_BYTES)
    assert len(letter.key) == MAX_KEY_BYTES
    assert dict(letter.headers).get(headers.ORIGINAL_BYTES) == (b"40000000" if size == 40_000_000 else None)
    assert record_bytes(letter) <= MAX_RECORD_BYTES - 32_768
    assert record_bytes(audit) < 4_096


def test_what_fits_is_kept_whole() -> None:
    assert letter_content(None, b"value", (("a", b"b"),)) == (None, b"value", (("a", b"b"),))


def record_bytes(record: OutputRecord) -> int:
    return len(record.key or b"") + len(record.value) + sum(len(name) + len(value) for name, value in record.headers)


def with_passages(bench: Bench, added_bytes: int, count: int = 64) -> QueuedRequest:
    queued: QueuedRequest = decided(bench, of_size(MAX_REQUEST_BYTES))
    texts = ["é" * (added_bytes // count // 2)] * count
    passages = tuple(Passage(f"p{number}", text, 0.5) for number, text in enumerate(texts))
    return replace(queued, passages=passages, retrieval_use=RetrievalUse("manuals", "hybrid"))


def test_the_largest_request_with_all_that_may_be_added_is_a_work_item_that_fits(bench: Bench) -> None:
    room = MAX_VALUE_BYTES - MAX_REQUEST_BYTES - 8_192
    queued = with_passages(bench, room)
    assert refusal_of(queued) is None
    work, audit = bench.dispatcher.output.writer.dispatched(turn_of(queued), NOW_MS)
    assert MAX_VALUE_BYTES - 16_384 < len(work.value) <= MAX_VALUE_BYTES
    assert record_bytes(work) <= MAX_RECORD_BYTES - 32_768
    assert record_bytes(audit) < 4_096


def test_beyond_that_it_is_refused(bench: Bench) -> None:
    found = refusal_of(with_passages(bench, MAX_VALUE_BYTES - MAX_REQUEST_BYTES))
    assert found is not None
    assert (found.code, found.field) == (Code.INVALID, "input")
    assert f"more than {MAX_VALUE_BYTES}" in found.message


def test_history_counts_as_well(bench: Bench) -> None:
    queued = decided(bench, of_size(MAX_REQUEST_BYTES))
    found = refusal_of(replace(queued, history=(Message("user", "x" * MAX_REQUEST_BYTES),)))
    assert found is not None
    assert found.field == "input"


# What a broker refuses for its size all the same


def turn_of(queued: QueuedRequest) -> Turn[QueuedRequest]:
    return Turn(queued, is_late=False, partition=0, view=View(0, 0.0, 0, 0.0, 1.0))


def settlement(*outputs: OutputRecord) -> Settlement:
    return Settlement(Claim(PartitionId("requests.acme", 0), 41, 1), outputs)


def test_work_that_its_topic_does_not_take_is_refused_and_not_tried_for_ever(bench: Bench) -> None:
    item = handed_back(handed_back=0, source=SourceCoordinate("requests.acme", 0, 41))
    trace = ((headers.TRACE_PARENT, b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01"),)
    work = OutputRecord(names.priority_topic("pool", "normal"), b"k", default_codec().encode(item), trace)
    made = bench.dispatcher.output.writer.unpublishable(settlement(work), "MSG_SIZE_TOO_LARGE")
    reply, audit = bench.decoded_all(made.outputs)
    assert (made.outputs[0].topic, reply.outcome, reply.code, reply.field) == (
        "replies.acme",
        Outcome.REJECTED,
        Code.INVALID,
        "input",
    )
    assert trace[0] in tuple(made.outputs[0].headers)
    assert (reply.source, audit.decision, audit.request_id) == (item.source, Decision.REFUSED, reply.request_id)
    assert not made.goes_to(work.topic)


def test_work_waits_for_a_topic_that_is_missing(bench: Bench) -> None:
    work = settlement(OutputRecord(names.priority_topic("pool", "normal"), b"k", b"v"))
    assert bench.dispatcher.output.writer.unpublishable(work, "UNKNOWN_TOPIC_OR_PART") is work


def test_a_dead_letter_that_its_topic_does_not_take_leaves_its_audit(bench: Bench) -> None:
    problem = DecodeError(DecodeProblem.EMPTY, "no bytes")
    letter, audit = bench.dispatcher.output.writer.dead_letter(
        ReceivedRecord(PARTITION, 41, NOW_MS, None, b"x" * 100), "acme", problem, NOW_MS
    )
    writer = bench.dispatcher.output.writer
    assert writer.unpublishable(settlement(letter, audit), "MSG_SIZE_TOO_LARGE").outputs == (audit,)
    waiting = settlement(letter, audit)
    assert writer.unpublishable(waiting, "TOPIC_AUTHORIZATION_FAILED") is waiting
