"""What stands in the logs that the work feed follows, as events. What cannot be true is not read: a number like that of
one process would go into the decisions of all."""

from typing import Protocol

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME

from fairlane import metrics, names
from fairlane.codec import Codec, DecodeError, SchemaNotLoadedError
from fairlane.logs import get_logger
from fairlane.records import CapacityReport, DispatchReport, UsageEvent
from fairlane.registry import RegistryError
from fairlane.unreadable import message_headers
from stream_processors.dispatcher.capacity_history import CapacityHistory
from stream_processors.dispatcher.log_clock import LogClock
from stream_processors.dispatcher.scheduling.in_flight import WorkId
from stream_processors.dispatcher.work_events import (
    CapacityHeard,
    FeedEvent,
    Headers,
    WorkSeen,
    check_numbers,
    dispatched_from,
    is_of_a_pool,
)

log = get_logger(__name__)

RECORD_TYPES: dict[str, type[UsageEvent] | type[CapacityReport] | type[DispatchReport]] = {
    names.LEDGER_USAGE: UsageEvent,
    names.CONTROL_CAPACITY: CapacityReport,
    names.CONTROL_DISPATCH: DispatchReport,
}
"""The topics whose records are decoded, and what they are; of all others the headers are enough."""

READER = "work_feed"
"""Of the metric of unreadable records."""

_ASK_AGAIN_MS = 30_000
"""After a schema registry did not answer. Until then what has an unknown schema is passed over: a feed that waited for
it would hold up the decisions about everything else."""

_SKEW_BEGINS_MS = 1_000
_SKEW_ENDS_MS = 500


class Record(Protocol):
    """The part of a confluent message that is read."""

    def topic(self) -> str | None: ...
    def partition(self) -> int | None: ...
    def offset(self) -> int | None: ...
    def value(self) -> bytes | None: ...
    def headers(self) -> Headers | None: ...
    def timestamp(self) -> tuple[int, int]: ...


class WorkRecords:
    """One thread. Capacity reports are kept until ``heard`` asks for them, all others are answered at once."""

    def __init__(self, codec: Codec, instance_id: str) -> None:
        self._codec = codec
        self._instance_id = instance_id
        self._reports = CapacityHistory()
        self._is_live = False
        """Whether what was there before the start is done."""
        self._clock = LogClock()
        self._is_skewed = False
        self._ask_from_ms = 0

    def read(self, record: Record, now_ms: int) -> FeedEvent | None:
        """The event that a record is; None when it is none, or cannot be read, or is kept."""
        topic, partition, offset = record.topic() or "", record.partition() or 0, record.offset() or 0
        try:
            record_type = RECORD_TYPES.get(topic)
            if record_type is None:
                # Headers only: the prompt stays where it is.
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
            # A consumer's clock is not trusted while there is another.
            self._reports.add(read, at_ms if by_broker or not self._is_live else now_ms)
            return None
        if isinstance(read, DispatchReport) and read.instance_id == self._instance_id and by_broker:
            self._clock.heard(read.reported_at_ms, at_ms, now_ms)
        return None if isinstance(read, UsageEvent) and not is_of_a_pool(read) else read

    def _decoded(
        self,
        record_type: type[UsageEvent] | type[CapacityReport] | type[DispatchReport],
        value: bytes | None,
        now_ms: int,
    ) -> UsageEvent | CapacityReport | DispatchReport:
        """Raises DecodeError, or SchemaNotLoadedError while the registry that would have to be asked is away."""
        try:
            return self._codec.decode_any((record_type,), value, may_ask=now_ms >= self._ask_from_ms)
        except RegistryError as error:
            self._ask_from_ms = now_ms + _ASK_AGAIN_MS
            log.warning("work_feed_schema_not_known", reason=str(error))
            return self._codec.decode_any((record_type,), value, may_ask=False)

    def heard(self, now_ms: int) -> list[CapacityHeard]:
        """What consumers reported since the last call, with its age. Call it first when what was there at the start is
        read, for how old a report is can be told when the newest is known; then after every poll, for a feed that lags
        reads old ones too."""
        at_ms = self._clock.broker_ms(now_ms)
        if at_ms is None:
            # Once live, only the newest report says how late it is: our clock may be wrong.
            at_ms = 0 if self._is_live else now_ms
        self._is_live = True
        return self._reports.take(at_ms)

    def show_skew(self) -> None:
        """Bring the gauge up to date, and say so when our clock and the broker's come apart or together."""
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
