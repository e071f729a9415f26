"""Publishes rows to the tenant's backfill topic: one transaction per chunk; the log records which chunks it has.

With the rows of a chunk the transaction commits an offset of a group that only this job has: the number of chunks that
are in the log. So a runner that takes over knows, whatever the one before it did last, and sends nothing twice. Its
producer fences that one, because both have the job's transactional id.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import monotonic

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from fairlane import cloud_events
from fairlane.cluster import LastConnectionError, quiet_config, reason_of
from fairlane.codec import Codec
from fairlane.kafka_config import read_committed_consumer, transactional_producer
from fairlane.names import JOBS_REPLIES, backfill_topic, job_group, job_transactional_id
from fairlane.offsets import CommitPoint
from fairlane.ownership import CommitPlan, Membership, PartitionId
from fairlane.records import CancelRequest
from fairlane.settings import Settings
from fairlane_server.kafka.settlement import OutputRecord
from fairlane_server.kafka.transactional_producer import (
    FatalTransactionError,
    RefusedTransactionError,
    TransactionalProducer,
)
from fairlane_server.processes.watchdog import Watchdog
from producers.backfill.ports import AwayError, JobFailedError

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
