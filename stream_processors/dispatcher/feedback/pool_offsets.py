"""Offsets of the pools' topics and committed offsets of their consumer groups, polled on a separate thread.

Uses one consumer per group that never joins it. The admin client must not be used for this: when its request to a
coordinator fails, librdkafka aborts the process (confluentinc/librdkafka issue 4605), so a broker outage would end
every dispatcher.
"""

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from time import monotonic
from typing import Any

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka import TopicCollection as Topics
from confluent_kafka.admin import AdminClient, OffsetSpec

from fairlane.kafka_clients import KafkaConsumer
from fairlane.kafka_config import read_committed_consumer
from fairlane.logs import get_logger
from fairlane.names import pool_group
from fairlane.offsets import CommitPoint, MetadataError
from fairlane.ownership import PartitionId
from fairlane.settings import Settings

_REQUEST_TIMEOUT_S = 2.0
_ANSWER_TIMEOUT_S = 2.5
_NO_SUCH_TOPIC = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_EXCEPTION})

_EARLIEST: OffsetSpec = OffsetSpec.earliest()  # type: ignore[no-untyped-call]  # its stubs leave it out
_LATEST: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call]  # its stubs leave it out


class LogPositions:
    """Offset queries. Each takes at most a few seconds and raises KafkaException if the broker does not answer."""

    def __init__(self, admin: AdminClient) -> None:
        self._admin = admin

    def partition_counts(self, topics: Iterable[str]) -> dict[str, int]:
        """Partition counts by topic; a topic that does not exist or has an invalid name is left out."""
        wanted = list(topics)
        if not wanted:
            return {}
        asked = self._admin.describe_topics(Topics(wanted), request_timeout=_REQUEST_TIMEOUT_S)
        counts = {}
        for topic, answer in asked.items():
            try:
                counts[topic] = len(_result(answer).partitions)
            except KafkaException as error:
                if error.args[0].code() not in _NO_SUCH_TOPIC:
                    raise
        return counts

    def earliest(self, partitions: Iterable[PartitionId]) -> dict[PartitionId, int]:
        """The first offset of each partition."""
        return self._list(partitions, _EARLIEST)

    def latest(self, partitions: Iterable[PartitionId]) -> dict[PartitionId, int]:
        """The last stable offset of each partition: the end for a ``read_committed`` reader."""
        return self._list(partitions, _LATEST)

    def newest(self, partitions: Iterable[PartitionId], records: int) -> dict[PartitionId, int]:
        """The start of the last ``records`` offsets of each partition, or its first offset if it has fewer."""
        wanted = list(partitions)
        first, ends = self.earliest(wanted), self.latest(wanted)
        return {partition: max(first[partition], ends[partition] - records) for partition in wanted}

    def since(self, partitions: Iterable[PartitionId], at_ms: int) -> dict[PartitionId, int]:
        """The first offset of each partition with a timestamp of at least ``at_ms``; its end if there is none."""
        wanted = list(partitions)
        ends = self.latest(wanted)
        found = self._list(wanted, OffsetSpec.for_timestamp(at_ms))
        return {partition: offset if offset >= 0 else ends[partition] for partition, offset in found.items()}

    def _list(self, partitions: Iterable[PartitionId], spec: OffsetSpec) -> dict[PartitionId, int]:
        wanted = {TopicPartition(*partition): spec for partition in partitions}
        if not wanted:
            return {}
        asked = self._admin.list_offsets(
            wanted,
            isolation_level=IsolationLevel.READ_COMMITTED,
            request_timeout=_REQUEST_TIMEOUT_S,
        )
        return {
            PartitionId(partition.topic, partition.partition): _result(answer).offset
            for partition, answer in asked.items()
        }


def _result(answer: "Future[Any]") -> Any:
    try:
        return answer.result(_ANSWER_TIMEOUT_S)
    except TimeoutError:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "the broker did not answer in time")) from None


log = get_logger(__name__)

_EVERY_S = 1.0
_TIMEOUT_S = 2.0
_STOP_TIMEOUT_S = 5.0

Points = Mapping[PartitionId, CommitPoint]


@dataclass(slots=True)
class _Group:
    consumer: Consumer
    partitions: list[PartitionId]
    answered_at: float


class PoolOffsets:
    """Call ``ask`` once for the partitions of a pool; from then on ``take`` returns changed offsets.

    ``ask``, ``take`` and ``stop`` are called from one thread.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._groups: dict[str, _Group] = {}
        self._lock = threading.Lock()
        """Guards ``_groups``; never held across I/O."""
        self._known: dict[PartitionId, CommitPoint] = {}
        self._answers: deque[Points] = deque(maxlen=1_000)
        self._stopping = threading.Event()
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None

    def ask(self, pool: str, new: Iterable[PartitionId]) -> Points:
        """Return the pool's committed offsets, where it has any, and poll these partitions from now on.

        Does not wait for offsets of a transaction being committed, since a busy group always has one; the next poll
        returns them. Raises KafkaException when the broker does not answer in time.
        """
        with self._lock:
            group = self._groups.get(pool)
        if group is None:
            config = read_committed_consumer(self._settings, pool_group(self._settings.group_prefix, pool))
            group = _Group(KafkaConsumer(config | {"isolation.level": "read_uncommitted"}), [], monotonic())
            with self._lock:
                self._groups[pool] = group
        wanted = [*group.partitions, *(place for place in new if place not in group.partitions)]
        found = _committed(group.consumer, wanted)
        group.partitions, group.answered_at = wanted, monotonic()
        self._known.update(found)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pool-offsets", daemon=True)
            self._thread.start()
        return found

    def take(self) -> Points:
        """Return the offsets changed since the last call. Raises the error that ended the polling thread, if any."""
        if self._failure is not None:
            raise self._failure
        changed: dict[PartitionId, CommitPoint] = {}
        while self._answers:
            for place, point in self._answers.popleft().items():
                if self._known.get(place) != point:
                    self._known[place] = changed[place] = point
        return changed

    def forget(self, place: PartitionId) -> None:
        """Make ``take`` return the next answer for this partition even if it is unchanged."""
        self._known.pop(place, None)

    @property
    def answered_at(self) -> float:
        """The oldest last-answer time of all groups, by ``monotonic``."""
        with self._lock:
            return min((group.answered_at for group in self._groups.values()), default=monotonic())

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_STOP_TIMEOUT_S)
        for group in self._groups.values():
            group.consumer.close()

    def _run(self) -> None:
        try:
            while not self._stopping.wait(_EVERY_S):
                with self._lock:
                    groups = list(self._groups.items())
                for pool, group in groups:
                    if not group.partitions or self._stopping.is_set():
                        continue
                    try:
                        found = _committed(group.consumer, group.partitions)
                    except KafkaException as error:
                        log.warning("group_offsets_unknown", pool=pool, error=error.args[0].name())
                    else:
                        group.answered_at = monotonic()
                        self._answers.append(found)
        except Exception as error:  # noqa: BLE001 - raised by take
            self._failure = error


def _committed(consumer: Consumer, places: Iterable[PartitionId]) -> dict[PartitionId, CommitPoint]:
    wanted = [TopicPartition(*place) for place in places]
    points = {}
    for found in consumer.committed(wanted, timeout=_TIMEOUT_S) if wanted else ():
        if found.error is not None:
            raise KafkaException(found.error)
        if found.offset < 0:
            continue
        try:
            point = CommitPoint.parse(found.offset, found.metadata)
        except MetadataError:
            # The offsets were reset with a tool, without our metadata: take the plain offset.
            point = CommitPoint(found.offset)
        points[PartitionId(found.topic, found.partition)] = point
    return points
