"""The walk over a record's bytes agrees with the decoder, and ends at the first count that is too large."""

import io
import struct
import tracemalloc
from typing import Any

import pytest
from fastavro import parse_schema, schemaless_reader
from hypothesis import given
from hypothesis import strategies as st

from fairlane.avro_validation import RecordScan, ScanError, ScanFault
from fairlane.codec import DecodeError, DecodeProblem
from fairlane.record_bounds import MAX_METADATA_BYTES, MAX_REQUEST_BYTES, MAX_STOP_STRINGS, max_items
from fairlane.records import (
    MOST_INPUT_ITEMS,
    CancelRequest,
    InferenceReply,
    InferenceRequest,
    Message,
    Parameters,
    RequestInput,
    type_by_name,
)
from fairlane.schema_files import committed_schemas, default_codec
from tests.kit.avro_bytes import ANY_RECORD, CODEC, IDS, frame, long, string
from tests.kit.cpu_time import cpu_time

ID = "6f9619ff-8b86-d011-b42d-00c04fc964ff"
SCANS = {name: RecordScan(committed_schemas().writer(name)[1], max_items) for name in type_by_name}
HEAD = string(ID) + string("words") + string("generate")


def scan_of(record: object) -> RecordScan:
    return SCANS[type(record).__name__]


def fault_of(name: str, body: bytes) -> ScanError:
    with pytest.raises(ScanError) as caught:
        SCANS[name].check(body, 0)
    return caught.value


@given(ANY_RECORD)
def test_whatever_is_encoded_passes(record: Any) -> None:
    data = CODEC.encode(record)
    scan_of(record).check(data, 5)
    assert scan_of(record).explain(data, 5) is None


@given(ANY_RECORD, st.data())
def test_damaged_bytes_pass_if_and_only_if_they_decode(record: Any, data: st.DataObject) -> None:
    """Except where fastavro is lenient: numbers of any length, the size that a block states for itself, and a negative
    branch of a union, which it takes as an index from the end."""
    damaged = bytearray(CODEC.encode(record))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(5, len(damaged) - 1))] = data.draw(st.integers(0, 127))
    try:
        CODEC.decode(bytes(damaged))
    except DecodeError as error:
        decodes = error.problem is DecodeProblem.TRAILING_BYTES
    else:
        decodes = True
    found = scan_of(record).explain(bytes(damaged), 5)
    if decodes:
        lenient = ("a block of", "a number of more than", "branch -")
        assert found is None or any(reason in found.reason for reason in lenient)
    else:
        assert found is not None
        assert found.field


@given(st.sampled_from(sorted(IDS)), st.binary(max_size=300))
def test_any_bytes_pass_or_are_a_scan_error(name: str, body: bytes) -> None:
    for check in (SCANS[name].check, SCANS[name].explain):
        found: ScanError | None = None
        try:
            check(body, 0)
        except ScanError as error:
            found = error
        assert found is None or (found.field and found.reason)


@pytest.mark.parametrize(
    ("name", "body", "field", "fault", "reason"),
    [
        ("InferenceRequest", b"", "request_id", ScanFault.ENDS_EARLY, "end within it"),
        ("InferenceRequest", long(-1), "request_id", ScanFault.INVALID, "a negative length"),
        ("InferenceRequest", long(2**40), "request_id", ScanFault.ENDS_EARLY, "1099511627776 bytes"),
        ("InferenceRequest", b"\xff" * 300, "request_id", ScanFault.INVALID, "more than 10 bytes"),
        ("InferenceRequest", HEAD + long(7), "input.messages", ScanFault.INVALID, "branch 7 of a union of 2"),
        ("InferenceRequest", HEAD + long(-1), "input.messages", ScanFault.INVALID, "branch -1"),
        (
            "InferenceRequest",
            HEAD + long(1) + long(2**62),
            "input.messages",
            ScanFault.TOO_MANY_ITEMS,
            "more than 4096",
        ),
        (
            "InferenceRequest",
            HEAD + long(1) + long(-(2**63)) + long(0),
            "input.messages",
            ScanFault.TOO_MANY_ITEMS,
            f"{2**63} items",
        ),
        (
            "InferenceRequest",
            HEAD + long(1) + long(-1) + long(50),
            "input.messages",
            ScanFault.INVALID,
            "a block of 50 bytes, of which 0",
        ),
        (
            "InferenceRequest",
            HEAD + long(1) + long(-1) + long(-7),
            "input.messages",
            ScanFault.INVALID,
            "a block of -7 bytes",
        ),
        (
            "InferenceRequest",
            HEAD + long(1) + long(2) + string("user") + string("") + string("user") + long(99),
            "input.messages[1].content",
            ScanFault.ENDS_EARLY,
            "99 bytes",
        ),
        ("AuditEvent", b"\x00" * 5 + b"\x02", "source.topic", ScanFault.ENDS_EARLY, "1 bytes"),
    ],
)
def test_the_field_and_the_reason_are_named(name: str, body: bytes, field: str, fault: ScanFault, reason: str) -> None:
    error = fault_of(name, body)
    assert (error.field, error.fault) == (field, fault)
    assert reason in error.reason


def many_blocks(count: int) -> bytes:
    """So many empty messages, each in a block of its own."""
    return HEAD + long(1) + (long(1) + b"\x00\x00") * count + b"\x00"


def test_items_are_counted_over_all_blocks() -> None:
    error = fault_of("InferenceRequest", many_blocks(MOST_INPUT_ITEMS + 1))
    assert (error.fault, error.field) == (ScanFault.TOO_MANY_ITEMS, "input.messages")


def test_text_that_is_no_utf8_is_found_by_its_field() -> None:
    body = string(ID) + long(2) + b"\xff\xfe"
    found = SCANS["InferenceRequest"].explain(body, 0)
    assert found is not None
    assert (found.field, found.reason) == ("model", "no UTF-8")


def test_leading_strings_end_where_they_cannot_be_read() -> None:
    scan = SCANS["InferenceRequest"]
    assert scan.leading_strings(HEAD + b"\xff", 0) == {"request_id": ID, "model": "words", "task": "generate"}
    assert scan.leading_strings(string(ID) + string("x" * 600), 0) == {"request_id": ID}
    assert scan.leading_strings(string(ID) + long(2) + b"\xff\xff", 0) == {"request_id": ID}
    assert scan.leading_strings(string(ID) + long(90), 0) == {"request_id": ID}
    assert scan.leading_strings(b"", 0) == {}


# What the codec makes of it


def refused(data: bytes) -> DecodeError:
    with pytest.raises(DecodeError) as caught:
        default_codec().decode(data)
    return caught.value


def request(**fields: Any) -> bytes:
    return default_codec().encode(InferenceRequest(ID, "words", "generate", **fields))


def test_a_million_empty_messages_take_no_time_and_no_memory() -> None:
    data = frame("InferenceRequest", HEAD + long(1) + long(1_000_000) + b"\x00\x00" * 1_000_000)
    refused(data)
    tracemalloc.start()
    try:
        with cpu_time() as time:
            error = refused(data)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (error.problem, error.field) == (DecodeProblem.TOO_MANY_ITEMS, "input.messages")
    assert str(error) == "too_many_items: InferenceRequest.input.messages: 1000000 items are more than 4096"
    assert error.leading["request_id"] == ID
    assert time.spent_s < 0.05
    assert peak_bytes < 100_000


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (request(input=RequestInput(texts=("",) * (MOST_INPUT_ITEMS + 1))), "input.texts"),
        (request(input=RequestInput(documents=("",) * (MOST_INPUT_ITEMS + 1))), "input.documents"),
        (
            request(input=RequestInput(prompt="x" * 5_000), parameters=Parameters(stop=("",) * (MAX_STOP_STRINGS + 1))),
            "parameters.stop",
        ),
        (
            request(input=RequestInput(), metadata={f"{n}": "" for n in range(MAX_METADATA_BYTES + 1)}),
            "metadata",
        ),
    ],
    ids=["texts", "documents", "stop", "metadata"],
)
def test_lists_and_maps_have_bounds_of_their_own(data: bytes, field: str) -> None:
    error = refused(data)
    assert (error.problem, error.field) == (DecodeProblem.TOO_MANY_ITEMS, field)


def test_the_largest_lists_pass() -> None:
    messages = (Message("", ""),) * MOST_INPUT_ITEMS
    made = InferenceRequest(ID, "words", "generate", RequestInput(messages=messages, texts=("",) * MOST_INPUT_ITEMS))
    assert default_codec().decode(default_codec().encode(made)) == made


def test_what_is_not_scanned_is_too_small_to_hold_too_much() -> None:
    """The smallest message takes two bytes and the smallest text one, so nothing here needs a scan."""
    body = HEAD + long(0) + long(0) + long(1) + long(MOST_INPUT_ITEMS)
    small = frame("InferenceRequest", body + b"\x00" * (MOST_INPUT_ITEMS - len(body) - 5))
    assert len(small) == MOST_INPUT_ITEMS
    assert refused(small).problem is DecodeProblem.TRUNCATED_BODY


@pytest.mark.parametrize("excess", [0, 1])
def test_a_request_is_refused_by_its_length_first(excess: int) -> None:
    around = len(request(input=RequestInput(prompt="x" * 3_000_000))) - 3_000_000
    data = request(input=RequestInput(prompt="x" * (MAX_REQUEST_BYTES - around + excess)))
    assert len(data) == MAX_REQUEST_BYTES + excess
    if not excess:
        assert isinstance(default_codec().decode(data), InferenceRequest)
        return
    error = refused(data)
    assert (error.problem, error.field) == (DecodeProblem.TOO_LARGE, "")
    assert error.leading == {"request_id": ID, "model": "words", "task": "generate"}
    assert error.record_type is InferenceRequest


def test_another_type_is_refused_before_anything_of_it_is_decoded() -> None:
    reply = default_codec().encode(InferenceReply("r", "acme", "ok"))
    with pytest.raises(DecodeError, match="InferenceReply, expected InferenceRequest or CancelRequest"):
        default_codec().decode_any((InferenceRequest, CancelRequest), reply[:7])


def test_of_a_map_key_that_comes_twice_the_last_counts() -> None:
    data = request(input=RequestInput(prompt="x"), metadata={"k": "1"})
    at = data.index(b"\x02\x02k\x021\x00")
    twice = data[:at] + long(2) + string("k") + string("1") + string("k") + string("2") + data[at + 5 :]
    decoded = default_codec().decode_as(InferenceRequest, twice)
    assert decoded.metadata == {"k": "2"}


@given(st.integers(0, 3), st.lists(st.lists(st.floats(allow_nan=False), max_size=5), max_size=5))
def test_lists_of_fixed_size_items_are_stepped_over_at_once(extra: int, vectors: list[list[float]]) -> None:
    schema = {
        "type": "record",
        "name": "R",
        "fields": [{"name": "v", "type": {"type": "array", "items": {"type": "array", "items": "double"}}}],
    }
    body = b"".join(
        long(len(vector)) + b"".join(struct.pack("<d", x) for x in vector) + (b"\x00" if vector else b"")
        for vector in vectors
    )
    data = (long(len(vectors)) + body if vectors else b"") + b"\x00"
    assert schemaless_reader(io.BytesIO(data), parse_schema(dict(schema)), None) == {"v": vectors}
    RecordScan(schema, lambda _record, _field: 10).check(data + b"\x00" * extra, 0)
