"""Batches as bytes: what was written is read, and of what cannot be read only a reason comes out."""

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.record_batches import (
    CODECS,
    Written,
    batch,
    deflated,
    field,
    gzip,
    record_bytes,
    varint,
)
from fairlane.codec import DecodeError, DecodeProblem
from fairlane.record_bounds import MAX_KEY_BYTES
from stream_processors.dispatcher.reading import record_batches
from stream_processors.dispatcher.reading.record_batches import (
    MAX_HEADERS,
    MAX_INFLATED_BYTES,
    MAX_RECORD_BYTES,
    MAX_RECORDS,
    BatchRecords,
    InflationError,
    ReadRecord,
    body_of,
    inflate,
    split,
)
from tests.kit.broker_log import with_crc, xerial
from tests.kit.cpu_time import cpu_time

MIB = 1024 * 1024
WRITTEN = st.builds(
    Written,
    st.none() | st.binary(max_size=200),
    st.none() | st.binary(max_size=20),
    st.lists(st.tuples(st.text(max_size=8).map(str.encode), st.none() | st.binary(max_size=8)), max_size=3),
)


def read(data: bytes) -> list[ReadRecord]:
    records: list[ReadRecord] = []
    for one in split(data):
        if one.problem is not None:
            raise one.problem
        assert one.header is not None
        records += BatchRecords(one.header, body_of(one.header, one.data))
    return records


def problem_of(data: bytes) -> DecodeProblem:
    with pytest.raises(DecodeError) as raised:
        read(data)
    return raised.value.problem


@given(st.lists(WRITTEN, min_size=1, max_size=6), st.sampled_from(range(len(CODECS))), st.integers(0, 2**40))
def test_what_was_written_is_read_in_every_codec(written: Sequence[Written], codec: int, base_offset: int) -> None:
    found = read(batch(written, codec=codec, base_offset=base_offset, timestamp_ms=77))
    assert [(one.offset, one.timestamp_ms, one.key, one.value, one.problem) for one in found] == [
        (base_offset + number, 77, one.key, one.value, None) for number, one in enumerate(written)
    ]
    assert [one.headers for one in found] == [
        tuple((name.decode(), content) for name, content in one.headers) for one in written
    ]


def test_javas_framing_of_snappy_and_several_members_of_gzip_are_read() -> None:
    body = b"".join(record_bytes(Written(b"x" * 50_000), number) for number in range(3))
    for codec, compressed in ((2, xerial(body)), (1, gzip(body[:70_000]) + gzip(body[70_000:]))):
        found = read(batch([b""] * 3, codec=codec, compressed=compressed))
        assert [one.value for one in found] == [b"x" * 50_000] * 3


@pytest.mark.parametrize("codec", range(1, len(CODECS)), ids=CODECS[1:])
def test_a_batch_inflates_to_the_limit_and_no_further(codec: int) -> None:
    at_limit = deflated(codec, bytes(2 * MIB))
    assert len(inflate(codec, at_limit, 2 * MIB)) == 2 * MIB
    with pytest.raises(InflationError) as raised:
        inflate(codec, at_limit, 2 * MIB - 1)
    assert raised.value.too_large
    bomb = batch([b""], codec=codec, compressed=deflated(codec, bytes(MAX_INFLATED_BYTES + 1)))
    assert problem_of(bomb) == DecodeProblem.INFLATES_TOO_FAR


@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=8), st.integers())
def test_members_of_gzip_of_any_size_are_read(sizes: list[int], seed: int) -> None:
    rng = Random(seed)
    members = [rng.randbytes(size) for size in sizes]
    assert inflate(1, b"".join(map(gzip, members)), 2 * MIB) == b"".join(members)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param((1, gzip(b"x") * 199_728), id="gzip"),
        pytest.param((2, xerial(bytes(600_000), block_bytes=1)), id="snappy"),
    ],
)
def test_four_mebibytes_of_tiny_parts_are_refused_before_they_take_long(data: tuple[int, bytes]) -> None:
    """Each costs as much as a large one."""
    with cpu_time() as time, pytest.raises(InflationError, match="parts"):
        inflate(*data, MAX_INFLATED_BYTES)
    assert time.spent_s < 0.5


def test_a_batch_of_more_records_than_can_be_requests_is_refused_whole() -> None:
    assert problem_of(batch([b""] * (MAX_RECORDS + 1), codec=4)) == DecodeProblem.TOO_MANY_ITEMS


def test_a_bomb_in_blocks_of_snappy_is_stopped_at_the_limit() -> None:
    with pytest.raises(InflationError) as raised:
        inflate(2, xerial(bytes(3 * MIB)), 2 * MIB)
    assert raised.value.too_large


@pytest.mark.parametrize("codec", range(1, len(CODECS)), ids=CODECS[1:])
@given(data=st.data())
def test_broken_compressed_bytes_are_a_reason_and_nothing_else(codec: int, data: st.DataObject) -> None:
    whole = bytearray(deflated(codec, b"some text that repeats, some text that repeats" * 20))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    try:
        assert len(inflate(codec, cut, MIB)) <= MIB
    except InflationError as error:
        assert str(error)  # noqa: PT017 - either may happen


@given(st.lists(WRITTEN, min_size=1, max_size=5), st.data())
def test_no_mutation_of_a_batch_does_more_than_give_a_reason(written: Sequence[Written], data: st.DataObject) -> None:
    """With a checksum that fits, so that what is behind it is reached."""
    whole = bytearray(batch(written))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(12, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = read(with_crc(bytes(whole)))
    except DecodeError:
        return
    offsets = [one.offset for one in found]
    assert offsets == sorted(set(offsets))
    assert sum(len(one.value or b"") for one in found) <= len(whole)


@given(st.binary(max_size=300))
def test_any_bytes_are_batches_or_a_reason(data: bytes) -> None:
    for one in split(data):
        assert one.header is not None or one.problem is not None


def test_a_flipped_bit_is_a_bad_checksum() -> None:
    whole = bytearray(batch([b"abc"]))
    whole[-3] ^= 1
    assert problem_of(bytes(whole)) == DecodeProblem.BAD_CRC


@pytest.mark.parametrize("magic", [0, 1, 3, 127, -1])
def test_another_format_is_named(magic: int) -> None:
    assert problem_of(batch([b"abc"], magic=magic)) == DecodeProblem.UNKNOWN_MAGIC


@pytest.mark.parametrize("length", [-(2**31), -1, 0, 48, 2**31 - 1])
def test_a_length_that_cannot_be_is_a_reason(length: int) -> None:
    whole = batch([b"abc"])
    changed = whole[:8] + length.to_bytes(4, "big", signed=True) + whole[12:]
    (one,) = split(changed)
    assert one.problem is not None
    assert bytes(one.data) == changed


def test_a_batch_that_the_broker_cut_is_left_out() -> None:
    first, second = batch([b"a"]), batch([b"b"], base_offset=1)
    assert len(list(split(first + second[:-1]))) == 1


@pytest.mark.parametrize("count", [-1, 2, 2**31 - 1])
def test_a_count_that_cannot_be_is_a_reason(count: int) -> None:
    assert problem_of(batch([b"abc"], count=count)) == DecodeProblem.BAD_BATCH


def test_an_empty_batch_and_one_with_gaps_are_as_compaction_leaves_them() -> None:
    assert read(batch([], last_offset_delta=9)) == []
    found = read(batch([b"a", b"b"], deltas=(3, 7), last_offset_delta=9, base_offset=100))
    assert [one.offset for one in found] == [103, 107]


@pytest.mark.parametrize(
    "body",
    [
        varint(-1),
        varint(1_000) + b"\0",
        b"\xff" * 20,
        varint(3) + b"\0\0\0",
        record_bytes(Written(b"a"), 0) + b"more",
        record_bytes(Written(b"a"), 1),
        record_bytes(Written(b"a"), -1),
        # A value, a header's name and a count that reach beyond their record.
        varint(8) + b"\0" + varint(0) + varint(0) + varint(-1) + varint(2**40),
        varint(9) + b"\0" + varint(0) + varint(0) + varint(-1) + field(b"v") + varint(1) + varint(90),
        varint(7) + b"\0" + varint(0) + varint(0) + varint(-1) + field(b"v") + varint(-5),
    ],
)
def test_a_body_that_is_no_record_is_a_reason(body: bytes) -> None:
    assert problem_of(batch([b""], body=body)) == DecodeProblem.BAD_BATCH


def test_offsets_out_of_order_are_a_reason() -> None:
    assert problem_of(batch([b"a", b"b"], deltas=(1, 0), last_offset_delta=1)) == DecodeProblem.BAD_BATCH


def test_a_header_that_is_no_text_spoils_its_own_record_alone() -> None:
    found = read(batch([b"a", Written(b"b", b"key", [(b"\xff\xfe", b"x"), (b"good", b"y")]), b"c"]))
    assert [one.problem and one.problem.problem for one in found] == [None, DecodeProblem.BAD_HEADER, None]
    assert (found[1].key, found[1].value, found[1].headers) == (b"key", b"b", (("good", b"y"),))


def test_more_headers_than_anybody_needs_are_not_read() -> None:
    within, beyond = ([(b"h", b"")] * count for count in (MAX_HEADERS, MAX_HEADERS + 1))
    found = read(batch([Written(b"a", None, within), Written(b"b", None, beyond), b"c"]))
    assert [one.problem and one.problem.problem for one in found] == [None, DecodeProblem.BAD_HEADER, None]
    assert [len(one.headers) for one in found] == [MAX_HEADERS, 0, 0]


def test_a_record_that_inflates_beyond_any_topics_limit_is_cut() -> None:
    found = read(batch([b"a", bytes(MAX_RECORD_BYTES + 1), b"c"], codec=4))
    assert [one.problem and one.problem.problem for one in found] == [None, DecodeProblem.TOO_LARGE, None]
    assert len(found[1].value or b"") == record_batches.MAX_KEPT_VALUE_BYTES


def test_of_a_key_no_more_is_read_than_a_dead_letter_keeps() -> None:
    (one,) = read(batch([Written(b"a", bytes(4 * MIB))], codec=1))
    assert (one.key, one.value, one.problem) == (bytes(MAX_KEY_BYTES), b"a", None)


@pytest.mark.parametrize("part", ["key", "header"])
def test_a_record_is_too_large_with_its_key_and_headers(part: str) -> None:
    large = bytes(MAX_RECORD_BYTES)
    written = Written(b"a", large) if part == "key" else Written(b"a", b"key", [(b"h", large)])
    found = read(batch([b"b", written, b"c"], codec=1))
    assert [one.problem and one.problem.problem for one in found] == [None, DecodeProblem.TOO_LARGE, None]
    assert (len(found[1].key or b"") <= MAX_KEY_BYTES, found[1].value, found[1].headers) == (True, b"a", ())


def test_records_are_read_when_they_are_asked_for() -> None:
    """16 MiB can hold two million records."""
    whole = batch([b""] * 100_000, codec=4)
    (one,) = split(whole)
    assert one.header is not None
    records = BatchRecords(one.header, body_of(one.header, one.data))
    assert [next(records).offset for _ in range(3)] == [0, 1, 2]
