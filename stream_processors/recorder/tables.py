"""The recorder's tables: columns in order, keys, and how a second row for a key is merged.

The tables themselves are made by ``deploy/migrations``; a test holds the two together.
"""

import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, get_type_hints

from fairlane.records import (
    AuditEvent,
    InferenceReply,
    ModelRoute,
    ModelVersion,
    TenantSpec,
    Timings,
    TokenUsage,
    UsageEvent,
)
from fairlane_server.costs.daily_sums import KEYS, SUMS
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
        in_order: rows are written by their key, the first columns, so that those who lock several wait for one another
            instead of deadlocking.
    """

    name: str
    record: str
    columns: Mapping[str, str]
    key: tuple[str, ...]
    on_conflict: str
    seen: str | None = None
    in_order: bool = False

    @property
    def insert(self) -> str:
        """One statement for any number of rows; its parameters are one array per column.

        No two rows of one statement may have the same key. With ``seen`` it returns key and count of what was seen
        more than once.
        """
        names = ", ".join(self.columns)
        arrays = ", ".join(f"%b::{kind}[]" for kind in self.columns.values())
        order = f"ORDER BY {', '.join(map(str, range(1, 1 + len(self.key))))} " if self.in_order else ""
        statement = (
            f"INSERT INTO {self.name} AS stored ({names}) SELECT * FROM unnest({arrays}) {order}"  # noqa: S608 - our own names
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


# Without a type of its own here a value is stored as JSON.
_TYPES = {
    hint: name
    for plain, name in ((str, "text"), (int, "bigint"), (float, "double precision"), (bool, "boolean"))
    for hint in (plain, plain | None)
}


def _columns_of(record: type, *, but: Collection[str] = ()) -> dict[str, str]:
    """A column for each field of a record, but for these fields."""
    return {name: _TYPES.get(hint, "jsonb") for name, hint in get_type_hints(record).items() if name not in but}


_LOG = {"log_topic": "text", "log_partition": "bigint", "log_offset": "bigint"}
_SOURCE = {"source_topic": "text", "source_partition": "bigint", "source_offset": "bigint"}
_COST = {"cost_nanos": "bigint", "currency": "text"}
_WORK = {"work_topic": "text", "work_partition": "bigint", "work_offset": "bigint"}

_RESULT_KEY = ("request_id", "tenant", *_SOURCE)
_RESULT_COLUMNS = {
    **_columns_of(InferenceReply, but=("usage", "timings", "replayed", "source", "turn", "cost", "evaluation")),
    **_columns_of(TokenUsage),
    **_columns_of(Timings),
    **_COST,
    **_SOURCE,
    "reply_topic": "text",
    "reply_partition": "bigint",
    "reply_offset": "bigint",
    "replied_at_ms": "bigint",
    "replies_seen": "integer",
    "replays_seen": "integer",
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
    {**_WORK, **_LOG, **_columns_of(UsageEvent, but=("work", "cost")), **_COST, "events_seen": "integer"},
    key=tuple(_WORK),
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
    {**_LOG, **_columns_of(AuditEvent, but=("source",)), **_SOURCE},
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


_FEEDBACK_SAID = ("thumb", "rating", "correction", "tags", "comment")
_FEEDBACK_ORDER = ("given_at_ms", *_LOG)
_ANSWERED_BY = {"model": "text", "model_version": "text", "arm": "text", "conversation_id": "text"}
_FEEDBACK_KEY = ("tenant", "request_id", "given_by")


def _feedback_conflict() -> str:
    """The later of a giver's records replaces the earlier, in whichever order they come. One that says the same moves
    the time: what was said in between is older."""
    changed = ", ".join(f"{name} = excluded.{name}" for name in (*_FEEDBACK_SAID, *_FEEDBACK_ORDER))
    return (
        f"UPDATE SET {changed} "
        "WHERE (stored.given_at_ms, stored.log_offset) < (excluded.given_at_ms, excluded.log_offset)"
    )


FEEDBACK = Table(
    "feedback",
    "feedback",
    {
        **dict.fromkeys(_FEEDBACK_KEY, "text"),
        "thumb": "text",
        "rating": "double precision",
        "correction": "text",
        "tags": "jsonb",
        "comment": "text",
        "given_at_ms": "bigint",
        **_LOG,
        **_ANSWERED_BY,
    },
    key=_FEEDBACK_KEY,
    on_conflict=_feedback_conflict(),
    in_order=True,
)
"""The model version is added when both the feedback and the result are stored, whichever comes first."""

EVALUATION_RESULTS = Table(
    "evaluation_results",
    "evaluation result",
    {
        **dict.fromkeys(("run", "tenant", "request_id", "arm", "kind", "conversation_id"), "text"),
        **_SOURCE,
        **dict.fromkeys(("ended", "outcome", "code", "message", "model", "model_version", "task"), "text"),
        "output": "jsonb",
        "finish_reason": "text",
        **_columns_of(TokenUsage),
        "engine_ms": "bigint",
        "batch_size": "bigint",
        **_COST,
        "copied_at_ms": "bigint",
        "finished_at_ms": "bigint",
        **_LOG,
        "replies_seen": "integer",
    },
    key=("run", "tenant", "request_id", "arm"),
    on_conflict=(
        "UPDATE SET replies_seen = stored.replies_seen + 1 "
        "WHERE (stored.log_topic, stored.log_partition, stored.log_offset) "
        "<> (excluded.log_topic, excluded.log_partition, excluded.log_offset) "
        "AND (stored.source_topic, stored.source_partition, stored.source_offset) "
        "= (excluded.source_topic, excluded.source_partition, excluded.source_offset)"
    ),
    seen="replies_seen",
)
"""Of copies that ran for evaluation, by the tenant and the id of the original. Of an id that was accepted twice, while
duplicates were not noticed, the first stays."""


def _latest(name: str, kind: str, columns: Mapping[str, str]) -> Table:
    """A table that mirrors a compacted topic: the newest record of a key, the first column, replaces the one before."""
    key, *rest = columns
    assignments = (*(f"{column} = excluded.{column}" for column in rest), "recorded_at = now()")
    return Table(name, kind, columns, (key,), f"UPDATE SET {', '.join(assignments)}")


TENANTS = _latest("tenants", "tenant", _columns_of(TenantSpec))
MODEL_VERSIONS = _latest("model_versions", "model version", {"reference": "text", **_columns_of(ModelVersion)})
MODEL_ROUTES = Table(
    "model_routes", "model route", {**_columns_of(ModelRoute), **_LOG}, key=tuple(_LOG), on_conflict="NOTHING"
)
"""All changes, as the audit: the topic keeps the last of each model alone."""

DAILY_SUMS = tuple(
    Table(
        name, "day", {**dict.fromkeys(keys, "text"), "day": "date", **dict.fromkeys(SUMS, "numeric")}, keys, "NOTHING"
    )
    for name, keys in KEYS.items()
)
"""Sums of usage, which triggers of that table count. The recorder removes old days."""

_HOUR = {"tenant": "text", "hour": "bigint", "currency": "text", "requests": "numeric", "cost_nanos": "numeric"}
HOURLY_SUMS = Table("usage_hourly", "hour", _HOUR, ("tenant", "hour", "currency"), "NOTHING")
"""Costs by the hour, likewise."""

ERASURES = Table("erasures", "erasure", {"erasure_id": "text", "requested_at_ms": "bigint"}, ("erasure_id",), "NOTHING")
ERASED = Table(
    "erased", "tombstone", {"tenant": "text", "kind": "text", "kept_until_ms": "bigint"}, ("tenant", "kind"), "NOTHING"
)
"""Of the erasures that tenants asked for. The recorder reads what is not to be stored, and removes what is old."""
LABEL_ITEMS = Table(
    "label_items",
    "label item",
    {"tenant": "text", "request_id": "text", "queued_at_ms": "bigint"},
    ("tenant", "request_id"),
    "NOTHING",
)
"""Which the recorder fills from other tables."""
ALL_TABLES = (RESULTS, TURNS, USAGE, AUDIT_LOGS, FEEDBACK, EVALUATION_RESULTS, TENANTS, MODEL_VERSIONS, MODEL_ROUTES)
