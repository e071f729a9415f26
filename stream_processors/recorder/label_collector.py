"""The thread that fills the labelling queue: outputs with bad feedback, and those that a guardrail found something in.

Only of tenants that allow evaluation; when a tenant does not any more, its items go. What a request was asked with is
read from the log, which Postgres does not have.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import psycopg

from fairlane import metrics
from fairlane.clock import ClockMs, now_ms
from fairlane.feedback import FLAGGED
from fairlane.logs import get_logger
from fairlane.outcomes import EvaluationConsent, GuardrailResult
from fairlane.records import SourceCoordinate
from fairlane.settings import Settings
from fairlane_server.erasure.erasures import ERASURE_LOCK
from fairlane_server.postgres.connection import ALL_TENANTS, ReconnectingConnection, is_value_error, reason
from stream_processors.recorder.label_sources import WorkItemLog, WorkItemLogError, input_of
from stream_processors.recorder.tables import json_text
from stream_processors.recorder.watch import Watch

log = get_logger(__name__)

APPLICATION_NAME = "fairlane-label-collector"
LOW_RATING = 0.5
"""An output with a rating below this is queued."""
WINDOW_MS = 86_400_000
"""What was rated, or answered, longer ago is not queued any more."""
MOST_INPUT_CHARS = 524_288
"""Of the JSON of one item's input; larger ones are not queued."""

_OVERLAP_MS = 600_000
"""A look sees results from so long before the last one: they are recorded a little later than they are from."""
_MOST_AT_ONCE = 200
_MOST_REMEMBERED = 10_000
_INTERVAL_S = 30.0
_CALL_TIMEOUT_S = 10.0
_SHARES = 65_536

_HITS = [hit.value for hit in (GuardrailResult.LOGGED, GuardrailResult.REDACTED, GuardrailResult.BLOCKED)]

_WITHDRAWN = """
DELETE FROM label_items WHERE NOT EXISTS (
    SELECT FROM tenants WHERE tenants.tenant = label_items.tenant AND tenants.evaluation = %s
)
"""
_WITHDRAWN_EXAMPLES = """
DELETE FROM evaluation_examples WHERE request_id IS NOT NULL AND NOT EXISTS (
    SELECT FROM tenants WHERE tenants.tenant = evaluation_examples.tenant AND tenants.evaluation = %s
)
"""
_OPEN = "SELECT tenant, count(*) FROM label_items WHERE state = 'open' GROUP BY tenant"
# A sample is a function of the id, so that every recorder, and every look, takes the same. Each candidate comes once,
# with the place of the last work item; in any order, so that none keeps others out.
_CANDIDATES = """
WITH allowed AS (
    SELECT tenant FROM tenants WHERE evaluation = %(allowed)s AND tenant <> ALL(%(full)s)
), found AS (
    SELECT tenant, request_id, 'feedback' AS origin FROM feedback JOIN allowed USING (tenant)
    WHERE given_at_ms + 0 > %(given_since_ms)s AND model IS NOT NULL AND (rating < %(low)s OR tags ? %(flagged)s)
    UNION ALL
    SELECT tenant, request_id, 'guardrail' FROM results JOIN allowed USING (tenant)
    WHERE replied_at_ms + 0 > %(replied_since_ms)s AND model_version IS NOT NULL AND guardrails <> '[]' AND EXISTS (
        SELECT FROM jsonb_array_elements(guardrails) AS verdict WHERE verdict ->> 'verdict' = ANY(%(hits)s)
    )
), sampled AS (
    SELECT DISTINCT ON (tenant, request_id) tenant, request_id, origin FROM found
    WHERE get_byte(sha256(convert_to(request_id, 'UTF8')), 0) * 256
        + get_byte(sha256(convert_to(request_id, 'UTF8')), 1) < %(share)s
    ORDER BY tenant, request_id, origin
), worked AS (
    SELECT DISTINCT ON (sampled.tenant, sampled.request_id) sampled.tenant, sampled.request_id, sampled.origin,
        usage.work_topic, usage.work_partition, usage.work_offset
    FROM sampled JOIN usage ON usage.request_id = sampled.request_id AND usage.tenant = sampled.tenant
    WHERE NOT EXISTS (
        SELECT FROM label_items AS item WHERE item.tenant = sampled.tenant AND item.request_id = sampled.request_id
    ) AND (sampled.tenant, sampled.request_id) NOT IN (
        SELECT * FROM unnest(%(passed_tenants)s::text[], %(passed)s::text[])
    )
    ORDER BY sampled.tenant, sampled.request_id, usage.occurred_at_ms DESC
)
SELECT * FROM worked ORDER BY random() LIMIT %(most)s
"""
_LOCK_ERASURES = f"SELECT pg_advisory_xact_lock_shared({ERASURE_LOCK})".encode()
# The result is locked until the item is committed: an erasure deletes it first, and then the item.
_QUEUE = """
WITH answer AS (
    SELECT * FROM results WHERE tenant = %(tenant)s AND request_id = %(request_id)s AND model IS NOT NULL
        AND model_version IS NOT NULL AND NOT EXISTS (
            SELECT FROM erased WHERE erased.tenant = %(tenant)s AND erased.kind = 'request'
                AND erased.digest = sha256(convert_to(%(request_id)s, 'UTF8'))
        )
    ORDER BY outcome <> 'ok', replied_at_ms DESC LIMIT 1 FOR SHARE
)
INSERT INTO label_items (tenant, request_id, origin, model, model_version, arm, task, input, output, guardrails,
    correction, answered_at_ms, queued_at_ms)
SELECT tenant, request_id, %(origin)s, model, model_version, arm, coalesce(task, ''), %(input)s,
    coalesce(output, '{}'), guardrails, (
        SELECT correction FROM feedback
        WHERE feedback.tenant = answer.tenant AND feedback.request_id = answer.request_id AND correction IS NOT NULL
        ORDER BY given_at_ms DESC LIMIT 1
    ), replied_at_ms, %(now_ms)s
FROM answer ON CONFLICT (tenant, request_id) DO NOTHING
"""


@dataclass(frozen=True, slots=True)
class LabelSource:
    """An output to be queued, why, and where the work that it answered is in the log."""

    tenant: str
    request_id: str
    origin: str
    work: SourceCoordinate


def within_bound(found: Iterable[LabelSource], queued: Mapping[str, int], most: int) -> list[LabelSource]:
    """Those that leave every tenant with at most ``most`` open items, of which it has ``queued``. Pure."""
    room: dict[str, int] = {}
    kept = []
    for one in found:
        left = room.setdefault(one.tenant, most - queued.get(one.tenant, 0))
        if left > 0:
            room[one.tenant] = left - 1
            kept.append(one)
    return kept


class LabelCollector(Watch):
    """Looks twice a minute. Several recorders do the same work once. ``on_failure`` is called on the thread with the
    error that ended it; Postgres or Kafka that does not answer is none."""

    def __init__(
        self,
        settings: Settings,
        works: WorkItemLog,
        on_failure: Callable[[BaseException], None],
        wall_clock: ClockMs = now_ms,
    ) -> None:
        super().__init__("label-collector", _INTERVAL_S, on_failure)
        dsn = settings.postgres_dsn.get_secret_value()
        self._kept = ReconnectingConnection(dsn, APPLICATION_NAME, _CALL_TIMEOUT_S)
        self._works = works
        self._most_open = settings.labels_max_open
        self._share = round(settings.labels_sample_rate * _SHARES)
        self._wall_clock = wall_clock
        self._looked_at_ms = 0
        """When the last look began that saw everything."""
        self._passed: dict[tuple[str, str], None] = {}
        """What cannot be queued, the oldest first: its work is not in the log, or its input too large."""

    def close(self) -> None:
        """Disconnect one whose thread was never started; the thread does it at its end."""
        self._works.close()
        self._kept.close()

    def look(self) -> None:
        """Remove what is not allowed any more, and queue what is new, once."""
        began_ms = self._wall_clock()
        try:
            found, are_all = self._found(began_ms)
            for one in found:
                if self._stopping.is_set():
                    return
                self._queue(one)
            if are_all:
                self._looked_at_ms = began_ms
        except psycopg.Error as error:
            log.warning("labels_not_queued", reason=reason(error))
        except WorkItemLogError as error:
            log.warning("labels_not_queued", reason=str(error))

    def _found(self, at_ms: int) -> tuple[list[LabelSource], bool]:
        """Some of what is to be queued, and whether there was no more."""
        with self._kept.transaction(ALL_TENANTS) as connection:
            for statement in (_WITHDRAWN, _WITHDRAWN_EXAMPLES):
                connection.execute(statement, (EvaluationConsent.ALLOWED.value,))
            queued = {tenant: int(count) for tenant, count in connection.execute(_OPEN)}
            asked = {
                "allowed": EvaluationConsent.ALLOWED.value,
                "full": [tenant for tenant, count in queued.items() if count >= self._most_open],
                "given_since_ms": at_ms - WINDOW_MS,
                # All results of a day are many; feedback is little, and may get its model late.
                "replied_since_ms": max(at_ms - WINDOW_MS, self._looked_at_ms - _OVERLAP_MS),
                "low": LOW_RATING,
                "flagged": FLAGGED,
                "hits": _HITS,
                "share": self._share,
                "passed_tenants": [tenant for tenant, _ in self._passed],
                "passed": [request_id for _, request_id in self._passed],
                "most": _MOST_AT_ONCE,
            }
            rows = connection.execute(_CANDIDATES, asked).fetchall()
        found = [LabelSource(tenant, one, origin, SourceCoordinate(*work)) for tenant, one, origin, *work in rows]
        return within_bound(found, queued, self._most_open), len(found) < _MOST_AT_ONCE

    def _queue(self, one: LabelSource) -> None:
        item = self._works.read(one.work)
        # A topic that was made anew has other records at the same offsets.
        is_its_own = item is not None and (item.tenant, item.request.request_id) == (one.tenant, one.request_id)
        content = json_text(input_of(item)) if item is not None and is_its_own else None
        if content is None or len(content) > MOST_INPUT_CHARS:
            self._pass_over(one)
            return
        values = {
            "tenant": one.tenant,
            "request_id": one.request_id,
            "origin": one.origin,
            "input": content,
            "now_ms": self._wall_clock(),
        }
        try:
            with self._kept.transaction(ALL_TENANTS) as connection:
                connection.execute(_LOCK_ERASURES)
                is_new = connection.execute(_QUEUE, values).rowcount == 1
        except psycopg.Error as error:
            if not is_value_error(error):
                raise
            self._pass_over(one)
            return
        if is_new:
            metrics.LABELS_QUEUED.labels(origin=one.origin).inc()

    def _pass_over(self, one: LabelSource) -> None:
        self._passed[one.tenant, one.request_id] = None
        if len(self._passed) > _MOST_REMEMBERED:
            del self._passed[next(iter(self._passed))]
