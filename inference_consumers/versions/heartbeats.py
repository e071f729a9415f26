"""Follower of the heartbeats of a pool's consumers."""

import threading
from collections.abc import Callable

from confluent_kafka import Consumer, Message, TopicPartition

from fairlane import metrics
from fairlane.clock import now_ms
from fairlane.codec import Codec, DecodeError
from fairlane.names import CONTROL_CAPACITY
from fairlane.records import CapacityReport
from fairlane.settings import KafkaSettings
from fairlane_server.admission_rule import CAPACITY_TTL_MS
from fairlane_server.kafka.feeds import READER, TopicFollower
from inference_consumers.versions.members import PoolMembers

_OFFSETS_TIMEOUT_S = 10.0


class PoolHeartbeats(TopicFollower):
    """Follows the heartbeats of all consumers from a moment ago on. Any thread may ask."""

    def __init__(
        self, settings: KafkaSettings, codec: Codec, pool: str, instance: str, on_failure: Callable[[Exception], None]
    ) -> None:
        """``instance`` is this consumer."""
        super().__init__(settings, CONTROL_CAPACITY)
        self._codec = codec
        self._instance = instance
        self._members = PoolMembers(pool)
        self._lock = threading.Lock()
        self.on_failure(on_failure)

    def has_turn(self) -> bool:
        with self._lock:
            return self._members.has_turn(self._instance)

    def all_others_have(self, version: str) -> bool:
        with self._lock:
            return self._members.all_have(version, but=self._instance)

    def failed_elsewhere(self) -> set[str]:
        with self._lock:
            return self._members.failed(but=self._instance)

    def _first_offset(self, consumer: Consumer, partition: int, low: int, end: int) -> int:  # noqa: ARG002 - the base's
        since = TopicPartition(self._topic, partition, now_ms() - CAPACITY_TTL_MS)
        (found,) = consumer.offsets_for_times([since], timeout=_OFFSETS_TIMEOUT_S)
        return found.offset if found.offset >= 0 else end

    def _take(self, message: Message) -> None:
        try:
            report = self._codec.decode_any((CapacityReport,), message.value())
        except DecodeError as error:
            metrics.UNREADABLE_RECORDS.labels(reader=READER, problem=error.problem).inc()
            return
        with self._lock:
            self._members.report(report, message.timestamp()[1])
