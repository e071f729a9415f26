"""Intake stage: takes records from Faust with backpressure, decodes and validates them, answers the invalid ones."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from aiokafka.structs import ConsumerRecord

from fairlane import metrics
from fairlane.clock import ClockMs
from fairlane.codec import SchemaNotLoadedError
from fairlane.names import EVALUATION_WORK, is_backfill
from fairlane.ownership import Claim, Ownership, PartitionId
from fairlane.records import Feedback
from fairlane_server.kafka.transactions import OutputRecord, Settlement, TransactionLoop
from stream_processors.dispatcher.intake.buffer import IntakeBuffer
from stream_processors.dispatcher.intake.classifier import RecordClassifier, Verdict
from stream_processors.dispatcher.intake.invalid_record_limiter import InvalidRecordLimiter
from stream_processors.dispatcher.intake.partition_limiter import PartitionLimiter
from stream_processors.dispatcher.intake.schema_waits import SchemaWaitQueue
from stream_processors.dispatcher.queued_request import CancelCommand, Candidate, QueuedRequest, ReceivedRecord
from stream_processors.dispatcher.reading.fenced_thread import Poll
from stream_processors.dispatcher.reading.fetched_partition import Unreadable

_MOST_THAT_WAITED = 64
"""Records that waited for a schema and are decided between two commits. More would delay the other tenants' records in
the next transactions."""

_NOT_REGISTERED = "it is registered under none of the subjects that count, or refused"
_TOO_MUCH_WAITS = "the schema registry does not answer, and too much waits for it"


@dataclass(slots=True)
class IntakeBatch:
    """The valid records of one batch, in order within each partition."""

    fresh: list[Candidate] = field(default_factory=list)
    requeued: list[Candidate] = field(default_factory=list)
    """Work that a consumer sent back."""
    copies: list[Candidate] = field(default_factory=list)
    """Copies for evaluation, also those that a consumer sent back."""
    cancels: list[tuple[CancelCommand, ReceivedRecord]] = field(default_factory=list)
    has_backfill: bool = False
    """Whether records were taken that may cause a pause: of backfill, or copies."""


@dataclass(slots=True)
class IntakeStage:
    """Runs on the event loop. No method raises because of a single record."""

    ownership: Ownership
    transactions: TransactionLoop
    classifier: RecordClassifier
    buffer: IntakeBuffer
    invalid_records: InvalidRecordLimiter
    feedback: PartitionLimiter
    schemas: SchemaWaitQueue
    clock: ClockMs
    wake: asyncio.Event
    """Set when ``take`` may return records."""
    _takes_waiting: bool = True
    """Whether a commit happened since records that waited for a schema were last decided."""

    async def receive(self, poll: Poll) -> None:
        """Take the records of one poll. Backpressure: waits while the intake buffer is full, which stops fetching."""
        with metrics.stage_time("intake"):
            now_ms = self.clock()
            for (topic, number), records in poll.records.items():
                partition = PartitionId(topic, number)
                claims = self.ownership.deliver_many(partition, [record.offset for record in records], poll.epoch)
                for claim, record in zip(claims, records, strict=True):
                    if claim is not None:
                        self.buffer.add(claim, _received(partition, record))
                self.invalid_records.arrived(partition, now_ms)
        self.wake.set()
        await self.buffer.wait_for_room()

    @metrics.stage_time("intake")
    def take(self, most: int) -> IntakeBatch:
        """Classify the next ``most`` records. Feedback, rejections and dead letters are submitted here, and charged to
        their partition: the latter two to its budget of invalid records."""
        records, batch = self.buffer.take(most), IntakeBatch()
        batch.has_backfill = any(
            is_backfill(claim.partition.topic) or claim.partition.topic == EVALUATION_WORK for claim, _ in records
        )
        for claim, record, verdict in self._verdicts(records):
            if isinstance(verdict, QueuedRequest) and verdict.evaluation is not None:
                batch.copies.append(Candidate(verdict, record))
            elif isinstance(verdict, QueuedRequest):
                (batch.requeued if verdict.handed_back else batch.fresh).append(Candidate(verdict, record))
            elif isinstance(verdict, CancelCommand):
                batch.cancels.append((verdict, record))
            elif isinstance(verdict, Feedback):
                self._settled(claim, record, (self.classifier.writer.feedback(verdict),), self.feedback)
            else:
                self._settled(claim, record, verdict, self.invalid_records)
        return batch

    def is_ready(self) -> bool:
        """Whether ``take`` would return records."""
        return bool(self.buffer) or self._has_waited()

    def held(self) -> set[PartitionId]:
        """Partitions to hold: crowded buffer, too many recent invalid records or much feedback, or many waits for a
        schema."""
        now_ms = self.clock()
        in_debt = self.invalid_records.in_debt(now_ms) | self.feedback.in_debt(now_ms)
        return self.buffer.crowded() | in_debt | self.schemas.crowded()

    def on_room(self) -> None:
        """Re-check for room after a commit or a drop. Spurious calls are harmless."""
        self.buffer.on_room()
        if self.schemas:
            self._takes_waiting = True
            self.wake.set()

    def discard(self, is_current: Callable[[Claim], bool]) -> None:
        """Drop the records of revoked partitions; their new owner reads them again."""
        self.buffer.discard(is_current)
        self.schemas.discard(is_current)

    async def run(self) -> None:
        """Look up unknown schemas, as a task besides intake."""
        self.schemas.on_answer = self.wake.set
        await self.schemas.run()

    def _verdicts(
        self, records: Sequence[tuple[Claim, ReceivedRecord]]
    ) -> Iterator[tuple[Claim, ReceivedRecord, Verdict]]:
        """Decode and validate, keeping the order within each partition. A record with an unknown schema waits in
        ``schemas``, and so do all later records of its partition."""
        if self._has_waited():
            self._takes_waiting = False
            for claim, record in self.schemas.take(_MOST_THAT_WAITED):
                yield claim, record, self.classifier.classify(claim, record, _NOT_REGISTERED)
        for claim, record in records:
            if self.schemas.holds(record.partition):
                self.schemas.add(claim, record)
                continue
            try:
                verdict = self.classifier.classify(claim, record)
            except SchemaNotLoadedError:
                self.schemas.add(claim, record)
                continue
            yield claim, record, verdict
        for claim, record in self.schemas.take_excess():
            yield claim, record, self.classifier.classify(claim, record, _TOO_MUCH_WAITS)

    def _has_waited(self) -> bool:
        """Whether records that waited for a schema may be decided now."""
        return self._takes_waiting and self.schemas.is_ready()

    def _settled(
        self, claim: Claim, record: ReceivedRecord, outputs: tuple[OutputRecord, ...], limiter: PartitionLimiter
    ) -> None:
        self.transactions.submit(Settlement(claim, outputs))
        if limiter.charge(claim.partition, record.cost_bytes, self.clock()):
            self.buffer.on_change()


def _received(partition: PartitionId, record: ConsumerRecord) -> ReceivedRecord:
    """The record as our fetcher returns it: ``checksum`` of one that cannot be read holds the reason."""
    unreadable: Unreadable | None = record.checksum
    problem, read_bytes = unreadable or (None, 0)
    timestamp_ms: int = record.timestamp
    key, value, headers = record.key, record.value, record.headers
    return ReceivedRecord(partition, record.offset, timestamp_ms, key, value, headers, problem, read_bytes)
