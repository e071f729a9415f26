"""One Kafka transaction at a time: records and offsets are committed together, or aborted with the reason."""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from time import monotonic, sleep

from confluent_kafka import KafkaError, KafkaException, Message, Producer, TopicPartition

from fairlane.backoff import Backoff
from fairlane.kafka_clients import KafkaProducer, watch_credentials
from fairlane.kafka_config import transactional_producer
from fairlane.ownership import CommitPlan
from fairlane.settings import KafkaSettings
from fairlane_server.kafka.settlement import OutputRecord
from fairlane_server.processes.watchdog import Watchdog

_CALL_TIMEOUT_S = 10.0
_LOOK_UP_TIMEOUT_S = 2.0
_RETRY_TIMEOUT_S = 30.0
_BACKOFF = Backoff(first_s=0.04, longest_s=1.0)

_TOPIC_REFUSED = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
    }
)
"""Errors shared by all records for the topic, and by no record for another."""

_RECORD_REFUSED = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_RECORD,
        KafkaError._INVALID_DIFFERENT_RECORD,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError.POLICY_VIOLATION,
    }
)
"""Errors of single records. The broker accepts or refuses a partition's batch as a whole, so the records around it
report them as well."""

_PURGED = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})
"""Errors that a failed transaction causes for records of unrelated topics."""

# Offsets that exceed one record of the offsets topic surface as UNKNOWN.
_TOO_MUCH = frozenset({KafkaError.OFFSET_METADATA_TOO_LARGE, KafkaError.UNKNOWN})


@dataclass(frozen=True, slots=True)
class TopicRefusal:
    """Why a topic refused a record (the name of the error): permanently (``lasting``) or for now, all its records or
    only some. Unless ``certain``, another topic of the same transaction may be to blame."""

    reason: str
    lasting: bool
    whole_topic: bool
    certain: bool = True

    @classmethod
    def of(cls, error: KafkaError) -> "TopicRefusal":
        record = error.code() in _RECORD_REFUSED
        return cls(error.name(), record or error.code() in _TOPIC_REFUSED, not record)


class FatalTransactionError(Exception):
    """This producer can never commit again: it was fenced or failed. The process must end and be restarted.

    Rebuilding the producer in place would let two processes that share a slot fence each other forever.
    """


class RefusedTransactionError(Exception):
    """The transaction was aborted; its records may be tried again if they are still owned.

    ``topics`` refused their records, if that was the cause; ``smaller``: a transaction of fewer records may pass.
    """

    def __init__(self, reason: str, *, topics: Mapping[str, TopicRefusal] | None = None, smaller: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.topics = topics or {}
        self.smaller = smaller


@dataclass(slots=True)
class TransactionalProducer:
    """The calls of a transaction, each bounded in time. For one thread.

    A topic that never took a record of this process is looked up first: producing to a missing topic takes until
    librdkafka gives up on it (``topic.metadata.propagation.max.ms``), and every other record would wait for that.
    """

    producer: Producer
    watchdog: Watchdog
    _errors: dict[str, KafkaError] = field(default_factory=dict, init=False)
    """First failed delivery of each topic in this transaction."""
    _proven: set[str] = field(default_factory=set, init=False)
    """Topics that took a record, and refused none since."""

    def is_proven(self, topic: str) -> bool:
        return topic in self._proven

    def commit(self, records: Sequence[OutputRecord], plan: CommitPlan | None) -> None:
        """Run one transaction; without a plan it commits no offsets. Raises RefusedTransactionError or
        FatalTransactionError."""
        self._errors.clear()
        unproven = {record.topic for record in records} - self._proven
        self._look_up(sorted(unproven))
        try:
            self.producer.begin_transaction()
            # Records first: the broker takes them while the offsets travel, which saves two of five round trips. With
            # an unproven topic the offsets go first: a broker that refuses a topic's partitions refuses all partitions
            # registered with them, and a transaction with nothing registered cannot be aborted, which is fatal to the
            # producer.
            if unproven:
                self._send_offsets(plan)
            for record in records:
                self._produce(record)
            if not unproven:
                self._send_offsets(plan)
            self._call("commit_transaction", lambda: self.producer.commit_transaction(_CALL_TIMEOUT_S))
        except KafkaException as error:
            raise self._aborted(error.args[0], unproven) from error
        self._proven |= unproven

    def _look_up(self, topics: Iterable[str]) -> None:
        """Raises RefusedTransactionError for topics that the broker does not offer."""
        refusals: dict[str, TopicRefusal] = {}
        for topic in topics:
            try:
                with self.watchdog.watching("list_topics"):
                    found = self.producer.list_topics(topic, _LOOK_UP_TIMEOUT_S).topics.get(topic)
            except KafkaException:
                break  # the broker is unavailable; the transaction reports more about it
            if found is not None and found.error is not None:
                refusals[topic] = TopicRefusal.of(found.error)
        if refusals:
            raise RefusedTransactionError(next(iter(refusals.values())).reason, topics=refusals)

    def _send_offsets(self, plan: CommitPlan | None) -> None:
        if plan is None:
            return
        offsets, group_metadata = topic_partitions(plan), plan.membership.group_metadata
        self._call(
            "send_offsets_to_transaction",
            lambda: self.producer.send_offsets_to_transaction(offsets, group_metadata, _CALL_TIMEOUT_S),
        )

    def _produce(self, record: OutputRecord) -> None:
        deadline = monotonic() + _CALL_TIMEOUT_S
        while True:
            try:
                self.producer.produce(
                    record.topic,
                    value=record.value,
                    key=record.key,
                    headers=list(record.headers),
                    partition=-1 if record.partition is None else record.partition,
                    on_delivery=self._on_delivery,
                )
            except BufferError:
                if monotonic() > deadline:
                    raise KafkaException(KafkaError(KafkaError._QUEUE_FULL)) from None
                self.producer.poll(0.01)
            except KafkaException as error:
                self._errors.setdefault(record.topic, error.args[0])
                raise
            else:
                return

    def _on_delivery(self, error: KafkaError | None, message: Message) -> None:
        if error is not None and error.code() not in _PURGED:
            self._errors.setdefault(str(message.topic()), error)

    def _aborted(self, cause: KafkaError, unproven: set[str]) -> RefusedTransactionError:
        """Abort, and return the reason. Raises FatalTransactionError."""
        # Before the abort, which fails the remaining records.
        refusals = {topic: TopicRefusal.of(error) for topic, error in self._errors.items()}
        if cause.fatal() or cause.code() == KafkaError._FENCED:
            raise FatalTransactionError(f"{cause.name()}: {cause.str()}")
        try:
            self._call("abort_transaction", lambda: self.producer.abort_transaction(_CALL_TIMEOUT_S))
        except KafkaException as error:
            raise FatalTransactionError(f"abort failed: {error.args[0].name()}") from error
        if not refusals and cause.code() in _TOPIC_REFUSED:
            # The broker refused to add a topic to the transaction, and librdkafka does not say which: one of the
            # unproven ones. Each is then tried alone.
            certain = len(unproven) == 1
            refusals = {topic: TopicRefusal(cause.name(), True, True, certain) for topic in unproven}
        # A refusal also fails deliveries to other topics that would have passed.
        lasting = {topic: refusal for topic, refusal in refusals.items() if refusal.lasting}
        refusals = lasting or refusals
        self._proven.difference_update(refusals)
        if not refusals:
            return RefusedTransactionError(cause.name(), smaller=cause.code() in _TOO_MUCH)
        return RefusedTransactionError(next(iter(refusals.values())).reason, topics=refusals)

    def _call(self, name: str, call: Callable[[], None]) -> None:
        """Repeat a transactional call while its error is retriable; bounded in time."""
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


class TransactionalProducers:
    """The producers of a process, one for each transactional id.

    A broker refuses to change the user of an open connection, and librdkafka gives up a transaction whose connection
    ends by that. So a producer keeps its credentials, and others take its place between two transactions.
    """

    def __init__(self, settings: KafkaSettings, ids: Iterable[str], timeout_ms: int) -> None:
        # Failed deliveries alone are reported: a commit reports the success of all.
        failures_alone = {"delivery.report.only.error": True}
        self._configs = [transactional_producer(settings, one, timeout_ms) | failures_alone for one in ids]
        self._are_replaced = False
        watch_credentials(self, self._configs[0])

    def set_sasl_credentials(self, username: str, password: str) -> None:  # noqa: ARG002 - new producers read them anew
        self._are_replaced = True

    def make(self) -> tuple[Producer, ...]:
        """Producers with the credentials of now."""
        self._are_replaced = False
        return tuple(KafkaProducer(config, keeps_credentials=True) for config in self._configs)

    def renewed(self) -> tuple[Producer, ...] | None:
        """Producers in place of those that were made before, if the credentials were replaced since then."""
        return self.make() if self._are_replaced else None


def backoff_s(failures: int) -> float:
    return _BACKOFF.delay_s(failures, random.random())  # noqa: S311 - jitter, not a secret


def while_retriable(call: Callable[[], None], tries: int) -> None:
    """Repeat a call while its error is retriable, at most so many times. Raises KafkaException."""
    for attempt in range(1, tries + 1):
        try:
            call()
        except KafkaException as error:
            if not error.args[0].retriable() or attempt == tries:
                raise
            sleep(backoff_s(attempt))
        else:
            return


def close_producer(producer: Producer) -> None:
    """Disconnect; an open transaction is aborted."""
    # A fenced client raises once more.
    with suppress(KafkaException, SystemError):
        producer.close()


def topic_partitions(plan: CommitPlan) -> list[TopicPartition]:
    """The plan's offsets as confluent-kafka takes them, with the bitmaps as metadata."""
    return [
        TopicPartition(partition.topic, partition.partition, point.offset, metadata=point.metadata)
        for partition, point in plan.points.items()
    ]
