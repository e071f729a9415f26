"""The parts of confluent-kafka the client uses, as protocols that unit tests can fill, and the real ones."""

import logging
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any, Protocol

from confluent_kafka import KafkaError, Message, Producer, TopicPartition

from fairlane.cluster import LastConnectionError, quiet_config
from fairlane.kafka_config import idempotent_producer, read_committed_consumer
from fairlane.settings import KafkaSettings
from fairlane.skipping_consumer import SkippingConsumer

# A library says what it has to say through the application's logging; nothing of it goes to stdout or stderr by itself.
log = logging.getLogger("fairlane.client")

KafkaHeaders = list[tuple[str, str | bytes | None]]
"""As confluent-kafka takes them; ours are all bytes."""

DeliveryReport = Callable[[KafkaError | None, Message], None]

LETTER_TIMEOUT_MS = 15_000
"""How long a dead letter may take to be written."""

# A topic that does not exist is reported after this long instead of librdkafka's 30 s.
_TOPIC_PROPAGATION_MS = 2_000
_SAME_ERROR_AGAIN_S = 30.0
# Chunks are small, and those of others are thrown away: no need to fetch far ahead.
_CHUNK_BUFFERS = {"fetch.message.max.bytes": 1024 * 1024, "queued.max.messages.kbytes": 4_096}


class ProducerPort(Protocol):
    """An idempotent producer."""

    def produce(
        self, topic: str, value: bytes, key: bytes, *, headers: KafkaHeaders, on_delivery: DeliveryReport
    ) -> None: ...

    def poll(self, timeout: float) -> int: ...

    def flush(self, timeout: float) -> int: ...

    def purge(self) -> None: ...


class ReaderPort(Protocol):
    """A consumer with partitions assigned by hand."""

    def list_topics(self, topic: str, timeout: float) -> Any: ...

    def get_watermark_offsets(self, partition: TopicPartition, timeout: float) -> tuple[int, int]: ...

    def incremental_assign(self, partitions: list[TopicPartition]) -> None: ...

    def seek(self, partition: TopicPartition) -> None: ...

    def poll(self, timeout: float) -> Message | None: ...

    def consume(self, num_messages: int, timeout: float) -> list[Message]: ...

    def close(self) -> None: ...


class Connector(Protocol):
    """Makes the clients of one connection."""

    def producer(self, max_messages: int, max_bytes: int) -> ProducerPort: ...

    def reader(self, group_id: str) -> ReaderPort: ...

    def chunk_reader(self, group_id: str) -> ReaderPort: ...

    def last_error(self) -> str | None: ...


class KafkaConnector:
    """Real clients. Each gets its errors logged, once in a while rather than with every attempt to connect."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._errors = _LoggedLastError()

    def producer(self, max_messages: int, max_bytes: int) -> ProducerPort:
        """A producer whose own queue holds at least this much. Raises KafkaException for settings it refuses."""
        config = quiet_config(idempotent_producer(self._settings), self._errors) | {
            "queue.buffering.max.messages": max_messages,
            "queue.buffering.max.kbytes": -(-max_bytes // 1024),
            "topic.metadata.propagation.max.ms": _TOPIC_PROPAGATION_MS,
        }
        producer: ProducerPort = Producer(config)
        return producer

    def letter_producer(self) -> Producer:
        """A producer of a few records at a time. Raises KafkaException for settings it refuses."""
        config = quiet_config(idempotent_producer(self._settings), self._errors)
        return Producer(config | {"linger.ms": 0, "delivery.timeout.ms": LETTER_TIMEOUT_MS})

    def reader(self, group_id: str) -> ReaderPort:
        """A consumer that joins no group. Raises KafkaException for settings it refuses."""
        return SkippingConsumer(
            quiet_config(read_committed_consumer(self._settings, group_id), self._errors), "client_replies"
        )

    def chunk_reader(self, group_id: str) -> ReaderPort:
        """A consumer of chunks, which are written outside transactions. Raises KafkaException for invalid settings."""
        config = quiet_config(read_committed_consumer(self._settings, group_id), self._errors)
        return SkippingConsumer(config | {"isolation.level": "read_uncommitted"} | _CHUNK_BUFFERS, "chunks")

    def member(self, group_id: str, max_poll_interval_ms: int, session_timeout_ms: int) -> SkippingConsumer:
        """A consumer to join its group with. Raises KafkaException for settings it refuses."""
        config = quiet_config(read_committed_consumer(self._settings, group_id), self._errors)
        config |= {
            "max.poll.interval.ms": max_poll_interval_ms,
            "session.timeout.ms": session_timeout_ms,
            # A member learns from its heartbeat that another joined; until then neither reads on.
            "heartbeat.interval.ms": 1_000,
        }
        return SkippingConsumer(config, "reply_member")

    def last_error(self) -> str | None:
        """Why it last could not connect, if it could not."""
        return self._errors.text


class _LoggedLastError(LastConnectionError):
    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._logged: dict[int, float] = {}

    def __call__(self, error: KafkaError) -> None:
        super().__call__(error)
        now = monotonic()
        with self._lock:
            if now - self._logged.get(error.code(), -_SAME_ERROR_AGAIN_S) < _SAME_ERROR_AGAIN_S:
                return
            self._logged[error.code()] = now
        log.warning("kafka_error name=%s reason=%s", error.name(), error.str())
