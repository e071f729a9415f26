"""The part of the log that a replay reads: ranges of offsets by time, and the work items in them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from fairlane import metrics
from fairlane.closing import Closing
from fairlane.cluster import LastConnectionError, quiet_config, reason_of
from fairlane.codec import Codec, DecodeError
from fairlane.kafka_config import read_committed_consumer
from fairlane.logs import get_logger
from fairlane.names import log_replay_group, priority_topic
from fairlane.outcomes import Priority
from fairlane.ownership import PartitionId
from fairlane.records import ModelVersion, SourceCoordinate, WorkItem
from fairlane.settings import Settings
from fairlane.skipping_consumer import SkippedRange, SkippingConsumer
from fairlane_server.kafka.cluster_admin import ClusterError
from fairlane_server.log_replay.progress import ReplayRange

log = get_logger(__name__)

MOST_AT_ONCE = 500
_CALL_TIMEOUT_S = 20.0
_READER = "log_replay"


@dataclass(frozen=True, slots=True)
class LoggedWork:
    """A record of a range, or the end of one.

    Attributes:
        offset: where it is; ``end`` is the offset behind it, or the end of the range.
        item: None if it cannot be read, and at the end of a range.
        gone: offsets before it that the log does not hold any more.
        size_bytes: of the record.
    """

    partition: PartitionId
    offset: int
    end: int
    item: WorkItem | None
    gone: int = 0
    size_bytes: int = 0

    @property
    def is_unreadable(self) -> bool:
        return self.item is None and self.end > self.offset

    @property
    def place(self) -> SourceCoordinate:
        return SourceCoordinate(*self.partition, self.offset)


def topics_of(version: ModelVersion) -> list[str]:
    """The topics that hold work of a version: those of its pools, in all classes."""
    pools = dict.fromkeys((version.pool, *version.dedicated_pools))
    return [priority_topic(pool, priority) for pool in pools for priority in Priority]


class WorkRanges(Closing):
    """Reads the ranges of one replay with a consumer that joins no group. For one thread. Raises ClusterError when the
    brokers cannot be asked or do not answer; it must then be closed."""

    def __init__(self, settings: Settings, codec: Codec, replay: str) -> None:
        self._codec = codec
        self._errors = LastConnectionError()
        group = log_replay_group(settings.group_prefix, replay)
        config = read_committed_consumer(settings, group) | {"enable.partition.eof": True}
        self._consumer = SkippingConsumer(quiet_config(config, self._errors), _READER)
        self._ends: dict[PartitionId, int] = {}
        self._position: dict[PartitionId, int] = {}
        self._open: set[PartitionId] = set()
        self._lost: dict[PartitionId, int] = {}
        """Offsets that are gone, to be reported with the next record or the end of the partition."""

    def close(self) -> None:
        self._consumer.close()

    @property
    def consumer(self) -> SkippingConsumer:
        """Names the group of the replay."""
        return self._consumer

    @property
    def is_read(self) -> bool:
        """Whether everything was returned."""
        return not self._open

    def find(self, topics: Iterable[str], from_ms: int, until_ms: int) -> list[ReplayRange]:
        """The offsets of these topics with the broker's times from ``from_ms`` until before ``until_ms``, as far as
        they can be read now; those that hold something. A topic that does not exist holds nothing."""
        try:
            known = self._consumer.list_topics(timeout=_CALL_TIMEOUT_S).topics
            places = [
                PartitionId(topic, number)
                for topic in topics
                if topic in known and known[topic].error is None
                for number in sorted(known[topic].partitions)
            ]
            starts, stops = (self._offsets_at(places, at_ms) for at_ms in (from_ms, until_ms))
            found = []
            for place in places:
                # Up to an open transaction: the end that a reader of committed records sees.
                low, high = self._watermarks(place)
                first, end = (high if at[place] is None else at[place] for at in (starts, stops))
                found.append(ReplayRange(*place, max(low, first or 0), min(high, end or 0)))
        except KafkaException as error:
            raise ClusterError(self._errors.text or reason_of(error)) from None
        return [one for one in found if len(one)]

    def open(self, ranges: Sequence[ReplayRange], positions: Mapping[PartitionId, int]) -> None:
        """Read from these positions on, or else from the beginning of each range."""
        assigned = []
        try:
            for one in ranges:
                place = PartitionId(one.topic, one.partition)
                position = positions.get(place, one.first)
                low, high = self._watermarks(place)
                # A log that ends before was made anew: what it held is gone.
                start = one.end if high < one.end else min(max(low, position), one.end)
                self._lost[place] = start - position
                self._ends[place], self._position[place] = one.end, position
                if start < one.end:
                    assigned.append(TopicPartition(*place, start))
                if start < one.end or start > position:
                    self._open.add(place)
            self._consumer.assign(assigned)
        except KafkaException as error:
            raise ClusterError(self._errors.text or reason_of(error)) from None

    def read(self, timeout_s: float) -> list[LoggedWork]:
        """Some records, in the order of each partition; waits for one at most so long. Where a range ends behind the
        last record of it, its end follows."""
        found = self._ended_by_loss()
        try:
            messages = self._consumer.poll_batch(MOST_AT_ONCE, 0 if found else timeout_s)
        except KafkaException as error:
            raise ClusterError(self._errors.text or reason_of(error)) from None
        for message in messages:
            if isinstance(message, SkippedRange):
                found += self._skipped_over(message)
            else:
                found += self._taken(message)
        return found

    def _ended_by_loss(self) -> list[LoggedWork]:
        """Ends of the partitions whose whole rest is gone."""
        ended = [place for place in self._open if self._position[place] + self._lost.get(place, 0) >= self._ends[place]]
        return [one for place in ended for one in self._at_end(place)]

    def _taken(self, message: Message) -> list[LoggedWork]:
        place, offset = PartitionId(message.topic() or "", message.partition() or 0), message.offset() or 0
        error = message.error()
        if error is not None and error.code() != KafkaError._PARTITION_EOF:
            if error.code() == KafkaError._AUTO_OFFSET_RESET:
                raise ClusterError(f"{place.topic}-{place.partition}: retention was faster than the replay")
            if not error.retriable():
                raise ClusterError(f"{place.topic}-{place.partition}: {error.str()}")
            return []
        if place not in self._open:
            return []
        if offset >= self._ends[place]:
            # Of the end of the partition too: its offset also counts markers of transactions.
            return self._at_end(place)
        if error is not None:
            return []
        return [self._work(place, offset, message)]

    def _work(self, place: PartitionId, offset: int, message: Message) -> LoggedWork:
        self._position[place] = offset + 1
        gone = self._lost.pop(place, 0)
        try:
            item = self._codec.decode_as(WorkItem, message.value())
        except DecodeError as problem:
            metrics.UNREADABLE_RECORDS.labels(reader=_READER, problem=problem.problem).inc()
            log.error("work_unreadable", topic=place.topic, partition=place.partition, offset=offset)
            item = None
        return LoggedWork(place, offset, offset + 1, item, gone, len(message.value() or b""))

    def _skipped_over(self, skipped: SkippedRange) -> list[LoggedWork]:
        place = PartitionId(skipped.topic, skipped.partition)
        if place not in self._open:
            return []
        if skipped.first >= self._ends[place]:
            return self._at_end(place)
        end = min(skipped.end, self._ends[place])
        self._position[place] = end
        return [LoggedWork(place, skipped.first, end, None, self._lost.pop(place, 0))]

    def _at_end(self, place: PartitionId) -> list[LoggedWork]:
        """The end of a partition as a record without an item; nothing is fetched of it any more."""
        self._open.discard(place)
        end, position = self._ends[place], self._position[place]
        self._position[place] = end
        if any((one.topic, one.partition) == place for one in self._consumer.assignment()):
            self._consumer.pause([TopicPartition(*place)])
        return [LoggedWork(place, end, end, None, self._lost.pop(place, 0))] if position < end else []

    def _offsets_at(self, places: Sequence[PartitionId], at_ms: int) -> dict[PartitionId, int | None]:
        """The first offset at this time or later; None where all are older."""
        if not places:
            return {}
        asked = [TopicPartition(*place, max(0, at_ms)) for place in places]
        found: dict[PartitionId, int | None] = {}
        for one in self._consumer.offsets_for_times(asked, timeout=_CALL_TIMEOUT_S):
            if one.error is not None:
                raise KafkaException(one.error)
            found[PartitionId(one.topic, one.partition)] = one.offset if one.offset >= 0 else None
        return found

    def _watermarks(self, place: PartitionId) -> tuple[int, int]:
        bounds = self._consumer.get_watermark_offsets(TopicPartition(*place), timeout=_CALL_TIMEOUT_S)
        if bounds is None:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, f"{place.topic}: no answer"))
        return bounds
