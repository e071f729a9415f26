"""Where a group left off: committed offsets with their metadata, and where the log itself begins."""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Protocol

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from fairlane import metrics
from fairlane.logs import get_logger
from fairlane.offsets import CommitPoint, MetadataError
from fairlane.ownership import PartitionId

log = get_logger(__name__)

_CALL_TIMEOUT_S = 5.0
_BACKOFF_S = 0.1


class OffsetSource(Protocol):
    """The part of a confluent consumer this needs. It must be a ``read_committed`` one: then ``committed`` waits for
    offsets of a transaction that is still being committed, instead of answering with those before it."""

    def committed(self, partitions: list[TopicPartition], timeout: float) -> list[TopicPartition]: ...

    def get_watermark_offsets(self, partition: TopicPartition, timeout: float) -> tuple[int, int]: ...


@dataclass(frozen=True, slots=True)
class Resume:
    """Where to read on. ``committed`` is None when the group never committed here."""

    committed: CommitPoint | None
    position: int


def resume_points(
    source: OffsetSource, partitions: Iterable[PartitionId], timeout_s: float
) -> dict[PartitionId, Resume]:
    """Ask the broker where the group left each partition.

    A committed offset that retention has truncated away is data loss: it is counted and logged as an alarm, and reading
    goes on at the head of what is left. So is a committed offset beyond the end.

    Raises KafkaException when the broker did not answer within ``timeout_s``.
    """
    wanted = [TopicPartition(partition.topic, partition.partition) for partition in partitions]
    if not wanted:
        return {}
    deadline = monotonic() + timeout_s
    return {
        PartitionId(found.topic, found.partition): _resume(source, found, deadline)
        for found in _committed(source, wanted, deadline)
    }


def _committed(source: OffsetSource, wanted: list[TopicPartition], deadline: float) -> list[TopicPartition]:
    while True:
        remaining = deadline - monotonic()
        try:
            found = source.committed(wanted, timeout=max(0.1, min(_CALL_TIMEOUT_S, remaining)))
            _raise_errors(found)
        except KafkaException as error:
            # It waits for pending transactional offsets and gives up at its own time-out: the answer is to ask again.
            if error.args[0].code() not in _ASK_AGAIN or monotonic() > deadline:
                raise
        else:
            return found
        sleep(random.uniform(0.5, 1.0) * _BACKOFF_S)  # noqa: S311 - jitter, not a secret


def _raise_errors(found: list[TopicPartition]) -> None:
    for partition in found:
        if partition.error is not None:
            raise KafkaException(partition.error)


def _resume(source: OffsetSource, found: TopicPartition, deadline: float) -> Resume:
    remaining = deadline - monotonic()
    if remaining <= 0:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "the positions were not found in time"))
    low, high = source.get_watermark_offsets(found, timeout=min(_CALL_TIMEOUT_S, remaining))
    if found.offset < 0:
        return Resume(None, low)
    if found.offset > high:
        # The log was replaced by a shorter one: what the group had done says nothing about what stands there now.
        metrics.LOG_TRUNCATED.labels(topic=found.topic).inc()
        log.error("log_replaced", topic=found.topic, partition=found.partition, committed=found.offset, end=high)
        return Resume(None, low)
    if found.offset < low:
        metrics.LOG_TRUNCATED.labels(topic=found.topic).inc()
        log.error("log_truncated", topic=found.topic, partition=found.partition, committed=found.offset, head=low)
    try:
        point = CommitPoint.parse(found.offset, found.metadata)
    except MetadataError as error:
        # Somebody reset the group's offsets with a tool: the offset is what they meant, the bitmap is gone.
        log.error("offset_metadata_unreadable", topic=found.topic, partition=found.partition, error=str(error))
        point = CommitPoint(found.offset)
    return Resume(point, max(low, found.offset))


_ASK_AGAIN = frozenset(
    {
        KafkaError._TIMED_OUT,
        KafkaError._TRANSPORT,
        KafkaError.UNSTABLE_OFFSET_COMMIT,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.NOT_COORDINATOR,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
    }
)
