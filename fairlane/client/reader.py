"""Positions of a topic's partitions, queried with deadlines, and a reader of a topic from its end on."""

import threading
import time
from collections.abc import Callable
from time import monotonic
from typing import Generic, TypeVar

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)

from fairlane import metrics
from fairlane.client.connector import log
from fairlane.clock import ClockMs
from fairlane.codec import Codec, DecodeError
from fairlane.errors import Unavailable

AnswerT = TypeVar("AnswerT")
RecordT = TypeVar("RecordT")

CALL_TIMEOUT_S = 2.0
_TOPIC_GRACE_S = 1.0
_RETRY_S = 0.1
_POLL_S = 0.1
_BATCH_RECORDS = 500
_REFRESH_S = 2.0
_GONE_AFTER_S = 15.0

PERMANENT_ERRORS = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError._AUTHENTICATION,
    }
)
"""Errors that a retry does not mend."""


def partitions_of(client: Consumer | Producer, topic: str, timeout_s: float) -> set[int]:
    """The partitions of a topic; none when it does not exist.

    Raises:
        Unavailable: it may not be read.
        KafkaException: no answer within ``timeout_s``.
    """
    metadata = client.list_topics(topic, timeout=timeout_s).topics.get(topic)
    if metadata is None:
        return set()
    if metadata.error is not None and metadata.error.code() in PERMANENT_ERRORS:
        raise Unavailable(f"{topic}: {metadata.error.str()}")
    return set(metadata.partitions)


def existing_partitions(client: Consumer | Producer, topic: str, deadline: float) -> list[int]:
    """The partitions of a topic that must exist. Deadlines are of ``time.monotonic``.

    Raises:
        Unavailable: the topic does not exist or may not be read.
        KafkaException: no answer before the deadline.
    """
    # The metadata of a topic that was just created may arrive later.
    missing_until = min(deadline, monotonic() + _TOPIC_GRACE_S)
    while not (partitions := ask(lambda timeout_s: partitions_of(client, topic, timeout_s), deadline)):
        if monotonic() >= missing_until:
            raise Unavailable(f"{topic} does not exist; `fairlane tenants apply` makes a tenant's topics")
        time.sleep(_RETRY_S)
    return sorted(partitions)


def end_of(client: Consumer, topic: str, partition: int, deadline: float) -> int:
    """The offset of the first record that a ``read_committed`` reader cannot have seen yet.

    Raises:
        KafkaException: no answer before the deadline.
    """
    wanted = TopicPartition(topic, partition)
    _low, end = ask(lambda timeout_s: client.get_watermark_offsets(wanted, timeout=timeout_s), deadline)
    return end


def ask(call: Callable[[float], AnswerT], deadline: float) -> AnswerT:
    """Call with a timeout, again until it answers. Raises the last KafkaException when the deadline has passed."""
    while True:
        try:
            return call(max(0.1, min(CALL_TIMEOUT_S, deadline - monotonic())))
        except KafkaException:
            if monotonic() >= deadline:
                raise
            time.sleep(_RETRY_S)


class TopicReader(Generic[RecordT]):
    """Passes every awaited record of a topic to ``deliver``.

    Args:
        consumer: with nothing assigned; owned by the reader from now on.
        topic: one whose keys are request ids.
        is_wanted: whether records of this request id are decoded; others are only counted.
        deliver: takes a decoded record and when it was read, milliseconds since the epoch.
    """

    def __init__(
        self,
        consumer: Consumer,
        topic: str,
        record_type: type[RecordT],
        codec: Codec,
        is_wanted: Callable[[str], bool],
        deliver: Callable[[RecordT, int], None],
        clock: ClockMs,
    ) -> None:
        self._consumer = consumer
        self._topic = topic
        self._record_type = record_type
        self._codec = codec
        self._is_wanted = is_wanted
        self._deliver = deliver
        self._clock = clock
        self._assigned: set[int] = set()
        self._next_refresh = 0.0
        self._gone_since: float | None = None
        self.undecodable = 0
        self.ignored = 0

    def seek_to_end(self, timeout_s: float) -> None:
        """Take up the topic where it ends now. Whatever is published after this returns is seen.

        Raises:
            Unavailable: the topic does not exist or may not be read.
            KafkaException: no broker answers within ``timeout_s``.
        """
        deadline = monotonic() + timeout_s
        starts = [
            TopicPartition(self._topic, partition, end_of(self._consumer, self._topic, partition, deadline))
            for partition in existing_partitions(self._consumer, self._topic, deadline)
        ]
        self._consumer.incremental_assign(starts)
        self._assigned = {start.partition for start in starts}
        self._next_refresh = monotonic() + _REFRESH_S

    def run(self, stopping: threading.Event) -> None:
        """Read until ``stopping`` is set. Raises fatal errors; the caller owns the thread."""
        while not stopping.is_set():
            self.step(_POLL_S)

    def step(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` for records and deliver all available ones.

        Raises:
            Unavailable: the topic is gone or may not be read.
            KafkaException: the consumer is beyond repair.
        """
        # poll returns with the first record; consume alone would wait for a full batch.
        first = self._consumer.poll(timeout_s)
        if first is not None:
            received_at_ms = self._clock()
            self._take(first, received_at_ms)
            for message in self._consumer.consume(_BATCH_RECORDS, 0):
                self._take(message, received_at_ms)
        if monotonic() >= self._next_refresh:
            self._refresh()

    def close(self) -> None:
        self._consumer.close()

    def _take(self, message: Message, received_at_ms: int) -> None:
        error = message.error()
        if error is not None:
            self._on_error(error, message)
            return
        key = message.key()
        if key is not None and not self._is_wanted(key.decode("utf-8", "replace")):
            self.ignored += 1
            return
        try:
            record = self._codec.decode_as(self._record_type, message.value())
        except DecodeError as problem:
            self.undecodable += 1
            metrics.UNREADABLE_RECORDS.labels(reader="client", problem=problem.problem).inc()
            log.error(
                "record_undecodable topic=%s partition=%s offset=%s problem=%s",
                message.topic(),
                message.partition(),
                message.offset(),
                problem.problem,
            )
            return
        self._deliver(record, received_at_ms)

    def _on_error(self, error: KafkaError, message: Message) -> None:
        if error.fatal():
            raise KafkaException(error)
        if error.code() in PERMANENT_ERRORS:
            raise Unavailable(f"{self._topic}: {error.str()}")
        if error.code() == KafkaError._AUTO_OFFSET_RESET:
            # Retention ran past us while we could not read. What was lost cannot be had back; what is left can.
            log.error("records_lost topic=%s partition=%s reason=%s", self._topic, message.partition(), error.str())
            self._consumer.seek(TopicPartition(self._topic, message.partition() or 0, OFFSET_BEGINNING))
            return
        log.debug("reader_error topic=%s name=%s", self._topic, error.name())

    def _refresh(self) -> None:
        """Notice partitions that were added since, and a topic that is gone."""
        self._next_refresh = monotonic() + _REFRESH_S
        try:
            present = partitions_of(self._consumer, self._topic, CALL_TIMEOUT_S)
        except KafkaException:
            return  # no broker answers: the consumer goes on trying by itself
        if present:
            self._gone_since = None
            # Born after the start, so all that is in them is newer than every request of ours.
            added = [TopicPartition(self._topic, partition, OFFSET_BEGINNING) for partition in present - self._assigned]
            if added:
                self._consumer.incremental_assign(added)
                self._assigned |= present
            return
        self._gone_since = self._gone_since or monotonic()
        if monotonic() - self._gone_since > _GONE_AFTER_S:
            raise Unavailable(f"{self._topic} does not exist any more")
