"""Postgres for the runner of replays: open replays, decisions about requests, results of copies, and progress."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import psycopg

from fairlane.closing import Closing
from fairlane.outcomes import EvaluationConsent, Outcome
from fairlane.records import SourceCoordinate, WorkItem
from fairlane_server.conversations.conversations import stored_name
from fairlane_server.evaluation.copies import CopyEnd, EvaluationArm
from fairlane_server.log_replay.plan import LogReplayState
from fairlane_server.log_replay.progress import ReplayRange
from fairlane_server.log_replay.report import PairPlace, ReplayLabels, read_labels
from fairlane_server.log_replay.selection import CopyDecision
from fairlane_server.log_replay.store import LogReplay, ReplayProgress, open_replays, plain_json
from fairlane_server.log_replay.verdict import ReplayReport
from fairlane_server.postgres.connection import ALL_TENANTS, ReconnectingConnection, reason
from fairlane_server.postgres.evaluation_results import ArmPair, read_pairs
from fairlane_server.store_error import StoreError

APPLICATION_NAME = "fairlane-log-replay-runner"

_CALL_TIMEOUT_S = 20.0
_MOST_OPEN = 100
_FORGOTTEN_AT_ONCE = 5_000

# What was answered counts, so that there is something to compare with; what was refused or expired says nothing of the
# version. Of a request that was dispatched twice it is the dispatch with the outcome of the reply.
_JUDGED = """
SELECT place, CASE
    WHEN NOT EXISTS (SELECT FROM tenants WHERE tenants.tenant = asked.tenant AND tenants.evaluation = %(allowed)s)
        THEN 'denied'
    WHEN EXISTS (
        SELECT FROM erased WHERE erased.tenant = asked.tenant AND (
            erased.kind = 'request' AND erased.digest IN (
                sha256(convert_to(asked.request_id, 'UTF8')), sha256(convert_to(asked.first_id, 'UTF8'))
            )
            OR erased.kind = 'conversation' AND erased.digest = sha256(convert_to(asked.conversation, 'UTF8'))
                AND (asked.submitted_at_ms < erased.before_ms OR asked.first_id <> asked.request_id)
            OR erased.kind = 'history' AND erased.digest = sha256(convert_to(asked.conversation, 'UTF8'))
                AND asked.has_history
        )
    ) THEN 'erased'
    WHEN NOT EXISTS (
        SELECT FROM usage JOIN results ON results.request_id = asked.request_id AND results.tenant = asked.tenant
        WHERE (usage.work_topic, usage.work_partition, usage.work_offset) = (asked.topic, asked.part, asked.place_in)
            AND (usage.tenant, usage.request_id) = (asked.tenant, asked.request_id)
            AND usage.outcome = ANY(%(outcomes)s) AND results.outcome = usage.outcome
            AND results.model_version = %(version)s AND results.cache_use IS NULL AND results.replies_seen > 0
    ) THEN 'unanswered'
    ELSE 'copied' END
FROM unnest(
    %(places)s::integer[], %(topics)s::text[], %(partitions)s::bigint[], %(offsets)s::bigint[], %(tenants)s::text[],
    %(requests)s::text[], %(first_ids)s::text[], %(conversations)s::text[], %(submitted)s::bigint[],
    %(histories)s::boolean[]
) AS asked (place, topic, part, place_in, tenant, request_id, first_id, conversation, submitted_at_ms, has_history)
"""
_CLAIM = """
INSERT INTO log_replay_requests (replay, tenant, request_id, work_topic, work_partition, work_offset)
SELECT %s, * FROM unnest(%s::text[], %s::text[], %s::text[], %s::bigint[], %s::bigint[])
ON CONFLICT (replay, tenant, request_id) DO NOTHING
"""
_CLAIMED = """
SELECT claimed.tenant, claimed.request_id, work_topic, work_partition, work_offset
FROM unnest(%s::text[], %s::text[]) AS asked (tenant, request_id)
JOIN log_replay_requests AS claimed
    ON claimed.replay = %s AND claimed.tenant = asked.tenant AND claimed.request_id = asked.request_id
"""
_BEGIN = """
UPDATE log_replays SET state = 'running', ranges = coalesce(ranges, %s), started_at_ms = coalesce(started_at_ms, %s)
WHERE replay = %s AND state = 'planned'
"""
_NOTE = "UPDATE log_replays SET progress = %s, trouble = %s WHERE replay = %s AND state IN ('planned', 'running')"
_END = """
UPDATE log_replays SET state = %s, trouble = %s, ended_at_ms = %s, report = %s
WHERE replay = %s AND state IN ('planned', 'running')
"""
_RESULTS = """
SELECT arm, ended, count(*) FROM evaluation_results WHERE run = %s GROUP BY arm, ended
"""
# What a tombstone, or a tenant that no longer allows it, keeps out of the results will never be there.
_MISSING = """
SELECT count(*) FROM log_replay_requests AS claimed
CROSS JOIN unnest(%(arms)s::text[]) AS wanted (arm)
WHERE claimed.replay = %(run)s
    AND NOT EXISTS (
        SELECT FROM evaluation_results AS result WHERE result.run = %(run)s AND result.arm = wanted.arm
            AND result.tenant = claimed.tenant AND result.request_id = claimed.request_id
    )
    AND NOT EXISTS (
        SELECT FROM erased WHERE erased.tenant = claimed.tenant AND erased.kind = 'request'
            AND erased.digest = sha256(convert_to(claimed.request_id, 'UTF8'))
    )
    AND EXISTS (SELECT FROM tenants WHERE tenants.tenant = claimed.tenant AND tenants.evaluation = %(allowed)s)
"""
_FORGET = """
DELETE FROM log_replay_requests WHERE ctid = ANY (ARRAY(
    SELECT claimed.ctid FROM log_replay_requests AS claimed JOIN log_replays USING (replay)
    WHERE log_replays.ended_at_ms < %s LIMIT %s
))
"""
_FORGET_REPLAYS = """
DELETE FROM log_replays WHERE ended_at_ms < %s
    AND NOT EXISTS (SELECT FROM log_replay_requests AS claimed WHERE claimed.replay = log_replays.replay)
"""


@dataclass(frozen=True, slots=True)
class ReplayedWork:
    """A sampled work item and its place in the log."""

    place: SourceCoordinate
    item: WorkItem

    @property
    def request(self) -> tuple[str, str]:
        """Tenant and id of the request."""
        return self.item.tenant, self.item.request.request_id


@dataclass(frozen=True, slots=True)
class CopyResults:
    """Results of the copies of a replay, by arm: all, those that failed, and those of copies that did not run."""

    answered: Mapping[str, int]
    failed: Mapping[str, int]
    dropped: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.answered.values())


class ReplayJournal(Closing):
    """Every call raises StoreError when Postgres cannot be used. For one thread."""

    def __init__(self, dsn: str) -> None:
        limits = {"statement_timeout": _CALL_TIMEOUT_S}
        self._kept = ReconnectingConnection(dsn, APPLICATION_NAME, _CALL_TIMEOUT_S, server_timeouts_s=limits)

    def close(self) -> None:
        self._kept.close()

    def open(self) -> Sequence[LogReplay]:
        """The replays that are planned or running, the oldest first."""
        with self._transaction() as connection:
            return open_replays(connection, _MOST_OPEN)

    def begin(self, replay: LogReplay, ranges: Sequence[ReplayRange], now_ms: int) -> None:
        """Make a planned replay running. Ranges that it has already stay."""
        with self._transaction() as connection:
            connection.execute(_BEGIN, (plain_json([asdict(one) for one in ranges]), now_ms, replay.replay))

    def note(self, replay: LogReplay, progress: ReplayProgress, trouble: str | None) -> None:
        """Record how far it is, for people."""
        with self._transaction() as connection:
            connection.execute(_NOTE, (plain_json(asdict(progress)), trouble, replay.replay))

    def end(
        self, replay: LogReplay, state: LogReplayState, why: str | None, report: ReplayReport | None, now_ms: int
    ) -> None:
        """End a replay, unless a person has paused or cancelled it."""
        stored = None if report is None else plain_json(asdict(report))
        with self._transaction() as connection:
            connection.execute(_END, (state, why, now_ms, stored, replay.replay))

    def pairs(self, replay: LogReplay, behind: PairPlace, most: int) -> Sequence[ArmPair]:
        """Some results of copies with their originals, behind the one of this tenant, request and arm."""
        with self._transaction() as connection:
            return list(read_pairs(connection, replay.replay, most, behind))

    def labels(self, replay: LogReplay) -> ReplayLabels:
        """The right labels of the replayed requests, where they are known."""
        with self._transaction() as connection:
            return read_labels(connection, replay.replay)

    def decide(self, replay: LogReplay, works: Sequence[ReplayedWork]) -> list[CopyDecision]:
        """What becomes of each of these, in their order. A request is bound to the dispatch that is copied: the same
        works, asked again after a kill, get the same decisions, and another dispatch of it gets ``repeated``."""
        if not works:
            return []
        items = [one.item for one in works]
        asked = {
            "allowed": EvaluationConsent.ALLOWED,
            "outcomes": [Outcome.OK, Outcome.FAILED],
            "version": replay.against,
            "places": list(range(len(works))),
            **_coordinates(works),
            "tenants": [item.tenant for item in items],
            "requests": [item.request.request_id for item in items],
            "first_ids": [item.request.replay_of or item.request.request_id for item in items],
            "histories": [bool(item.history) for item in items],
            "conversations": [stored_name(item.request.conversation_id or "") for item in items],
            "submitted": [item.submitted_at_ms for item in items],
        }
        with self._transaction() as connection:
            decisions = dict(connection.execute(_JUDGED, asked).fetchall())
            found = [CopyDecision(decisions[place]) for place in range(len(works))]
            wanted = [one for one, decision in zip(works, found, strict=True) if decision is CopyDecision.COPIED]
            claimed = _claimed(connection, replay.replay, wanted)
        return [
            CopyDecision.REPEATED
            if decision is CopyDecision.COPIED and claimed.get(one.request) != one.place
            else decision
            for one, decision in zip(works, found, strict=True)
        ]

    def results(self, replay: LogReplay) -> CopyResults:
        """How many copies have ended, and how."""
        answered: dict[str, int] = {}
        failed: dict[str, int] = {}
        dropped: dict[str, int] = {}
        with self._transaction() as connection:
            for arm, ended, count in connection.execute(_RESULTS, (replay.replay,)):
                answered[arm] = answered.get(arm, 0) + count
                if ended == CopyEnd.FAILED:
                    failed[arm] = count
                elif ended == CopyEnd.DROPPED:
                    dropped[arm] = count
        return CopyResults(answered, failed, dropped)

    def missing(self, replay: LogReplay) -> int:
        """How many copies have no result and may still get one. Takes longer than ``results``."""
        asked = {"arms": list(EvaluationArm), "run": replay.replay, "allowed": EvaluationConsent.ALLOWED}
        with self._transaction() as connection:
            row = connection.execute(_MISSING, asked).fetchone()
        return int((row or (0,))[0])

    def forget(self, requests_before_ms: int, replays_before_ms: int) -> bool:
        """Remove some of what ended before these times: which requests were copied, and then the replays. Returns
        whether there may be more."""
        with self._transaction() as connection:
            removed = connection.execute(_FORGET, (requests_before_ms, _FORGOTTEN_AT_ONCE)).rowcount
            connection.execute(_FORGET_REPLAYS, (replays_before_ms,))
        return removed == _FORGOTTEN_AT_ONCE

    @contextmanager
    def _transaction(self) -> Iterator[psycopg.Connection]:
        try:
            with self._kept.transaction(ALL_TENANTS) as connection:
                yield connection
        except psycopg.Error as error:
            raise StoreError(f"Postgres: {reason(error)}") from None


def _coordinates(works: Sequence[ReplayedWork]) -> dict[str, list[object]]:
    return {
        "topics": [one.place.topic for one in works],
        "partitions": [one.place.partition for one in works],
        "offsets": [one.place.offset for one in works],
    }


def _claimed(
    connection: psycopg.Connection, replay: str, works: Sequence[ReplayedWork]
) -> Mapping[tuple[str, str], SourceCoordinate]:
    """Bind requests to the first of these dispatches, unless they are bound. Returns the dispatch of each."""
    first: dict[tuple[str, str], ReplayedWork] = {}
    for one in works:
        first.setdefault(one.request, one)
    if not first:
        return {}
    # In one order, as the rows of other transactions are.
    chosen = [first[request] for request in sorted(first)]
    tenants, requests = ([one.request[part] for one in chosen] for part in (0, 1))
    places = _coordinates(chosen)
    connection.execute(_CLAIM, (replay, tenants, requests, places["topics"], places["partitions"], places["offsets"]))
    rows = connection.execute(_CLAIMED, (tenants, requests, replay))
    return {(tenant, request): SourceCoordinate(*place) for tenant, request, *place in rows}
