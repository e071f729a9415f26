"""Kafka source of the recorder. The only module of it that talks to Kafka.

What was assigned is not fetched before the stored offset is known, so nothing here needs the database and a rebalance
never waits for it: a callback only notes what changed, and ``fetch`` starts a partition at an exact offset.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from confluent_kafka import (
    TIMESTAMP_NOT_AVAILABLE,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from fairlane import names
from fairlane.committed import TopicIds
from fairlane.frozen import frozen_dataclass
from fairlane.kafka_config import read_committed_consumer
from fairlane.logs import get_logger
from fairlane.settings import Settings
from fairlane.skipping_consumer import SkippedRange, SkippingConsumer
from fairlane_server.processes.service import exit_after
from stream_processors.recorder.positions import Partition
from stream_processors.recorder.projection import LogRecord

log = get_logger(__name__)

SESSION_TIMEOUT_MS = 6_000
REQUEST_TIMEOUT_S = 2.0
REJOIN_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 20.0
_FETCH_MIN_BYTES = 256 * 1024

OnChange = Callable[[frozenset[Partition]], None]


class LogUnavailableError(Exception):
    """The broker did not answer about a partition: try again later."""


@frozen_dataclass(frozen=True, slots=True)
class End:
    """Nothing more can be delivered before this offset for now."""

    partition: Partition
    offset: int


@frozen_dataclass(frozen=True, slots=True)
class OutOfRange:
    """The offset asked for is not in the log."""

    partition: Partition


Event = LogRecord | End | OutOfRange | SkippedRange


class LogConsumer:
    """A member of the recorder's group. Not safe between threads."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._topic_ids = TopicIds(settings)
        self._revoked_at_s: float | None = None
        """Since when all was taken away and nothing was assigned."""
        self._owned: frozenset[Partition] = frozenset()
        self._on_assigned: OnChange = lambda _: None
        self._on_revoked: OnChange = lambda _: None
        self._fetched: set[Partition] = set()
        self._passed: list[SkippedRange] = []
        """By the poll under way."""
        self._consumer = SkippingConsumer(
            _config(settings), "recorder", self._passed.append, logger=logging.getLogger("confluent_kafka")
        )

    def start(self, on_assigned: OnChange, on_revoked: OnChange) -> None:
        """Join the group. The callbacks run inside ``read`` and ``close``, with what was added and taken away."""
        self._on_assigned, self._on_revoked = on_assigned, on_revoked
        # Patterns, all of them: a topic that does not exist yet is then no error, and one that comes later is found.
        self._consumer.subscribe(
            list(names.RECORDED_TOPICS), on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked
        )

    def close(self) -> None:
        """Leave the group. The process ends if that hangs: after a broker stood still, the client may wait for ever."""
        hung = exit_after(CLOSE_TIMEOUT_S)
        self._consumer.close()
        hung.cancel()

    def fetch(self, offsets: Mapping[Partition, int]) -> None:
        """Start reading each of these at its offset."""
        self._consumer.incremental_assign([TopicPartition(*partition, offset) for partition, offset in offsets.items()])
        self._fetched.update(offsets)

    def stop_fetching(self, partitions: Iterable[Partition]) -> None:
        """Read no more of these, and forget what was read ahead."""
        gone = self._fetched.intersection(partitions)
        if gone:
            self._consumer.incremental_unassign([TopicPartition(*partition) for partition in gone])
            self._fetched -= gone

    def read(self, max_records: int, max_bytes: int, timeout_s: float) -> list[Event]:
        """What is there, after waiting for the first: at most so many records, and none after those that have so many
        bytes together. Raises KafkaException for a fatal error, and when the group took all partitions away and has
        assigned nothing since: a client that does not come back by itself is started anew.
        """
        if self._revoked_at_s is not None and self._clock() - self._revoked_at_s > REJOIN_TIMEOUT_S:
            reason = f"nothing was assigned for {REJOIN_TIMEOUT_S:g} s after all was taken away"
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, reason))
        events: list[Event] = []
        size_bytes = 0
        # One by one: what is too much stays with the client, which knows whether it still is ours to read.
        for number in range(max_records):
            message = self._consumer.poll(0 if number else timeout_s)
            if message is None:
                if not self._passed:
                    break
                events.append(self._passed.pop())
                continue
            if (event := _event(message)) is not None:
                events.append(event)
                size_bytes += len(event.value or b"") if isinstance(event, LogRecord) else 0
            if size_bytes >= max_bytes:
                break
        return events

    def bounds(self, partition: Partition) -> tuple[int, int]:
        """First offset and end of the log, asked from the broker. Raises LogUnavailableError."""
        try:
            low, high = self._consumer.get_watermark_offsets(TopicPartition(*partition), timeout=REQUEST_TIMEOUT_S)
        except KafkaException as error:
            raise LogUnavailableError(str(error.args[0].str())) from None
        return low, high

    def topic_ids(self, topics: Collection[str]) -> Mapping[str, str]:
        """The ids of these topics, as far as they have any. Raises LogUnavailableError."""
        try:
            return self._topic_ids(topics, REQUEST_TIMEOUT_S)
        except KafkaException as error:
            raise LogUnavailableError(str(error.args[0].str())) from None

    def known_end(self, partition: Partition) -> int | None:
        """The end of a fetched partition as the last fetch saw it, without asking."""
        _, high = self._consumer.get_watermark_offsets(TopicPartition(*partition), cached=True)
        return high if high >= 0 else None

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        # Acknowledges the rebalance without fetching anything yet.
        consumer.incremental_assign([])
        new = _partitions(partitions)
        self._revoked_at_s = None
        self._owned |= new
        self._on_assigned(new)

    def _revoked(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        gone = _partitions(partitions)
        self._owned -= gone
        self._revoked_at_s = None if self._owned else self._clock()
        self._on_revoked(gone)
        kept = self._fetched & gone
        self._consumer.incremental_unassign([TopicPartition(*partition) for partition in kept])
        self._fetched -= gone


def _config(settings: Settings) -> dict[str, Any]:
    return read_committed_consumer(settings, names.recorder_group(settings.group_prefix)) | {
        "client.id": settings.instance_id,
        # Cooperative: a new topic or a second recorder does not interrupt the other partitions. The classic protocol,
        # because the pattern is then matched here, within a metadata refresh; brokers do it every ten seconds at best.
        "partition.assignment.strategy": "cooperative-sticky",
        "session.timeout.ms": SESSION_TIMEOUT_MS,
        "heartbeat.interval.ms": SESSION_TIMEOUT_MS // 4,
        "enable.partition.eof": True,
        # Nobody waits for a row: a broker answers when it has this much, or after ``fetch.wait.max.ms``.
        "fetch.min.bytes": _FETCH_MIN_BYTES,
    }


def _partitions(partitions: Iterable[TopicPartition]) -> frozenset[Partition]:
    return frozenset(Partition(partition.topic, partition.partition) for partition in partitions)


def _event(message: Message) -> Event | None:
    topic, number, offset = message.topic(), message.partition(), message.offset()
    error = message.error()
    if error is None:
        kind, timestamp_ms = message.timestamp()
        if topic is None or number is None or offset is None:
            return None
        return LogRecord(
            topic,
            number,
            offset,
            0 if kind == TIMESTAMP_NOT_AVAILABLE else timestamp_ms,
            message.key(),
            message.value(),
        )
    if error.fatal():
        raise KafkaException(error)
    if topic is not None and number is not None:
        if error.code() == KafkaError._PARTITION_EOF and offset is not None:
            return End(Partition(topic, number), offset)
        if error.code() == KafkaError._AUTO_OFFSET_RESET:
            return OutOfRange(Partition(topic, number))
    log.warning("consumer_error", topic=topic, error=error.name(), reason=error.str())
    return None
