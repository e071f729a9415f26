import dataclasses
import math
import tracemalloc
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.codec import Codec, DecodeError, DecodeProblem
from fairlane.records import (
    CancelRequest,
    InferenceReply,
    InferenceRequest,
    Output,
    ReplyChunk,
    RequestInput,
    SourceCoordinate,
    TenantSpec,
    WorkItem,
    type_by_name,
)
from fairlane.schema_files import committed_schemas
from tests.kit.avro_bytes import ANY_RECORD, CODEC, IDS, frame, long, string, values
from tests.kit.cpu_time import cpu_time

CHUNK = ReplyChunk("r-1", "acme", 1, 2, 3, "text", last=True)


def _problem(data: bytes | None) -> DecodeProblem:
    with pytest.raises(DecodeError) as caught:
        CODEC.decode(data)
    return caught.value.problem


@given(ANY_RECORD)
def test_round_trip(record: Any) -> None:
    assert CODEC.decode(CODEC.encode(record)) == record


@pytest.mark.parametrize("size", [0, 1, 2, 3])
def test_optional_lists_of_every_length(size: int) -> None:
    """A pair inside an optional field once meant something else to the Avro library."""
    texts = tuple(f"text {number}" for number in range(size))
    request = InferenceRequest("r", "m", "rank", RequestInput(texts=texts, documents=texts))
    reply = InferenceReply("r", "acme", "ok", output=Output(embeddings=tuple((0.5,) * size for _ in range(size))))
    assert CODEC.decode(CODEC.encode(request)) == request
    assert CODEC.decode(CODEC.encode(reply)) == reply


def test_nan_and_infinities_travel() -> None:
    source = TenantSpec("acme", weight=math.inf, requests_per_s=-math.inf)
    assert CODEC.decode(CODEC.encode(source)) == source
    decoded = CODEC.decode_as(TenantSpec, CODEC.encode(TenantSpec("acme", weight=math.nan)))
    assert math.isnan(decoded.weight)


def test_frame_is_confluents() -> None:
    assert CODEC.encode(CHUNK) == (
        b"\x00\x00\x00\x00\x04"
        + string("r-1")
        + string("acme")
        + long(1)
        + long(2)
        + long(3)
        + string("text")
        + b"\x01"
    )


@given(st.binary(max_size=200))
def test_random_bytes_are_a_record_or_a_decode_error(data: bytes) -> None:
    _decodes_or_refuses(data)


@given(st.sampled_from(sorted(IDS)), st.binary(max_size=200))
def test_random_body_of_a_known_schema_is_a_record_or_a_decode_error(name: str, body: bytes) -> None:
    _decodes_or_refuses(frame(name, body))


@given(ANY_RECORD, st.data())
def test_flipped_bytes_are_a_record_or_a_decode_error(record: Any, data: st.DataObject) -> None:
    damaged = bytearray(CODEC.encode(record))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    _decodes_or_refuses(bytes(damaged))


def _decodes_or_refuses(data: bytes) -> None:
    """Any exception but DecodeError fails the test by itself."""
    with suppress(DecodeError):
        assert type(CODEC.decode(data)) in type_by_name.values()


@given(ANY_RECORD, st.binary(min_size=1, max_size=3))
def test_truncated_and_trailing_bytes_are_named(record: Any, extra: bytes) -> None:
    data = CODEC.encode(record)
    for length in range(5, len(data)):
        assert _problem(data[:length]) is DecodeProblem.TRUNCATED_BODY
    assert _problem(data + extra) is DecodeProblem.TRAILING_BYTES


@pytest.mark.parametrize("data", [None, b""])
def test_no_bytes(data: bytes | None) -> None:
    assert _problem(data) is DecodeProblem.EMPTY


def test_problems_of_the_frame() -> None:
    assert _problem(b"{json}") is DecodeProblem.BAD_MAGIC
    assert _problem(b"\x00\x00\x00") is DecodeProblem.TRUNCATED_BODY
    assert _problem(b"\x00\x00\x00\x27\x0f") is DecodeProblem.UNKNOWN_SCHEMA_ID
    with pytest.raises(DecodeError, match="schema id 4294967295"):
        CODEC.decode(b"\x00\xff\xff\xff\xff" + b"body")


def test_record_of_another_type() -> None:
    with pytest.raises(DecodeError, match="ReplyChunk, expected TenantSpec") as caught:
        CODEC.decode_as(TenantSpec, CODEC.encode(CHUNK))
    assert caught.value.problem is DecodeProblem.UNEXPECTED_TYPE
    assert CODEC.decode_as(ReplyChunk, CODEC.encode(CHUNK)) == CHUNK


def test_record_of_one_of_several_types() -> None:
    request = InferenceRequest("r", "m", "embed", RequestInput(texts=("one",)))
    cancel = CancelRequest("r", "acme")
    expected = (InferenceRequest, CancelRequest)
    for record in (request, cancel):
        read: InferenceRequest | CancelRequest = CODEC.decode_any(expected, CODEC.encode(record))
        assert read == record
    with pytest.raises(DecodeError, match="ReplyChunk, expected InferenceRequest or CancelRequest") as caught:
        CODEC.decode_any(expected, CODEC.encode(CHUNK))
    assert caught.value.problem is DecodeProblem.UNEXPECTED_TYPE
    with pytest.raises(DecodeError, match="empty: no bytes"):
        CODEC.decode_any(expected, None)


_REQUEST_UP_TO_INPUT = string("r") + string("m") + string("embed")
_CAPACITY_UP_TO_MODELS = string("i") + string("p")


@pytest.mark.parametrize(
    "data",
    [
        frame("InferenceRequest", long(2**31) + b"abcdefgh"),
        frame("InferenceRequest", long(2**62) + b"abcdefgh"),
        frame("InferenceRequest", long(-1) + b"abcdefgh"),
        frame("InferenceRequest", long(-(2**63)) + b"abcdefgh"),
        frame("InferenceRequest", b"\xff" * 300),
        frame("InferenceRequest", _REQUEST_UP_TO_INPUT + long(0) + long(0) + long(1) + long(2**40) + b"\x00" * 20),
        frame("InferenceRequest", _REQUEST_UP_TO_INPUT + long(1) + long(2**62) + b"\x02a\x02b" * 20),
        frame("InferenceRequest", _REQUEST_UP_TO_INPUT + long(7) + b"\x00" * 40),
        frame("InferenceRequest", _REQUEST_UP_TO_INPUT + long(-1) + b"\x00" * 7),
        frame("InferenceRequest", _REQUEST_UP_TO_INPUT + long(2**40) + b"\x00" * 40),
        frame("CapacityReport", _CAPACITY_UP_TO_MODELS + long(2**62) + b"\x00" * 30),
        frame("CapacityReport", _CAPACITY_UP_TO_MODELS + long(-(2**62)) + long(2**62) + b"\x00" * 30),
        frame("CapacityReport", _CAPACITY_UP_TO_MODELS + long(-(2**63)) + long(3) + b"\x00" * 30),
        frame("CapacityReport", long(1) + b"\xff" * 40),
    ],
    ids=[
        "string of 2 GB",
        "string of 4 EB",
        "negative string",
        "most negative string",
        "endless varint",
        "array of 2**40",
        "array of 2**62 records",
        "branch 7 of 2",
        "branch -1",
        "branch 2**40",
        "array of 2**62 empty strings",
        "negative block count",
        "most negative block count",
        "no UTF-8",
    ],
)
def test_hostile_lengths_are_refused_at_once_and_in_no_memory(data: bytes) -> None:
    CODEC.encode(CHUNK)
    tracemalloc.start()
    try:
        with cpu_time() as time:
            _problem(data)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.spent_s < 0.5
    # Preparing a schema for its first use is the largest part of it.
    assert peak_bytes < 4_000_000


def test_decode_error_does_not_repeat_the_bytes() -> None:
    body = string("r") + string("m") + string("generate") + long(0) + long(1) + string("my secret prompt")
    with pytest.raises(DecodeError) as caught:
        CODEC.decode(frame("InferenceRequest", body))
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("record", "field"),
    [
        (TenantSpec(5), "TenantSpec.tenant"),  # type: ignore[arg-type]  # what the type checker would refuse
        (TenantSpec("acme", weight="heavy"), "TenantSpec"),  # type: ignore[arg-type]  # same
        (TenantSpec("acme", max_queue_bytes=2**70), "TenantSpec"),
        (TenantSpec("acme", burst_requests=2**70), "TenantSpec.burst_requests"),
        (TenantSpec("acme", classes=None), "TenantSpec.classes"),  # type: ignore[arg-type]  # same
        (TenantSpec("half a pair \ud800"), "TenantSpec"),
        (InferenceRequest("r", "m", "t", None), "InferenceRequest"),  # type: ignore[arg-type]  # same
        (InferenceRequest("r", "m", "t", RequestInput(prompt=b"secret")), "InferenceRequest"),  # type: ignore[arg-type]  # same
    ],
)
def test_bad_value_is_a_value_error_that_does_not_repeat_it(record: object, field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}") as caught:
        CODEC.encode(record)
    assert "secret" not in str(caught.value)
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("value", ["text", None, SourceCoordinate("t", 0, 0), RequestInput()])
def test_only_records_can_be_encoded(value: object) -> None:
    with pytest.raises(TypeError, match="has no schema"):
        CODEC.encode(value)


def test_namesake_of_a_record_cannot_be_encoded() -> None:
    namesake = dataclasses.make_dataclass("TenantSpec", ["tenant"])
    with pytest.raises(TypeError, match="has no schema"):
        Codec(committed_schemas()).encode(namesake("acme"))


@given(values(WorkItem))
def test_a_record_around_the_bytes_of_its_first_field_is_the_same_as_encoded_whole(item: WorkItem) -> None:
    body = CODEC.body_if_current(InferenceRequest, CODEC.encode(item.request))
    assert body is not None
    assert CODEC.encode_around(item, body) == CODEC.encode(item)


def test_bytes_of_another_schema_are_no_current_body() -> None:
    message = CODEC.encode(InferenceRequest("id", "model", "embed", RequestInput(texts=("one",))))
    older = bytes((0, *(1).to_bytes(4, "big"))) + message[5:]
    assert CODEC.body_if_current(InferenceRequest, older) is None
    assert CODEC.body_if_current(WorkItem, message) is None
    assert CODEC.body_if_current(InferenceRequest, b"") is None
