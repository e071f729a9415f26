"""Kafka side of a job: rows published in one transaction per chunk, and its partition of the reply topic.

With the rows of a chunk the transaction commits an offset of the job's own consumer group: the number of chunks in the
topic. A runner that takes over reads it and sends nothing twice. Its producer fences the previous one: both have the
job's transactional id.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from time import monotonic

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from fairlane import cloud_events, metrics
from fairlane.cluster import LastConnectionError, quiet_config, reason_of
from fairlane.codec import Codec, DecodeError
from fairlane.kafka_clients import KafkaConsumer, KafkaProducer
from fairlane.kafka_config import read_committed_consumer, transactional_producer
from fairlane.logs import get_logger
from fairlane.names import JOBS_REPLIES, backfill_topic, job_group, job_transactional_id, jobs_group
from fairlane.offsets import CommitPoint
from fairlane.ownership import CommitPlan, Membership, PartitionId
from fairlane.records import CancelRequest, InferenceReply
from fairlane.schema_registry import RegistryError
from fairlane.settings import Settings
from fairlane.skipping_consumer import SkippedRange, SkippingConsumer
from fairlane_server.kafka.settlement import OutputRecord
from fairlane_server.kafka.transactional_producer import (
    FatalTransactionError,
    RefusedTransactionError,
    TransactionalProducer,
)
from fairlane_server.processes.watchdog import Watchdog
from producers.backfill.errors import JobFailedError, UnavailableError
from producers.backfill.job import Job, RowIds

_CALL_TIMEOUT_S = 20.0
_HANG_LIMIT_S = 60.0
_CANCELS_PER_TRANSACTION = 5_000
_REJECTION_LIMIT_S = 30.0
"""How long a topic may reject permanently before the job fails: a new topic is not known to every broker at once."""


class KafkaPublisher:
    """Publishes to the tenant's backfill topic; a record is a request id and the encoded request. All raise
    UnavailableError and JobFailedError. Used by one thread; ``close`` it."""

    def __init__(
        self, settings: Settings, codec: Codec, tenant: str, job_id: str, partition: int, on_hang: Callable[[str], None]
    ) -> None:
        """Does not connect yet. ``partition``: partition of the reply topic that carries the group's offset."""
        self._settings = settings
        self._codec = codec
        self._tenant = tenant
        self._topic = backfill_topic(tenant)
        self._job_id = job_id
        self._mark = PartitionId(JOBS_REPLIES, partition)
        self._watchdog = Watchdog(_HANG_LIMIT_S, on_hang)
        self._watchdog.start()
        self._producer: TransactionalProducer | None = None
        self._errors = LastConnectionError()
        self._group: Consumer | None = None
        self._published = 0
        self._refused_since: float | None = None

    def close(self) -> None:
        """Disconnect."""
        self._watchdog.stop()
        self._drop_producer()
        if self._group is not None:
            self._group.close()
            self._group = None

    def start(self) -> int:
        """Fence earlier publishers of this job. Returns the number of the first chunk that is not in the topic."""
        self._ready()
        return self._published

    def publish(self, chunk: int, records: Sequence[tuple[str, bytes]]) -> None:
        """Publish all rows of a chunk in one transaction; a chunk that is already in the topic is skipped."""
        producer = self._ready()
        if chunk < self._published:
            return
        membership = Membership(-1, "", self._group_metadata())
        plan = CommitPlan(membership, (), {self._mark: CommitPoint(chunk + 1)})
        self._commit(producer, self._out(dict(records), cloud_events.of_request), plan)
        self._published = chunk + 1

    def send_again(self, records: Sequence[tuple[str, bytes]]) -> None:
        """Publish requests again that were rejected for now, under the same ids."""
        self._commit(self._ready(), self._out(dict(records), cloud_events.of_request), None)

    def cancel(self, request_ids: Sequence[str]) -> None:
        for begin in range(0, len(request_ids), _CANCELS_PER_TRANSACTION):
            some = request_ids[begin : begin + _CANCELS_PER_TRANSACTION]
            cancels = {request_id: self._codec.encode(CancelRequest(request_id)) for request_id in some}
            self._commit(self._ready(), self._out(cancels, cloud_events.of_cancellation), None)

    def _out(
        self, records: Mapping[str, bytes], headers_of: Callable[[str, str], cloud_events.EventHeaders]
    ) -> list[OutputRecord]:
        return [
            OutputRecord(self._topic, request_id.encode(), record, headers_of(self._tenant, request_id))
            for request_id, record in records.items()
        ]

    def _commit(
        self, producer: TransactionalProducer, records: Sequence[OutputRecord], plan: CommitPlan | None
    ) -> None:
        try:
            producer.commit(records, plan)
        except RefusedTransactionError as error:
            self._note_refusal(error)
            raise UnavailableError(f"Kafka refused a transaction: {error.reason}") from None
        except FatalTransactionError as error:
            # The lease decides who may publish, so another producer does no harm: a runner without the lease learns
            # that before it publishes again.
            self._drop_producer()
            raise UnavailableError(f"the producer was lost: {error}") from None
        self._refused_since = None

    def _note_refusal(self, error: RefusedTransactionError) -> None:
        """Raises JobFailedError for a rejection that lasts."""
        refusal = error.topics.get(self._topic)
        if refusal is None or not refusal.lasting:
            self._refused_since = None
            return
        now = monotonic()
        self._refused_since = self._refused_since or now
        if now - self._refused_since > _REJECTION_LIMIT_S:
            raise JobFailedError(f"{self._topic} does not take the rows: {refusal.reason}")

    def _ready(self) -> TransactionalProducer:
        """A producer that has fenced its predecessors; sets the number of chunks that are in the topic."""
        if self._producer is not None:
            return self._producer
        transactional_id = job_transactional_id(self._settings.group_prefix, self._job_id)
        config = transactional_producer(self._settings, transactional_id, self._settings.transaction_timeout_ms)
        producer = KafkaProducer(quiet_config(config, self._errors))
        try:
            with self._watchdog.watching("init_transactions"):
                producer.init_transactions(_CALL_TIMEOUT_S)
            self._published = max(self._published, self._marked())
        except KafkaException as error:
            raise UnavailableError(f"no transaction can be begun: {self._errors.text or reason_of(error)}") from None
        self._producer = TransactionalProducer(producer, self._watchdog)
        return self._producer

    def _marked(self) -> int:
        # After init_transactions: a predecessor's transaction is committed or aborted by then.
        place = TopicPartition(self._mark.topic, self._mark.partition)
        (found,) = self._member().committed([place], timeout=_CALL_TIMEOUT_S)
        if found.error is not None:
            raise KafkaException(found.error)
        return max(0, found.offset)

    def _group_metadata(self) -> object:
        try:
            return self._member().consumer_group_metadata()
        except KafkaException as error:
            raise UnavailableError(f"Kafka: {reason_of(error)}") from None

    def _member(self) -> Consumer:
        """A consumer that only names the group: it neither joins nor reads."""
        if self._group is None:
            group = job_group(self._settings.group_prefix, self._job_id)
            self._group = KafkaConsumer(quiet_config(read_committed_consumer(self._settings, group), self._errors))
        return self._group

    def _drop_producer(self) -> None:
        if self._producer is not None:
            # A fenced producer reports that again.
            with suppress(KafkaException, SystemError):
                self._producer.producer.close()
            self._producer = None


log = get_logger(__name__)

_READER = "backfill"
_READ_TIMEOUT_S = 10.0
_MOST_MESSAGES = 2_000
_QUEUED_KIB = 16_384


@contextmanager
def _explained(errors: LastConnectionError) -> Iterator[None]:
    """Raises UnavailableError instead of KafkaException."""
    try:
        yield
    except KafkaException as error:
        raise UnavailableError(f"Kafka: {errors.text or reason_of(error)}") from None


def reply_partitions(settings: Settings, timeout_s: float = _READ_TIMEOUT_S) -> int:
    """Number of partitions of the reply topic. Raises UnavailableError."""
    errors = LastConnectionError()
    consumer = KafkaConsumer(quiet_config(read_committed_consumer(settings, jobs_group(settings.group_prefix)), errors))
    with closing(consumer), _explained(errors):
        found = consumer.list_topics(JOBS_REPLIES, timeout=timeout_s).topics[JOBS_REPLIES]
        if found.error is not None:
            raise UnavailableError(f"{JOBS_REPLIES}: {found.error.str()}; `fairlane topics apply` makes it")
        return len(found.partitions)


class KafkaReplies:
    """The job's partition of the reply topic, in order. All raise UnavailableError. Used by one thread; ``close`` it.

    Attributes:
        position: offset of the next record to read.
        losses: number of times that replies were removed from the topic before they were read, or were unreadable.
    """

    def __init__(self, settings: Settings, codec: Codec, job: Job) -> None:
        ids = RowIds(job.job_id, job.partitions)
        self._codec = codec
        self._prefix = ids.prefix.encode()
        self._partitions = job.partitions
        self._partition = ids.partition
        self._errors = LastConnectionError()
        config = read_committed_consumer(settings, job_group(settings.group_prefix, job.job_id))
        # Replies are read in large batches. Transaction markers behind the last of them show only as the end of the
        # partition.
        config |= {"queued.max.messages.kbytes": _QUEUED_KIB, "enable.partition.eof": True}
        self._consumer = SkippingConsumer(quiet_config(config, self._errors), _READER, self._on_skipped)
        self._unprocessed: deque[Message] = deque()
        self.position = 0
        self.losses = 0
        self._is_out_of_range = False

    def close(self) -> None:
        """Disconnect."""
        self._consumer.close()

    def start(self, offset: int | None) -> None:
        """Read from this offset on; None: from the end."""
        place = TopicPartition(JOBS_REPLIES, self._partition)
        with _explained(self._errors):
            found = self._consumer.list_topics(JOBS_REPLIES, timeout=_READ_TIMEOUT_S).topics[JOBS_REPLIES]
            if found.error is None and len(found.partitions) != self._partitions:
                raise JobFailedError(
                    f"{JOBS_REPLIES} has {len(found.partitions)} partitions; the ids of the job's rows are for "
                    f"{self._partitions}"
                )
            low, high = self._consumer.get_watermark_offsets(place, timeout=_READ_TIMEOUT_S)
            is_lost = offset is not None and not low <= offset <= high
            # Nothing can be read beyond the end; the rows without a reply are sent again.
            position = high if offset is None else min(max(low, offset), high)
            self._consumer.assign([TopicPartition(JOBS_REPLIES, self._partition, position)])
            self.position = position
            self._unprocessed.clear()
            if is_lost:
                self.losses += 1
                log.error("replies_were_removed", partition=self._partition, wanted=offset, first=low, end=high)

    def end(self) -> int:
        """End offset: once ``position`` has reached it, all current replies were read."""
        place = TopicPartition(JOBS_REPLIES, self._partition)
        with _explained(self._errors):
            return int(self._consumer.get_watermark_offsets(place, timeout=_READ_TIMEOUT_S)[1])

    def read(self, timeout_s: float) -> list[InferenceReply]:
        """Replies that may be this job's, at once if there are any."""
        if self._is_out_of_range:
            self.start(self.position)
            self._is_out_of_range = False
        if not self._unprocessed:
            try:
                first = self._consumer.consume(1, timeout_s)
                self._unprocessed.extend([*first, *self._consumer.consume(_MOST_MESSAGES, 0)] if first else [])
            except KafkaException as error:
                raise UnavailableError(f"Kafka: {reason_of(error)}") from None
        replies: list[InferenceReply] = []
        while self._unprocessed:
            message = self._unprocessed.popleft()
            try:
                reply = self._reply(message)
            except RegistryError as error:
                # The record is not at fault: a later call decodes it.
                self._unprocessed.appendleft(message)
                self.position = min(self.position, message.offset() or 0)
                if replies:
                    break
                raise UnavailableError(str(error)) from None
            if reply is not None:
                replies.append(reply)
        return replies

    def _reply(self, message: Message) -> InferenceReply | None:
        error = message.error()
        if error is not None:
            if error.code() == KafkaError._PARTITION_EOF:
                self.position = max(self.position, message.offset() or 0)
            else:
                self._note(error)
            return None
        self.position = (message.offset() or 0) + 1
        key = message.key()
        # Replies of other jobs in the partition are not decoded.
        if not isinstance(key, bytes) or not key.startswith(self._prefix):
            return None
        try:
            return self._codec.decode_as(InferenceReply, message.value())
        except DecodeError as problem:
            # Its row will get no other reply.
            self.losses += 1
            metrics.UNREADABLE_RECORDS.labels(reader=_READER, problem=problem.problem).inc()
            log.error("reply_unreadable", offset=message.offset(), problem=str(problem.problem))
            return None

    def _on_skipped(self, passed: SkippedRange) -> None:
        self.position = max(self.position, passed.end)
        self.losses += 1

    def _note(self, error: KafkaError) -> None:
        if error.code() == KafkaError._AUTO_OFFSET_RESET:
            # Retention was faster than this job. Nothing more is read until the next assignment.
            self._is_out_of_range = True
        elif error.fatal():
            raise UnavailableError(f"Kafka: {error.str()}")
        else:
            log.warning("reading_replies", reason=error.str())
