"""Records of the work feed, their events, and the effect of these on in-flight tracking. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME

from fairlane import headers, metrics, names
from fairlane.codec import Codec, DecodeError, SchemaNotLoadedError
from fairlane.frozen import frozen_dataclass
from fairlane.logs import get_logger
from fairlane.money import LARGEST_NANOS
from fairlane.names import is_backfill, is_name, pool_of_priority
from fairlane.offsets import CommitPoint
from fairlane.records import CapacityReport, DispatchReport, SourceCoordinate, UsageEvent
from fairlane.schema_registry import RegistryError
from fairlane.skipping_consumer import SkippedRange, message_headers
from stream_processors.dispatcher.budgets.ledger import ReadUsage
from stream_processors.dispatcher.feedback.broker_clock import BrokerClock
from stream_processors.dispatcher.scheduling.in_flight import Dispatched, InFlight, SettledWork, WorkId

Headers = Mapping[str, str | bytes | None] | Sequence[tuple[str, str | bytes | None]]

_MOST = 10**12
"""Upper bound of a rate, size or count of one process; sums of such values still fit into any record."""

_LEAST_RATE = 0.001
"""Least positive rate, since rates are divisors."""


@frozen_dataclass(frozen=True, slots=True)
class WorkSeen:
    """A work item was read back from a priority topic."""

    work: WorkId
    dispatched: Dispatched


@frozen_dataclass(frozen=True, slots=True)
class PoolCommitted:
    """Committed offset of a pool's group in one partition of a priority topic. ``in`` tells whether an offset at or
    beyond it is in the done set."""

    topic: str
    partition: int
    point: CommitPoint

    def __contains__(self, offset: object) -> bool:
        distance = offset - self.point.offset if isinstance(offset, int) else -1
        return distance >= 0 and bool(self.point.done_beyond >> distance & 1)


@frozen_dataclass(frozen=True, slots=True)
class PartitionsKnown:
    """The partition count of a priority topic."""

    topic: str
    count: int


@frozen_dataclass(frozen=True, slots=True)
class PartitionRecreated:
    """The log of a partition was replaced by a new one: old offsets are void."""

    topic: str
    partition: int


@frozen_dataclass(frozen=True, slots=True)
class AgedCapacityReport:
    """A consumer's capacity report and its age when passed on: seconds or more if it was written before this process
    started, or if the feed lags."""

    report: CapacityReport
    age_ms: int = 0


@frozen_dataclass(frozen=True, slots=True)
class UsageStarted:
    """Reading of a partition of ``ledger.usage`` starts at this offset."""

    partition: int
    offset: int


@frozen_dataclass(frozen=True, slots=True)
class UsageRead:
    """All usage of one poll, with its offsets; also that of answers from the cache, which settle no work, and the
    places of what cannot be read."""

    records: tuple[ReadUsage, ...]


WorkEvent = WorkSeen | UsageEvent | PoolCommitted | PartitionsKnown | PartitionRecreated
FeedEvent = WorkEvent | UsageStarted | UsageRead | AgedCapacityReport | DispatchReport


def apply_to_in_flight(in_flight: InFlight, event: WorkEvent) -> SettledWork | None:
    """Apply the event to in-flight tracking. Returns the work it settles, if any."""
    match event:
        case WorkSeen():
            return in_flight.dispatched(event.work, event.dispatched)
        case UsageEvent():
            work = event.work
            return in_flight.settled(WorkId(work.topic, work.partition, work.offset), event)
        case PoolCommitted():
            in_flight.committed(event.topic, event.partition, event.point.offset, event)
        case PartitionsKnown():
            in_flight.set_partitions(event.topic, event.count)
        case PartitionRecreated():
            in_flight.restart(event.topic, event.partition)
    return None


def dispatched_from(record_headers: Headers | None) -> Dispatched:
    """Parse the headers of a work item. Tenant and dispatcher are empty if an older dispatcher wrote it.

    Raises ValueError for headers that no dispatcher can have written.
    """
    found = {name: value for name, value in dict(record_headers or ()).items() if isinstance(value, bytes)}
    try:
        source = SourceCoordinate(
            found[headers.SOURCE_TOPIC].decode(),
            int(found[headers.SOURCE_PARTITION]),
            int(found[headers.SOURCE_OFFSET]),
        )
        cost_tokens = int(found[headers.COST_TOKENS])
        tenant = found.get(headers.TENANT, b"").decode()
        dispatcher_id = found.get(headers.DISPATCHER_ID, b"").decode()
        reserved = found.get(headers.RESERVED_NANOS)
        reserved_nanos = None if reserved is None else int(reserved)
        caller = found.get(headers.REQUESTED_BY)
        requested_by = None if caller is None else caller.decode()
        # Of a row that was handed back, the source is in a requeue topic.
        is_batch = headers.BATCH_ROW in found or is_backfill(source.topic)
    except KeyError as error:
        raise ValueError(f"the header {error.args[0]} is missing") from None
    _check("cost of tokens", cost_tokens)
    if reserved_nanos is not None and not 0 <= reserved_nanos <= LARGEST_NANOS:
        raise ValueError(f"reserved nanos {reserved_nanos}")
    return Dispatched(source, tenant, dispatcher_id, cost_tokens, reserved_nanos, requested_by, is_batch)


def check_numbers(record: CapacityReport | DispatchReport | UsageEvent) -> None:
    """Raises ValueError for impossible numbers: one of them would affect the decisions of every dispatcher."""
    match record:
        case CapacityReport():
            if not is_name(record.pool):
                raise ValueError("no name of a pool")
            for rate in (record.prefill_tokens_per_s, record.decode_tokens_per_s, record.cost_tokens_per_s):
                _check("rate", rate, least=_LEAST_RATE)
            for size in (record.max_batch_size, record.max_batch_tokens, record.in_flight_items):
                _check("size", size)
            _check("size", record.in_flight_tokens)
            _check("batch_fill", record.batch_fill)
            for partition in record.partitions:
                _check("partition", partition)
        case DispatchReport():
            for load in record.pools:
                for waiting in load.classes:
                    _check("backlogged_weight", waiting.backlogged_weight)
        case UsageEvent():
            for tokens in (record.prompt_tokens, record.completion_tokens, record.cost_tokens):
                _check("count of tokens", tokens)


def _check(name: str, value: float, least: float = 0.0) -> None:
    """Raises ValueError outside 0 and [least, _MOST]; NaN fails every comparison and is refused too."""
    if not (value == 0 or least <= value <= _MOST):
        raise ValueError(f"{name} {value}")


def is_priority_work(usage: UsageEvent) -> bool:
    """Whether this settles work of a priority topic; other usage is ignored."""
    try:
        pool_of_priority(usage.work.topic)
    except ValueError:
        return False
    return True


_Kind = tuple[str, str, bool, bool]


@dataclass(slots=True)
class CapacityHistory:
    """Takes reports in log order and keeps at most four per pool and consumer.

    These suffice to know which consumers of a pool were alive at its last report, and its rates: the newest report, the
    newest with a measured rate, and the draining ones.
    """

    _newest: dict[_Kind, tuple[CapacityReport, int]] = field(default_factory=dict)
    _newest_at_ms: int = 0

    def add(self, report: CapacityReport, at_ms: int) -> None:
        """Add a report; ``at_ms`` is its time by the broker's clock, as far as that is known."""
        kind = (report.pool, report.instance_id, report.draining, report.cost_tokens_per_s > 0)
        # Removed first, so that it is inserted at the end.
        self._newest.pop(kind, None)
        self._newest[kind] = (report, at_ms)
        self._newest_at_ms = max(self._newest_at_ms, at_ms)

    def take(self, now_ms: int) -> list[AgedCapacityReport]:
        """Remove and return the reports in log order. Ages are relative to ``now_ms`` or to the newest record ever
        added, whichever is later."""
        taken, self._newest = self._newest, {}
        latest_ms = max(now_ms, self._newest_at_ms)
        return [AgedCapacityReport(report, latest_ms - at_ms) for report, at_ms in taken.values()]


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
    """For one thread. ``read`` returns an event per record, except that capacity reports are kept for ``heard``, and
    usage also for ``usage_read``."""

    def __init__(self, codec: Codec, instance_id: str) -> None:
        self._codec = codec
        self._instance_id = instance_id
        self._reports = CapacityHistory()
        self._usage: list[ReadUsage] = []
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
            if topic == names.LEDGER_USAGE:
                self._usage.append(ReadUsage(partition, offset, None))
            return None
        kind, at_ms = record.timestamp()
        by_broker = kind == TIMESTAMP_LOG_APPEND_TIME
        if isinstance(read, CapacityReport):
            # Do not trust the consumer's timestamp if our own clock can be used.
            self._reports.add(read, at_ms if by_broker or not self._is_live else now_ms)
            return None
        if isinstance(read, DispatchReport) and read.instance_id == self._instance_id and by_broker:
            self._clock.heard(read.reported_at_ms, at_ms, now_ms)
        if isinstance(read, UsageEvent):
            self._usage.append(ReadUsage(partition, offset, read))
            return read if is_priority_work(read) else None
        return read

    def passed_over(self, skipped: SkippedRange) -> None:
        """Note a range of which no record is read, in the order of reading."""
        if skipped.topic == names.LEDGER_USAGE:
            self._usage.append(ReadUsage(skipped.partition, skipped.end - 1, None))

    def usage_read(self) -> UsageRead | None:
        """The usage read since the last call, if any."""
        usage, self._usage = self._usage, []
        return UsageRead(tuple(usage)) if usage else None

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
