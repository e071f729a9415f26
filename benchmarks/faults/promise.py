"""The promise, held against everything that is in the log and in Postgres once a fault run is over."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field

import psycopg
from confluent_kafka import Message

from benchmarks.faults.rig import Deployment
from deploy.demo.checks import check, committed_records
from fairlane import names
from fairlane.committed import resume_points
from fairlane.kafka_clients import KafkaConsumer
from fairlane.kafka_config import read_committed_consumer
from fairlane.offsets import OffsetTracker
from fairlane.outcomes import Outcome, Priority
from fairlane.ownership import PartitionId
from fairlane.records import InferenceReply, SourceCoordinate, UsageEvent, WorkItem
from fairlane.settings import KafkaSettings

_READ_TIMEOUT_S = 60.0
_SHOWN = 5
_COUNT_ROWS = "SELECT count(*) FROM results WHERE tenant = ANY(%s)"


@dataclass(slots=True)
class PromiseReport:
    """What a run came to; ``problems`` is empty when the promise was kept.

    Attributes:
        lost: requests without a reply.
        twice: requests with more than one.
        rows: requests whose row in Postgres is missing or is not what the reply topics say, and rows of nobody.
    """

    requests: int
    lost: int = 0
    twice: int = 0
    rows: int = 0
    problems: list[str] = field(default_factory=list)

    def note(self, what: str, found: Collection[object]) -> None:
        """Something that must not be was found, unless there is none of it."""
        if found:
            self.problems.append(f"{len(found)} {what}, for instance {sorted(map(str, found))[:_SHOWN]}")


def examine(
    deployed: Deployment, expected: Mapping[str, str], *, postgres_dsn: str | None, timeout_s: float
) -> PromiseReport:
    """Read everything and compare.

    Args:
        deployed: whose log it is.
        expected: the outcome that each published request must have.
        postgres_dsn: where the recorder writes, as an operator; None if there is no recorder.
        timeout_s: how long the recorder may take to catch up.
    """
    report = PromiseReport(len(expected))
    given_again = _examine_replies(deployed, expected, report)
    work = _examine_work(deployed, expected, given_again, report)
    # Committed offsets and done sets cover every record of both hops.
    requests = _records(deployed, deployed.source_topics)
    for group, records in ((deployed.dispatcher_group, requests), (deployed.work_group, work)):
        report.note(f"records are not settled by {group}", unsettled(deployed.settings, group, records))
    if postgres_dsn is not None:
        _examine_rows(deployed, expected, report, postgres_dsn, timeout_s)
    return report


def _examine_replies(deployed: Deployment, expected: Mapping[str, str], report: PromiseReport) -> set[str]:
    """Returns the ids of requests that got an earlier answer again."""
    final: dict[str, list[InferenceReply]] = {}
    for record in _records(deployed, [names.replies_topic(tenant) for tenant in deployed.tenants]):
        reply = deployed.codec.decode_as(InferenceReply, record.value())
        if not reply.replayed:
            final.setdefault(reply.request_id, []).append(reply)
    lost = expected.keys() - final.keys()
    twice = [request_id for request_id, found in final.items() if len(found) > 1]
    report.lost, report.twice = len(lost), len(twice)
    report.note("requests have no reply", lost)
    report.note("requests have more than one reply", twice)
    report.note("replies are to nobody's request", final.keys() - expected.keys())
    unexpected = [
        f"{request_id}: {reply.outcome} {reply.code}"
        for request_id, found in final.items()
        for reply in found
        if reply.outcome != expected.get(request_id)
    ]
    report.note("replies have another outcome than expected", unexpected)
    return {request_id for request_id, found in final.items() if any(reply.cache_use for reply in found)}


def _examine_work(
    deployed: Deployment, expected: Mapping[str, str], given_again: Set[str], report: PromiseReport
) -> list[Message]:
    """One work item per request that was to run, and one more each time that a consumer handed it back; one usage event
    per work item, and per answer that was given again."""
    codec, pool = deployed.codec, deployed.pool
    work = _records(deployed, [names.priority_topic(pool, priority) for priority in Priority])
    handed_back = _records(deployed, [names.returned_topic(pool)])
    dispatched, returned = (
        Counter(codec.decode_as(WorkItem, record.value()).request.request_id for record in records)
        for records in (work, handed_back)
    )
    to_run = {request_id for request_id, outcome in expected.items() if outcome == Outcome.OK}
    report.note("requests were never dispatched", to_run - given_again - dispatched.keys())
    report.note("requests were run as well as answered from a cache", given_again & dispatched.keys())
    again = [one for one, count in dispatched.items() if count > 1 + returned[one]]
    report.note("requests were dispatched more often than handed back", again)
    # What waited before a consumer until its deadline was dispatched; what waited before the dispatcher was not.
    may_run = to_run | {request_id for request_id, outcome in expected.items() if outcome == Outcome.EXPIRED}
    report.note("work items are of requests that were refused or unknown", dispatched.keys() - may_run)
    events = [codec.decode_as(UsageEvent, record.value()) for record in _records(deployed, [names.LEDGER_USAGE])]
    ours = [event for event in events if event.tenant in deployed.tenants]
    used = Counter(event.work for event in ours if not event.cached)
    cached = Counter(event.request_id for event in ours if event.cached)
    report.note("answers from a cache have not one usage event each", cached - Counter(given_again))
    report.note("answers from a cache have no usage event", given_again - cached.keys())
    coordinates = {
        SourceCoordinate(str(record.topic()), record.partition() or 0, record.offset() or 0) for record in work
    }
    report.note("work items have no usage event", coordinates - used.keys())
    report.note("work items have more than one usage event", [one for one, count in used.items() if count > 1])
    report.note("usage events are of no work item", used.keys() - coordinates)
    return work


def unsettled(settings: KafkaSettings, group: str, records: Iterable[Message]) -> list[tuple[PartitionId, int]]:
    """What of these records a new owner in the group would work on."""
    offsets: dict[PartitionId, list[int]] = {}
    for record in records:
        partition = PartitionId(str(record.topic()), record.partition() or 0)
        offsets.setdefault(partition, []).append(record.offset() or 0)
    source = KafkaConsumer(read_committed_consumer(settings, group))
    try:
        resumes = resume_points(source, offsets, _READ_TIMEOUT_S)
    finally:
        source.close()
    undone = []
    for partition, resume in resumes.items():
        tracker = OffsetTracker(resume.committed)
        undone += [(partition, offset) for offset in sorted(offsets[partition]) if tracker.deliver(offset)]
    return undone


def _examine_rows(
    deployed: Deployment, expected: Mapping[str, str], report: PromiseReport, dsn: str, timeout_s: float
) -> None:
    """Postgres equals the reply topics: a row for each reply, its outcome, seen once."""
    found = check(deployed.settings, dsn, deployed.tenants, expected.keys(), timeout_s)
    report.note("requests have no row in Postgres", found.without_row)
    report.note("rows in Postgres differ from the reply, or were seen more than once", found.rows_that_differ)
    with psycopg.connect(dsn, connect_timeout=10) as connection:
        connection.execute("SELECT set_config('fairlane.tenant', '*', true)")
        row = connection.execute(_COUNT_ROWS, (list(deployed.tenants),)).fetchone()
    count = 0 if row is None else row[0]
    of_nobody = count - (len(expected) - len(found.without_row))
    if of_nobody:
        report.problems.append(f"Postgres has {count} rows for {len(expected)} requests")
    report.rows = len(found.without_row) + len(found.rows_that_differ) + abs(of_nobody)


def _records(deployed: Deployment, topics: Iterable[str]) -> list[Message]:
    return committed_records(deployed.settings, topics, _READ_TIMEOUT_S)
