"""Committed offsets of a group: topic ids, checks against the current logs, and where to resume reading."""

import random
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from time import monotonic, sleep
from typing import TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka import TopicCollection as Topics

from fairlane import metrics
from fairlane.kafka_clients import KafkaAdmin
from fairlane.kafka_config import connection
from fairlane.logs import get_logger
from fairlane.offsets import CommitPoint, MetadataError
from fairlane.ownership import PartitionId
from fairlane.settings import KafkaSettings


class LogPosition(StrEnum):
    """How a stored position fits the current log."""

    IN_LOG = "in_log"
    HEAD_REMOVED = "head_removed"
    """Retention removed records that were not read."""
    CUT = "cut"
    """The same topic ends before the position: a replica without the last records became the leader."""
    RECREATED = "recreated"
    """Another topic of the same name: the position does not apply to it."""


@dataclass(frozen=True, slots=True)
class PartitionLog:
    """A partition's log: first offset, end offset, and topic id ("" when unknown)."""

    first: int
    end: int
    topic_id: str = ""


def resume_offset(position: int, topic_id: str, log: PartitionLog) -> tuple[int, LogPosition]:
    """The offset to resume from, and why.

    A truncated log is resumed at its end: all that is left of it was read before. A topic that was deleted and created
    again is read from its beginning: nothing of it was read.

    Args:
        position: the stored position.
        topic_id: of the topic it was stored for; "" (unknown) counts as the same topic.
        log: the current log.
    """
    if topic_id and log.topic_id and topic_id != log.topic_id:
        return log.first, LogPosition.RECREATED
    if position > log.end:
        return log.end, LogPosition.CUT
    if position < log.first:
        return log.first, LogPosition.HEAD_REMOVED
    return position, LogPosition.IN_LOG


_CALL_TIMEOUT_S = 5.0
_GRACE_S = 0.5
_NO_ID = "AAAAAAAAAAAAAAAAAAAAAA"
"""The zero id, which brokers before 2.8 return."""


class TopicIds:
    """Looks up topic ids with an admin client that exists only during the call, which is once per assignment."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings

    def __call__(self, topics: Collection[str], timeout_s: float) -> Mapping[str, str]:
        """The id of each of these topics that exists and has one.

        Raises KafkaException when the broker refuses or does not answer in time.
        """
        wanted = sorted(set(topics))
        if not wanted:
            return {}
        timeout_s = max(0.1, min(_CALL_TIMEOUT_S, timeout_s))
        deadline = monotonic() + timeout_s + _GRACE_S
        admin = KafkaAdmin(connection(self._settings))
        found = {}
        for topic, answer in admin.describe_topics(Topics(wanted), request_timeout=timeout_s).items():
            try:
                uuid = answer.result(max(0.0, deadline - monotonic())).topic_id
            except TimeoutError:
                reason = "the ids of the topics did not arrive in time"
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT, reason)) from None
            except KafkaException as error:
                if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise
            else:
                # URL-safe base64, as in Kafka's tools; librdkafka uses the standard alphabet.
                topic_id = str(uuid).replace("+", "-").replace("/", "_")
                if topic_id != _NO_ID:
                    found[topic] = topic_id
        return found


log = get_logger(__name__)

_BACKOFF_S = 0.1

AnswerT = TypeVar("AnswerT")


TopicIdLookup = Callable[[Collection[str], float], Mapping[str, str]]
"""Look up topic ids by name, with a timeout in seconds: see :class:`fairlane.committed.TopicIds`."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Resume point of a partition.

    Attributes:
        committed: what is done; None when the group has no commit, or the commit is ``lost``.
        position: the offset to resume from.
        topic_id: "" when unknown.
        lost: the commit is beyond the end of the log, or of another topic of this name. Commit ``position`` at once:
            the log may grow past the stale offset.
    """

    committed: CommitPoint | None
    position: int
    topic_id: str = ""
    lost: bool = False


def resume_points(
    consumer: Consumer,
    partitions: Iterable[PartitionId],
    timeout_s: float,
    topic_ids: TopicIdLookup | None = None,
) -> dict[PartitionId, ResumePoint]:
    """Determine where to resume each partition.

    The consumer must be ``read_committed``: ``committed`` then waits for the offsets of a pending transaction instead
    of returning the ones before it.

    A committed offset that is not in the log is counted and logged as an alarm; ``fairlane.committed`` decides where to
    resume. Without ``topic_ids`` a topic that was created again cannot be distinguished from a truncated one.

    Raises KafkaException when the broker does not answer within ``timeout_s``.
    """
    wanted = [TopicPartition(partition.topic, partition.partition) for partition in partitions]
    if not wanted:
        return {}
    deadline = monotonic() + timeout_s
    found = _ask(lambda timeout_s: _committed(consumer, wanted, timeout_s), deadline)
    ids: Mapping[str, str] = {}
    if topic_ids is not None:
        ids = _ask(partial(topic_ids, {partition.topic for partition in wanted}), deadline)
    return {
        PartitionId(partition.topic, partition.partition): _resume(
            consumer, partition, ids.get(partition.topic, ""), deadline
        )
        for partition in found
    }


def topic_ids_of(found: Mapping[PartitionId, ResumePoint]) -> dict[str, str]:
    """Topic ids by topic; "" when unknown."""
    return {partition.topic: resume.topic_id for partition, resume in found.items()}


def stale_partitions(found: Mapping[PartitionId, ResumePoint]) -> frozenset[PartitionId]:
    """The partitions whose commit is not in the log."""
    return frozenset(partition for partition, resume in found.items() if resume.lost)


def alarm(finding: LogPosition, topic: str, partition: int, position: int, log_now: PartitionLog) -> None:
    """Count and log any finding except IN_LOG."""
    if finding is LogPosition.IN_LOG:
        return
    if finding is LogPosition.HEAD_REMOVED:
        metrics.LOG_TRUNCATED.labels(topic=topic).inc()
    else:
        metrics.LOG_REPLACED.labels(topic=topic, finding=finding).inc()
    log.error(
        "position_not_in_log",
        finding=str(finding),
        topic=topic,
        partition=partition,
        position=position,
        first=log_now.first,
        end=log_now.end,
    )


def _ask(call: Callable[[float], AnswerT], deadline: float) -> AnswerT:
    """Call with a timeout, again after a transient error. Raises KafkaException."""
    while True:
        try:
            return call(max(0.1, min(_CALL_TIMEOUT_S, deadline - monotonic())))
        except KafkaException as error:
            if error.args[0].code() not in _ASK_AGAIN or monotonic() > deadline:
                raise
        sleep(random.uniform(0.5, 1.0) * _BACKOFF_S)  # noqa: S311 - jitter, not a secret


def _committed(consumer: Consumer, wanted: list[TopicPartition], timeout_s: float) -> list[TopicPartition]:
    # It waits for the offsets of a pending transaction only until its own timeout.
    found = consumer.committed(wanted, timeout=timeout_s)
    for partition in found:
        if partition.error is not None:
            raise KafkaException(partition.error)
    return found


def _resume(consumer: Consumer, found: TopicPartition, topic_id: str, deadline: float) -> ResumePoint:
    remaining = deadline - monotonic()
    if remaining <= 0:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "the positions were not found in time"))
    first, end = consumer.get_watermark_offsets(found, timeout=min(_CALL_TIMEOUT_S, remaining))
    if found.offset < 0:
        return ResumePoint(None, first, topic_id)
    try:
        point = CommitPoint.parse(found.offset, found.metadata)
    except MetadataError as error:
        # Another tool has reset the group's offsets: the offset is intended, the bitmap is lost.
        log.error("offset_metadata_unreadable", topic=found.topic, partition=found.partition, error=str(error))
        point = CommitPoint(found.offset)
    log_now = PartitionLog(first, end, topic_id)
    position, finding = resume_offset(point.offset, point.topic_id, log_now)
    if finding is LogPosition.IN_LOG and point.cut_at(end) != point:
        # The first undone record is still in the log; done records behind it are not.
        finding = LogPosition.CUT
    alarm(finding, found.topic, found.partition, point.offset, log_now)
    if finding is LogPosition.RECREATED or position < point.offset:
        return ResumePoint(None, position, topic_id, lost=True)
    return ResumePoint(replace(point.cut_at(end), topic_id=topic_id), position, topic_id)


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
