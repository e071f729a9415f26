"""Events of the work feed and their effect on in-flight tracking. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fairlane import headers
from fairlane.names import is_name, pool_of_priority
from fairlane.offsets import CommitPoint
from fairlane.records import CapacityReport, DispatchReport, SourceCoordinate, UsageEvent
from stream_processors.dispatcher.scheduling.in_flight import Dispatched, InFlight, Settled, WorkId

Headers = Mapping[str, str | bytes | None] | Sequence[tuple[str, str | bytes | None]]

_MOST = 10**12
"""Upper bound of a rate, size or count of one process; sums of such values still fit into any record."""

_LEAST_RATE = 0.001
"""Least positive rate, since rates are divisors."""


@dataclass(frozen=True, slots=True)
class WorkSeen:
    """A work item was read back from a priority topic."""

    work: WorkId
    dispatched: Dispatched


@dataclass(frozen=True, slots=True)
class PoolCommitted:
    """Committed offset of a pool's group in one partition of a priority topic. ``in`` tells whether an offset at or
    beyond it is in the done set."""

    topic: str
    partition: int
    point: CommitPoint

    def __contains__(self, offset: object) -> bool:
        distance = offset - self.point.offset if isinstance(offset, int) else -1
        return distance >= 0 and bool(self.point.done_beyond >> distance & 1)


@dataclass(frozen=True, slots=True)
class PartitionsKnown:
    """The partition count of a priority topic."""

    topic: str
    count: int


@dataclass(frozen=True, slots=True)
class PartitionRecreated:
    """The log of a partition was replaced by a new one: old offsets are void."""

    topic: str
    partition: int


@dataclass(frozen=True, slots=True)
class AgedCapacityReport:
    """A consumer's capacity report and its age when passed on: seconds or more if it was written before this process
    started, or if the feed lags."""

    report: CapacityReport
    age_ms: int = 0


WorkEvent = WorkSeen | UsageEvent | PoolCommitted | PartitionsKnown | PartitionRecreated
FeedEvent = WorkEvent | AgedCapacityReport | DispatchReport


def apply_to_in_flight(in_flight: InFlight, event: WorkEvent) -> Settled | None:
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
    except KeyError as error:
        raise ValueError(f"the header {error.args[0]} is missing") from None
    _check("cost of tokens", cost_tokens)
    return Dispatched(source, tenant, dispatcher_id, cost_tokens)


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
