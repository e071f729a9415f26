"""The recorder's tables: columns in order, keys, and how a second row for a key is merged.

The tables themselves are made by ``deploy/migrations``; a test holds the two together.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from fairlane_server.text import without_nul

_ESCAPED_NUL = "\\u0000"
# Plain characters: escaped, Chinese would be twice as long and an emoji three times. Control characters stay escaped.
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False)
_LEFT_OUT = " … "


def storable(value: Any) -> Any:
    """A value for a column: strings without NUL, everything else as it is."""
    return without_nul(value) if type(value) is str else value


def without_middle(text: str, most_characters: int) -> str:
    """The text, or its beginning and its end with a mark between them: at most so many characters."""
    if len(text) <= most_characters:
        return text
    half = (most_characters - len(_LEFT_OUT)) // 2
    return f"{text[:half]}{_LEFT_OUT}{text[-half:]}"


def json_text(value: Any) -> str:
    """JSON for a ``jsonb`` column. NaN and the infinities become the strings "NaN", "Infinity" and "-Infinity"."""
    try:
        text = _ENCODER.encode(value)
    except ValueError:
        return _ENCODER.encode(_clean(value))
    return _ENCODER.encode(_clean(value)) if _ESCAPED_NUL in text else text


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        return {storable(key): _clean(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return storable(value)


@dataclass(frozen=True, slots=True)
class Table:
    """One table.

    Attributes:
        record: name of a row in metrics and logs.
        columns: name to type, in the order of a row.
        on_conflict: clause for a row whose key exists; the stored one is ``stored``, the new one ``excluded``.
        seen: the column that counts outcomes of the same key; more than 1 is an alarm. None: nothing is counted.
    """

    name: str
    record: str
    columns: Mapping[str, str]
    key: tuple[str, ...]
    on_conflict: str
    seen: str | None = None

    @property
    def insert(self) -> str:
        """One statement for any number of rows; its parameters are one array per column.

        No two rows of one statement may have the same key. With ``seen`` it returns key and count of what was seen
        more than once.
        """
        names = ", ".join(self.columns)
        arrays = ", ".join(f"%b::{kind}[]" for kind in self.columns.values())
        statement = (
            f"INSERT INTO {self.name} AS stored ({names}) SELECT * FROM unnest({arrays}) "  # noqa: S608 - our own names
            f"ON CONFLICT ({', '.join(self.key)}) DO {self.on_conflict}"
        )
        if self.seen is None:
            return statement
        returned = f"{', '.join(self.key)}, {self.seen}"
        return (
            f"WITH written AS ({statement} RETURNING {returned}) "  # noqa: S608 - our own names
            f"SELECT {returned} FROM written WHERE {self.seen} > 1"
        )

    @property
    def delete(self) -> str:
        """Removes rows by the first column of the key; its parameter is an array."""
        return f"DELETE FROM {self.name} WHERE {self.key[0]} = ANY(%s)"  # noqa: S608 - our own names

    @property
    def key_of(self) -> Callable[[tuple[object, ...]], object]:
        """A function from a row to its key."""
        names = list(self.columns)
        return itemgetter(*map(names.index, self.key))


_LOG = {"log_topic": "text", "log_partition": "bigint", "log_offset": "bigint"}
_SOURCE = {"source_topic": "text", "source_partition": "bigint", "source_offset": "bigint"}
_TOKENS = {"prompt_tokens": "bigint", "completion_tokens": "bigint", "cached_tokens": "bigint"}

_RESULT_KEY = ("request_id", "tenant", *_SOURCE)
_RESULT_COLUMNS = {
    "request_id": "text",
    "tenant": "text",
    **_SOURCE,
    "reply_topic": "text",
    "reply_partition": "bigint",
    "reply_offset": "bigint",
    "replied_at_ms": "bigint",
    "outcome": "text",
    "code": "text",
    "field": "text",
    "message": "text",
    "retry_after_ms": "bigint",
    "model": "text",
    "model_version": "text",
    "task": "text",
    "engine": "text",
    "output": "jsonb",
    "finish_reason": "text",
    **_TOKENS,
    "submitted_at_ms": "bigint",
    "admitted_at_ms": "bigint",
    "dispatched_at_ms": "bigint",
    "received_at_ms": "bigint",
    "engine_started_at_ms": "bigint",
    "engine_finished_at_ms": "bigint",
    "batch_size": "bigint",
    "degradations": "jsonb",
    "passages": "jsonb",
    "replies_seen": "integer",
    "replays_seen": "integer",
    "replay_of": "text",
    "attempts": "bigint",
    "retrieval_use": "jsonb",
    "cache_use": "jsonb",
    "history_use": "jsonb",
}


def _result_conflict() -> str:
    """The first final reply stays; others are counted, so that a broken promise can be seen.

    A record that is read again (same place in the log) does not count. A copy that was read before its original, from
    another topic, gives way to it.
    """
    same = (
        "(stored.reply_topic, stored.reply_partition, stored.reply_offset) = "
        "(excluded.reply_topic, excluded.reply_partition, excluded.reply_offset)"
    )
    counters = ("replies_seen", "replays_seen")
    content = (name for name in _RESULT_COLUMNS if name not in (*_RESULT_KEY, *counters))
    cases = {
        **{name: f"WHEN {same} THEN stored.{name} ELSE stored.{name} + excluded.{name}" for name in counters},
        **{name: f"WHEN stored.replies_seen = 0 THEN excluded.{name} ELSE stored.{name}" for name in content},
    }
    return f"UPDATE SET {', '.join(f'{name} = CASE {case} END' for name, case in cases.items())}"


RESULTS = Table("results", "reply", _RESULT_COLUMNS, _RESULT_KEY, _result_conflict(), seen="replies_seen")

USAGE = Table(
    "usage",
    "usage",
    {
        "work_topic": "text",
        "work_partition": "bigint",
        "work_offset": "bigint",
        **_LOG,
        "request_id": "text",
        "tenant": "text",
        "pool": "text",
        "model": "text",
        "model_version": "text",
        "priority_class": "text",
        "outcome": "text",
        "code": "text",
        **_TOKENS,
        "cost_tokens": "bigint",
        "engine_ms": "bigint",
        "occurred_at_ms": "bigint",
        "events_seen": "integer",
        "cached": "boolean",
    },
    key=("work_topic", "work_partition", "work_offset"),
    on_conflict=(
        "UPDATE SET events_seen = stored.events_seen + 1 "
        "WHERE (stored.log_topic, stored.log_partition, stored.log_offset) "
        "<> (excluded.log_topic, excluded.log_partition, excluded.log_offset)"
    ),
    seen="events_seen",
)

AUDIT_LOGS = Table(
    "audit_logs",
    "audit",
    {
        **_LOG,
        "request_id": "text",
        "tenant": "text",
        "decision": "text",
        "actor": "text",
        "occurred_at_ms": "bigint",
        **_SOURCE,
        "code": "text",
        "message": "text",
        "inputs": "jsonb",
    },
    key=tuple(_LOG),
    on_conflict="NOTHING",
)

TURNS = Table(
    "conversation_turns",
    "turn",
    {
        "tenant": "text",
        "conversation_id": "text",
        "request_id": "text",
        **_SOURCE,
        "submitted_at_ms": "bigint",
        "replied_at_ms": "bigint",
        "messages": "jsonb",
        "answer": "text",
        "tokens": "bigint",
    },
    key=("tenant", "conversation_id", "request_id"),
    on_conflict="NOTHING",
)


def _latest(name: str, record: str, columns: Mapping[str, str]) -> Table:
    """A table that mirrors a compacted topic: the newest record of a key replaces the one before."""
    key, *rest = columns
    assignments = (*(f"{column} = excluded.{column}" for column in rest), "recorded_at = now()")
    return Table(name, record, columns, (key,), f"UPDATE SET {', '.join(assignments)}")


TENANTS = _latest(
    "tenants",
    "tenant",
    {
        "tenant": "text",
        "weight": "double precision",
        "classes": "jsonb",
        "models": "jsonb",
        "services": "jsonb",
        "pool": "text",
        "max_queue_requests": "bigint",
        "max_queue_bytes": "bigint",
        "requests_per_s": "double precision",
        "burst_requests": "bigint",
        "tokens_per_minute": "bigint",
        "tokens_per_day": "bigint",
        "groups": "jsonb",
        "forbidden_degradations": "jsonb",
        "max_prompt_tokens": "bigint",
        "max_completion_tokens": "bigint",
        "cache": "text",
    },
)

MODELS = _latest(
    "models",
    "model",
    {
        "model": "text",
        "version": "text",
        "pool": "text",
        "engine": "text",
        "tasks": "jsonb",
        "path": "text",
        "max_context_tokens": "bigint",
        "max_output_tokens": "bigint",
        "max_batch_size": "bigint",
        "max_batch_tokens": "bigint",
        "dedicated_pools": "jsonb",
        "smaller_model": "text",
        "dtype": "text",
        "quantization": "text",
        "tensor_parallel_size": "bigint",
    },
)

ALL_TABLES = (RESULTS, TURNS, USAGE, AUDIT_LOGS, TENANTS, MODELS)
