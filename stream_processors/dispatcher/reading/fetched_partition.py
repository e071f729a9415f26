"""What a fetch brought of one partition: readable records of committed transactions, in turns of a bounded size."""

from collections.abc import Iterable, Iterator
from typing import Any, Final

from aiokafka.consumer.fetcher import FetchResult
from aiokafka.structs import ConsumerRecord, TopicPartition

from fairlane import metrics
from fairlane.codec import DecodeError, DecodeProblem
from stream_processors.dispatcher.reading.record_batches import (
    MAGIC,
    MAX_KEPT_BYTES,
    Batch,
    BatchHeader,
    ReadRecord,
    body_of,
    records_of,
    split,
)

_LOG_APPEND_TIME: Final = 0x08


class CommittedRecords:
    """Iterator over the records of one fetch, as aiokafka's ``PartitionRecords`` is.

    Skips aborted transactions and control batches. What cannot be read is one record per batch, whose ``checksum`` is
    the DecodeError and whose value is what can be kept of the bytes.
    """

    def __init__(
        self, tp: TopicPartition, fetched: bytes, aborted: Iterable[tuple[int, int]], fetch_offset: int
    ) -> None:
        self._tp = tp
        self._aborted = sorted(aborted, key=lambda transaction: transaction[1])
        self._aborted_producers: set[int] = set()
        self.next_fetch_offset = fetch_offset
        self.size_bytes = len(fetched)
        self.inflated_bytes = 0
        self._records = self._read(split(fetched))

    def __iter__(self) -> Iterator[ConsumerRecord]:
        return self

    def __next__(self) -> ConsumerRecord:
        return next(self._records)

    def _read(self, batches: Iterator[Batch]) -> Iterator[ConsumerRecord]:
        batch = next(batches, None)
        while batch is not None:
            following = next(batches, None)
            header = batch.header
            if header is None or batch.problem is not None:
                yield self._unreadable(batch, batch.problem, self._next_behind(header, following))
            elif header.next_offset > self.next_fetch_offset:
                yield from self._of_batch(batch, header)
            batch = following

    def _of_batch(self, batch: Batch, header: BatchHeader) -> Iterator[ConsumerRecord]:
        self._note_aborted(header.base_offset)
        if header.is_control:
            # Whether it commits or aborts: what its producer writes next is another transaction.
            self._aborted_producers.discard(header.producer_id)
        elif not (header.is_transactional and header.producer_id in self._aborted_producers):
            try:
                body = body_of(header, batch.data)
                self.inflated_bytes = len(body) if isinstance(body, bytes) else 0
                for record in records_of(header, body):
                    if record.offset >= self.next_fetch_offset:
                        self.next_fetch_offset = record.offset + 1
                        yield self._record(record, header.attributes & _LOG_APPEND_TIME)
            except DecodeError as error:
                # Behind its last record there may be bytes that are none: then nothing of it is left to be handed on.
                if header.next_offset > self.next_fetch_offset:
                    yield self._unreadable(batch, error, header.next_offset)
            self.inflated_bytes = 0
        # The last offsets of a batch may have been compacted away.
        self.next_fetch_offset = max(self.next_fetch_offset, header.next_offset)

    def _note_aborted(self, base_offset: int) -> None:
        while self._aborted and self._aborted[0][1] <= base_offset:
            self._aborted_producers.add(self._aborted.pop(0)[0])

    def _next_behind(self, header: BatchHeader | None, following: Batch | None) -> int:
        """The offset behind a batch whose header may lie. The batch behind it says where that begins, also if it is
        damaged: no checksum covers base offsets. Without one, two fields that agree are believed; else the next offset
        is tried, which brings the same batch again."""
        least = self.next_fetch_offset + 1
        if following is not None and following.header is not None:
            return max(least, following.header.base_offset)
        if header is not None and header.last_offset_delta + 1 == header.record_count and header.magic == MAGIC:
            return max(least, header.next_offset)
        return least

    def _unreadable(self, batch: Batch, problem: DecodeError | None, next_offset: int) -> ConsumerRecord:
        problem = problem or DecodeError(DecodeProblem.BAD_BATCH, "no header")
        first, self.next_fetch_offset = self.next_fetch_offset, next_offset
        metrics.UNREADABLE_BATCHES.labels(problem=problem.problem).inc()
        timestamp_ms = 0 if batch.header is None else max(0, batch.header.max_timestamp_ms)
        where = DecodeError(problem.problem, f"{str(problem).partition(': ')[2]}; offsets {first} to {next_offset - 1}")
        kept = bytes(batch.data[:MAX_KEPT_BYTES])
        return self._record(ReadRecord(next_offset - 1, timestamp_ms, None, kept, (), where), log_append_time=1)

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
            record.problem,
            -1 if key is None else len(key),
            -1 if value is None else len(value),
            record.headers,
        )


class FetchedPartition(FetchResult):  # type: ignore[misc]  # aiokafka has no types
    """What is left of a fetch of one partition. Position and assignment are aiokafka's, as it checks them."""

    def __init__(self, tp: TopicPartition, assignment: Any, records: CommittedRecords) -> None:
        super().__init__(tp, assignment=assignment, partition_records=records, backoff=0)

    @property
    def size_bytes(self) -> int:
        """What it holds in memory: the fetch, and the batch that is inflated now."""
        records: CommittedRecords | None = self._partition_records
        return 0 if records is None else records.size_bytes + records.inflated_bytes

    def release(self) -> None:
        """Forget what was not taken: it is fetched again from the position, which counts what was taken alone."""
        self._partition_records = None

    def take(self, max_records: int, max_bytes: int) -> list[ConsumerRecord]:
        """The next records, at most so many and, beyond the first, at most so many bytes."""
        taken: list[ConsumerRecord] = []
        records: CommittedRecords | None = self._partition_records
        if records is None or not self.check_assignment(self._topic_partition):
            return taken
        left = max_bytes
        for record in records:
            taken.append(record)
            left -= record_bytes(record)
            if len(taken) >= max_records or left <= 0:
                self._update_position()
                return taken
        self._update_position()
        self._partition_records = None
        return taken


def record_bytes(record: ConsumerRecord) -> int:
    """What a record takes in memory beside its fixed fields."""
    size: int = max(0, record.serialized_key_size) + max(0, record.serialized_value_size)
    for name, content in record.headers:
        size += len(name) + len(content or b"")
    return size
