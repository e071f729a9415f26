"""What a request was asked with, read from the work item in the log: the input, the history and the passages."""

import base64
from dataclasses import asdict
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from fairlane import metrics
from fairlane.cluster import reason_of
from fairlane.codec import Codec, DecodeError
from fairlane.kafka_config import read_committed_consumer
from fairlane.logs import get_logger
from fairlane.names import is_priority, observer_group
from fairlane.records import SourceCoordinate, WorkItem
from fairlane.schema_registry import RegistryError
from fairlane.settings import Settings
from fairlane.skipping_consumer import SkippedRange, SkippingConsumer

log = get_logger(__name__)

_READER = "label-sources"
_READ_TIMEOUT_S = 2.0
_NOT_THERE = frozenset({KafkaError._AUTO_OFFSET_RESET, KafkaError._PARTITION_EOF})
"""Retention moved the beginning of the log, or a topic that was made anew is shorter."""


class WorkItemLogError(Exception):
    """The broker does not return the record now, or the schema registry not its schema: try again later."""


class WorkItemLog:
    """Reads single work items by their coordinates, with a consumer that joins no group. For one thread."""

    def __init__(self, settings: Settings, codec: Codec) -> None:
        self._settings = settings
        self._codec = codec
        self._consumer: Consumer | None = None
        self._skipped: list[SkippedRange] = []
        """Damaged batches that the read under way met."""

    def close(self) -> None:
        """Disconnect until the next read. A consumer that nobody polls keeps what its broker reports."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def read(self, place: SourceCoordinate) -> WorkItem | None:
        """The work item there; None if it is not in the log any more, or cannot be read. Raises WorkItemLogError."""
        if not is_priority(place.topic):
            return None
        self._skipped.clear()
        try:
            message = self._opened(place).poll(_READ_TIMEOUT_S)
        except KafkaException as error:
            self.close()
            raise WorkItemLogError(reason_of(error)) from None
        if message is None:
            if any(one.first <= place.offset < one.end for one in self._skipped):
                return None
            raise WorkItemLogError(f"no record within {_READ_TIMEOUT_S:g} s")
        if (problem := message.error()) is not None:
            if problem.code() in _NOT_THERE:
                return None
            raise WorkItemLogError(problem.str())
        if message.offset() != place.offset:
            return None
        try:
            return self._codec.decode_as(WorkItem, message.value())
        except RegistryError as error:
            raise WorkItemLogError(str(error)) from None
        except DecodeError as error:
            metrics.UNREADABLE_RECORDS.labels(reader=_READER, problem=error.problem).inc()
            log.error("work_unreadable", topic=place.topic, partition=place.partition, offset=place.offset)
            return None

    def _opened(self, place: SourceCoordinate) -> Consumer:
        if self._consumer is None:
            config = read_committed_consumer(self._settings, observer_group(_READER)) | {"enable.partition.eof": True}
            self._consumer = SkippingConsumer(config, _READER, self._skipped.append)
        self._consumer.assign([TopicPartition(place.topic, place.partition, place.offset)])
        return self._consumer


def input_of(item: WorkItem) -> dict[str, Any]:
    """The given fields of the input, an image in base64; with ``history`` and ``passages`` if there are any."""
    plain = {name: value for name, value in asdict(item.request.input).items() if value is not None}
    if item.request.input.image is not None:
        plain["image"] = base64.b64encode(item.request.input.image).decode()
    if item.history:
        plain["history"] = [asdict(one) for one in item.history]
    if item.passages:
        plain["passages"] = [asdict(one) for one in item.passages]
    return plain
