"""Kafka side of a job: rows published in one transaction per chunk, and its partition of the reply topic.

With the rows of a chunk the transaction commits an offset of a group that only this job has: the number of chunks that
are in the log. So a runner that takes over knows, whatever the one before it did last, and sends nothing twice. Its
producer fences that one, because both have the job's transactional id.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import monotonic

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from fairlane import cloud_events, metrics
from fairlane.cluster import LastConnectionError, quiet_config, reason_of
from fairlane.codec import Codec, DecodeError
from fairlane.kafka_config import read_committed_consumer, transactional_producer
from fairlane.logs import get_logger
from fairlane.names import JOBS_REPLIES, backfill_topic, job_group, job_transactional_id, jobs_group
from fairlane.offsets import CommitPoint
from fairlane.ownership import CommitPlan, Membership, PartitionId
from fairlane.records import CancelRequest, InferenceReply, InferenceRequest
from fairlane.settings import Settings
from fairlane.skipping_consumer import SkippedRange, SkippingConsumer
from fairlane_server.kafka.settlement import OutputRecord
from fairlane_server.kafka.transactional_producer import (
    FatalTransactionError,
    RefusedTransactionError,
    TransactionalProducer,
)
from fairlane_server.processes.watchdog import Watchdog
from producers.backfill.job import ChunkPlan, Job
from producers.backfill.ports import AwayError, JobFailedError
from producers.backfill.row import BadRow, ParsedRow, RowIds

MOST_RECORD_BYTES = 4_000_000
"""A little less than a record of a backfill topic may have (topics.yaml)."""


@dataclass(frozen=True, slots=True)
class RequestRecords:
    """Of one job.

    Attributes:
        ids: of its rows.
        encode: raises ValueError for what cannot be a record.
        max_timeout_ms: the longest a request may have.
        deadline_at_ms: when the completion window ends, if it does.
    """

    ids: RowIds
    encode: Callable[[InferenceRequest], bytes]
    max_timeout_ms: int
    deadline_at_ms: int | None

    def of(
        self, plan: ChunkPlan, rows: Sequence[ParsedRow], now_ms: int, only: frozenset[int] | None = None
    ) -> tuple[list[tuple[str, bytes]], dict[int, BadRow]]:
        """Request ids and encoded requests of a chunk's rows, or of some of them, which have the time that is left; and
        the rows that turn out to be none that can be sent."""
        left_ms = self.max_timeout_ms if self.deadline_at_ms is None else self.deadline_at_ms - now_ms
        timeout_ms = max(1, min(left_ms, self.max_timeout_ms))
        records: list[tuple[str, bytes]] = []
        refused: dict[int, BadRow] = {}
        for number, row in enumerate(rows, plan.first_row):
            if isinstance(row, BadRow) or (only is not None and number not in only):
                continue
            request_id = self.ids.id_of(number)
            encoded = self._encoded(
                replace(row.request, request_id=request_id, timeout_ms=timeout_ms, reply_to=JOBS_REPLIES)
            )
            if isinstance(encoded, str):
                refused[number] = BadRow(row.row_id, "row", encoded, row.url)
            else:
                records.append((request_id, encoded))
        return records, refused

    def _encoded(self, request: InferenceRequest) -> bytes | str:
        """The encoded record, or the reason for its refusal."""
        try:
            record = self.encode(request)
        except ValueError as error:
            return str(error)
        if len(record) > MOST_RECORD_BYTES:
            return f"{len(record)} bytes are more than {MOST_RECORD_BYTES}"
        return record


_CALL_TIMEOUT_S = 20.0
_HANG_LIMIT_S = 60.0
_CANCELS_PER_TRANSACTION = 5_000
_TOPIC_PATIENCE_S = 30.0
"""How long a topic may refuse for good before the job fails: one that was just made is not known everywhere."""


class KafkaPublisher:
    """See :class:`producers.backfill.ports.Publisher`. Used by one thread; ``close`` it."""

    def __init__(
        self, settings: Settings, codec: Codec, tenant: str, job_id: str, partition: int, on_hang: Callable[[str], None]
    ) -> None:
        """Connects to nothing yet. ``partition``: of the reply topic, of which the group's offset is."""
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
        self._ready()
        return self._published

    def publish(self, chunk: int, records: Sequence[tuple[str, bytes]]) -> None:
        producer = self._ready()
        if chunk < self._published:
            return
        membership = Membership(-1, "", self._group_metadata())
        plan = CommitPlan(membership, (), {self._mark: CommitPoint(chunk + 1)})
        self._commit(producer, self._out(dict(records), cloud_events.of_request), plan)
        self._published = chunk + 1

    def send_again(self, records: Sequence[tuple[str, bytes]]) -> None:
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
            raise AwayError(f"Kafka refused a transaction: {error.reason}") from None
        except FatalTransactionError as error:
            # Who may publish is settled by the lease, so another producer does no harm: a runner without the lease is
            # told so before it comes here again.
            self._drop_producer()
            raise AwayError(f"the producer was lost: {error}") from None
        self._refused_since = None

    def _note_refusal(self, error: RefusedTransactionError) -> None:
        """Raises JobFailedError for what will not pass later either."""
        refusal = error.topics.get(self._topic)
        if refusal is None or not refusal.lasting:
            self._refused_since = None
            return
        now = monotonic()
        self._refused_since = self._refused_since or now
        if now - self._refused_since > _TOPIC_PATIENCE_S:
            raise JobFailedError(f"{self._topic} does not take the rows: {refusal.reason}")

    def _ready(self) -> TransactionalProducer:
        """A producer that fenced those before it, and the number of chunks that they left in the log."""
        if self._producer is not None:
            return self._producer
        transactional_id = job_transactional_id(self._settings.group_prefix, self._job_id)
        config = transactional_producer(self._settings, transactional_id, self._settings.transaction_timeout_ms)
        producer = Producer(quiet_config(config, self._errors))
        try:
            with self._watchdog.watching("init_transactions"):
                producer.init_transactions(_CALL_TIMEOUT_S)
            self._published = max(self._published, self._marked())
        except KafkaException as error:
            raise AwayError(f"no transaction can be begun: {self._errors.text or reason_of(error)}") from None
        self._producer = TransactionalProducer(producer, self._watchdog)
        return self._producer

    def _marked(self) -> int:
        # After init_transactions: what a predecessor had under way is committed or aborted by then.
        place = TopicPartition(self._mark.topic, self._mark.partition)
        (found,) = self._member().committed([place], timeout=_CALL_TIMEOUT_S)
        if found.error is not None:
            raise KafkaException(found.error)
        return max(0, found.offset)

    def _group_metadata(self) -> object:
        try:
            return self._member().consumer_group_metadata()
        except KafkaException as error:
            raise AwayError(f"Kafka: {reason_of(error)}") from None

    def _member(self) -> Consumer:
        """Names the group; joins nothing and reads nothing."""
        if self._group is None:
            group = job_group(self._settings.group_prefix, self._job_id)
            self._group = Consumer(quiet_config(read_committed_consumer(self._settings, group), self._errors))
        return self._group

    def _drop_producer(self) -> None:
        if self._producer is not None:
            # One that was fenced says so once more.
            with suppress(KafkaException, SystemError):
                self._producer.producer.close()
            self._producer = None


log = get_logger(__name__)

_READER = "backfill"
_READ_TIMEOUT_S = 10.0
_MOST_MESSAGES = 2_000
_QUEUED_KIB = 16_384


def reply_partitions(settings: Settings, timeout_s: float = _READ_TIMEOUT_S) -> int:
    """Number of partitions of the reply topic. Raises AwayError."""
    errors = LastConnectionError()
    consumer = Consumer(quiet_config(read_committed_consumer(settings, jobs_group(settings.group_prefix)), errors))
    try:
        found = consumer.list_topics(JOBS_REPLIES, timeout=timeout_s).topics[JOBS_REPLIES]
        if found.error is not None:
            raise AwayError(f"{JOBS_REPLIES}: {found.error.str()}; `fairlane topics apply` makes it")
        return len(found.partitions)
    except KafkaException as error:
        raise AwayError(f"Kafka: {errors.text or reason_of(error)}") from None
    finally:
        consumer.close()


class KafkaReplies:
    """See :class:`producers.backfill.ports.Replies`. Used by one thread; ``close`` it."""

    def __init__(self, settings: Settings, codec: Codec, job: Job) -> None:
        ids = RowIds(job.job_id, job.partitions)
        self._codec = codec
        self._prefix = ids.prefix.encode()
        self._partitions = job.partitions
        self._partition = ids.partition
        self._errors = LastConnectionError()
        config = read_committed_consumer(settings, job_group(settings.group_prefix, job.job_id))
        # Replies come in larger batches than requests, and nobody waits for a single one.
        # Behind the last of them stand the markers of transactions, which only the end of the partition tells of.
        config |= {"queued.max.messages.kbytes": _QUEUED_KIB, "enable.partition.eof": True}
        self._consumer = SkippingConsumer(quiet_config(config, self._errors), _READER, self._unreadable)
        self._position = 0
        self._losses = 0
        self._is_out_of_range = False

    def close(self) -> None:
        """Disconnect."""
        self._consumer.close()

    @property
    def position(self) -> int:
        return self._position

    @property
    def losses(self) -> int:
        return self._losses

    def start(self, offset: int | None) -> None:
        place = TopicPartition(JOBS_REPLIES, self._partition)
        try:
            found = self._consumer.list_topics(JOBS_REPLIES, timeout=_READ_TIMEOUT_S).topics[JOBS_REPLIES]
            if found.error is None and len(found.partitions) != self._partitions:
                raise JobFailedError(
                    f"{JOBS_REPLIES} has {len(found.partitions)} partitions; the ids of the job's rows are for "
                    f"{self._partitions}"
                )
            low, high = self._consumer.get_watermark_offsets(place, timeout=_READ_TIMEOUT_S)
            is_lost = offset is not None and not low <= offset <= high
            # Beyond the end nothing is known of what is there; the rows without a reply are asked for again.
            position = high if offset is None else min(max(low, offset), high)
            self._consumer.assign([TopicPartition(JOBS_REPLIES, self._partition, position)])
            self._position = position
            if is_lost:
                self._losses += 1
                log.error("replies_were_removed", partition=self._partition, wanted=offset, first=low, end=high)
        except KafkaException as error:
            raise AwayError(f"Kafka: {self._errors.text or reason_of(error)}") from None

    def end(self) -> int:
        place = TopicPartition(JOBS_REPLIES, self._partition)
        try:
            return int(self._consumer.get_watermark_offsets(place, timeout=_READ_TIMEOUT_S)[1])
        except KafkaException as error:
            raise AwayError(f"Kafka: {self._errors.text or reason_of(error)}") from None

    def read(self, timeout_s: float) -> list[InferenceReply]:
        if self._is_out_of_range:
            self.start(self._position)
            self._is_out_of_range = False
        try:
            first = self._consumer.consume(1, timeout_s)
            messages = [*first, *self._consumer.consume(_MOST_MESSAGES, 0)] if first else []
        except KafkaException as error:
            raise AwayError(f"Kafka: {reason_of(error)}") from None
        return [reply for reply in map(self._reply, messages) if reply is not None]

    def _reply(self, message: Message) -> InferenceReply | None:
        error = message.error()
        if error is not None:
            if error.code() == KafkaError._PARTITION_EOF:
                self._position = max(self._position, message.offset() or 0)
            else:
                self._note(error)
            return None
        self._position = (message.offset() or 0) + 1
        key = message.key()
        # Other jobs share the partition: theirs need not be decoded.
        if not isinstance(key, bytes) or not key.startswith(self._prefix):
            return None
        try:
            return self._codec.decode_as(InferenceReply, message.value())
        except DecodeError as problem:
            # Of its row nothing else will come.
            self._losses += 1
            metrics.UNREADABLE_RECORDS.labels(reader=_READER, problem=problem.problem).inc()
            log.error("reply_unreadable", offset=message.offset(), problem=str(problem.problem))
            return None

    def _unreadable(self, passed: SkippedRange) -> None:
        self._position = max(self._position, passed.end)
        self._losses += 1

    def _note(self, error: KafkaError) -> None:
        if error.code() == KafkaError._AUTO_OFFSET_RESET:
            # Retention was faster than this job. Nothing more is read until it is assigned again.
            self._is_out_of_range = True
        elif error.fatal():
            raise AwayError(f"Kafka: {error.str()}")
        else:
            log.warning("reading_replies", reason=error.str())
