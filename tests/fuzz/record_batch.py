"""Record batches of Kafka (magic 2) made by hand, with what no client library writes, and a bare produce request.

The layout is that of ``org.apache.kafka.common.record.DefaultRecordBatch``; the request is Produce, version 7.
"""

import gzip
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from aiokafka.record.util import calc_crc32c

_HEAD = struct.Struct(">qiib")
_BODY = struct.Struct(">hiqqqhii")
_CRC_AT, _CRC_END = 17, 21
_GZIP = 1
_PRODUCE, _VERSION = 0, 7
_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class RawRecord:
    """One record; every part is bytes, the names of headers too."""

    value: bytes | None
    key: bytes | None = None
    headers: Sequence[tuple[bytes, bytes | None]] = field(default=())


def batch_of(records: Sequence[RawRecord], timestamp_ms: int, *, compressed: bool = False) -> bytes:
    """A batch that a broker takes."""
    body = b"".join(_record(number, record) for number, record in enumerate(records))
    attributes = _GZIP if compressed else 0
    count = len(records)
    packed = _BODY.pack(attributes, count - 1, timestamp_ms, timestamp_ms, -1, -1, -1, count)
    after_crc = packed + (gzip.compress(body, 1) if compressed else body)
    head = _HEAD.pack(0, 4 + 1 + 4 + len(after_crc), -1, 2)
    return head + struct.pack(">I", calc_crc32c(after_crc)) + after_crc


def repaired(batch: bytes) -> bytes:
    """The batch with the length and the checksum that its bytes have: what is wrong in it is not found by those."""
    if len(batch) <= _CRC_END:
        return batch
    length = struct.pack(">i", len(batch) - 12)
    return batch[:8] + length + batch[12:_CRC_AT] + struct.pack(">I", calc_crc32c(batch[_CRC_END:])) + batch[_CRC_END:]


def some_batch(rng: Random, values: Sequence[bytes], timestamp_ms: int) -> bytes:
    """A batch of one to five of these values."""
    chosen = [
        RawRecord(rng.choice(values), rng.randbytes(8), ((b"traceparent", b"x"),)) for _ in range(rng.randint(1, 5))
    ]
    return batch_of(chosen, timestamp_ms, compressed=rng.random() < 0.3)


def produce(bootstrap_servers: str, topic: str, batch: bytes) -> int:
    """Send a batch as it is to partition 0 of a topic. Returns the broker's error code, 0 if it took the batch.

    The first server must lead the partition. Raises OSError, also when the broker closed the connection on it.
    """
    host, _, port = bootstrap_servers.split(",", maxsplit=1)[0].rpartition(":")
    body = struct.pack(">hhi", -1, 1, 5_000) + struct.pack(">i", 1) + _string(topic)
    body += struct.pack(">iii", 1, 0, len(batch)) + batch
    head = struct.pack(">hhi", _PRODUCE, _VERSION, 1) + _string("fuzz")
    with socket.create_connection((host, int(port)), timeout=_TIMEOUT_S) as connection:
        connection.sendall(struct.pack(">i", len(head + body)) + head + body)
        answer = _read(connection, struct.unpack(">i", _read(connection, 4))[0])
    # Correlation id, one topic with its name, one partition.
    at = 4 + 4 + 2 + len(topic.encode()) + 4 + 4
    return int(struct.unpack_from(">h", answer, at)[0])


def _record(number: int, record: RawRecord) -> bytes:
    headers = b"".join(_sized(name) + _sized(value) for name, value in record.headers)
    body = b"\x00" + _varint(0) + _varint(number) + _sized(record.key) + _sized(record.value)
    body += _varint(len(record.headers)) + headers
    return _varint(len(body)) + body


def _sized(value: bytes | None) -> bytes:
    return _varint(-1) if value is None else _varint(len(value)) + value


def _varint(number: int) -> bytes:
    left = (number << 1) ^ (number >> 63)
    out = bytearray()
    while left > 0x7F:
        out.append(left & 0x7F | 0x80)
        left >>= 7
    out.append(left)
    return bytes(out)


def _string(text: str) -> bytes:
    return struct.pack(">h", len(text.encode())) + text.encode()


def _read(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            raise ConnectionResetError("the broker closed the connection")
        found += part
    return found
