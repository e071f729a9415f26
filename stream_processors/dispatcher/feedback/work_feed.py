"""Work feed: reads all work items, usage, and heartbeats of consumers and dispatchers, on a separate thread.

A plain consumer of every partition, without a group. The start positions keep the in-flight count right:
``ledger.usage`` from its end, taken before the pools' groups are asked for their offsets; ``priority.*`` from those
offsets. Work settled before that end is below the committed offsets; work settled later is read. (A commit not yet
visible at the broker is seen when the groups are asked again, once a second.)

``control.capacity`` is read from its start, up to a bound: a pool that lost its consumers differs from one that never
had any.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from uuid import uuid4

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from fairlane import metrics, names
from fairlane.clock import now_ms
from fairlane.codec import Codec
from fairlane.kafka_clients import KafkaAdmin
from fairlane.kafka_config import IDLE_FETCH_WAIT_MS, ClientConfig, connection, read_committed_consumer
from fairlane.logs import get_logger
from fairlane.outcomes import Priority
from fairlane.ownership import PartitionId
from fairlane.records import UsageEvent
from fairlane.settings import Settings
from fairlane.skipping_consumer import SkippedRange, SkippingConsumer
from fairlane_server.kafka.feeds import CatchUp, FeedUnavailableError
from stream_processors.dispatcher.feedback.pool_offsets import LogPositions, Points, PoolOffsets
from stream_processors.dispatcher.feedback.work_records import (
    READER,
    RECORD_TYPES,
    FeedEvent,
    PartitionRecreated,
    PartitionsKnown,
    PoolCommitted,
    UsageStarted,
    WorkRecords,
)

log = get_logger(__name__)

_POLL_S = 0.1
_MAX_POLL_RECORDS = 2_000
_STOP_TIMEOUT_S = 15.0
_MEASURE_EVERY_S = 1.0
_LOOK_FOR_TOPICS_EVERY_S = 1.0
_LOOK_AT_ALL_TOPICS_EVERY_S = 10.0
_DISPATCHERS_SINCE_MS = 5_000
_MAX_CAPACITY_RECORDS = 150_000
"""Per partition: ten minutes of 64 consumers, read in about two seconds."""


class WorkFeed:
    """Passes events on in batches: ``on_events`` is called on the feed's thread, once per poll.

    Within a batch, work comes before usage. ``pools`` returns the present pools; it is called once a second on the
    feed's thread, and a pool once returned is followed until the end.
    """

    def __init__(
        self,
        settings: Settings,
        codec: Codec,
        pools: Callable[[], Iterable[str]],
        on_events: Callable[[Sequence[FeedEvent]], None],
    ) -> None:
        self._settings = settings
        self._records = WorkRecords(codec, settings.instance_id)
        self._names_of_pools = pools
        self._on_events = on_events
        self._on_failure: Callable[[Exception], None] | None = None
        self._caught_up = threading.Event()
        self._stopping = threading.Event()
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        self._pools: set[str] = set()
        self._groups = PoolOffsets(settings)
        self._counts: dict[str, int] = {}
        """Partition counts of the followed topics."""
        self._read_up_to: dict[PartitionId, int] = {}
        self._catch_up: CatchUp[PartitionId] | None = None
        """None before the first assignment."""
        self._lost: set[PartitionId] = set()
        """Partitions whose position is no longer in the log."""
        self._events: list[FeedEvent] = []

    def on_failure(self, listener: Callable[[Exception], None]) -> None:
        """Register a callback for a failure after start-up, called on the feed's thread. Call before ``start``."""
        self._on_failure = listener

    @property
    def age_s(self) -> float:
        """Seconds since the oldest answer about a pool's committed offsets: the staleness of the in-flight count."""
        return monotonic() - self._groups.answered_at

    def start(self, timeout_s: float = 30.0) -> None:
        """Start the thread and wait until it has read to the present ends. Raises FeedUnavailableError."""
        self._thread = threading.Thread(target=self._run, name="work-feed", daemon=True)
        self._thread.start()
        if not self._caught_up.wait(timeout_s) or self._failure is not None:
            self.stop()
            reason = self._failure or f"not read to its end within {timeout_s:g} s"
            raise FeedUnavailableError(f"the work feed: {reason}") from self._failure

    def stop(self) -> None:
        """Stop the thread; waits until no more events are passed on, at most ``_STOP_TIMEOUT_S``."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_STOP_TIMEOUT_S)

    def _run(self) -> None:
        try:
            consumer = SkippingConsumer(_config(self._settings), READER)
            try:
                self._follow(consumer, LogPositions(KafkaAdmin(connection(self._settings))))
            finally:
                consumer.close()
                self._groups.stop()
        except Exception as error:  # noqa: BLE001 - handed to the waiting starter, or to the owner: never silent
            self._failure = error
            started = self._caught_up.is_set()
            self._caught_up.set()
            log.error("work_feed_stopped", error=str(error))
            if started and self._on_failure is not None:
                self._on_failure(error)

    def _follow(self, consumer: SkippingConsumer, positions: LogPositions) -> None:
        look_for_topics_at = look_at_all_at = measure_at = 0.0
        while not self._stopping.is_set():
            now = monotonic()
            if now >= look_for_topics_at:
                look_at_all = now >= look_at_all_at
                try:
                    self._look_for_topics(consumer, positions, look_at_all)
                    look_at_all_at = now + _LOOK_AT_ALL_TOPICS_EVERY_S if look_at_all else look_at_all_at
                except KafkaException as error:
                    log.warning("work_feed_waits", error=error.args[0].name())
                look_for_topics_at = monotonic() + _LOOK_FOR_TOPICS_EVERY_S
            if now >= measure_at:
                self._measure(consumer)
                measure_at = now + _MEASURE_EVERY_S
            self._poll(consumer)
            self._take_committed(self._groups.take())
            is_caught_up = self._catch_up is not None and self._catch_up.is_done
            if is_caught_up:
                self._events.extend(self._records.heard(now_ms()))
            self._hand_on()
            if is_caught_up:
                self._caught_up.set()

    # Partitions and start positions

    def _look_for_topics(self, consumer: Consumer, positions: LogPositions, look_at_all: bool) -> None:
        """Add new pools, topics and partitions."""
        self._pools.update(self._names_of_pools())
        wanted = {names.priority_topic(pool, priority): pool for pool in self._pools for priority in Priority}
        topics = [topic for topic in (*RECORD_TYPES, *wanted) if look_at_all or self._lost or topic not in self._counts]
        counts = positions.partition_counts(topics)
        if missing := [topic for topic in RECORD_TYPES if topic not in self._counts and topic not in counts]:
            raise KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART, f"{missing} do not exist"))
        new = [
            PartitionId(topic, partition)
            for topic, count in counts.items()
            for partition in range(self._counts.get(topic, 0), count)
            if PartitionId(topic, partition) not in self._read_up_to
        ]
        start = self._start_of_shared(positions, [place for place in new if place.topic in RECORD_TYPES])
        for pool in {wanted[place.topic] for place in new if place.topic in wanted}:
            places = [place for place in new if wanted.get(place.topic) == pool]
            start.update(self._start_of_pool(positions, pool, places))
        ends = positions.latest(start) if self._catch_up is None else {}
        self._reposition(consumer, positions)
        if new:
            consumer.incremental_assign([TopicPartition(*place, offset) for place, offset in start.items()])
        self._read_up_to.update(start)
        self._events.extend(
            UsageStarted(place.partition, offset)
            for place, offset in start.items()
            if place.topic == names.LEDGER_USAGE
        )
        self._counts.update(counts)
        self._events.extend(PartitionsKnown(topic, count) for topic, count in counts.items() if topic in wanted)
        if self._catch_up is None:
            self._catch_up = CatchUp(start, ends)

    def _start_of_shared(self, positions: LogPositions, new: list[PartitionId]) -> dict[PartitionId, int]:
        usage, capacity, dispatch = (
            [place for place in new if place.topic == topic]
            for topic in (names.LEDGER_USAGE, names.CONTROL_CAPACITY, names.CONTROL_DISPATCH)
        )
        return (
            positions.latest(usage)
            | positions.newest(capacity, _MAX_CAPACITY_RECORDS)
            | positions.since(dispatch, now_ms() - _DISPATCHERS_SINCE_MS)
        )

    def _start_of_pool(self, positions: LogPositions, pool: str, new: list[PartitionId]) -> dict[PartitionId, int]:
        """The pool's committed offsets, or the first offsets. Call after ``_start_of_shared``: see the module."""
        committed = self._groups.ask(pool, new)
        first = positions.earliest(new)
        self._take_committed(committed)
        return {
            place: max(first[place], committed[place].offset) if place in committed else first[place] for place in new
        }

    def _reposition(self, consumer: Consumer, positions: LogPositions) -> None:
        """Continue at the first offset of logs that lost the position, by retention or because the topic was
        recreated."""
        lost = list(self._lost)
        first, last = positions.earliest(lost), positions.latest(lost)
        for place in lost:
            if self._read_up_to[place] > last[place]:
                log.error("work_feed_log_replaced", topic=place.topic, partition=place.partition)
                self._events.append(PartitionRecreated(*place))
                if self._catch_up is not None:
                    self._catch_up.moved(place, last[place])
                self._groups.forget(place)
            else:
                log.error("work_feed_overtaken", topic=place.topic, partition=place.partition)
            self._read_up_to[place] = first[place]
            if place.topic == names.LEDGER_USAGE:
                self._events.append(UsageStarted(place.partition, first[place]))
            consumer.incremental_unassign([TopicPartition(*place)])
            consumer.incremental_assign([TopicPartition(*place, first[place])])
        self._lost.clear()

    def _take_committed(self, points: Points) -> None:
        self._events.extend(PoolCommitted(place.topic, place.partition, point) for place, point in points.items())

    # Records

    def _poll(self, consumer: SkippingConsumer) -> None:
        for one in consumer.poll_batch(_MAX_POLL_RECORDS, _POLL_S):
            if isinstance(one, SkippedRange):
                self._records.passed_over(one)
            else:
                self._take(one)

    def _take(self, message: Message) -> None:
        error, topic, partition, offset = message.error(), message.topic(), message.partition(), message.offset()
        if topic is None or partition is None or offset is None:
            if error is not None and error.fatal():
                raise KafkaException(error)
            log.warning("work_feed_error", error=None if error is None else error.name())
            return
        place = PartitionId(topic, partition)
        if error is None:
            self._reached(place, offset + 1)
            event = self._records.read(message, now_ms())
            if event is not None:
                self._events.append(event)
        elif error.code() == KafkaError._PARTITION_EOF:
            self._read_up_to[place] = offset
            if self._catch_up is not None:
                self._catch_up.ended(place)
        elif error.code() == KafkaError._AUTO_OFFSET_RESET:
            self._lost.add(place)
        elif error.fatal():
            raise KafkaException(error)
        else:
            log.warning("work_feed_error", topic=topic, error=error.name())

    def _reached(self, place: PartitionId, position: int) -> None:
        self._read_up_to[place] = position
        if self._catch_up is not None:
            self._catch_up.reached(place, position)

    def _hand_on(self) -> None:
        usage = self._records.usage_read()
        if usage is not None:
            self._events.append(usage)
        if self._events:
            events, self._events = self._events, []
            # Usage read in the same poll as its work would otherwise often come first.
            events.sort(key=lambda event: isinstance(event, UsageEvent))
            self._on_events(events)

    def _measure(self, consumer: Consumer) -> None:
        behind = 0
        for place, position in self._read_up_to.items():
            ends = consumer.get_watermark_offsets(TopicPartition(*place), cached=True)
            if ends is not None:
                behind += max(0, ends[1] - position)
        metrics.WORK_FEED_LAG.set(behind)
        metrics.WORK_FEED_AGE_SECONDS.set(self.age_s)
        self._records.show_skew()


def _config(settings: Settings) -> ClientConfig:
    return read_committed_consumer(settings, names.observer_group(f"work-feed-{uuid4()}")) | {
        "client.id": settings.instance_id,
        "enable.partition.eof": True,
        "fetch.wait.max.ms": IDLE_FETCH_WAIT_MS,
    }
