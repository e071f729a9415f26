"""Record batches of Kafka's log, valid and hostile, as bytes, and a produce request that sends them unchecked."""

import socket
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from time import monotonic, sleep
from typing import NamedTuple

import cramjam
from aiokafka.record.util import calc_crc32c, encode_varint
from confluent_kafka import KafkaError

_PRODUCE, _VERSION = 0, 7
_ALL_REPLICAS = -1
_TIMEOUT_MS = 30_000
_LEADER_MISSING = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.NOT_LEADER_FOR_PARTITION)
_LEADER_TIMEOUT_S = 10
_LEADER_RETRY_S = 0.05
_RESPONSE = struct.Struct(">ihqqq")
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
# Version 1, independent blocks, none above 4 MiB, and the checksum of that.
_LZ4_FRAME_HEADER = b"\x04\x22\x4d\x18\x60\x70\x73"
_LZ4_BLOCK_BYTES = 4 * 1024 * 1024


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


class ProduceRefusedError(Exception):
    """The broker refused a batch, with this error code and its name."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.name = KafkaError(code).name()
        super().__init__(self.name)


def produce_batch(bootstrap_servers: str, topic: str, batch: bytes, *, partition: int = 0) -> int:
    """Write one batch. Returns its base offset. Raises ProduceRefusedError."""
    deadline = monotonic() + _LEADER_TIMEOUT_S
    while True:
        try:
            return _produce_once(bootstrap_servers, topic, batch, partition)
        except ProduceRefusedError as refused:
            # As every client does: a broker leads a new partition only a moment after it was created.
            if refused.code not in _LEADER_MISSING or monotonic() > deadline:
                raise
            sleep(_LEADER_RETRY_S)


def _produce_once(bootstrap_servers: str, topic: str, batch: bytes, partition: int) -> int:
    host, port = bootstrap_servers.split(",", maxsplit=1)[0].rsplit(":", 1)
    request = struct.pack(">hhi", _PRODUCE, _VERSION, 1) + _string("hostile") + struct.pack(">h", -1)
    request += struct.pack(">hi", _ALL_REPLICAS, _TIMEOUT_MS)
    request += struct.pack(">i", 1) + _string(topic) + struct.pack(">ii", 1, partition)
    request += struct.pack(">i", len(batch)) + batch
    with (
        socket.create_connection((host, int(port)), timeout=_TIMEOUT_MS / 1_000) as connection,
        connection.makefile("rb") as answer,
    ):
        connection.sendall(struct.pack(">i", len(request)) + request)
        size = int.from_bytes(answer.read(4), "big")
        response = answer.read(size)
        if not size or len(response) < size:
            raise ConnectionError("the broker closed the connection")
    # The correlation id, one topic with its name, one partition.
    found = 4 + 4 + 2 + len(topic) + 4
    _, code, base_offset, _, _ = _RESPONSE.unpack_from(response, found)
    if code:
        raise ProduceRefusedError(code)
    return int(base_offset)


def _string(text: str) -> bytes:
    return struct.pack(">h", len(text)) + text.encode()
