"""Following a compacted control topic: the newest record per key, kept up to date on a thread of its own."""

import threading
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Generic, TypeVar
from uuid import uuid4

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from fairlane.codec import Codec, DecodeError
from fairlane.kafka import connection
from fairlane.logs import get_logger
from fairlane.settings import KafkaSettings

log = get_logger(__name__)

RecordT = TypeVar("RecordT")

_METADATA_TIMEOUT_S = 5.0
_POLL_S = 0.25


class FeedUnavailableError(Exception):
    """The control topic does not exist or could not be read to its end in time."""


class Feed(Generic[RecordT]):
    """The live content of one compacted topic. ``snapshot`` is an immutable mapping, replaced at every change."""

    def __init__(self, settings: KafkaSettings, codec: Codec, topic: str, record_type: type[RecordT]) -> None:
        self._settings = settings
        self._codec = codec
        self._topic = topic
        self._record_type = record_type
        self._snapshot: Mapping[str, RecordT] = {}
        self._caught_up = threading.Event()
        self._stopping = threading.Event()
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        self._on_failure: Callable[[Exception], None] | None = None
        self._listeners: list[Callable[[Mapping[str, RecordT]], None]] = []

    @property
    def snapshot(self) -> Mapping[str, RecordT]:
        return self._snapshot

    def on_change(self, listener: Callable[[Mapping[str, RecordT]], None]) -> None:
        """Call this with every new snapshot, on the feed's thread. Register before ``start``."""
        self._listeners.append(listener)

    def on_failure(self, listener: Callable[[Exception], None]) -> None:
        """Call this, on the feed's thread, when following ends by itself. Register before ``start``."""
        self._on_failure = listener

    def start(self, timeout_s: float = 30.0) -> None:
        """Read the topic to its present end, then go on following it. Raises FeedUnavailableError."""
        self._thread = threading.Thread(target=self._run, name=f"feed-{self._topic}", daemon=True)
        self._thread.start()
        if not self._caught_up.wait(timeout_s) or self._failure is not None:
            self.stop()
            reason = self._failure or f"not read to its end within {timeout_s:g} s"
            raise FeedUnavailableError(f"{self._topic}: {reason}") from self._failure

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_METADATA_TIMEOUT_S)

    def _run(self) -> None:
        consumer = Consumer(
            connection(self._settings)
            | {
                "group.id": f"feed-{uuid4()}",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "isolation.level": "read_committed",
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": 100,
            }
        )
        try:
            self._follow(consumer)
        except Exception as error:  # noqa: BLE001 - handed to the waiting starter, or logged: never silent
            self._failure = error
            started = self._caught_up.is_set()
            self._caught_up.set()
            log.error("feed_stopped", topic=self._topic, error=str(error))
            if started and self._on_failure is not None:
                self._on_failure(error)
        finally:
            consumer.close()

    def _follow(self, consumer: Consumer) -> None:
        partitions = self._partitions(consumer)
        # An explicit offset: OFFSET_BEGINNING costs librdkafka half a second before the first record.
        consumer.assign([self._beginning(consumer, partition) for partition in partitions])
        behind = set(partitions)
        content: dict[str, RecordT] = {}
        while not self._stopping.is_set():
            message = consumer.poll(_POLL_S)
            if message is None:
                continue
            error = message.error()
            if error is not None:
                if error.code() == KafkaError._PARTITION_EOF:
                    behind.discard(message.partition() or 0)
                    if not behind:
                        self._publish(content)
                        self._caught_up.set()
                elif error.fatal():
                    raise KafkaException(error)
                else:
                    log.warning("feed_error", topic=self._topic, error=error.name())
                continue
            if self._apply(content, message.key(), message.value()) and not behind:
                self._publish(content)

    def _partitions(self, consumer: Consumer) -> list[int]:
        deadline = monotonic() + 4 * _METADATA_TIMEOUT_S
        while True:
            metadata = consumer.list_topics(self._topic, timeout=_METADATA_TIMEOUT_S).topics[self._topic]
            if metadata.error is None and metadata.partitions:
                return sorted(metadata.partitions)
            if monotonic() > deadline or self._stopping.wait(0.2):
                raise FeedUnavailableError("the topic does not exist; run `fairlane topics apply`")

    def _beginning(self, consumer: Consumer, partition: int) -> TopicPartition:
        first = TopicPartition(self._topic, partition)
        low, _high = consumer.get_watermark_offsets(first, timeout=_METADATA_TIMEOUT_S)
        return TopicPartition(self._topic, partition, low)

    def _apply(self, content: dict[str, RecordT], key: object, value: bytes | None) -> bool:
        name = key.decode("utf-8", "replace") if isinstance(key, bytes) else str(key)
        if value is None:
            return content.pop(name, None) is not None
        try:
            content[name] = self._codec.decode_as(self._record_type, value)
        except DecodeError as error:
            log.error("feed_record_undecodable", topic=self._topic, key=name, problem=error.problem)
            return False
        return True

    def _publish(self, content: Mapping[str, RecordT]) -> None:
        self._snapshot = dict(content)
        for listener in self._listeners:
            listener(self._snapshot)
