"""Record batches of Kafka's log, well made and hostile, as bytes."""

import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import cramjam
from aiokafka.record.util import calc_crc32c, encode_varint

HEADER = struct.Struct(">qiibIhiqqqhii")
CRC_FROM = 21
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
LOG_APPEND_TIME, TRANSACTIONAL, CONTROL = 0x08, 0x10, 0x20
# Version 1, independent blocks, none above 4 MiB, and the checksum of that.
_LZ4_FRAME_HEADER = b"\x04\x22\x4d\x18\x60\x70\x73"
_LZ4_BLOCK_BYTES = 4 * 1024 * 1024
XERIAL_HEADER = b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1)


class Written(NamedTuple):
    """A record as a producer gives it; a header's name as bytes, so that it can be no text."""

    value: bytes | None = None
    key: bytes | None = None
    headers: Sequence[tuple[bytes, bytes | None]] = ()


def batch(
    records: Iterable[Written | bytes],
    *,
    base_offset: int = 0,
    codec: int = 0,
    attributes: int = 0,
    producer_id: int = -1,
    timestamp_ms: int = 1_700_000_000_000,
    deltas: Sequence[int] | None = None,
    last_offset_delta: int | None = None,
    count: int | None = None,
    magic: int = 2,
    body: bytes | None = None,
    compressed: bytes | None = None,
) -> bytes:
    """A batch whose checksum is right. ``deltas`` are the records' offsets in it; ``count``, ``last_offset_delta``,
    ``body`` (inflated) and ``compressed`` replace what follows from the records."""
    written = [record if isinstance(record, Written) else Written(record) for record in records]
    deltas = range(len(written)) if deltas is None else deltas
    if body is None:
        body = b"".join(map(record_bytes, written, deltas))
    if compressed is None:
        compressed = deflated(codec, body)
    last = (deltas[-1] if len(deltas) else -1) if last_offset_delta is None else last_offset_delta
    rest = struct.pack(
        ">hiqqqhii",
        attributes | codec,
        last,
        timestamp_ms,
        timestamp_ms,
        producer_id,
        0 if producer_id >= 0 else -1,
        -1,
        len(written) if count is None else count,
    )
    rest += compressed
    head = struct.pack(">qiibI", base_offset, 9 + len(rest), 0, magic, calc_crc32c(rest))
    return head + rest


def record_bytes(record: Written, delta: int) -> bytes:
    """One record of format v2."""
    fields = bytearray(b"\0")
    fields += varint(0) + varint(delta) + field(record.key) + field(record.value) + varint(len(record.headers))
    for name, content in record.headers:
        fields += field(name) + field(content)
    return varint(len(fields)) + bytes(fields)


def field(content: bytes | None) -> bytes:
    return varint(-1) if content is None else varint(len(content)) + content


def varint(value: int) -> bytes:
    written = bytearray()
    encode_varint(value, written.append)
    return bytes(written)


def deflated(codec: int, body: bytes) -> bytes:
    """As a producer compresses it; snappy in one block, as librdkafka does."""
    compress: Sequence[Callable[[bytes], bytes]] = (
        lambda data: data,
        gzip,
        lambda data: bytes(cramjam.snappy.compress_raw(data)),
        lz4,
        lambda data: bytes(cramjam.zstd.compress(data)),
    )
    return compress[codec](body)


def gzip(data: bytes) -> bytes:
    deflate = zlib.compressobj(6, zlib.DEFLATED, 31)
    return deflate.compress(data) + deflate.flush()


def lz4(data: bytes) -> bytes:
    """A frame of independent blocks, the only kind that Kafka's broker reads."""
    frame = bytearray(_LZ4_FRAME_HEADER)
    for start in range(0, len(data), _LZ4_BLOCK_BYTES):
        block = bytes(cramjam.lz4.compress_block(data[start : start + _LZ4_BLOCK_BYTES], store_size=False))
        frame += struct.pack("<I", len(block)) + block
    return bytes(frame + bytes(4))


def gzip_of_zeros(size: int) -> bytes:
    """The body of a batch of one record whose value has so many zeros, compressed piece by piece."""
    head = b"\0" + varint(0) + varint(0) + varint(-1) + varint(size)
    tail = varint(0)
    deflate = zlib.compressobj(9, zlib.DEFLATED, 31)
    parts = [deflate.compress(varint(len(head) + size + len(tail)) + head)]
    whole, rest = divmod(size, 1024 * 1024)
    parts += [deflate.compress(bytes(1024 * 1024)) for _ in range(whole)]
    parts += [deflate.compress(bytes(rest) + tail), deflate.flush()]
    return b"".join(parts)


def xerial(data: bytes, block_bytes: int = 32_768) -> bytes:
    """Snappy in the framing of snappy-java, which Java's producer writes."""
    framed = bytearray(XERIAL_HEADER)
    for start in range(0, len(data), block_bytes):
        block = bytes(cramjam.snappy.compress_raw(data[start : start + block_bytes]))
        framed += struct.pack(">i", len(block)) + block
    return bytes(framed)


def with_crc(data: bytes) -> bytes:
    """The batch with the checksum that fits its bytes."""
    return data[:17] + struct.pack(">I", calc_crc32c(data[CRC_FROM:])) + data[CRC_FROM:]
