"""Record batches of Kafka's log format v2 (KIP-98), read with bounds.

Bytes in; records, or the reason why they cannot be read, out. Pure. Records are read lazily, one after another: a batch
of 16 MiB can hold two million.

A batch of 4 MiB on the wire can decompress to gigabytes. librdkafka and aiokafka decompress without a limit; here the
output is bounded, and memory grows with the bytes written, never with the size that a frame announces.
"""

import struct
import zlib
from collections.abc import Callable, Collection, Iterator
from typing import Final, NamedTuple

import cramjam
from aiokafka.record.util import calc_crc32c

from fairlane.codec import DecodeError, DecodeProblem
from fairlane.record_bounds import MAX_KEY_BYTES

CODECS: Final = ("none", "gzip", "snappy", "lz4", "zstd")
"""Indexed by the codec number in the attributes of a batch (KIP-98, KIP-110)."""

_GZIP_WINDOW_BITS = 31
# The framing of snappy-java, which Java's producer writes: magic, version, compatible version, then length and block.
_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER_BYTES = 16
_FIRST_GUESS_BYTES = _PIECE_BYTES = 65_536
# gzip members (clients write one) or snappy blocks (clients write 1 KiB and more).
_MAX_FRAMES = 16_384
_GUESS_FACTOR = 4
# Error text of cramjam for a full output buffer; any other error means a broken input.
_BUFFER_FULL = "failed to write whole buffer"

_Into = Callable[[bytes, bytearray], int]


class InflationError(ValueError):
    """Decompression failed. ``too_large``: because the limit was reached."""

    def __init__(self, message: str, *, too_large: bool = False) -> None:
        super().__init__(message)
        self.too_large = too_large


def inflate(codec: int, data: bytes, max_bytes: int) -> bytes:
    """Decompress ``data``. Raises InflationError for a broken input and beyond ``max_bytes``."""
    if codec == 1:
        return _gzip(data, max_bytes)
    if codec == 2:
        return _snappy(data, max_bytes)
    if codec == 3:
        return _growing(cramjam.lz4.decompress_into, "lz4", data, max_bytes)
    if codec == 4:
        return _growing(cramjam.zstd.decompress_into, "zstd", data, max_bytes)
    raise InflationError(f"codec {codec} is unknown")


def _gzip(data: bytes, max_bytes: int) -> bytes:
    view = memoryview(data)
    parts: list[bytes] = []
    size = position = 0
    for _ in range(_MAX_FRAMES + 1):
        if position == len(view):
            return b"".join(parts)
        member = zlib.decompressobj(_GZIP_WINDOW_BITS)
        while not member.eof:
            # In pieces: a member copies all input after its end.
            piece = view[position : position + _PIECE_BYTES]
            try:
                # One byte above the limit tells "exactly the limit" from "more".
                part = member.decompress(piece, max_bytes - size + 1)
            except zlib.error as error:
                raise InflationError(f"gzip: {error}") from None
            read_bytes = len(piece) - len(member.unused_data) - len(member.unconsumed_tail)
            if not part and not read_bytes:
                raise InflationError("gzip: the stream ends early")
            position += read_bytes
            size += len(part)
            if size > max_bytes:
                raise _too_large("gzip", max_bytes)
            parts.append(part)
    raise _too_many_frames("gzip")


def _snappy(data: bytes, max_bytes: int) -> bytes:
    if not data.startswith(_XERIAL_MAGIC):
        return _snappy_block(data, max_bytes)
    parts: list[bytes] = []
    position, size = _XERIAL_HEADER_BYTES, 0
    for _ in range(_MAX_FRAMES + 1):
        if position >= len(data):
            return b"".join(parts)
        end = position + 4 + int.from_bytes(data[position : position + 4], "big")
        if not position + 4 < end <= len(data):
            raise InflationError("snappy: a block of the xerial framing ends early")
        part = _snappy_block(data[position + 4 : end], max_bytes - size)
        size += len(part)
        parts.append(part)
        position = end
    raise _too_many_frames("snappy")


def _snappy_block(block: bytes, max_bytes: int) -> bytes:
    try:
        size = cramjam.snappy.decompress_raw_len(block)
        if size > max_bytes:
            raise _too_large("snappy", max_bytes)
        return bytes(cramjam.snappy.decompress_raw(block, output_len=size)) if size else b""
    except cramjam.DecompressionError as error:
        raise InflationError(f"snappy: {error}") from None


def _growing(into: _Into, name: str, data: bytes, max_bytes: int) -> bytes:
    """Decompress into a buffer that starts small: most batches are small, and zeroing a large buffer costs time."""
    guess = min(max_bytes, max(_FIRST_GUESS_BYTES, _GUESS_FACTOR * len(data)))
    while True:
        buffer = bytearray(guess)
        try:
            size = into(data, buffer)
        except cramjam.DecompressionError as error:
            if _BUFFER_FULL not in str(error):
                raise InflationError(f"{name}: {error}") from None
            if guess >= max_bytes:
                raise _too_large(name, max_bytes) from None
            guess = min(max_bytes, _GUESS_FACTOR * guess)
            continue
        del buffer[size:]
        return bytes(buffer)


def _too_many_frames(name: str) -> InflationError:
    return InflationError(f"{name}: more than {_MAX_FRAMES} parts")


def _too_large(name: str, max_bytes: int) -> InflationError:
    return InflationError(f"{name}: more than {max_bytes} bytes once inflated", too_large=True)


MAX_INFLATED_BYTES: Final = 16 * 1024 * 1024
"""Bound of one decompressed batch. A topic accepts 4 MiB on the wire; requests do not compress better than 4:1."""

MAX_RECORD_BYTES: Final = 8 * 1024 * 1024
"""Of a record with its key and headers: the largest of any topic that a dispatcher reads (``returned``)."""

MAX_RECORDS: Final = 200_000
"""Bound of one batch: more requests exceed MAX_INFLATED_BYTES, and each is skipped again when reading resumes after
them."""

MAX_HEADERS: Final = 256
MAX_KEPT_BYTES: Final = 4 * 1024 * 1024
"""Kept of an unreadable batch: the most that a producer can send in one."""

MAX_KEPT_VALUE_BYTES: Final = 1024 * 1024
"""Kept of the value of a record that is too large."""

MAGIC: Final = 2
_HEADER: Final = struct.Struct(">qiibIhiqqqhii")
_LENGTH_AT, _LENGTH_END = 8, 12
_CRC_FROM = 21
_CODEC_MASK, _LOG_APPEND_TIME, _TRANSACTIONAL, _CONTROL = 0x07, 0x08, 0x10, 0x20
_NO_PRODUCER = -1
# Measured overhead of Python objects: an empty header takes two bytes on the wire and more than 100 in memory.
_RECORD_BYTES, _HEADER_BYTES = 512, 160
_LONGEST_VARINT_BITS = 70


class BatchHeader(NamedTuple):
    """The fixed fields in front of the records, as on the wire."""

    base_offset: int
    length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    first_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def offsets(self) -> int:
        """Number of offsets, compacted ones included."""
        return self.last_offset_delta + 1

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.offsets

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & _CONTROL)

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & _TRANSACTIONAL) and self.producer_id != _NO_PRODUCER


class Batch(NamedTuple):
    """One batch of a fetch.

    Attributes:
        header: None if there are too few bytes for one.
        data: the whole batch; the rest of the fetch if the end of the batch is unknown.
        problem: why no field can be trusted, if so.
    """

    header: BatchHeader | None
    data: memoryview
    problem: DecodeError | None


class ReadRecord(NamedTuple):
    """A record of a batch. With a ``problem``, ``value`` is what can be kept of ``read_bytes``. Only dead letters use a
    key, and keep MAX_KEY_BYTES of it: no more is read."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    problem: DecodeError | None = None
    read_bytes: int = 0


def memory_bytes(content_bytes: int, headers: Collection[tuple[str, bytes | None]]) -> int:
    """Memory used by a record with this many bytes of key and value, and these headers."""
    return (
        _RECORD_BYTES
        + content_bytes
        + sum(_HEADER_BYTES + len(name) + len(content or b"") for name, content in headers)
    )


def split(fetched: bytes) -> Iterator[Batch]:
    """The batches of a fetch. A last batch cut by the broker is left out, unless it is also the first: brokers send the
    first batch whole (KIP-74), so its length must be wrong."""
    view = memoryview(fetched)
    position = 0
    while len(view) - position >= _LENGTH_END:
        length = int.from_bytes(view[position + _LENGTH_AT : position + _LENGTH_END], "big", signed=True)
        end = position + _LENGTH_END + length
        if length < _HEADER.size - _LENGTH_END or (end > len(view) and position == 0):
            header = _header(view[position:]) if len(view) - position >= _HEADER.size else None
            problem = DecodeError(DecodeProblem.BAD_BATCH, f"a batch cannot be {length} bytes long here")
            yield Batch(header, view[position:], problem)
            return
        if end > len(view):
            return
        data = view[position:end]
        header = _header(data)
        yield Batch(header, data, _problem_of(header, data))
        position = end


def _header(data: memoryview) -> BatchHeader:
    return BatchHeader(*_HEADER.unpack_from(data))


def _problem_of(header: BatchHeader, data: memoryview) -> DecodeError | None:
    if header.magic != MAGIC:
        return DecodeError(DecodeProblem.UNKNOWN_MAGIC, f"a batch of format {header.magic}, expected {MAGIC}")
    if calc_crc32c(data[_CRC_FROM:]) != header.crc:
        return DecodeError(DecodeProblem.BAD_CRC, f"a batch of {len(data)} bytes does not match its checksum")
    if header.last_offset_delta < 0 or not 0 <= header.record_count <= header.last_offset_delta + 1:
        counts = f"{header.record_count} records in {header.last_offset_delta + 1} offsets"
        return DecodeError(DecodeProblem.BAD_BATCH, f"a batch of {counts}")
    return None


def body_of(header: BatchHeader, data: memoryview, max_bytes: int = MAX_INFLATED_BYTES) -> bytes | memoryview:
    """The decompressed records of a batch. Raises DecodeError if that fails, for too many records, and beyond
    ``max_bytes``."""
    if header.record_count > MAX_RECORDS:
        reason = f"a batch of {header.record_count} records, at most {MAX_RECORDS} are read"
        raise DecodeError(DecodeProblem.TOO_MANY_ITEMS, reason)
    codec = header.attributes & _CODEC_MASK
    body = data[_HEADER.size :]
    if codec == 0:
        return body
    if codec >= len(CODECS):
        raise DecodeError(DecodeProblem.BAD_COMPRESSION, f"codec {codec} is unknown")
    try:
        return inflate(codec, bytes(body), max_bytes)
    except InflationError as error:
        problem = DecodeProblem.INFLATES_TOO_FAR if error.too_large else DecodeProblem.BAD_COMPRESSION
        raise DecodeError(problem, str(error)) from None


class RecordPlace(NamedTuple):
    """Position of the next record of a batch, and number and last offset of those before it."""

    position: int
    number: int
    last_offset: int


class BatchRecords:
    """Iterator over the records of a batch, in the order of their offsets.

    A record with known bounds that cannot be used has a ``problem``. Raises DecodeError where the bounds of the next
    record are unknown.
    """

    def __init__(self, header: BatchHeader, body: bytes | memoryview) -> None:
        self._header = header
        self._body = body
        self.place = RecordPlace(0, 0, header.base_offset - 1)
        """Position of the next record. May be set to that of another iterator over the same batch."""

    def __iter__(self) -> Iterator[ReadRecord]:
        return self

    def __next__(self) -> ReadRecord:
        header, body, place = self._header, self._body, self.place
        if place.number == header.record_count:
            if place.position != len(body):
                raise self._bad(f"{len(body) - place.position} bytes behind the last record")
            raise StopIteration
        try:
            record, end = _record(header, body, place.position)
        except (IndexError, ValueError) as error:
            raise self._bad("it ends early" if isinstance(error, IndexError) else str(error)) from None
        if not place.last_offset < record.offset < header.next_offset:
            raise self._bad("its offset is out of order")
        self.place = RecordPlace(end, place.number + 1, record.offset)
        return record

    def pass_to(self, offset: int) -> None:
        """Skip to the first record at or after this offset, without decoding the skipped ones."""
        header, body = self._header, self._body
        position, number, last = self.place
        try:
            while number < header.record_count and last + 1 < offset:
                end, passed = _end_and_offset(header, body, position)
                if passed >= offset:
                    break
                position, number, last = end, number + 1, passed
        except (IndexError, ValueError) as error:
            raise self._bad("it ends early" if isinstance(error, IndexError) else str(error)) from None
        finally:
            self.place = RecordPlace(position, number, last)

    def _bad(self, reason: str) -> DecodeError:
        return DecodeError(DecodeProblem.BAD_BATCH, f"record behind offset {self.place.last_offset}: {reason}")


def _record(header: BatchHeader, body: bytes | memoryview, position: int) -> tuple[ReadRecord, int]:
    """The record at ``position`` and its end. Raises IndexError and ValueError."""
    start, end = _bounds(body, position)
    return _fields(header, body, start, end), end


def _end_and_offset(header: BatchHeader, body: bytes | memoryview, position: int) -> tuple[int, int]:
    """End and offset of the record at ``position``. Raises IndexError and ValueError."""
    start, end = _bounds(body, position)
    _, position = _varint(body, start + 1)
    delta, _ = _varint(body, position)
    return end, header.base_offset + delta


def _bounds(body: bytes | memoryview, position: int) -> tuple[int, int]:
    length, start = _varint(body, position)
    end = start + length
    if length < 0 or end > len(body):
        raise ValueError(f"a record of {length} bytes")
    return start, end


def _fields(header: BatchHeader, body: bytes | memoryview, start: int, end: int) -> ReadRecord:
    timestamp_delta, position = _varint(body, start + 1)
    offset_delta, position = _varint(body, position)
    key, position = _bytes(body, position, end, MAX_KEY_BYTES)
    value_length, position = _varint(body, position)
    value_end = position + max(value_length, 0)
    if value_end > end:
        raise ValueError("its value ends outside of it")
    offset = header.base_offset + offset_delta
    timestamp_ms = header.max_timestamp_ms
    if not header.attributes & _LOG_APPEND_TIME:
        timestamp_ms = header.first_timestamp_ms + timestamp_delta
    if end - start > MAX_RECORD_BYTES:
        reason = f"a record of {end - start} bytes, at most {MAX_RECORD_BYTES} are read"
        problem = DecodeError(DecodeProblem.TOO_LARGE, reason)
        kept = bytes(body[position : min(value_end, position + MAX_KEPT_VALUE_BYTES)])
        return ReadRecord(offset, timestamp_ms, key, kept, (), problem, end - start)
    value = None if value_length < 0 else bytes(body[position:value_end])
    count, position = _varint(body, value_end)
    if count < 0:
        raise ValueError("a negative number of headers")
    if count > MAX_HEADERS:
        problem = DecodeError(DecodeProblem.BAD_HEADER, f"{count} headers, at most {MAX_HEADERS} are read")
        return ReadRecord(offset, timestamp_ms, key, value, (), problem, end - start)
    headers: list[tuple[str, bytes | None]] = []
    bad_name: DecodeError | None = None
    for number in range(count):
        name, position = _bytes(body, position, end)
        content, position = _bytes(body, position, end)
        if name is None:
            raise ValueError("a header without a name")
        try:
            headers.append((name.decode(), content))
        except UnicodeDecodeError:
            bad_name = DecodeError(DecodeProblem.BAD_HEADER, f"the name of header {number} is not UTF-8")
    if position != end:
        raise ValueError("its length is not that of its fields")
    return ReadRecord(offset, timestamp_ms, key, value, tuple(headers), bad_name, end - start)


def _bytes(
    body: bytes | memoryview, position: int, end: int, max_kept_bytes: int = MAX_RECORD_BYTES
) -> tuple[bytes | None, int]:
    length, position = _varint(body, position)
    if length < 0:
        return None, position
    if position + length > end:
        raise ValueError("a field ends outside of it")
    return bytes(body[position : position + min(length, max_kept_bytes)]), position + length


def _varint(body: bytes | memoryview, position: int) -> tuple[int, int]:
    byte = body[position]
    position += 1
    if byte < 0x80:
        return (byte >> 1) ^ -(byte & 1), position
    value, shift = byte & 0x7F, 7
    while True:
        byte = body[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), position
        shift += 7
        if shift >= _LONGEST_VARINT_BITS:
            raise ValueError("a number is too long")
