"""The promise, held against everything that is in the log and in Postgres once a fault test is over."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import psycopg
from confluent_kafka import Consumer

from deploy.demo.checks import check
from fairlane import names
from fairlane.committed import resume_points
from fairlane.kafka import read_committed_consumer
from fairlane.offsets import CommitPoint, OffsetTracker
from fairlane.outcomes import Outcome, Priority
from fairlane.ownership import PartitionId
from fairlane.records import SourceCoordinate, UsageEvent, WorkItem
from tests.integration.log_reader import LogReader
from tests.integration.pipeline import Pipeline

_READ_TIMEOUT_S = 60.0
_SHOWN = 5
_COUNT_ROWS = "SELECT count(*) FROM results WHERE tenant = ANY(%s)"


@dataclass(slots=True)
class Findings:
    """What a run came to; ``problems`` is empty when the promise was kept."""

    requests: int
    lost: int = 0
    twice: int = 0
    problems: list[str] = field(default_factory=list)

    def note(self, what: str, found: Collection[object]) -> None:
        """Something that must not be was found, unless there is none of it."""
        if found:
            self.problems.append(f"{len(found)} {what}, for instance {sorted(map(str, found))[:_SHOWN]}")


def examine(pipeline: Pipeline, expected: Mapping[str, str], *, postgres_dsn: str | None, timeout_s: float) -> Findings:
    """Read everything and compare.

    Args:
        pipeline: whose log it is.
        expected: the outcome that each published request must have.
        postgres_dsn: where the recorder writes; None if there is no recorder.
        timeout_s: how long the recorder may take to catch up.
    """
    findings = Findings(len(expected))
    _examine_replies(pipeline, expected, findings)
    work = _examine_work(pipeline, expected, findings)
    _examine_settled(pipeline, work, findings)
    if postgres_dsn is not None:
        _examine_rows(pipeline, expected, findings, postgres_dsn, timeout_s)
    return findings


def _examine_replies(pipeline: Pipeline, expected: Mapping[str, str], findings: Findings) -> None:
    replies = pipeline.replies()
    replies.read_to_end(_READ_TIMEOUT_S)
    final = {
        request_id: [reply for reply in found if not reply.replayed] for request_id, found in replies.by_id.items()
    }
    lost = [request_id for request_id in expected if not final.get(request_id)]
    twice = [request_id for request_id, found in final.items() if len(found) > 1]
    findings.lost, findings.twice = len(lost), len(twice)
    findings.note("requests have no reply", lost)
    findings.note("requests have more than one reply", twice)
    findings.note("replies are to nobody's request", final.keys() - expected.keys())
    unexpected = [
        f"{request_id}: {reply.outcome} {reply.code}"
        for request_id, found in final.items()
        for reply in found
        if reply.outcome != expected.get(request_id)
    ]
    findings.note("replies have another outcome than expected", unexpected)


def _examine_work(pipeline: Pipeline, expected: Mapping[str, str], findings: Findings) -> LogReader:
    """One work item per request that was to run, one usage event per work item."""
    priorities = [
        names.priority_topic(pool, priority)
        for pool in sorted({model.pool for model in pipeline.models})
        for priority in Priority
    ]
    work, ledger = pipeline.reader(*priorities), pipeline.reader(names.LEDGER_USAGE)
    for reader in (work, ledger):
        reader.read_to_end(_READ_TIMEOUT_S)
    dispatched = Counter(
        pipeline.codec.decode_as(WorkItem, record.value()).request.request_id for record in work.records
    )
    to_run = {request_id for request_id, outcome in expected.items() if outcome == Outcome.OK}
    findings.note("requests were never dispatched", to_run - dispatched.keys())
    findings.note("requests were dispatched more than once", [one for one, count in dispatched.items() if count > 1])
    findings.note("work items are of requests that were refused or unknown", dispatched.keys() - to_run)
    used = Counter(event.work for event in pipeline.decoded(ledger, UsageEvent))
    coordinates = {
        SourceCoordinate(str(record.topic()), record.partition() or 0, record.offset() or 0) for record in work.records
    }
    findings.note("work items have no usage event", coordinates - used.keys())
    findings.note("work items have more than one usage event", [one for one, count in used.items() if count > 1])
    findings.note("usage events are of no work item", used.keys() - coordinates)
    return work


def _examine_settled(pipeline: Pipeline, work: LogReader, findings: Findings) -> None:
    """Committed offsets and done sets cover every record of both hops."""
    topics = [
        topic for tenant in pipeline.tenants for topic in (names.requests_topic(tenant), names.backfill_topic(tenant))
    ]
    requests = pipeline.reader(*topics)
    requests.read_to_end(_READ_TIMEOUT_S)
    pools = sorted({model.pool for model in pipeline.models})
    assert len(pools) == 1, f"one group for all work items, not {pools}"
    for group, reader in ((pipeline.dispatcher_group, requests), (pipeline.pool_group(), work)):
        findings.note(f"records are not settled by {group}", unsettled(pipeline, group, reader))


def unsettled(pipeline: Pipeline, group: str, reader: LogReader) -> list[tuple[PartitionId, int]]:
    """What of these records a new owner in the group would work on."""
    offsets: dict[PartitionId, list[int]] = {}
    for record in reader.records:
        partition = PartitionId(str(record.topic()), record.partition() or 0)
        offsets.setdefault(partition, []).append(record.offset() or 0)
    source = Consumer(read_committed_consumer(pipeline.settings, group))
    try:
        resumes = resume_points(source, offsets, _READ_TIMEOUT_S)
    finally:
        source.close()
    return [
        (partition, offset)
        for partition, resume in resumes.items()
        for offset in undone(resume.committed, offsets[partition])
    ]


def undone(committed: CommitPoint | None, offsets: Iterable[int]) -> list[int]:
    """The offsets that this commit point leaves undone."""
    tracker = OffsetTracker(committed)
    return [offset for offset in sorted(offsets) if tracker.deliver(offset)]


def _examine_rows(
    pipeline: Pipeline, expected: Mapping[str, str], findings: Findings, dsn: str, timeout_s: float
) -> None:
    """Postgres equals the reply topics: a row for each reply, its outcome, seen once."""
    found = check(pipeline.settings, dsn, pipeline.tenants, expected.keys(), timeout_s)
    findings.note("requests have no row in Postgres", found.without_row)
    findings.note("rows in Postgres differ from the reply, or were seen more than once", found.rows_that_differ)
    with psycopg.connect(dsn, connect_timeout=10) as connection:
        connection.execute("SELECT set_config('fairlane.tenant', '*', true)")
        row = connection.execute(_COUNT_ROWS, (list(pipeline.tenants),)).fetchone()
    count = 0 if row is None else row[0]
    if count != len(expected):
        findings.problems.append(f"Postgres has {count} rows for {len(expected)} requests")
