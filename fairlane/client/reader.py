"""Reads a topic from its end on, on one thread: replies or chunks, for all handles of a client."""

import threading
from collections.abc import Callable
from time import monotonic
from typing import Generic, TypeVar

from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException, Message, TopicPartition

from fairlane import metrics
from fairlane.client.ports import ReaderPort, log
from fairlane.client.positions import CALL_TIMEOUT_S, PERMANENT_ERRORS, end_of, existing_partitions, partitions_of
from fairlane.clock import ClockMs
from fairlane.codec import Codec, DecodeError
from fairlane.errors import Unavailable

RecordT = TypeVar("RecordT")

_POLL_S = 0.1
_BATCH_RECORDS = 500
_REFRESH_S = 2.0
_GONE_AFTER_S = 15.0


class TopicReader(Generic[RecordT]):
    """Passes every awaited record of a topic to ``deliver``.

    Args:
        consumer: with nothing assigned; the reader owns it from now on.
        topic: one whose keys are request ids.
        record_type: what stands on it.
        codec: decodes the records.
        is_wanted: whether somebody waits for this request id; others are not even decoded.
        deliver: takes a decoded record and when it was read, milliseconds since the epoch.
        clock: the time.
    """

    def __init__(
        self,
        consumer: ReaderPort,
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
