"""Fetched data of one partition: records of committed transactions, in turns of bounded size."""

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from aiokafka.consumer.fetcher import FetchResult
from aiokafka.structs import ConsumerRecord, TopicPartition

from fairlane import metrics
from fairlane.codec import DecodeError, DecodeProblem
from stream_processors.dispatcher.reading.record_batches import (
    MAGIC,
    MAX_INFLATED_BYTES,
    MAX_KEPT_BYTES,
    Batch,
    BatchHeader,
    BatchRecords,
    ReadRecord,
    RecordPlace,
    body_of,
    memory_bytes,
    split,
)

_LOG_APPEND_TIME: Final = 0x08
_INFLATION_FAILED: Final = {DecodeProblem.INFLATES_TOO_FAR, DecodeProblem.BAD_COMPRESSION}
_NO_LIMIT: Final = 2**63 - 1


class BatchPlace(NamedTuple):
    """Position inside a batch, so that a later fetch of the same batch resumes there."""

    base_offset: int
    crc: int
    records: RecordPlace


class Unreadable(NamedTuple):
    """Stored in ``checksum`` of a record that cannot be read.

    Attributes:
        problem: the reason.
        read_bytes: bytes read or decompressed to find it.
    """

    problem: DecodeError
    read_bytes: int


class CommittedRecords:
    """Iterator over the records of one fetch, as aiokafka's ``PartitionRecords`` is.

    Skips aborted transactions and control batches. An unreadable batch becomes one record, whose ``checksum`` is
    Unreadable and whose value is the part of the bytes that is kept. Ends early after a batch that leaves open where
    the next one begins, or whether a transaction ended: the rest is fetched again, from the position.

    Args:
        tp: topic and partition.
        fetched: the batches, as the broker sent them.
        aborted: producer ids and first offsets of the aborted transactions.
        fetch_offset: the first wanted offset.
        log_end: known upper bound of batch ends.
        place: position of an earlier fetch, if inside a batch.
    """

    def __init__(
        self,
        tp: TopicPartition,
        fetched: bytes,
        aborted: Iterable[tuple[int, int]],
        fetch_offset: int,
        log_end: int = _NO_LIMIT,
        place: BatchPlace | None = None,
    ) -> None:
        self._tp = tp
        self._aborted = sorted(aborted, key=lambda transaction: transaction[1])
        self._aborted_producers: set[int] = set()
        self.next_fetch_offset = fetch_offset
        self.size_bytes = len(fetched)
        self.inflated_bytes = 0
        """Decompressed bytes of the present batch."""
        self.spent_bytes = 0
        """Bytes decompressed so far, also in vain."""
        self._log_end = log_end
        self._resume = place
        self._current: tuple[BatchHeader, BatchRecords] | None = None
        self._is_behind_first = False
        self._records = self._read(split(fetched))

    def __iter__(self) -> Iterator[ConsumerRecord]:
        return self

    def __next__(self) -> ConsumerRecord:
        return next(self._records)

    @property
    def place(self) -> BatchPlace | None:
        """Position of the next record inside a batch."""
        if self._current is None:
            return None
        header, records = self._current
        return BatchPlace(header.base_offset, header.crc, records.place)

    def _read(self, batches: Iterator[Batch]) -> Iterator[ConsumerRecord]:
        batch = next(batches, None)
        while batch is not None:
            following = next(batches, None)
            sound = following.header if following is not None and following.problem is None else None
            header = batch.header
            if header is None or batch.problem is not None:
                behind = sound or _agreeing(header, following)
                yield self._unreadable(batch, batch.problem, self._next_behind(header, behind))
                if behind is None or self._aborted_producers:
                    return
            elif self._is_misplaced(header, sound):
                reason = f"base offset {header.base_offset} where {self.next_fetch_offset} is next"
                yield self._unreadable(
                    batch, DecodeError(DecodeProblem.BAD_BATCH, reason), self.next_fetch_offset + header.offsets
                )
            elif header.next_offset > self.next_fetch_offset:
                yield from self._of_batch(batch, header)
            batch = following

    def _is_misplaced(self, header: BatchHeader, following: BatchHeader | None) -> bool:
        """Whether the base offset, which no checksum covers, is wrong: it lies before the position, or the batch leaves
        a gap and overlaps the following one."""
        if header.base_offset <= self.next_fetch_offset:
            return self._is_behind_first and header.base_offset < self.next_fetch_offset
        return following is not None and header.next_offset > following.base_offset

    def _of_batch(self, batch: Batch, header: BatchHeader) -> Iterator[ConsumerRecord]:
        self._is_behind_first = True
        self._note_aborted(header.base_offset)
        spent_before = self.spent_bytes
        if header.is_control:
            # Commit or abort: the producer's next records belong to another transaction.
            self._aborted_producers.discard(header.producer_id)
        elif not (header.is_transactional and header.producer_id in self._aborted_producers):
            try:
                for record in self._records_of(batch, header):
                    self.next_fetch_offset = record.offset + 1
                    yield self._record(record, header.attributes & _LOG_APPEND_TIME)
            except DecodeError as error:
                self.spent_bytes += MAX_INFLATED_BYTES if error.problem in _INFLATION_FAILED else 0
                # After the last record there may be trailing bytes; then no offset of the batch is left.
                if header.next_offset > self.next_fetch_offset:
                    read_bytes = self.spent_bytes - spent_before
                    yield self._unreadable(batch, error, header.next_offset, read_bytes)
            self._current, self.inflated_bytes = None, 0
        # The last offsets of a batch may have been compacted away.
        self.next_fetch_offset = max(self.next_fetch_offset, header.next_offset)

    def _records_of(self, batch: Batch, header: BatchHeader) -> Iterator[ReadRecord]:
        """The wanted records. Raises DecodeError."""
        body = body_of(header, batch.data)
        if isinstance(body, bytes):
            self.inflated_bytes = len(body)
            self.spent_bytes += len(body)
        records = BatchRecords(header, body)
        resume, self._resume = self._resume, None
        if (
            resume is not None
            and (resume.base_offset, resume.crc) == (header.base_offset, header.crc)
            and resume.records.last_offset < self.next_fetch_offset
        ):
            records.place = resume.records
        self._current = header, records
        records.pass_to(self.next_fetch_offset)
        return records

    def _note_aborted(self, base_offset: int) -> None:
        while self._aborted and self._aborted[0][1] <= base_offset:
            self._aborted_producers.add(self._aborted.pop(0)[0])

    def _next_behind(self, header: BatchHeader | None, following: BatchHeader | None) -> int:
        """The offset after a batch whose header may be wrong: the base offset of the following batch; without one, two
        header fields that agree are believed; else the next offset is tried, which returns the same batch again."""
        least = self.next_fetch_offset + 1
        if following is not None:
            return max(least, following.base_offset)
        if header is not None and header.last_offset_delta + 1 == header.record_count and header.magic == MAGIC:
            return max(least, header.next_offset) if header.next_offset <= self._log_end else least
        return least

    def _unreadable(
        self, batch: Batch, problem: DecodeError | None, next_offset: int, inflated_bytes: int = 0
    ) -> ConsumerRecord:
        self._is_behind_first = True
        problem = problem or DecodeError(DecodeProblem.BAD_BATCH, "no header")
        first, self.next_fetch_offset = self.next_fetch_offset, next_offset
        metrics.UNREADABLE_BATCHES.labels(problem=problem.problem).inc()
        timestamp_ms = 0 if batch.header is None else max(0, batch.header.max_timestamp_ms)
        where = DecodeError(problem.problem, f"{str(problem).partition(': ')[2]}; offsets {first} to {next_offset - 1}")
        kept = bytes(batch.data[:MAX_KEPT_BYTES])
        read_bytes = max(len(batch.data), inflated_bytes)
        record = ReadRecord(next_offset - 1, timestamp_ms, None, kept, (), where, read_bytes)
        return self._record(record, log_append_time=1)

    def _record(self, record: ReadRecord, log_append_time: int) -> ConsumerRecord:
        key, value = record.key, record.value
        return ConsumerRecord(
            self._tp.topic,
            self._tp.partition,
            record.offset,
            record.timestamp_ms,
            1 if log_append_time else 0,
            key,
            value,
            None if record.problem is None else Unreadable(record.problem, record.read_bytes),
            -1 if key is None else len(key),
            -1 if value is None else len(value),
            record.headers,
        )


class FetchedPartition(FetchResult):  # type: ignore[misc]  # aiokafka has no types
    """The rest of a fetch of one partition. Position and assignment are aiokafka's."""

    _partition_records: CommittedRecords | None

    def __init__(self, tp: TopicPartition, assignment: Any, records: CommittedRecords) -> None:
        super().__init__(tp, assignment=assignment, partition_records=records, backoff=0)
        self.place: BatchPlace | None = None
        """Position at its release, if inside a batch."""
        self.turn_bytes = 0
        """Bytes of the last turn: records, or more if decompressed."""
        self.had_turn = False

    @property
    def size_bytes(self) -> int:
        """Memory used by the fetch and the decompressed batch."""
        records = self._partition_records
        return 0 if records is None else records.size_bytes + records.inflated_bytes

    def release(self) -> None:
        """Drop the records not taken: they are fetched again from the position."""
        records = self._partition_records
        if records is not None:
            self.place = records.place
        self._partition_records = None

    def take(self, max_records: int, max_bytes: int) -> list[ConsumerRecord]:
        """The next records: at most ``max_records`` and, beyond the first, ``max_bytes``, decompressed bytes
        included."""
        taken: list[ConsumerRecord] = []
        self.turn_bytes, self.had_turn = 0, True
        records = self._partition_records
        if records is None or not self.check_assignment(self._topic_partition):
            return taken
        spent_before, taken_bytes = records.spent_bytes, 0
        for record in records:
            taken.append(record)
            taken_bytes += record_bytes(record)
            self.turn_bytes = max(taken_bytes, records.spent_bytes - spent_before)
            if len(taken) >= max_records or self.turn_bytes >= max_bytes:
                self._update_position()
                return taken
        self._update_position()
        self._partition_records = None
        return taken


def _agreeing(header: BatchHeader | None, following: Batch | None) -> BatchHeader | None:
    """The header of the following batch, damaged too, if it begins where the first one ends."""
    if header is None or following is None or following.header is None:
        return None
    return following.header if following.header.base_offset == header.next_offset else None


def record_bytes(record: ConsumerRecord) -> int:
    """Memory used by a record."""
    return memory_bytes(max(0, record.serialized_key_size) + max(0, record.serialized_value_size), record.headers)
