"""Rewriting what stands in a running broker's log, for what a broker refuses to take from a producer.

A broker checks checksum, magic, record count and lengths of what is produced, so that a damaged batch can only come
from a disk, or from a broker that is broken itself. It serves a fetch from the segment file by sendfile and looks at
nothing but the headers of the batches on the way: bytes that are written over the file are what the next fetch brings.
A batch keeps its place and its size, because the broker knows where each begins.

    log = PartitionLog.of(log_dir, topic, partition=0)
    victim = log.batches()[1]
    log.flip(victim)                                              # a bad CRC
    log.replace(victim, attributes=GZIP, body=noise(victim))      # garbage in place of what gzip wrote
    log.replace(victim, body=records_filling(victim, [Record(value=b"x", headers=((b"\\xff", b""),))]))
"""

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import cramjam
from aiokafka.record.util import calc_crc32c

from benchmarks.record_batches import varint

HEADER_BYTES = 61
"""Of a batch of format 2, up to the first record."""

PREFIX_BYTES = 12
"""The base offset and the length, which the length does not count."""

NONE, GZIP, SNAPPY, LZ4, ZSTD = range(5)
"""Codecs, as they stand in the attributes."""

UNKNOWN_CODEC = 6
TRANSACTIONAL = 0x10
CONTROL = 0x20

COMMIT_MARKER = b"\x00\x00\x00\x01"
"""The key of a control record: version 0, type 1."""

_HEADER = struct.Struct(">qiibIhiqqqhii")
_MAGIC_AT = 16
_TODAYS_MAGIC = 2
_CRC_AT = 17
CHECKED_FROM = 21
"""The attributes, where what the checksum covers begins."""
_XERIAL_HEADER = b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1)


@dataclass(frozen=True, slots=True)
class Batch:
    """The header of a batch in a segment file. ``position`` is where it begins there, ``length`` as it stands in it."""

    position: int
    base_offset: int
    length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def size(self) -> int:
        """Its bytes in the file."""
        return PREFIX_BYTES + self.length

    @property
    def body_size(self) -> int:
        """The bytes behind its header."""
        return self.size - HEADER_BYTES

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        """Where the next batch begins, if nothing was compacted away."""
        return self.last_offset + 1

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & CONTROL)

    def encoded(self, body: bytes, crc: int | None = None) -> bytes:
        """The whole batch as it stands in the file; with the right checksum, unless one is given."""
        header = _HEADER.pack(
            *(self.base_offset, HEADER_BYTES - PREFIX_BYTES + len(body), self.leader_epoch),
            *(self.magic, 0, self.attributes, self.last_offset_delta, self.base_timestamp, self.max_timestamp),
            *(self.producer_id, self.producer_epoch, self.base_sequence, self.record_count),
        )
        checked = header[CHECKED_FROM:] + body
        return header[:_CRC_AT] + struct.pack(">I", calc_crc32c(checked) if crc is None else crc) + checked


@dataclass(frozen=True, slots=True)
class Record:
    """A record to be written into a batch. A number that is given stands there in place of the right one."""

    value: bytes | None = b""
    key: bytes | None = None
    headers: Sequence[tuple[bytes, bytes | None]] = ()
    offset_delta: int | None = None
    length: int | None = None
    key_length: int | None = None
    value_length: int | None = None
    header_count: int | None = None

    def encoded(self, index: int) -> bytes:
        """As it stands in a batch, as the record of this number."""
        delta = index if self.offset_delta is None else self.offset_delta
        body = bytearray(b"\0" + varint(0) + varint(delta))
        body += _sized(self.key, self.key_length) + _sized(self.value, self.value_length)
        body += varint(len(self.headers) if self.header_count is None else self.header_count)
        for name, value in self.headers:
            body += _sized(name) + _sized(value)
        return varint(len(body) if self.length is None else self.length) + bytes(body)


def _sized(data: bytes | None, length: int | None = None) -> bytes:
    if length is None:
        length = -1 if data is None else len(data)
    return varint(length) + (data or b"")


def records(*given: Record) -> bytes:
    """The body of an uncompressed batch."""
    return b"".join(record.encoded(index) for index, record in enumerate(given))


def records_filling(batch: Batch, given: Sequence[Record]) -> bytes:
    """The same, exactly as long as the body of this batch: the last record gets a header of the bytes that are left.

    Raises ValueError when they do not fit.
    """
    *before, last = given

    def padded(name: bytes, pad: int) -> bytes:
        return records(*before, replace(last, headers=(*last.headers, (name, b"\0" * pad))))

    spare = batch.body_size - len(padded(b"pad", 0))
    for pad in range(max(0, spare - 8), spare + 1):
        for name in (b"pad", b"padd"):  # a length may grow by a byte together with what it counts
            if len(body := padded(name, pad)) == batch.body_size:
                return body
    raise ValueError(f"the records do not fit into {batch.body_size} bytes")


def noise(batch: Batch) -> bytes:
    """Bytes that no codec wrote, as many as the body of this batch has."""
    return (b"\xa5\x5a\xc3\x3c" * (batch.body_size // 4 + 1))[: batch.body_size]


@dataclass(frozen=True, slots=True)
class PartitionLog:
    """The first segment of a partition's log, while a broker serves it."""

    file: Path

    @classmethod
    def of(cls, log_dir: Path, topic: str, partition: int = 0) -> "PartitionLog":
        """Of a partition, in one of the broker's `log.dirs`."""
        return cls(log_dir / f"{topic}-{partition}" / f"{0:020}.log")

    def batches(self) -> list[Batch]:
        """All batches, in order."""
        data, found, position = self.file.read_bytes(), [], 0
        while position + HEADER_BYTES <= len(data):
            batch = Batch(position, *_HEADER.unpack_from(data, position))
            found.append(batch)
            position += batch.size
        return found

    def at(self, offset: int) -> Batch:
        """The batch that holds this offset. Raises LookupError."""
        for batch in self.batches():
            if batch.base_offset <= offset <= batch.last_offset:
                return batch
        raise LookupError(f"no batch of {self.file.parent.name} holds offset {offset}")

    def body(self, batch: Batch) -> bytes:
        """What stands behind its header."""
        return self._read(batch.position + HEADER_BYTES, batch.body_size)

    def flip(self, batch: Batch, at: int = -1) -> None:
        """Change a byte of its body, so that the checksum does not fit any more."""
        index = range(batch.body_size)[at]
        body = bytearray(self.body(batch))
        body[index] ^= 0xFF
        self._write(batch.position + HEADER_BYTES, bytes(body))

    def set_magic(self, batch: Batch, magic: int) -> None:
        """Give it another format. The checksum does not cover that.

        In formats 0 and 1 the attributes stand behind the magic. A codec there that is none makes the broker fail on
        every fetch that has to look past the batch; so it is none at all, whatever the checksum was.
        """
        self._write(batch.position + _MAGIC_AT, struct.pack(">b", magic) + (b"\0" if magic < _TODAYS_MAGIC else b""))

    def replace(
        self,
        batch: Batch,
        *,
        body: bytes | None = None,
        attributes: int | None = None,
        record_count: int | None = None,
        last_offset_delta: int | None = None,
        crc: int | None = None,
    ) -> None:
        """Write another batch of the same size in its place; what is not given stays. Its checksum is right unless one
        is given."""
        changed = replace(
            batch,
            attributes=batch.attributes if attributes is None else attributes,
            record_count=batch.record_count if record_count is None else record_count,
            last_offset_delta=batch.last_offset_delta if last_offset_delta is None else last_offset_delta,
        )
        self._overwrite(batch, changed.encoded(self.body(batch) if body is None else body, crc))

    def make_empty(self, batch: Batch, last: Record = Record(b"the last")) -> None:
        """Take its records away, all but the last, which becomes this one, as compaction does: an empty batch and one
        of a single record. A batch that was emptied keeps its header, for the sequence numbers in it.
        """
        if batch.last_offset_delta < 1:
            raise ValueError("a batch of one record has no room for two")
        empty = replace(batch, attributes=NONE, last_offset_delta=batch.last_offset_delta - 1, record_count=0)
        single = replace(
            batch,
            base_offset=batch.last_offset,
            length=batch.length - HEADER_BYTES,
            attributes=NONE,
            last_offset_delta=0,
            record_count=1,
        )
        filled = records_filling(single, [last])
        self._overwrite(batch, empty.encoded(b"") + single.encoded(filled))

    def make_control(self, batch: Batch) -> None:
        """Put the marker of a committed transaction in its place."""
        body = records_filling(batch, [Record(key=COMMIT_MARKER, value=b"\0\0\0\0\0\0")])
        self.replace(batch, body=body, attributes=TRANSACTIONAL | CONTROL, record_count=1)

    def _overwrite(self, batch: Batch, data: bytes) -> None:
        if len(data) != batch.size:
            raise ValueError(f"{len(data)} bytes cannot stand in the place of {batch.size}")
        self._write(batch.position, data)

    def _read(self, position: int, size: int) -> bytes:
        with self.file.open("rb") as file:
            return os.pread(file.fileno(), size, position)

    def _write(self, position: int, data: bytes) -> None:
        with self.file.open("r+b") as file:
            written = os.pwrite(file.fileno(), data, position)
        if written != len(data):
            raise OSError(f"{written} of {len(data)} bytes were written")


def xerial(data: bytes, block_bytes: int = 32_768) -> bytes:
    """Snappy in the framing of snappy-java, which Java's producer writes."""
    framed = bytearray(_XERIAL_HEADER)
    for start in range(0, len(data), block_bytes):
        block = bytes(cramjam.snappy.compress_raw(data[start : start + block_bytes]))
        framed += struct.pack(">i", len(block)) + block
    return bytes(framed)


def with_crc(data: bytes) -> bytes:
    """The batch with the checksum that fits its bytes."""
    return data[:17] + struct.pack(">I", calc_crc32c(data[CHECKED_FROM:])) + data[CHECKED_FROM:]
