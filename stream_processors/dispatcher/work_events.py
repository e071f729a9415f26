"""What the work feed hands on, and what in-flight tracking makes of it. Pure: messages in, events out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fairlane import headers
from fairlane.names import is_name, pool_of_priority
from fairlane.offsets import CommitPoint
from fairlane.records import CapacityReport, DispatchReport, SourceCoordinate, UsageEvent
from stream_processors.dispatcher.scheduling.in_flight import Dispatched, InFlight, Settled, WorkId

Headers = Mapping[str, str | bytes | None] | Sequence[tuple[str, str | bytes | None]]

_MOST = 10**12
"""No rate, size or count of one process is larger; sums of these still fit into any record."""

_LEAST_RATE = 0.001
"""A rate is 0 or at least this: it is divided by."""


@dataclass(frozen=True, slots=True)
class WorkSeen:
    """A work item was read back from a priority topic."""

    work: WorkId
    dispatched: Dispatched


@dataclass(frozen=True, slots=True)
class PoolCommitted:
    """How far a pool's group is with one partition of a priority topic: usable as the container of what is done beyond
    the offset."""

    topic: str
    partition: int
    point: CommitPoint

    def __contains__(self, offset: object) -> bool:
        distance = offset - self.point.offset if isinstance(offset, int) else -1
        return distance >= 0 and bool(self.point.done_beyond >> distance & 1)


@dataclass(frozen=True, slots=True)
class PartitionsKnown:
    """How many partitions a priority topic has."""

    topic: str
    count: int


@dataclass(frozen=True, slots=True)
class LogReplaced:
    """The log of a partition is another one now, with offsets of its own."""

    topic: str
    partition: int


@dataclass(frozen=True, slots=True)
class CapacityHeard:
    """What a consumer reported, and how long before it was handed on: seconds and more if it was there before we came,
    or if we read late."""

    report: CapacityReport
    age_ms: int = 0


WorkEvent = WorkSeen | UsageEvent | PoolCommitted | PartitionsKnown | LogReplaced
FeedEvent = WorkEvent | CapacityHeard | DispatchReport


def track(in_flight: InFlight, event: WorkEvent) -> Settled | None:
    """Tell in-flight tracking. Returns what is settled by this event, if anything."""
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
        case LogReplaced():
            in_flight.restart(event.topic, event.partition)
    return None


def dispatched_from(record_headers: Headers | None) -> Dispatched:
    """What the headers of a work item say. Tenant and dispatcher are empty when an older dispatcher wrote it.

    Raises ValueError when it is no work item of a dispatcher.
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
    """Raises ValueError for numbers that cannot be: one such number would go into the decisions of every dispatcher."""
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
    """Not a number compares with nothing, and so is none of these either."""
    if not (value == 0 or least <= value <= _MOST):
        raise ValueError(f"{name} {value}")


def is_of_a_pool(usage: UsageEvent) -> bool:
    """Whether this settles work of a priority topic, which is all that is followed."""
    try:
        pool_of_priority(usage.work.topic)
    except ValueError:
        return False
    return True
