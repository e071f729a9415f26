"""Kafka clients of the SDK, made from its settings."""

import logging
import threading
from time import monotonic

from confluent_kafka import KafkaError, KafkaException, Producer

from fairlane.cluster import LastConnectionError, quiet_config, reason_of
from fairlane.errors import Unavailable
from fairlane.kafka_clients import KafkaProducer
from fairlane.kafka_config import (
    IDLE_FETCH_WAIT_MS,
    ClientConfig,
    idempotent_producer,
    read_committed_consumer,
)
from fairlane.settings import KafkaSettings
from fairlane.skipping_consumer import SkippingConsumer

# A library logs through the application's logging; nothing goes to stdout or stderr by itself.
log = logging.getLogger("fairlane.client")

KafkaHeaders = list[tuple[str, str | bytes | None]]
"""As confluent-kafka takes them; ours are all bytes."""

LETTER_TIMEOUT_MS = 15_000
"""How long a dead letter may take to be written."""

# A topic that does not exist is reported after this long instead of librdkafka's 30 s.
_TOPIC_PROPAGATION_MS = 2_000
_SAME_ERROR_AGAIN_S = 30.0
# Chunks are small, and those of others are thrown away: no need to fetch far ahead.
_CHUNK_OPTIONS: ClientConfig = {
    "isolation.level": "read_uncommitted",
    "fetch.message.max.bytes": 1024 * 1024,
    "queued.max.messages.kbytes": 4_096,
}


class KafkaConnector:
    """Makes the Kafka clients of one connection. Each raises Unavailable for invalid settings.

    Connection errors are logged once in a while rather than with every attempt to connect.
    """

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._errors = _LoggedLastError()

    def producer(self, max_messages: int, max_bytes: int) -> Producer:
        """A producer whose own queue holds at least this much."""
        return self._producer(
            {
                "queue.buffering.max.messages": max_messages,
                "queue.buffering.max.kbytes": -(-max_bytes // 1024),
                "topic.metadata.propagation.max.ms": _TOPIC_PROPAGATION_MS,
            }
        )

    def letter_producer(self) -> Producer:
        """A producer of a few records at a time."""
        return self._producer({"linger.ms": 0, "delivery.timeout.ms": LETTER_TIMEOUT_MS})

    def reader(self, group_id: str) -> SkippingConsumer:
        """A consumer that joins no group."""
        return self._consumer(group_id, "client_replies", {"fetch.wait.max.ms": IDLE_FETCH_WAIT_MS})

    def chunk_reader(self, group_id: str) -> SkippingConsumer:
        """A consumer of chunks, which are written outside transactions."""
        return self._consumer(group_id, "chunks", _CHUNK_OPTIONS)

    def member(self, group_id: str, max_poll_interval_ms: int, session_timeout_ms: int) -> SkippingConsumer:
        """A consumer to join its group with."""
        options: ClientConfig = {
            "max.poll.interval.ms": max_poll_interval_ms,
            "session.timeout.ms": session_timeout_ms,
            # A member learns from its heartbeat that another joined; until then neither reads on.
            "heartbeat.interval.ms": 1_000,
        }
        return self._consumer(group_id, "reply_member", options)

    def last_error(self) -> str | None:
        """Why it last could not connect, if it could not."""
        return self._errors.text

    def _producer(self, options: ClientConfig) -> Producer:
        try:
            return KafkaProducer(quiet_config(idempotent_producer(self._settings), self._errors) | options)
        except KafkaException as error:
            raise _invalid(error) from error

    def _consumer(self, group_id: str, reader: str, options: ClientConfig) -> SkippingConsumer:
        config = quiet_config(read_committed_consumer(self._settings, group_id), self._errors) | options
        try:
            return SkippingConsumer(config, reader)
        except KafkaException as error:
            raise _invalid(error) from error


def _invalid(error: KafkaException) -> Unavailable:
    return Unavailable(f"the settings of the connection are wrong: {reason_of(error)}")


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
