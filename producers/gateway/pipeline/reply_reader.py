"""Reader of the gateway's reply topic: the partitions of this instance, as a member of the gateways' consumer group.

No offsets are committed: a new owner starts at the end of a partition, since earlier replies were awaited elsewhere and
are in Postgres. An instance that gets a partition back resumes at its last position.
"""

from collections.abc import Callable
from time import monotonic

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from fairlane import metrics
from fairlane.client.reader import ask, end_of, existing_partitions, partitions_of
from fairlane.cluster import reason_of
from fairlane.codec import Codec
from fairlane.kafka_config import ClientConfig, read_committed_consumer
from fairlane.logs import get_logger
from fairlane.names import GATEWAY_REPLIES, gateway_group
from fairlane.records import InferenceReply
from fairlane.settings import Settings
from fairlane.skipping_consumer import SkippedRange, SkippingConsumer
from producers.gateway.pipeline.pending import Pending
from producers.gateway.pipeline.reader_thread import ReaderThread

log = get_logger(__name__)

MOST_BEHIND_RECORDS = 50_000
"""Largest lag at which an instance resumes a partition; beyond it starts at the end. Older replies are in Postgres."""

_POLL_S = 0.1
_MAX_RECORDS = 500
_POSITION_TIMEOUT_S = 5.0
_START_TIMEOUT_S = 20.0
_CLASSIC_SESSION_TIMEOUT_MS = 6_000


class ReplyReader(ReaderThread[InferenceReply, InferenceReply]):
    """One group member. ``on_replies`` is called with all replies read, on a thread of the reader and before the sink;
    it must be fast and must not raise."""

    def __init__(
        self,
        settings: Settings,
        codec: Codec,
        sink: Pending,
        on_replies: Callable[[list[InferenceReply]], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        super().__init__("replies", codec, InferenceReply, sink.settle, on_failure)
        self._settings = settings
        self._sink = sink
        self._on_replies = on_replies
        self._partition_count = 0
        self._new: set[int] = set()
        """Assigned, not read yet."""
        self._passed: set[int] = set()
        """Assigned, to be sought to the end: retention has deleted the records at our position."""
        self._owned: set[int] = set()
        self._positions: dict[int, int] = {}
        """Next offset of every partition ever owned."""

    def _read_until_stopped(self) -> None:
        consumer = SkippingConsumer(_config(self._settings), "gateway_replies", self._unreadable)
        try:
            self._partition_count = len(existing_partitions(consumer, GATEWAY_REPLIES, monotonic() + _START_TIMEOUT_S))
            consumer.subscribe(
                [GATEWAY_REPLIES], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked
            )
            while not self._stopping.is_set():
                self._read(consumer)
        finally:
            consumer.close()

    def _read(self, consumer: Consumer) -> None:
        first = consumer.poll(_POLL_S)
        messages = [] if first is None else [first, *consumer.consume(_MAX_RECORDS, 0)]
        taken = [self._take(message) for message in messages]
        replies = [reply for reply in taken if reply is not None]
        if replies:
            self._came(replies)
        try:
            if self._new:
                self._take_up(consumer)
            if self._passed:
                self._go_on(consumer)
        except KafkaException as error:
            # Retried after the next poll; until then no request ids are made for these partitions.
            self._log.warning("positions_not_known", reason=reason_of(error))

    def _take(self, message: Message) -> InferenceReply | None:
        error, partition = message.error(), message.partition()
        if error is not None:
            self._on_error(error, partition)
            return None
        if partition is None or partition not in self._owned:
            return None
        self._positions[partition] = (message.offset() or 0) + 1
        return self._decoder.decode(message)

    def _unreadable(self, passed: SkippedRange) -> None:
        metrics.GATEWAY_UNREADABLE.labels(record=InferenceReply.__name__, problem=passed.problem).inc(
            passed.end - passed.first
        )
        if passed.partition in self._owned:
            self._positions[passed.partition] = passed.end

    def _on_error(self, error: KafkaError, partition: int | None) -> None:
        if error.fatal():
            raise KafkaException(error)
        if error.code() != KafkaError._AUTO_OFFSET_RESET or partition is None:
            self._log.warning("reply_reader_error", error=error.name(), partition=partition)
            return
        if partition not in self._owned:
            return
        # Retention has deleted the records at our position. The replies are in Postgres.
        log.error("replies_passed_unread", partition=partition)
        self._owned.discard(partition)
        self._passed.add(partition)
        self._call(self._sink.lost, frozenset({partition}))

    def _late(self, found: list[tuple[str, InferenceReply]]) -> None:
        self._came([reply for _, reply in found])

    def _came(self, replies: list[InferenceReply]) -> None:
        self._on_replies(replies)
        self._give(replies)

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        # Only acknowledge here, and start reading after the poll: a call that waits for a broker in this callback would
        # crash the client library at the next callback of the same poll.
        consumer.incremental_assign([])
        self._new.update(partition.partition for partition in partitions)

    def _take_up(self, consumer: Consumer) -> None:
        """Start reading the newly assigned partitions."""
        new = sorted(self._new)
        starts = {number: self._start(consumer, number) for number in new}
        # A topic with new partitions is reassigned.
        present = ask(
            lambda timeout_s: partitions_of(consumer, GATEWAY_REPLIES, timeout_s), monotonic() + _POSITION_TIMEOUT_S
        )
        consumer.incremental_assign([TopicPartition(GATEWAY_REPLIES, *start) for start in starts.items()])
        self._new.clear()
        self._positions.update(starts)
        self._owned.update(starts)
        self._partition_count = len(present) or self._partition_count
        log.info("assigned", partitions=new)
        self._call(self._sink.owned, frozenset(self._owned), self._partition_count)

    def _go_on(self, consumer: Consumer) -> None:
        """Seek to the end where retention has deleted the records at our position."""
        for number in sorted(self._passed):
            end = end_of(consumer, GATEWAY_REPLIES, number, monotonic() + _POSITION_TIMEOUT_S)
            consumer.seek(TopicPartition(GATEWAY_REPLIES, number, end))
            self._positions[number] = end
            self._passed.discard(number)
            self._owned.add(number)
            self._call(self._sink.owned, frozenset(self._owned), self._partition_count)

    def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        gone = frozenset(partition.partition for partition in partitions)
        kept = gone & (self._owned | self._passed)
        self._new -= gone
        self._passed -= gone
        self._owned -= gone
        consumer.incremental_unassign([TopicPartition(GATEWAY_REPLIES, number) for number in kept])
        log.info("revoked", partitions=sorted(gone))
        self._call(self._sink.lost, gone)
        self._call(self._sink.owned, frozenset(self._owned), self._partition_count)

    def _start(self, consumer: Consumer, partition: int) -> int:
        end = end_of(consumer, GATEWAY_REPLIES, partition, monotonic() + _POSITION_TIMEOUT_S)
        known = self._positions.get(partition)
        return known if known is not None and 0 <= end - known <= MOST_BEHIND_RECORDS else end


def _config(settings: Settings) -> ClientConfig:
    config = read_committed_consumer(settings, gateway_group(settings.group_prefix)) | {
        "client.id": settings.instance_id
    }
    if settings.consumer_group_protocol == "consumer":
        # Uniform moves the fewest partitions when an instance joins or leaves.
        return config | {"group.protocol": "consumer", "group.remote.assignor": "uniform"}
    return config | {
        "partition.assignment.strategy": "cooperative-sticky",
        "session.timeout.ms": _CLASSIC_SESSION_TIMEOUT_MS,
        "heartbeat.interval.ms": _CLASSIC_SESSION_TIMEOUT_MS // 6,
    }
