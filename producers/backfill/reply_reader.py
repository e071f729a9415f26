"""Reads the job's partition of the reply topic from a given offset, without a group and without commits."""

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from fairlane import metrics
from fairlane.cluster import LastConnectionError, quiet_config, reason_of
from fairlane.codec import Codec, DecodeError
from fairlane.kafka_config import read_committed_consumer
from fairlane.logs import get_logger
from fairlane.names import JOBS_REPLIES, job_group, jobs_group
from fairlane.records import InferenceReply
from fairlane.settings import Settings
from fairlane.skipping_consumer import SkippedRange, SkippingConsumer
from producers.backfill.job import Job
from producers.backfill.ports import AwayError, JobFailedError
from producers.backfill.row_ids import RowIds

log = get_logger(__name__)

_READER = "backfill"
_CALL_TIMEOUT_S = 10.0
_MOST_MESSAGES = 2_000
_QUEUED_KIB = 16_384


def reply_partitions(settings: Settings, timeout_s: float = _CALL_TIMEOUT_S) -> int:
    """How many partitions the topic of the replies has. Raises AwayError."""
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
            found = self._consumer.list_topics(JOBS_REPLIES, timeout=_CALL_TIMEOUT_S).topics[JOBS_REPLIES]
            if found.error is None and len(found.partitions) != self._partitions:
                raise JobFailedError(
                    f"{JOBS_REPLIES} has {len(found.partitions)} partitions; the ids of the job's rows are for "
                    f"{self._partitions}"
                )
            low, high = self._consumer.get_watermark_offsets(place, timeout=_CALL_TIMEOUT_S)
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
            return int(self._consumer.get_watermark_offsets(place, timeout=_CALL_TIMEOUT_S)[1])
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
