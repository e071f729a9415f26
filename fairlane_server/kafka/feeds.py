"""Followers of control topics, each on a thread of its own; of a compacted topic, the newest record per key.

Progress is judged by positions. librdkafka reports the end of a partition only after an empty fetch, which never
happens on a busy topic. The event is still needed, because transaction markers at the end are not records.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from random import random
from time import monotonic
from typing import Generic, TypeVar
from uuid import uuid4

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from fairlane import metrics
from fairlane.backoff import Backoff
from fairlane.codec import Codec, DecodeError
from fairlane.kafka_config import IDLE_FETCH_WAIT_MS, read_committed_consumer
from fairlane.logs import get_logger
from fairlane.names import observer_group
from fairlane.schema_registry import RegistryError
from fairlane.settings import KafkaSettings
from fairlane.skipping_consumer import SkippingConsumer

PlaceT = TypeVar("PlaceT", bound=Hashable)


class CatchUp(Generic[PlaceT]):
    """``starts`` and ``ends``: by partition, the first offset to read, and the offset after the last one in the log."""

    def __init__(self, starts: Mapping[PlaceT, int], ends: Mapping[PlaceT, int]) -> None:
        self._behind = {place: end for place, end in ends.items() if starts[place] < end}

    @property
    def is_done(self) -> bool:
        return not self._behind

    def reached(self, place: PlaceT, position: int) -> None:
        if place in self._behind and position >= self._behind[place]:
            del self._behind[place]

    def ended(self, place: PlaceT) -> None:
        self._behind.pop(place, None)

    def moved(self, place: PlaceT, end: int) -> None:
        """The log ends elsewhere: it was replaced by another."""
        if place in self._behind:
            self._behind[place] = end


log = get_logger(__name__)

RecordT = TypeVar("RecordT")

READER = "feed"
"""Of the metric of unreadable records."""

_METADATA_TIMEOUT_S = 5.0
_POLL_S = 0.25
_SCHEMA_AGAIN = Backoff(first_s=0.25, longest_s=10.0)


class FeedUnavailableError(Exception):
    """The control topic does not exist or could not be read to its end in time."""


class TopicFollower(ABC):
    """Reads a topic to its present end before ``start`` returns, and goes on from there. It is in no group.

    What a record means is up to who derives from it; all of that runs on the thread.
    """

    def __init__(self, settings: KafkaSettings, topic: str) -> None:
        self._settings = settings
        self._topic = topic
        self._caught_up = threading.Event()
        self._stopping = threading.Event()
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        self._on_failure: Callable[[Exception], None] | None = None

    @abstractmethod
    def _take(self, message: Message) -> None:
        """Apply one record. Called again with the same record after a RegistryError; any other error ends the feed."""

    def _first_offset(self, consumer: Consumer, partition: int, low: int, end: int) -> int:  # noqa: ARG002 - for others
        """The offset to start from: ``low``, the first in the log, unless a subclass starts later."""
        return low

    def _on_caught_up(self) -> None:  # noqa: B027 - who shows nothing has nothing to do here
        """Everything that was there at the start is read."""

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
        config = read_committed_consumer(self._settings, observer_group(f"feed-{uuid4()}"))
        # No partition is sought, paused or added, so a fetch that waits for records delays nothing.
        options = {
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": IDLE_FETCH_WAIT_MS,
        }
        consumer = SkippingConsumer(config | options, READER)
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
        bounds = {
            partition: consumer.get_watermark_offsets(
                TopicPartition(self._topic, partition), timeout=_METADATA_TIMEOUT_S
            )
            for partition in partitions
        }
        starts = {
            partition: self._first_offset(consumer, partition, low, end) for partition, (low, end) in bounds.items()
        }
        # An explicit offset: OFFSET_BEGINNING costs librdkafka half a second before the first record.
        consumer.assign([TopicPartition(self._topic, partition, start) for partition, start in starts.items()])
        catch_up = CatchUp(starts, {partition: end for partition, (_, end) in bounds.items()})
        while not self._stopping.is_set():
            if catch_up.is_done and not self._caught_up.is_set():
                self._on_caught_up()
                self._caught_up.set()
            message = consumer.poll(_POLL_S)
            if message is None:
                continue
            partition, error = message.partition() or 0, message.error()
            if error is None:
                self._take_when_schema_known(message)
                catch_up.reached(partition, (message.offset() or 0) + 1)
            elif error.code() == KafkaError._PARTITION_EOF:
                catch_up.ended(partition)
            elif error.fatal():
                raise KafkaException(error)
            else:
                log.warning("feed_error", topic=self._topic, error=error.name())

    def _take_when_schema_known(self, message: Message) -> None:
        """Retry a record until the schema registry answers or the feed stops. Later records wait: of one key the newest
        counts."""
        failures = 0
        while True:
            try:
                return self._take(message)
            except RegistryError as error:
                failures += 1
                log.warning("feed_schema_not_known", topic=self._topic, reason=str(error))
                if self._stopping.wait(_SCHEMA_AGAIN.delay_s(failures, random())):  # noqa: S311 - jitter, no secret
                    return None

    def _partitions(self, consumer: Consumer) -> list[int]:
        deadline = monotonic() + 4 * _METADATA_TIMEOUT_S
        while True:
            metadata = consumer.list_topics(self._topic, timeout=_METADATA_TIMEOUT_S).topics[self._topic]
            if metadata.error is None and metadata.partitions:
                return sorted(metadata.partitions)
            if monotonic() > deadline or self._stopping.wait(0.2):
                raise FeedUnavailableError("the topic does not exist; run `fairlane topics apply`")


class Feed(TopicFollower, Generic[RecordT]):
    """The live content of one compacted topic. ``snapshot`` is an immutable mapping, replaced at every change."""

    def __init__(self, settings: KafkaSettings, codec: Codec, topic: str, *record_types: type[RecordT]) -> None:
        super().__init__(settings, topic)
        self._codec = codec
        self._record_types = record_types
        self._content: dict[str, RecordT] = {}
        self._snapshot: Mapping[str, RecordT] = {}
        self._listeners: list[Callable[[Mapping[str, RecordT]], None]] = []

    @property
    def snapshot(self) -> Mapping[str, RecordT]:
        return self._snapshot

    def on_change(self, listener: Callable[[Mapping[str, RecordT]], None]) -> None:
        """Call this with every new snapshot, on the feed's thread. Register before ``start``."""
        self._listeners.append(listener)

    def _take(self, message: Message) -> None:
        if self._apply(message.key(), message.value()) and self._caught_up.is_set():
            self._publish()

    def _apply(self, key: object, value: bytes | None) -> bool:
        name = key.decode("utf-8", "replace") if isinstance(key, bytes) else str(key)
        if value is None:
            return self._content.pop(name, None) is not None
        try:
            self._content[name] = self._codec.decode_any(self._record_types, value)
        except DecodeError as error:
            metrics.UNREADABLE_RECORDS.labels(reader=READER, problem=error.problem).inc()
            log.error("feed_record_undecodable", topic=self._topic, key=name, problem=error.problem)
            return False
        return True

    def _on_caught_up(self) -> None:
        self._publish()

    def _publish(self) -> None:
        self._snapshot = dict(self._content)
        for listener in self._listeners:
            listener(self._snapshot)
