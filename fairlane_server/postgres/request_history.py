"""Records of a request id in Postgres. Read-only, under row-level security, without the text of answers."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from fairlane.guardrail_records import GuardrailVerdict
from fairlane.records import (
    AuditEvent,
    BudgetNotice,
    CacheUse,
    Cost,
    HistoryUse,
    InferenceReply,
    Output,
    PassageReference,
    RetrievalUse,
    SourceCoordinate,
    Timings,
    TokenUsage,
    UsageEvent,
)
from fairlane.settings import Settings
from fairlane_server.postgres.reading import reading
from fairlane_server.postgres.request_timeline import History, RecordedReply

Rows = Sequence[tuple[Any, ...]]

MAX_ROWS = 1_000
"""Per table: of an id that was sent very often, only the newest rows are read."""

_APPLICATION = "fairlane-explain"
_TIMEOUT_S = 15.0

# All names are constants; only the parameters (id and row limit) come from outside.
DECISIONS = b"""
SELECT request_id, tenant, decision, actor, occurred_at_ms, source_topic, source_partition, source_offset, code,
       message, inputs
FROM audit_logs WHERE request_id = %s
ORDER BY occurred_at_ms DESC, log_partition DESC, log_offset DESC LIMIT %s
"""
USAGE = b"""
SELECT request_id, tenant, pool, model, model_version, priority_class, outcome, code, prompt_tokens, completion_tokens,
       cached_tokens, cost_tokens, engine_ms, occurred_at_ms, work_topic, work_partition, work_offset, cached, images,
       batch_size, cost_nanos, currency, requested_by
FROM usage WHERE request_id = %s
ORDER BY occurred_at_ms DESC, log_partition DESC, log_offset DESC LIMIT %s
"""
REPLY_COLUMNS = """
request_id, tenant, source_topic, source_partition, source_offset, replied_at_ms, replies_seen, replays_seen,
outcome, code, field, message, retry_after_ms, model, model_version, task, engine, finish_reason, batch_size,
prompt_tokens, completion_tokens, cached_tokens, submitted_at_ms, admitted_at_ms, dispatched_at_ms,
received_at_ms, engine_started_at_ms, engine_finished_at_ms, degradations, passages, replay_of, attempts,
retrieval_use, cache_use, history_use, cost_nanos, currency, budget, guardrails
"""
"""Columns that ``recorded_reply`` reads, named as the fields of the records."""
_REPLY_NAMES = REPLY_COLUMNS.replace(",", " ").split()
_TOKENS = [field.name for field in fields(TokenUsage)]
_TIMINGS = [field.name for field in fields(Timings)]
REPLIES = f"""
SELECT {REPLY_COLUMNS} FROM results WHERE request_id = %s
ORDER BY replied_at_ms DESC, source_offset DESC LIMIT %s
""".encode()  # noqa: S608 - our own names


def read_history(settings: Settings, request_id: str, tenant: str | None = None) -> History:
    """Read everything recorded under an id, of one tenant or, as a trusted service, of all.

    At most MAX_ROWS of each kind, the newest. Raises as ``reading``.
    """
    # One snapshot, so that a reply is never seen without the decisions that were recorded before it.
    with reading(settings, _APPLICATION, _TIMEOUT_S, tenant, one_snapshot=True) as connection:
        decisions, usage, replies = (
            connection.execute(query, (request_id, MAX_ROWS)).fetchall() for query in (DECISIONS, USAGE, REPLIES)
        )
    return history_of(decisions, usage, replies)


def history_of(decisions: Rows, usage: Rows, replies: Rows) -> History:
    return History(
        tuple(map(_decision, reversed(decisions))),
        tuple(map(_usage, reversed(usage))),
        tuple(map(recorded_reply, reversed(replies))),
    )


def _usage(row: tuple[Any, ...]) -> UsageEvent:
    *before, nanos, currency, requested_by = row
    values = (*before[:14], SourceCoordinate(*before[14:17]), *before[17:], _cost(nanos, currency), requested_by)
    return UsageEvent(*values)


def _cost(nanos: int | None, currency: str | None) -> Cost | None:
    return None if nanos is None or currency is None else Cost(nanos, currency)


def _decision(row: tuple[Any, ...]) -> AuditEvent:
    request_id, tenant, decision, actor, occurred_at_ms, topic, partition, offset, code, message, inputs = row
    source = SourceCoordinate(topic, partition, offset)
    # jsonb does not keep the order of keys.
    ordered = dict(sorted(inputs.items()))
    return AuditEvent(request_id, tenant, decision, actor, occurred_at_ms, source, code, message, ordered)


def recorded_reply(row: tuple[Any, ...], output: Output | None = None) -> RecordedReply:
    """Build a reply from a row of REPLY_COLUMNS and, if it was read separately, the output."""
    stored = dict(zip(_REPLY_NAMES, row, strict=True))

    def taken(*names: str) -> list[Any]:
        return [stored.pop(name) for name in names]

    counts = taken("replied_at_ms", "replies_seen", "replays_seen")
    passages = [PassageReference(passage["passage_id"], passage["score"]) for passage in stored.pop("passages")]
    for name, use in (
        ("retrieval_use", RetrievalUse),
        ("cache_use", CacheUse),
        ("history_use", HistoryUse),
        ("budget", BudgetNotice),
    ):
        stored[name] = None if stored[name] is None else use(**stored[name])
    verdicts = [GuardrailVerdict(**{**one, "types": tuple(one["types"])}) for one in stored.pop("guardrails")]
    reply = InferenceReply(
        source=SourceCoordinate(*taken("source_topic", "source_partition", "source_offset")),
        usage=TokenUsage(*taken(*_TOKENS)),
        timings=Timings(*taken(*_TIMINGS)),
        degradations=tuple(stored.pop("degradations")),
        passages=tuple(passages),
        output=output,
        cost=_cost(*taken("cost_nanos", "currency")),
        guardrails=tuple(verdicts),
        **stored,
    )
    return RecordedReply(reply, *counts)
