"""What the drift watch reads and writes in Postgres. Each call is one transaction that acts for all tenants."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psycopg

from fairlane.names import BACKFILL_PREFIX
from fairlane.outcomes import EvaluationConsent, Outcome, Task
from fairlane.records import SourceCoordinate
from fairlane_server.drift.figures import REFUSAL_CHARS, STATISTICS, AnsweredRequest, Figure, figures_of
from fairlane_server.drift.monitor import DriftFinding, StatisticMonitor
from fairlane_server.drift.stored import block_of, monitors_of, plain_block, plain_monitors
from fairlane_server.drift.streams import DriftStream, OpenBlock, StreamKey
from fairlane_server.erasure.erasures import SHARE_ERASURE_LOCK
from fairlane_server.postgres.connection import ALL_TENANTS, ReconnectingConnection
from stream_processors.recorder.tables import json_text

APPLICATION_NAME = "fairlane-drift-watch"
SHOWN_MS = 86_400_000
"""Findings of so long are shown."""
MOST_ROWS = 50_000
"""Of a look, those of each stream in turn."""
MOST_STREAMS = 5_000
"""Streams with states; others are not begun."""

_CALL_TIMEOUT_S = 20.0
_OVERLAP_MS = 60_000
"""A look sees results from so long before the last one again: partitions are not recorded in the order of time."""
_MOST_BEHIND_MS = 600_000
"""What was answered longer ago is not read: behind an outage, a look would take too long."""
_MOST_SHOWN = 200

_POSITION = "SELECT looked_to_ms, looks FROM drift_looks"
_BEGIN = "INSERT INTO drift_looks (looked_to_ms) VALUES (%s) ON CONFLICT DO NOTHING"
_MOVE = "UPDATE drift_looks SET looked_to_ms = %s, looks = looks + 1 WHERE looks = %s"
# Digests choose requests: which ones are sampled does not depend on the moment of the look.
_PLACE = "('x' || encode(substring(sha256(convert_to(request_id, 'UTF8')) FOR 8), 'hex'))::bit(64)::bigint"
_KEY = "request_id, tenant, source_topic, source_partition, source_offset"
_COUNTED = """
outcome = %(ok)s AND cache_use IS NULL AND replied_at_ms IS NOT NULL AND task IS NOT NULL AND model IS NOT NULL
    AND model_version IS NOT NULL AND NOT starts_with(source_topic, %(backfill)s)
"""
_FIGURES = """
SELECT sampled.place, results.request_id, results.tenant, results.model, results.task, results.model_version,
    replied_at_ms, prompt_tokens, completion_tokens,
    CASE results.task WHEN %(classify)s THEN (output #>> '{labels,0,score}')::double precision END,
    CASE results.task WHEN %(rank)s THEN (
        SELECT max(score::double precision) FROM jsonb_array_elements_text(output -> 'scores') AS all_of (score)
    ) END,
    tenants.tenant IS NOT NULL,
    CASE WHEN tenants.tenant IS NOT NULL THEN left(output ->> 'text', %(chars)s) END,
    CASE WHEN tenants.tenant IS NOT NULL THEN output #>> '{labels,0,label}' END,
    CASE WHEN tenants.tenant IS NOT NULL THEN output #> '{embeddings,0}' END,
    work.work_topic, work.work_partition, work.work_offset
FROM sampled JOIN results USING (request_id, tenant, source_topic, source_partition, source_offset)
LEFT JOIN tenants ON tenants.tenant = results.tenant AND tenants.evaluation = %(allowed)s
LEFT JOIN LATERAL (
    SELECT work_topic, work_partition, work_offset FROM usage
    WHERE tenants.tenant IS NOT NULL AND usage.request_id = results.request_id AND usage.tenant = results.tenant
    ORDER BY usage.occurred_at_ms DESC LIMIT 1
) AS work ON true
"""
# What belongs to a block that is closed must not take the place of what does not: each has its own order.
_FRESH = f"""
WITH counted AS (
    SELECT {_KEY}, {_PLACE} AS place, replied_at_ms, model, task, model_version FROM results
    WHERE replied_at_ms + 0 > %(since_ms)s AND {_COUNTED}
), fresh AS (
    SELECT counted.*, replied_at_ms >= coalesce(of_requests.not_before_ms, 0) AS for_requests,
        replied_at_ms >= coalesce(of_answers.not_before_ms, 0) AS for_answers
    FROM counted
    LEFT JOIN drift_streams AS of_requests ON of_requests.tenant = counted.tenant AND of_requests.model = counted.model
        AND of_requests.task = counted.task AND of_requests.version = ''
        AND of_requests.block_requests = %(size)s
    LEFT JOIN drift_streams AS of_answers ON of_answers.tenant = counted.tenant AND of_answers.model = counted.model
        AND of_answers.task = counted.task AND of_answers.version = counted.model_version
        AND of_answers.block_requests = %(size)s
), ranked AS (
    SELECT {_KEY}, place, row_number() OVER (
        PARTITION BY tenant, model, task, model_version, for_requests, for_answers ORDER BY place
    ) AS turn
    FROM fresh WHERE for_requests OR for_answers
), sampled AS (SELECT {_KEY}, place FROM ranked WHERE turn <= %(size)s ORDER BY turn, place LIMIT %(most)s)
{_FIGURES}
"""  # noqa: S608 - our own names
_WINDOW = f"""
WITH sampled AS (
    SELECT {_KEY}, {_PLACE} AS place FROM results
    WHERE tenant = %(tenant)s AND model = %(model)s AND replied_at_ms BETWEEN %(since_ms)s AND %(until_ms)s
        AND task = %(task)s AND (%(version)s = '' OR model_version = %(version)s) AND {_COUNTED}
    ORDER BY place LIMIT %(most)s
)
{_FIGURES}
"""  # noqa: S608 - our own names
_WATCHED = "SELECT coalesce(sum(watched), 0), count(*) FROM drift_streams"
# The monitors, which are large, are read and written when a block is judged.
_STATES = """
SELECT tenant, model, task, version, {column} FROM drift_streams JOIN unnest(
    %s::text[], %s::text[], %s::text[], %s::text[]
) AS wanted (tenant, model, task, version) USING (tenant, model, task, version)
WHERE block_requests = %s
"""
_OPENED = """
UPDATE drift_streams SET block = %(block)s, not_before_ms = %(not_before_ms)s, seen_at_ms = %(now_ms)s,
    has_payload = has_payload OR %(has_payload)s
WHERE (tenant, model, task, version) = (%(tenant)s, %(model)s, %(task)s, %(version)s)
"""
_JUDGED = """
INSERT INTO drift_streams
    (tenant, model, task, version, block_requests, block, not_before_ms, monitors, statistics, watched, has_payload,
    seen_at_ms)
VALUES (%(tenant)s, %(model)s, %(task)s, %(version)s, %(size)s, %(block)s, %(not_before_ms)s, %(monitors)s,
    %(statistics)s, %(watched)s, %(has_payload)s, %(now_ms)s)
ON CONFLICT (tenant, model, task, version) DO UPDATE SET block_requests = excluded.block_requests,
    block = excluded.block, not_before_ms = excluded.not_before_ms, monitors = excluded.monitors,
    statistics = excluded.statistics, watched = excluded.watched,
    has_payload = excluded.has_payload, seen_at_ms = excluded.seen_at_ms
"""
_FOUND = """
INSERT INTO drift_findings (tenant, finding_id, model, task, version, statistic, needs_consent, effect, log_evidence,
    log_needed, since_ms, until_ms, blocks, before, now, found_at_ms)
VALUES (%(tenant)s, %(finding_id)s, %(model)s, %(task)s, %(version)s, %(statistic)s, %(needs_consent)s, %(effect)s,
    %(log_evidence)s, %(log_needed)s, %(since_ms)s, %(until_ms)s, %(blocks)s, %(before)s, %(now)s, %(found_at_ms)s)
ON CONFLICT (tenant, finding_id) DO NOTHING
"""
_SHOWN_BY = """
INSERT INTO drift_samples (tenant, finding_id, request_id, strangeness, answered_at_ms, found_at_ms)
SELECT %(tenant)s, %(finding_id)s, one.request_id, one.strangeness, one.answered_at_ms, %(found_at_ms)s
FROM unnest(%(ids)s::text[], %(strangeness)s::double precision[], %(times)s::bigint[])
    AS one (request_id, strangeness, answered_at_ms)
WHERE NOT EXISTS (
    SELECT FROM erased WHERE erased.tenant = %(tenant)s AND erased.kind = 'request'
        AND erased.digest = sha256(convert_to(one.request_id, 'UTF8'))
)
ON CONFLICT DO NOTHING
"""
_CLEAR = (
    "DELETE FROM drift_streams WHERE seen_at_ms < %(before_ms)s",
    "DELETE FROM drift_findings WHERE found_at_ms < %(before_ms)s",
    """
    DELETE FROM drift_streams WHERE has_payload AND NOT EXISTS (
        SELECT FROM tenants WHERE tenants.tenant = drift_streams.tenant AND tenants.evaluation = %(allowed)s
    )
    """,
    """
    DELETE FROM drift_findings WHERE needs_consent AND NOT EXISTS (
        SELECT FROM tenants WHERE tenants.tenant = drift_findings.tenant AND tenants.evaluation = %(allowed)s
    )
    """,
)
_FINDINGS = """
SELECT tenant, model, statistic, count(*) FROM drift_findings WHERE found_at_ms >= %s
GROUP BY 1, 2, 3 ORDER BY 4 DESC, 1, 2, 3 LIMIT %s
"""
_PHASES = """
SELECT one.value ->> 'phase', count(*) FROM drift_streams, jsonb_each(statistics) AS one GROUP BY 1
"""


@dataclass(frozen=True, slots=True)
class FreshRequest:
    """An answered request that a look has read.

    Attributes:
        place: digest of its id.
        figures: without its language.
        work: where its text is in the log; None unless its tenant allows evaluation.
    """

    place: int
    request_id: str
    tenant: str
    model: str
    task: str
    version: str
    answered_at_ms: int
    figures: Mapping[str, Figure]
    is_allowed: bool
    work: SourceCoordinate | None

    @property
    def streams(self) -> tuple[StreamKey, StreamKey]:
        """The streams of requests, and of answers, that it belongs to."""
        of_requests = StreamKey(self.tenant, self.model, self.task, "")
        return of_requests, StreamKey(self.tenant, self.model, self.task, self.version)


@dataclass(frozen=True, slots=True)
class DriftLook:
    """What one look found in the tables.

    Attributes:
        looks: number of looks before, by which ``write`` knows whether another recorder was faster.
        size: requests of a block.
        looked_to_ms: the latest reply seen.
        blocks: the open blocks of their streams, as far as these have begun.
        watched: statistics that are judged, in all streams.
        has_room: whether new streams may begin.
    """

    looks: int
    size: int
    looked_to_ms: int
    requests: Sequence[FreshRequest]
    blocks: Mapping[StreamKey, OpenBlock]
    watched: int
    has_room: bool


@dataclass(frozen=True, slots=True)
class ShownFinding:
    """A finding with its id, its stream, and the requests that show it with how strange they are."""

    finding_id: str
    key: StreamKey
    finding: DriftFinding
    samples: Sequence[tuple[FreshRequest, float]]


class DriftStore:
    """One connection. Every call raises psycopg.Error."""

    def __init__(self, dsn: str) -> None:
        self._kept = ReconnectingConnection(dsn, APPLICATION_NAME, _CALL_TIMEOUT_S)

    def close(self) -> None:
        self._kept.close()

    def look(self, now_ms: int, size: int) -> DriftLook:
        """What was answered since the last look, at most ``size`` requests of each version, and the open blocks."""
        with self._kept.transaction(ALL_TENANTS) as connection:
            connection.execute(_BEGIN, (now_ms - _OVERLAP_MS,))
            ((looked_to_ms, looks),) = connection.execute(_POSITION)
            asked = {
                **_counted(),
                "since_ms": max(looked_to_ms - _OVERLAP_MS, now_ms - _MOST_BEHIND_MS),
                "size": size,
                "most": MOST_ROWS,
            }
            requests = [_fresh(row) for row in connection.execute(_FRESH.encode(), asked)]
            keys = {key for one in requests for key in one.streams}
            blocks = {key: block_of(block) for key, block in _states(connection, "block", keys, size)}
            ((watched, count),) = connection.execute(_WATCHED)
        latest_ms = max((one.answered_at_ms for one in requests), default=looked_to_ms)
        has_room = count + len(keys) <= MOST_STREAMS
        return DriftLook(looks, size, max(looked_to_ms, latest_ms), requests, blocks, int(watched), has_room)

    def monitors(self, keys: Collection[StreamKey], size: int) -> dict[StreamKey, dict[str, StatisticMonitor]]:
        """The monitors of these streams, as far as they have begun."""
        with self._kept.transaction(ALL_TENANTS) as connection:
            return {key: monitors_of(plain) for key, plain in _states(connection, "monitors", keys, size)}

    def window(self, key: StreamKey, since_ms: int, until_ms: int, most: int) -> list[FreshRequest]:
        """Some requests of a stream that were answered in this time."""
        asked = {**_counted(), **asdict(key), "since_ms": since_ms, "until_ms": until_ms, "most": most}
        with self._kept.transaction(ALL_TENANTS) as connection:
            return [_fresh(row) for row in connection.execute(_WINDOW.encode(), asked)]

    def write(
        self,
        look: DriftLook,
        opened: Sequence[DriftStream],
        judged: Sequence[DriftStream],
        found: Sequence[ShownFinding],
        now_ms: int,
    ) -> bool:
        """Store what follows from a look, or nothing if another recorder has looked meanwhile. ``opened`` are streams
        of which only the block has changed."""
        with self._kept.transaction(ALL_TENANTS) as connection:
            if connection.execute(_MOVE, (look.looked_to_ms, look.looks)).rowcount != 1:
                return False
            if found:
                connection.execute(SHARE_ERASURE_LOCK)
            with connection.cursor() as cursor:
                if opened:
                    cursor.executemany(_OPENED.encode(), [_opened_row(one, now_ms) for one in opened])
                if judged:
                    cursor.executemany(_JUDGED.encode(), [_judged_row(one, look.size, now_ms) for one in judged])
                for one in found:
                    cursor.execute(_FOUND, _finding_row(one, now_ms))
                    cursor.execute(_SHOWN_BY, _sample_row(one, now_ms))
        return True

    def clear(self, before_ms: int) -> None:
        """Remove findings, and states without requests, from before this, and what consent was taken back for."""
        asked = {"before_ms": before_ms, "allowed": EvaluationConsent.ALLOWED.value}
        with self._kept.transaction(ALL_TENANTS) as connection:
            for query in _CLEAR:
                connection.execute(query.encode(), asked)

    def shown(self, now_ms: int) -> tuple[dict[tuple[str, str, str], int], dict[str, int]]:
        """Findings of the last day by tenant, model and statistic, and statistics by phase."""
        with self._kept.transaction(ALL_TENANTS) as connection:
            findings = connection.execute(_FINDINGS, (now_ms - SHOWN_MS, _MOST_SHOWN)).fetchall()
            phases = connection.execute(_PHASES).fetchall()
        return {tuple(place): int(count) for *place, count in findings}, {phase: int(count) for phase, count in phases}


def _counted() -> dict[str, Any]:
    return {
        "ok": Outcome.OK.value,
        "backfill": BACKFILL_PREFIX,
        "classify": Task.CLASSIFY.value,
        "rank": Task.RANK.value,
        "chars": REFUSAL_CHARS,
        "allowed": EvaluationConsent.ALLOWED.value,
    }


def _fresh(row: tuple[Any, ...]) -> FreshRequest:
    place, request_id, tenant, model, task, version, at_ms, prompt, completion, confidence, best, *rest = row
    is_allowed, beginning, label, embedding, *work = rest
    answered = AnsweredRequest(
        task, prompt or 0, completion or 0, _finite(confidence), _finite(best), is_allowed, beginning, label, embedding
    )
    place_of_work = None if work[0] is None else SourceCoordinate(*work)
    key = (tenant, model, task, version)
    return FreshRequest(place, request_id, *key, at_ms, figures_of(answered), is_allowed, place_of_work)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _states(
    connection: psycopg.Connection, column: str, keys: Collection[StreamKey], size: int
) -> Iterator[tuple[StreamKey, Any]]:
    wanted = [[getattr(key, name) for key in keys] for name in ("tenant", "model", "task", "version")]
    for *names, state in connection.execute(_STATES.format(column=column).encode(), (*wanted, size)):
        yield StreamKey(*names), state


def _opened_row(stream: DriftStream, now_ms: int) -> dict[str, Any]:
    of_payload = {one.name for one in stream.key.statistics if one.needs_consent}
    in_block = any(of_payload & one.figures.keys() or one.work for one in stream.block.sample)
    return {
        **asdict(stream.key),
        "block": json_text(plain_block(stream.block)),
        "not_before_ms": stream.block.not_before_ms,
        "has_payload": in_block or bool(of_payload & stream.monitors.keys()),
        "now_ms": now_ms,
    }


def _judged_row(stream: DriftStream, size: int, now_ms: int) -> dict[str, Any]:
    return {
        **_opened_row(stream, now_ms),
        "size": size,
        "monitors": json_text(plain_monitors(stream.monitors)),
        "statistics": json_text(dict(_statistics(stream))),
        "watched": stream.watched,
    }


def _statistics(stream: DriftStream) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, monitor in stream.monitors.items():
        log = monitor.evidence.log
        yield (
            name,
            {
                "phase": monitor.phase.value,
                "blocks": monitor.judged if monitor.is_watching else monitor.blocks,
                "log_evidence": round(log, 3) if math.isfinite(log) else None,
            },
        )


def _finding_row(one: ShownFinding, now_ms: int) -> dict[str, Any]:
    plain = ("statistic", "effect", "log_evidence", "log_needed", "since_ms", "until_ms", "blocks")
    return {
        **asdict(one.key),
        **{name: getattr(one.finding, name) for name in plain},
        "before": json_text(dict(one.finding.before)),
        "now": json_text(dict(one.finding.now)),
        "finding_id": one.finding_id,
        "needs_consent": STATISTICS[one.finding.statistic].needs_consent,
        "found_at_ms": now_ms,
    }


def _sample_row(one: ShownFinding, now_ms: int) -> dict[str, Any]:
    return {
        "tenant": one.key.tenant,
        "finding_id": one.finding_id,
        "found_at_ms": now_ms,
        "ids": [request.request_id for request, _ in one.samples],
        "strangeness": [strangeness for _, strangeness in one.samples],
        "times": [request.answered_at_ms for request, _ in one.samples],
    }
