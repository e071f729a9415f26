"""First, last and timestamp offsets of partitions from the broker, batched and with timeouts."""

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
