"""One Kafka transaction at a time: records and offsets committed together, or aborted with the reason why."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from time import monotonic, sleep

from confluent_kafka import KafkaError, KafkaException, Message, Producer, TopicPartition

from fairlane.backoff import Backoff
from fairlane.ownership import CommitPlan
from fairlane.watchdog import Watchdog

_CALL_TIMEOUT_S = 10.0
_RETRY_TIMEOUT_S = 30.0
_BACKOFF = Backoff(first_s=0.04, longest_s=1.0)

_RECORD_REFUSED = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_RECORD,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.POLICY_VIOLATION,
    }
)
"""Errors of one record and its topic, which the records around it do not share."""

# Too many offsets for one record of the offsets topic surface as UNKNOWN.
_TOO_MUCH = frozenset({KafkaError.OFFSET_METADATA_TOO_LARGE, KafkaError.UNKNOWN})


@dataclass(frozen=True, slots=True)
class OutRecord:
    """A record to be written in a transaction."""

    topic: str
    key: bytes | None
    value: bytes
    headers: Sequence[tuple[str, bytes]] = ()


class FatalTransactionError(Exception):
    """This producer can never commit again: it was fenced or broke. The process must end and be restarted.

    Rebuilding the producer in place would let two processes that share a slot fence each other for ever.
    """


class RefusedTransactionError(Exception):
    """The transaction was aborted; the same records may be tried again if they are still owned.

    Attributes:
        reason: the name of the error.
        topic: the topic that a record could not be written to, if that was it.
        record_refused: the broker refuses that record for good, and not for the moment.
        smaller: a transaction of fewer records may pass.
    """

    def __init__(
        self, reason: str, *, topic: str | None = None, record_refused: bool = False, smaller: bool = False
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.topic = topic
        self.record_refused = record_refused
        self.smaller = smaller


@dataclass(slots=True)
class TransactionalProducer:
    """The calls of a transaction, each bounded in time. Used by one thread."""

    producer: Producer
    watchdog: Watchdog
    _delivery_error: tuple[KafkaError, str] | None = field(default=None, init=False)

    def commit(self, records: Iterable[OutRecord], plan: CommitPlan) -> None:
        """One transaction. Raises RefusedTransactionError or FatalTransactionError."""
        self._delivery_error = None
        offsets = topic_partitions(plan)
        try:
            self.producer.begin_transaction()
            for record in records:
                self._produce(record)
            self._call(
                "send_offsets_to_transaction",
                lambda: self.producer.send_offsets_to_transaction(
                    offsets, plan.membership.group_metadata, _CALL_TIMEOUT_S
                ),
            )
            self._call("commit_transaction", lambda: self.producer.commit_transaction(_CALL_TIMEOUT_S))
        except KafkaException as error:
            raise self._aborted(error.args[0]) from error

    def _produce(self, record: OutRecord) -> None:
        deadline = monotonic() + _CALL_TIMEOUT_S
        while True:
            try:
                self.producer.produce(
                    record.topic,
                    value=record.value,
                    key=record.key,
                    headers=list(record.headers),
                    on_delivery=self._on_delivery,
                )
            except BufferError:
                if monotonic() > deadline:
                    raise KafkaException(KafkaError(KafkaError._QUEUE_FULL)) from None
                self.producer.poll(0.01)
            except KafkaException as error:
                self._delivery_error = (error.args[0], record.topic)
                raise
            else:
                return

    def _on_delivery(self, error: KafkaError | None, message: Message) -> None:
        if error is not None and self._delivery_error is None:
            self._delivery_error = (error, str(message.topic()))

    def _aborted(self, cause: KafkaError) -> RefusedTransactionError:
        """Abort and say why. Raises FatalTransactionError."""
        # An abort purges what is still queued and reports that as failed deliveries, which says nothing about topics.
        delivery = self._delivery_error
        if cause.fatal() or cause.code() == KafkaError._FENCED:
            raise FatalTransactionError(f"{cause.name()}: {cause.str()}")
        try:
            self._call("abort_transaction", lambda: self.producer.abort_transaction(_CALL_TIMEOUT_S))
        except KafkaException as error:
            raise FatalTransactionError(f"abort failed: {error.args[0].name()}") from error
        if delivery is None:
            return RefusedTransactionError(cause.name(), smaller=cause.code() in _TOO_MUCH)
        refused = delivery[0].code() in _RECORD_REFUSED
        return RefusedTransactionError(delivery[0].name(), topic=delivery[1], record_refused=refused, smaller=refused)

    def _call(self, name: str, call: Callable[[], None]) -> None:
        """Repeat a transactional call while the broker says that repeating may help; bounded in time."""
        deadline = monotonic() + _RETRY_TIMEOUT_S
        for attempt in count(1):
            try:
                with self.watchdog.watching(name):
                    call()
            except KafkaException as error:
                if not error.args[0].retriable() or monotonic() > deadline:
                    raise
            else:
                return
            sleep(backoff_s(attempt))


def backoff_s(failures: int) -> float:
    """How long to wait after so many failures in a row."""
    return _BACKOFF.delay_s(failures, random.random())  # noqa: S311 - jitter, not a secret


def topic_partitions(plan: CommitPlan) -> list[TopicPartition]:
    """The plan's offsets as confluent-kafka takes them, the bitmaps in the metadata."""
    return [
        TopicPartition(partition.topic, partition.partition, point.offset, metadata=point.metadata)
        for partition, point in plan.points.items()
    ]
