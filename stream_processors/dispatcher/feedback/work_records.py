"""Decoding of the work feed's records into events. Records with impossible numbers are skipped: those of one process
would affect the decisions of all."""

from typing import Protocol

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME

from fairlane import metrics, names
from fairlane.codec import Codec, DecodeError, SchemaNotLoadedError
from fairlane.logs import get_logger
from fairlane.records import CapacityReport, DispatchReport, UsageEvent
from fairlane.schema_registry import RegistryError
from fairlane.skipping_consumer import message_headers
from stream_processors.dispatcher.feedback.broker_clock import BrokerClock
from stream_processors.dispatcher.feedback.capacity_history import CapacityHistory
from stream_processors.dispatcher.feedback.work_events import (
    AgedCapacityReport,
    FeedEvent,
    Headers,
    WorkSeen,
    check_numbers,
    dispatched_from,
    is_priority_work,
)
from stream_processors.dispatcher.scheduling.in_flight import WorkId

log = get_logger(__name__)

RECORD_TYPES: dict[str, type[UsageEvent] | type[CapacityReport] | type[DispatchReport]] = {
    names.LEDGER_USAGE: UsageEvent,
    names.CONTROL_CAPACITY: CapacityReport,
    names.CONTROL_DISPATCH: DispatchReport,
}
"""Record types by topic. Of all other topics only the headers are read."""

READER = "work_feed"
"""Label of this reader in the metric of unreadable records."""

_ASK_AGAIN_MS = 30_000
"""Pause after a failed schema look-up. Meanwhile records with an unknown schema are skipped: a feed waiting for the
registry would delay all other decisions."""

_SKEW_BEGINS_MS = 1_000
_SKEW_ENDS_MS = 500


class ConsumedMessage(Protocol):
    """The used part of a confluent message."""

    def topic(self) -> str | None: ...
    def partition(self) -> int | None: ...
    def offset(self) -> int | None: ...
    def value(self) -> bytes | None: ...
    def headers(self) -> Headers | None: ...
    def timestamp(self) -> tuple[int, int]: ...


class WorkRecords:
    """For one thread. ``read`` returns an event per record, except that capacity reports are kept for ``heard``."""

    def __init__(self, codec: Codec, instance_id: str) -> None:
        self._codec = codec
        self._instance_id = instance_id
        self._reports = CapacityHistory()
        self._is_live = False
        """Whether the records written before the start have been read."""
        self._clock = BrokerClock()
        self._is_skewed = False
        self._ask_from_ms = 0

    def read(self, record: ConsumedMessage, now_ms: int) -> FeedEvent | None:
        """The event of a record; None if it is irrelevant, unreadable, or kept for ``heard``."""
        topic, partition, offset = record.topic() or "", record.partition() or 0, record.offset() or 0
        try:
            record_type = RECORD_TYPES.get(topic)
            if record_type is None:
                # Headers only: the work item with its prompt is not decoded.
                return WorkSeen(WorkId(topic, partition, offset), dispatched_from(message_headers(record, READER)))
            read = self._decoded(record_type, record.value(), now_ms)
            check_numbers(read)
        except (ValueError, SchemaNotLoadedError) as error:
            why = error.problem if isinstance(error, DecodeError) else str(error)
            metrics.WORK_FEED_UNREADABLE.labels(topic=topic).inc()
            log.error("work_feed_unreadable", topic=topic, partition=partition, offset=offset, problem=why)
            return None
        kind, at_ms = record.timestamp()
        by_broker = kind == TIMESTAMP_LOG_APPEND_TIME
        if isinstance(read, CapacityReport):
            # Do not trust the consumer's timestamp if our own clock can be used.
            self._reports.add(read, at_ms if by_broker or not self._is_live else now_ms)
            return None
        if isinstance(read, DispatchReport) and read.instance_id == self._instance_id and by_broker:
            self._clock.heard(read.reported_at_ms, at_ms, now_ms)
        return None if isinstance(read, UsageEvent) and not is_priority_work(read) else read

    def _decoded(
        self,
        record_type: type[UsageEvent] | type[CapacityReport] | type[DispatchReport],
        value: bytes | None,
        now_ms: int,
    ) -> UsageEvent | CapacityReport | DispatchReport:
        """Decode a value. Raises DecodeError, or SchemaNotLoadedError while the schema registry is unavailable."""
        try:
            return self._codec.decode_any((record_type,), value, may_ask=now_ms >= self._ask_from_ms)
        except RegistryError as error:
            self._ask_from_ms = now_ms + _ASK_AGAIN_MS
            log.warning("work_feed_schema_not_known", reason=str(error))
            return self._codec.decode_any((record_type,), value, may_ask=False)

    def heard(self, now_ms: int) -> list[AgedCapacityReport]:
        """Capacity reports since the last call, with their ages. Call it first once the records written before the
        start have been read, since ages need the newest report; then after every poll, since a lagging feed reads old
        reports too."""
        at_ms = self._clock.broker_ms(now_ms)
        if at_ms is None:
            # Without a heartbeat our clock may be wrong: once live, take ages relative to the newest report.
            at_ms = 0 if self._is_live else now_ms
        self._is_live = True
        return self._reports.take(at_ms)

    def show_skew(self) -> None:
        """Update the skew gauge; log when the skew to the broker's clock begins or ends."""
        skew_ms = self._clock.skew_ms
        if skew_ms is None:
            return
        metrics.CLOCK_SKEW_SECONDS.set(skew_ms / 1000)
        if not self._is_skewed and abs(skew_ms) >= _SKEW_BEGINS_MS:
            self._is_skewed = True
            log.warning("clock_skewed", ahead_of_broker_s=skew_ms / 1000)
        elif self._is_skewed and abs(skew_ms) < _SKEW_ENDS_MS:
            self._is_skewed = False
            log.info("clock_right_again", ahead_of_broker_s=skew_ms / 1000)
