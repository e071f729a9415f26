"""Projection of log records to table rows. Pure: no Kafka client, no database, no clock."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from operator import itemgetter
from typing import Any

from fairlane.codec import Codec, DecodeError, DecodeProblem
from fairlane.feedback import rating_of
from fairlane.frozen import frozen_dataclass
from fairlane.names import (
    CONTROL_MODELS,
    CONTROL_TENANTS,
    EVALUATION_REPLIES,
    LEDGER_AUDIT,
    LEDGER_FEEDBACK,
    LEDGER_USAGE,
    is_replies,
)
from fairlane.outcomes import Outcome
from fairlane.records import (
    AuditEvent,
    Cost,
    Feedback,
    InferenceReply,
    Message,
    ModelRoute,
    ModelVersion,
    Output,
    SourceCoordinate,
    TenantSpec,
    UsageEvent,
)
from fairlane_server.conversations.turns import turn_tokens
from fairlane_server.evaluation.copies import end_of
from fairlane_server.text import without_nul
from stream_processors.recorder.tables import (
    AUDIT_LOGS,
    EVALUATION_RESULTS,
    FEEDBACK,
    MODEL_ROUTES,
    MODEL_VERSIONS,
    RESULTS,
    TENANTS,
    TURNS,
    USAGE,
    Table,
    json_text,
    storable,
    without_middle,
)

Row = tuple[Any, ...]

MAX_TEXT_CHARACTERS = 262_144
"""Of one text of a turn: more than the history of any prompt has room for."""

_UNKNOWN_SOURCE = SourceCoordinate("", -1, -1)


@frozen_dataclass(frozen=True, slots=True)
class LogRecord:
    """One record of the log; ``timestamp_ms`` is the record's own, since the epoch."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None


@frozen_dataclass(frozen=True, slots=True)
class Skipped:
    """A record that says nothing that could be stored, and why."""

    topic: str
    partition: int
    offset: int
    problem: str


@dataclass(slots=True)
class Projection:
    """Rows of a batch of records.

    Attributes:
        layers: statements' worth of rows per table: no two rows of one layer have the same key, and the layers are
            written in order.
        withdrawn: keys to delete per table, written after the layers.
        skipped: records that hold nothing to store.
        conversations: the conversation of each reply that continues one, by tenant and request id.
        replays: the first id of each request that is the replay of a dead letter, likewise.
    """

    layers: dict[str, list[list[Row]]] = field(default_factory=dict)
    withdrawn: dict[str, list[str]] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)
    conversations: dict[tuple[str, str], str] = field(default_factory=dict)
    replays: dict[tuple[str, str], str] = field(default_factory=dict)

    def count(self, table: Table) -> int:
        """How many rows of a table are written."""
        return sum(map(len, self.layers.get(table.name, ())))


def project(records: Iterable[LogRecord], codec: Codec) -> Projection:
    """The rows of these records, in the order given per topic. Bytes that do not decode are skipped, never raised."""
    projection = Projection()
    events: dict[str, list[Row]] = {}
    latest: dict[str, dict[str, Row | None]] = {}
    for record in records:
        try:
            for table, key, row in _control(record, codec):
                latest.setdefault(table.name, {})[key] = row
            for table, row in _event(record, codec, projection):
                events.setdefault(table.name, []).append(row)
        except DecodeError as error:
            projection.skipped.append(Skipped(record.topic, record.partition, record.offset, error.problem))
    for table in (RESULTS, TURNS, USAGE, AUDIT_LOGS, FEEDBACK, EVALUATION_RESULTS, MODEL_ROUTES):
        if rows := events.get(table.name):
            projection.layers[table.name] = _layers(table, rows)
    for name, rows_by_key in latest.items():
        if rows := [row for row in rows_by_key.values() if row is not None]:
            projection.layers[name] = [rows]
        if gone := [key for key, row in rows_by_key.items() if row is None]:
            projection.withdrawn[name] = gone
    return projection


def ends_of_copies(projection: Projection) -> Counter[tuple[str, str, str]]:
    """The number of copies in a batch by kind, arm and how they ended. A reply that is read again counts again."""
    place_of = itemgetter(*map(list(EVALUATION_RESULTS.columns).index, ("kind", "arm", "ended")))
    layers = projection.layers.get(EVALUATION_RESULTS.name, ())
    return Counter(place_of(row) for layer in layers for row in layer)


def _layers(table: Table, rows: Sequence[Row]) -> list[list[Row]]:
    """The rows in as few layers as their keys allow: one, unless a key comes twice."""
    layers: list[list[Row]] = []
    times: dict[object, int] = {}
    key_of = table.key_of
    for row in rows:
        key = key_of(row)
        depth = times.get(key, 0)
        times[key] = depth + 1
        if depth == len(layers):
            layers.append([])
        layers[depth].append(row)
    return layers


def _event(record: LogRecord, codec: Codec, projection: Projection) -> tuple[tuple[Table, Row], ...]:
    if is_replies(record.topic):
        reply = codec.decode_as(InferenceReply, record.value)
        key = storable(reply.tenant), storable(reply.request_id)
        if reply.turn is not None:
            projection.conversations[key] = storable(reply.turn.conversation_id)
        if reply.replay_of is not None:
            projection.replays[key] = storable(reply.replay_of)
        result = RESULTS, _result(reply, record)
        turn = _turn(reply, record)
        return (result,) if turn is None else (result, (TURNS, turn))
    if record.topic == EVALUATION_REPLIES:
        return ((EVALUATION_RESULTS, _evaluated(codec.decode_as(InferenceReply, record.value), record, projection)),)
    if record.topic == LEDGER_USAGE:
        return ((USAGE, _usage(codec.decode_as(UsageEvent, record.value), record)),)
    if record.topic == LEDGER_AUDIT:
        return ((AUDIT_LOGS, _audit(codec.decode_as(AuditEvent, record.value), record)),)
    if record.topic == LEDGER_FEEDBACK:
        return ((FEEDBACK, _feedback(codec.decode_as(Feedback, record.value), record)),)
    if record.topic == CONTROL_MODELS:
        route = _route(record, codec)
        return () if route is None else ((MODEL_ROUTES, route),)
    if record.topic == CONTROL_TENANTS:
        return ()
    raise ValueError(f"{record.topic} is not projected")


def _result(reply: InferenceReply, record: LogRecord) -> Row:
    values = {
        **_fields(reply),
        **_fields(reply.usage),
        **_fields(reply.timings),
        **_place("source", reply.source or _UNKNOWN_SOURCE),
        **_place("reply", record),
        **_cost(reply.cost),
        "replied_at_ms": record.timestamp_ms,
        "output": None if reply.output is None else json_text(_output(reply.output)),
        "degradations": json_text(reply.degradations),
        "passages": json_text([asdict(passage) for passage in reply.passages]),
        "guardrails": json_text([asdict(verdict) for verdict in reply.guardrails]),
        "replies_seen": 0 if reply.replayed else 1,
        "replays_seen": 1 if reply.replayed else 0,
    }
    for name in ("retrieval_use", "cache_use", "history_use", "budget"):
        values[name] = None if values[name] is None else json_text(asdict(values[name]))
    return _row(RESULTS, values)


def _evaluated(reply: InferenceReply, record: LogRecord, projection: Projection) -> Row:
    mark, times = reply.evaluation, reply.timings
    if mark is None:
        raise DecodeError(DecodeProblem.INVALID_BODY, "InferenceReply.evaluation: missing")
    if reply.replay_of is not None:
        projection.replays[storable(mark.tenant), storable(mark.request_id)] = storable(reply.replay_of)
    if mark.conversation_id is not None:
        projection.conversations[storable(mark.tenant), storable(mark.request_id)] = storable(mark.conversation_id)
    has_run = times.engine_started_at_ms is not None and times.engine_finished_at_ms is not None
    values = {
        **_fields(reply),
        **_fields(mark),
        **_fields(reply.usage),
        **_place("source", reply.source or _UNKNOWN_SOURCE),
        **_cost(reply.cost),
        **_place("log", record),
        "ended": end_of(reply),
        "output": None if reply.output is None else json_text(_output(reply.output)),
        "engine_ms": (times.engine_finished_at_ms or 0) - (times.engine_started_at_ms or 0) if has_run else None,
        "copied_at_ms": times.submitted_at_ms,
        "finished_at_ms": record.timestamp_ms,
        "replies_seen": 1,
    }
    return _row(EVALUATION_RESULTS, values)


def _turn(reply: InferenceReply, record: LogRecord) -> Row | None:
    """What a reply adds to its conversation: what was asked and the answer. A copy of a reply, and one that is no
    answer, add nothing."""
    turn = reply.turn
    text = None if reply.output is None else reply.output.text
    if turn is None or text is None or reply.replayed or reply.outcome != Outcome.OK:
        return None
    submitted_at_ms = reply.timings.submitted_at_ms
    messages = [Message(said.role, without_middle(said.content, MAX_TEXT_CHARACTERS)) for said in turn.messages]
    answer = without_middle(text, MAX_TEXT_CHARACTERS)
    values = {
        "tenant": reply.tenant,
        "conversation_id": turn.conversation_id,
        "request_id": reply.request_id,
        **_place("source", reply.source or _UNKNOWN_SOURCE),
        "submitted_at_ms": record.timestamp_ms if submitted_at_ms is None else submitted_at_ms,
        "replied_at_ms": record.timestamp_ms,
        "messages": json_text([asdict(message) for message in messages]),
        "answer": answer,
        "tokens": turn_tokens(messages, answer),
    }
    return _row(TURNS, values)


def _output(output: Output) -> dict[str, Any]:
    """The parts of an output that are there; labels are a list of {label, score}, log probabilities one of {token,
    logprob, top}."""
    plain: dict[str, Any] = {"text": output.text, "embeddings": output.embeddings, "scores": output.scores}
    if output.labels is not None:
        plain["labels"] = [asdict(label) for label in output.labels]
    if output.logprobs is not None:
        plain["logprobs"] = [asdict(token) for token in output.logprobs]
    return {name: value for name, value in plain.items() if value is not None}


def _usage(event: UsageEvent, record: LogRecord) -> Row:
    places = {**_place("work", event.work), **_place("log", record)}
    return _row(USAGE, {**_fields(event), **_cost(event.cost), **places, "events_seen": 1})


def _audit(event: AuditEvent, record: LogRecord) -> Row:
    places = {**_place("source", event.source), **_place("log", record)}
    return _row(AUDIT_LOGS, {**_fields(event), **places, "inputs": json_text(event.inputs)})


def _feedback(feedback: Feedback, record: LogRecord) -> Row:
    values = {
        **_fields(feedback),
        **_place("log", record),
        "given_by": feedback.given_by or "",
        "rating": rating_of(feedback),
        "tags": json_text(feedback.tags),
        **dict.fromkeys(("model", "model_version", "arm", "conversation_id")),
    }
    return _row(FEEDBACK, values)


def _control(record: LogRecord, codec: Codec) -> Iterator[tuple[Table, str, Row | None]]:
    """The tables that hold the newest record of each key: the table, the key and the row; no row for a tombstone."""
    if record.topic not in (CONTROL_TENANTS, CONTROL_MODELS):
        return
    table = TENANTS if record.topic == CONTROL_TENANTS else MODEL_VERSIONS
    key = _key(record)
    if record.value is None:
        yield table, key, None
        return
    if table is TENANTS:
        spec = codec.decode_as(TenantSpec, record.value)
        yield table, storable(spec.tenant), _row(table, _plain_fields(spec))
        return
    model = codec.decode_any((ModelVersion, ModelRoute), record.value)
    # A route under a key where an older deployment had a version takes the place of that.
    row = _row(table, {"reference": key, **_plain_fields(model)}) if isinstance(model, ModelVersion) else None
    yield table, key, row


def _route(record: LogRecord, codec: Codec) -> Row | None:
    """A change of a model's route. One that was taken back has no aliases and the revision 0."""
    if record.value is None:
        key = _key(record)
        route = None if "/" in key else ModelRoute(key, 0, {}, {}, changed_at_ms=record.timestamp_ms)
    else:
        decoded = codec.decode_any((ModelVersion, ModelRoute), record.value)
        route = decoded if isinstance(decoded, ModelRoute) else None
    return None if route is None else _row(MODEL_ROUTES, {**_plain_fields(route), **_place("log", record)})


def _key(record: LogRecord) -> str:
    try:
        return without_nul((record.key or b"").decode())
    except UnicodeDecodeError:
        raise DecodeError(DecodeProblem.INVALID_BODY, "the key is no text") from None


def _plain_fields(record: Any) -> dict[str, Any]:
    return {name: _plain(value) for name, value in _fields(record).items()}


def _plain(value: Any) -> Any:
    """A list, a map and a record in a record as JSON; any other value as it is."""
    if is_dataclass(value) and not isinstance(value, type):
        return json_text(asdict(value))
    if isinstance(value, dict):
        return json_text(value)
    if isinstance(value, tuple):
        entries = [asdict(one) if is_dataclass(one) and not isinstance(one, type) else one for one in value]
        return json_text(entries)
    return value


def _fields(record: Any) -> dict[str, Any]:
    return {entry.name: getattr(record, entry.name) for entry in fields(record)}


def _cost(cost: Cost | None) -> dict[str, Any]:
    if cost is None:
        return {"cost_nanos": None, "currency": None}
    return {"cost_nanos": cost.nanos, "currency": cost.currency}


def _place(prefix: str, place: SourceCoordinate | LogRecord) -> dict[str, Any]:
    return {
        f"{prefix}_topic": place.topic,
        f"{prefix}_partition": place.partition,
        f"{prefix}_offset": place.offset,
    }


def _row(table: Table, values: Mapping[str, Any]) -> Row:
    """The values of the table's columns; others are left out."""
    return tuple([storable(values[name]) for name in table.columns])
