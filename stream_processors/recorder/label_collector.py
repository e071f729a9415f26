"""The thread that fills the labelling queue: outputs with bad feedback, those that a guardrail found something in, and
those that show drift.

Only of tenants that allow evaluation; when a tenant does not any more, its items go, and the results of copies of its
requests. What a request was asked with is read from the log, which Postgres does not have.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import psycopg

from fairlane import metrics
from fairlane.clock import ClockMs, now_ms
from fairlane.feedback import FLAGGED
from fairlane.logs import get_logger
from fairlane.names import PRIORITY_PREFIX
from fairlane.outcomes import Degradation, EvaluationConsent, GuardrailResult
from fairlane.records import SourceCoordinate, WorkItem
from fairlane.settings import Settings
from fairlane_server.erasure.erasures import SHARE_ERASURE_LOCK
from fairlane_server.postgres.connection import ALL_TENANTS, ReconnectingConnection, is_value_error, reason
from stream_processors.recorder.erased import CONVERSATION, HISTORY, REQUEST
from stream_processors.recorder.label_sources import WorkItemLog, WorkItemLogError, input_of
from stream_processors.recorder.tables import json_text, storable
from stream_processors.recorder.watch import Watch

log = get_logger(__name__)

APPLICATION_NAME = "fairlane-label-collector"
DRIFT = "drift"
"""Origin of requests that show a finding of drift."""
LOW_RATING = 0.5
"""An output with a rating below this is queued."""
WINDOW_MS = 86_400_000
"""What was rated, or recorded, longer ago is not queued any more."""
MOST_INPUT_BYTES = 524_288
"""Of the JSON of one item's input, in UTF-8; larger ones are not queued."""

_OVERLAP_MS = 60_000
"""A look sees what was recorded from so long before the last one: rows have the time at which their transaction began,
and a recorder's takes 15 s at most."""
_MOST_AT_ONCE = 200
_MOST_REMOVED_AT_ONCE = 1_000
_MOST_FAILURES = 5
"""Reads that may fail in one look. One costs up to 2 s; one that always fails must not keep the others out."""
_MOST_REMEMBERED = 10_000
_INTERVAL_S = 30.0
_CALL_TIMEOUT_S = 10.0
_SHARES = 65_536

_HITS = (GuardrailResult.LOGGED, GuardrailResult.REDACTED, GuardrailResult.BLOCKED)
_SHORTENED = frozenset(
    {Degradation.FEWER_PASSAGES, Degradation.NO_RETRIEVAL, Degradation.SHORTER_CONTEXT, Degradation.NO_HISTORY}
)
# As the index `results_of_guardrail_hits` has it, in revision 0036.
_IS_HIT = " || ".join(f'@ == "{hit}"' for hit in _HITS)
_HIT = f"model_version IS NOT NULL AND guardrails @? '$[*].verdict ? ({_IS_HIT})'"

NEED_CONSENT = ("label_items", "evaluation_results", "evaluation_examples")
"""Tables whose rows of requests go when their tenant does not allow evaluation any more. Each has an index that begins
with the tenant."""
# From one tenant to the next in the index of the key, not through all rows.
_WITHDRAWN = """
WITH RECURSIVE holder AS (
    (SELECT tenant FROM {table} ORDER BY tenant LIMIT 1)
    UNION ALL
    SELECT next.tenant FROM holder CROSS JOIN LATERAL (
        SELECT tenant FROM {table} AS kept WHERE kept.tenant > holder.tenant ORDER BY tenant LIMIT 1
    ) AS next
)
SELECT tenant FROM holder WHERE NOT EXISTS (
    SELECT FROM tenants WHERE tenants.tenant = holder.tenant AND tenants.evaluation = %s
)
"""
_REMOVE = """
DELETE FROM {table} WHERE tenant = %(tenant)s AND request_id = ANY (ARRAY(
    SELECT request_id FROM {table} WHERE tenant = %(tenant)s AND request_id IS NOT NULL AND NOT EXISTS (
        SELECT FROM tenants WHERE tenant = %(tenant)s AND evaluation = %(allowed)s
    ) LIMIT %(most)s
))
"""
_NOW = "SELECT floor(extract(epoch FROM now()) * 1000)::bigint"
# Gold items never close.
_IS_OPEN = "state = 'open' AND gold_label IS NULL"
_OPEN = f"SELECT tenant, count(*) FROM label_items WHERE {_IS_OPEN} GROUP BY tenant"  # noqa: S608 - our own names
# A sample is a function of the id, so that every recorder, and every look, takes the same; of drift there are few. Each
# candidate comes once, with the place of the last work item: none while its usage is not recorded, and never one of a
# cached answer. In any order, so that none keeps others out. Conditions compare plain columns: behind a policy, one of
# an expression is no condition of an index.
_CANDIDATES = f"""
WITH allowed AS (
    SELECT tenant FROM tenants WHERE evaluation = %(allowed)s AND tenant <> ALL(%(full)s)
), found AS (
    SELECT tenant, request_id, 'feedback' AS origin FROM feedback JOIN allowed USING (tenant)
    WHERE given_at_ms > %(given_since_ms)s AND model IS NOT NULL AND (rating < %(low)s OR tags ? %(flagged)s)
    UNION ALL
    SELECT tenant, request_id, 'guardrail' FROM results JOIN allowed USING (tenant)
    WHERE recorded_at > to_timestamp(%(recorded_since_ms)s / 1000.0) AND {_HIT}
    UNION ALL
    SELECT tenant, request_id, %(drift)s FROM drift_samples JOIN allowed USING (tenant)
    WHERE found_at_ms > %(given_since_ms)s
), sampled AS (
    SELECT DISTINCT ON (tenant, request_id) tenant, request_id, origin FROM found
    WHERE origin = %(drift)s OR get_byte(sha256(convert_to(request_id, 'UTF8')), 0) * 256
        + get_byte(sha256(convert_to(request_id, 'UTF8')), 1) < %(share)s
    ORDER BY tenant, request_id, origin
), worked AS (
    SELECT DISTINCT ON (sampled.tenant, sampled.request_id) sampled.tenant, sampled.request_id, sampled.origin,
        usage.work_topic, usage.work_partition, usage.work_offset
    FROM sampled LEFT JOIN usage ON usage.request_id = sampled.request_id AND usage.tenant = sampled.tenant
    WHERE (usage.work_topic IS NULL OR starts_with(usage.work_topic, %(priority)s)) AND NOT EXISTS (
        SELECT FROM label_items AS item WHERE item.tenant = sampled.tenant AND item.request_id = sampled.request_id
    ) AND (sampled.tenant, sampled.request_id) NOT IN (
        SELECT * FROM unnest(%(passed_tenants)s::text[], %(passed)s::text[])
    )
    ORDER BY sampled.tenant, sampled.request_id, usage.occurred_at_ms DESC
)
SELECT * FROM worked ORDER BY work_topic IS NULL, random() LIMIT %(most)s
"""  # noqa: S608 - our own names
# Recorders that queue items of one tenant count them one after another.
_LOCK_TENANT = "SELECT pg_advisory_xact_lock(hashtextextended('fairlane.labels.' || %s, 0))"
_OPEN_OF_TENANT = f"SELECT count(*) FROM label_items WHERE tenant = %s AND {_IS_OPEN}"  # noqa: S608 - our own names
# The result is locked until the item is committed: an erasure deletes it first, and then the item. It is that of the
# work: an id that was sent again has several. And that of all of it: a consumer leaves out passages and turns for which
# the context has no room, and what the model got then is not stored.
_QUEUE = """
WITH answer AS (
    SELECT * FROM results WHERE tenant = %(tenant)s AND request_id = %(request_id)s AND model IS NOT NULL
        AND model_version IS NOT NULL
        AND (source_topic, source_partition, source_offset) = (%(topic)s, %(partition)s, %(offset)s)
        AND NOT degradations ?| %(shortened)s
        AND (outcome <> 'ok' OR jsonb_array_length(passages) = %(passages)s)
        AND coalesce((history_use ->> 'messages')::integer, %(history)s) = %(history)s
        AND NOT EXISTS (
            SELECT FROM unnest(%(kinds)s::text[], %(names)s::text[]) AS about (kind, name)
            JOIN erased ON erased.tenant = %(tenant)s AND erased.kind = about.kind
                AND erased.digest = sha256(convert_to(about.name, 'UTF8'))
        )
    FOR SHARE
)
INSERT INTO label_items (tenant, request_id, conversation_id, origin, model, model_version, arm, task, input, output,
    guardrails, answered_at_ms, queued_at_ms)
SELECT tenant, request_id, %(conversation_id)s, %(origin)s, model, model_version, arm, coalesce(task, ''), %(input)s,
    coalesce(output, '{}'), guardrails, replied_at_ms, %(now_ms)s
FROM answer WHERE EXISTS (SELECT FROM tenants WHERE tenant = %(tenant)s AND evaluation = %(allowed)s)
ON CONFLICT (tenant, request_id) DO NOTHING
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


def erasable(item: WorkItem) -> list[tuple[str, str]]:
    """Kinds and names of the tombstones any of which keeps the item out of the queue. Pure."""
    request = item.request
    found = [(REQUEST, request.request_id), (REQUEST, request.replay_of), (CONVERSATION, request.conversation_id)]
    if item.history:
        found.append((HISTORY, request.conversation_id))
    return [(kind, storable(name)) for kind, name in found if name is not None]


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
        """When the last look began that left nothing, by the clock of Postgres."""
        self._passed: dict[tuple[str, str], None] = {}
        """What cannot be queued, the oldest first: its work is not in the log, its input is too large, the model got
        less of it, or it is erased."""

    def close(self) -> None:
        """Disconnect one whose thread was never started; the thread does it at its end."""
        self._works.close()
        self._kept.close()

    def look(self) -> None:
        """Remove what is not allowed any more, and queue what is new, once."""
        try:
            self._remove_withdrawn()
            found, at_ms = self._found()
            if self._queue_all(found) and at_ms is not None:
                self._looked_at_ms = at_ms
        except psycopg.Error as error:
            log.warning("labels_not_queued", reason=reason(error))
        finally:
            self._works.close()

    def _queue_all(self, found: Sequence[LabelSource]) -> bool:
        """Queue these. Returns whether each is queued now, or never can be."""
        failures, are_all = [], True
        for one in found:
            if self._stopping.is_set():
                return False
            try:
                are_all &= self._queue(one)
            except WorkItemLogError as error:
                failures.append(str(error))
                if len(failures) == _MOST_FAILURES:
                    break
        if failures:
            log.warning("labels_not_queued", reason=failures[-1], failures=len(failures))
        return are_all and not failures

    def _remove_withdrawn(self) -> None:
        """Remove the rows of tenants that do not allow evaluation any more, in transactions of their own: whatever else
        a look fails at, and however much there is, they go."""
        for table in NEED_CONSENT:
            with self._kept.transaction(ALL_TENANTS) as connection:
                query = _WITHDRAWN.format(table=table).encode()
                tenants = [tenant for (tenant,) in connection.execute(query, (EvaluationConsent.ALLOWED.value,))]
            for tenant in tenants:
                self._remove_rows(table, tenant)

    def _remove_rows(self, table: str, tenant: str) -> None:
        asked = {"tenant": tenant, "allowed": EvaluationConsent.ALLOWED.value, "most": _MOST_REMOVED_AT_ONCE}
        removed = 1
        while removed and not self._stopping.is_set():
            with self._kept.transaction(ALL_TENANTS) as connection:
                removed = connection.execute(_REMOVE.format(table=table).encode(), asked).rowcount

    def _found(self) -> tuple[list[LabelSource], int | None]:
        """Some of what is to be queued, and the time up to which that is all; None if it is not. A tenant that has as
        many items as it may gets the others when it has fewer."""
        with self._kept.transaction(ALL_TENANTS) as connection:
            (at_ms,) = connection.execute(_NOW).fetchone() or (0,)
            queued = {tenant: int(count) for tenant, count in connection.execute(_OPEN)}
            full = [tenant for tenant, count in queued.items() if count >= self._most_open]
            asked = {
                "allowed": EvaluationConsent.ALLOWED.value,
                "full": full,
                "given_since_ms": at_ms - WINDOW_MS,
                # Feedback may get its model late.
                "recorded_since_ms": max(at_ms - WINDOW_MS, self._looked_at_ms - _OVERLAP_MS),
                "drift": DRIFT,
                "low": LOW_RATING,
                "flagged": FLAGGED,
                "share": self._share,
                "priority": PRIORITY_PREFIX,
                "passed_tenants": [tenant for tenant, _ in self._passed],
                "passed": [request_id for _, request_id in self._passed],
                "most": _MOST_AT_ONCE,
            }
            rows = connection.execute(_CANDIDATES, asked).fetchall()
        found = [
            LabelSource(tenant, one, origin, SourceCoordinate(*work))
            for tenant, one, origin, *work in rows
            if work[0] is not None
        ]
        kept = within_bound(found, queued, self._most_open)
        are_all = not full and len(kept) == len(rows) < _MOST_AT_ONCE
        return kept, at_ms if are_all else None

    def _queue(self, one: LabelSource) -> bool:
        """Queue an output, or remember that it never can be. Returns False when its tenant has as many items as it
        may. Raises WorkItemLogError, psycopg.Error."""
        item = self._works.read(one.work)
        # A topic that was made anew has other records at the same offsets.
        is_its_own = item is not None and (item.tenant, item.request.request_id) == (one.tenant, one.request_id)
        content = json_text(input_of(item)) if item is not None and is_its_own else None
        if item is None or content is None or len(content.encode()) > MOST_INPUT_BYTES:
            self._pass_over(one)
            return True
        about = erasable(item)
        values = {
            "tenant": one.tenant,
            "request_id": one.request_id,
            "allowed": EvaluationConsent.ALLOWED.value,
            "conversation_id": storable(item.request.conversation_id),
            "origin": one.origin,
            "input": content,
            "topic": item.source.topic,
            "partition": item.source.partition,
            "offset": item.source.offset,
            "shortened": sorted(_SHORTENED.difference(item.degradations)),
            "passages": len(item.passages),
            "history": len(item.history),
            "kinds": [kind for kind, _ in about],
            "names": [name for _, name in about],
            "now_ms": self._wall_clock(),
        }
        try:
            with self._kept.transaction(ALL_TENANTS) as connection:
                connection.execute(SHARE_ERASURE_LOCK)
                connection.execute(_LOCK_TENANT, (one.tenant,))
                (count,) = connection.execute(_OPEN_OF_TENANT, (one.tenant,)).fetchone() or (0,)
                if count >= self._most_open:
                    return False
                is_new = connection.execute(_QUEUE, values).rowcount == 1
        except psycopg.Error as error:
            if not is_value_error(error):
                raise
            is_new = False
        if is_new:
            metrics.LABELS_QUEUED.labels(origin=one.origin).inc()
        else:
            self._pass_over(one)
        return True

    def _pass_over(self, one: LabelSource) -> None:
        self._passed[one.tenant, one.request_id] = None
        if len(self._passed) > _MOST_REMEMBERED:
            del self._passed[next(iter(self._passed))]
