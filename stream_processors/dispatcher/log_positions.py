"""Asking the broker where logs begin and end: many partitions in one request, bounded in time."""

from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka import TopicCollection as Topics
from confluent_kafka.admin import AdminClient, OffsetSpec

from fairlane.ownership import PartitionId

_REQUEST_TIMEOUT_S = 2.0
_ANSWER_TIMEOUT_S = 2.5
_NO_SUCH_TOPIC = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_EXCEPTION})

_EARLIEST: OffsetSpec = OffsetSpec.earliest()  # type: ignore[no-untyped-call]  # its stubs leave it out
_LATEST: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call]  # its stubs leave it out


class LogPositions:
    """Every call takes at most a few seconds. Raises KafkaException when the broker did not answer."""

    def __init__(self, admin: AdminClient) -> None:
        self._admin = admin

    def partition_counts(self, topics: Iterable[str]) -> dict[str, int]:
        """How many partitions each of these topics has; one that does not exist, or that no topic can be named,
        is left out."""
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
        """The first offset of each."""
        return self._list(partitions, _EARLIEST)

    def latest(self, partitions: Iterable[PartitionId]) -> dict[PartitionId, int]:
        """Where a ``read_committed`` reader finds the end of each: an open transaction and all behind it is beyond."""
        return self._list(partitions, _LATEST)

    def newest(self, partitions: Iterable[PartitionId], records: int) -> dict[PartitionId, int]:
        """Where the last so many offsets of each begin, or all that there are."""
        wanted = list(partitions)
        first, ends = self.earliest(wanted), self.latest(wanted)
        return {partition: max(first[partition], ends[partition] - records) for partition in wanted}

    def since(self, partitions: Iterable[PartitionId], at_ms: int) -> dict[PartitionId, int]:
        """The first record of each that is not older; the end of a partition that has none."""
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
