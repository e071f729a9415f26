"""Existing partitions of a topic and their ends, queried with deadlines."""

import time
from collections.abc import Callable
from time import monotonic
from typing import Any, Protocol, TypeVar

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from fairlane.errors import Unavailable

AnswerT = TypeVar("AnswerT")

CALL_TIMEOUT_S = 2.0
_TOPIC_GRACE_S = 1.0
_RETRY_S = 0.1

PERMANENT_ERRORS = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError._AUTHENTICATION,
    }
)
"""Errors that trying again does not mend."""


class MetadataSource(Protocol):
    """The part of any confluent client this needs."""

    def list_topics(self, topic: str, timeout: float) -> Any: ...


class TopicSource(MetadataSource, Protocol):
    """The part of a confluent consumer this needs."""

    def get_watermark_offsets(self, partition: TopicPartition, timeout: float) -> tuple[int, int]: ...


def partitions_of(source: MetadataSource, topic: str, timeout_s: float) -> set[int]:
    """The partitions of a topic; none when it does not exist.

    Raises:
        Unavailable: it may not be read.
        KafkaException: no answer within ``timeout_s``.
    """
    metadata = source.list_topics(topic, timeout=timeout_s).topics.get(topic)
    if metadata is None:
        return set()
    if metadata.error is not None and metadata.error.code() in PERMANENT_ERRORS:
        raise Unavailable(f"{topic}: {metadata.error.str()}")
    return set(metadata.partitions)


def existing_partitions(source: MetadataSource, topic: str, deadline: float) -> list[int]:
    """The partitions of a topic that must exist. Deadlines are of ``time.monotonic``.

    Raises:
        Unavailable: the topic does not exist or may not be read.
        KafkaException: no answer before the deadline.
    """
    # Metadata of a topic that was made a moment ago may still be on its way.
    missing_until = min(deadline, monotonic() + _TOPIC_GRACE_S)
    while not (partitions := ask(lambda timeout_s: partitions_of(source, topic, timeout_s), deadline)):
        if monotonic() >= missing_until:
            raise Unavailable(f"{topic} does not exist; `fairlane tenants apply` makes a tenant's topics")
        time.sleep(_RETRY_S)
    return sorted(partitions)


def end_of(source: TopicSource, topic: str, partition: int, deadline: float) -> int:
    """The offset of the first record that a ``read_committed`` reader cannot have seen yet.

    Raises:
        KafkaException: no answer before the deadline.
    """
    wanted = TopicPartition(topic, partition)
    _low, end = ask(lambda timeout_s: source.get_watermark_offsets(wanted, timeout=timeout_s), deadline)
    return end


def ask(call: Callable[[float], AnswerT], deadline: float) -> AnswerT:
    """Call with a timeout, again until it answers. Raises the last KafkaException when the deadline has passed."""
    while True:
        try:
            return call(max(0.1, min(CALL_TIMEOUT_S, deadline - monotonic())))
        except KafkaException:
            if monotonic() >= deadline:
                raise
            time.sleep(_RETRY_S)
