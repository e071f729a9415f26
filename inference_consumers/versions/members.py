"""The other consumers of a pool, by their heartbeats, and whose turn it is to give up a version.

The heartbeats are in one partition, so that all consumers see them in one order: the first whose heartbeat says that it
waits for its turn has it, until a later one says otherwise or it falls silent. Silence is measured by the broker's
clock, the same for all.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from confluent_kafka import Consumer, Message, TopicPartition

from fairlane import metrics
from fairlane.clock import now_ms
from fairlane.codec import Codec, DecodeError
from fairlane.names import CONTROL_CAPACITY
from fairlane.outcomes import VersionState
from fairlane.records import CapacityReport
from fairlane.settings import KafkaSettings
from fairlane_server.admission_rule import CAPACITY_TTL_MS
from fairlane_server.kafka.feeds import READER, TopicFollower

_QUEUED = frozenset({VersionState.WAITING, VersionState.CHANGING})
_OFFSETS_TIMEOUT_S = 10.0


@dataclass(slots=True)
class PoolMembers:
    """Newest heartbeats of a pool's consumers, given in the order of the log. Pure; one thread at a time."""

    pool: str
    _log_ms: int = 0
    """Time of the newest heartbeat of any pool."""
    _reports: dict[str, tuple[CapacityReport, int]] = field(default_factory=dict)
    _queue: dict[str, None] = field(default_factory=dict)
    """Those that wait for their turn, and the one that has it, the first to wait first."""

    def report(self, report: CapacityReport, appended_at_ms: int) -> None:
        self._log_ms = max(self._log_ms, appended_at_ms)
        for instance in [one for one, (_, at_ms) in self._reports.items() if at_ms < self._log_ms - CAPACITY_TTL_MS]:
            self._leave(instance)
        if report.pool != self.pool:
            return
        if report.draining:
            self._leave(report.instance_id)
            return
        self._reports[report.instance_id] = report, appended_at_ms
        if any(change.state in _QUEUED for change in report.changes):
            self._queue.setdefault(report.instance_id)
        else:
            self._queue.pop(report.instance_id, None)

    def _leave(self, instance: str) -> None:
        self._reports.pop(instance, None)
        self._queue.pop(instance, None)

    def has_turn(self, instance: str) -> bool:
        return next(iter(self._queue), None) == instance

    def all_have(self, version: str, *, but: str) -> bool:
        """Whether every consumer but this one has loaded a version."""
        return all(version in report.versions for name, (report, _) in self._reports.items() if name != but)

    def failed(self, *, but: str) -> set[str]:
        """Versions that a consumer other than this one could not load."""
        return {
            change.version
            for name, (report, _) in self._reports.items()
            for change in report.changes
            if name != but and change.state == VersionState.FAILED
        }


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
