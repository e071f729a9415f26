"""Records of the log to rows: what is stored, what is skipped, and what Postgres could not hold."""

import json
from dataclasses import replace
from typing import Any

import pytest

from fairlane.evaluation_records import EvaluationMark
from fairlane.guardrail_records import GuardrailPolicy, GuardrailRule, GuardrailVerdict
from fairlane.names import EVALUATION_REPLIES, EVALUATION_TENANT, GATEWAY_REPLIES, JOBS_REPLIES
from fairlane.records import (
    AuditEvent,
    Budget,
    CacheUse,
    ConversationTurn,
    Cost,
    HistoryUse,
    InferenceReply,
    LabelScore,
    LatencyTarget,
    Message,
    ModelRoute,
    ModelVersion,
    Output,
    PassageReference,
    SourceCoordinate,
    TenantGroup,
    TenantSpec,
    Timings,
    TokenLogprob,
    TokenUsage,
    TopLogprob,
    UsageEvent,
)
from fairlane.schema_files import default_codec
from fairlane_server.text import reserved_tokens
from stream_processors.recorder.projection import MAX_TEXT_CHARACTERS, LogRecord, Projection, project
from stream_processors.recorder.tables import (
    ALL_TABLES,
    AUDIT_LOGS,
    EVALUATION_RESULTS,
    MODEL_ROUTES,
    MODEL_VERSIONS,
    RESULTS,
    TENANTS,
    TURNS,
    USAGE,
    Table,
    json_text,
    storable,
)

SOURCE = SourceCoordinate("requests.acme", 0, 7)
REPLY = InferenceReply("id-1", "acme", "ok", source=SOURCE)
USAGE_EVENT = UsageEvent(
    *("id-1", "acme", "generate", "words", "1", "normal", "ok", None),
    *(3, 4, 0, 11, 25, 1_000),
    SourceCoordinate("priority.generate.normal", 2, 9),
)
AUDIT_EVENT = AuditEvent("id-1", "acme", "accepted", "dispatcher-1", 1_000, SOURCE, inputs={"cost_tokens": "11"})
TENANT = TenantSpec(
    *("acme", 2, ("low",), ("words",)),
    requests_per_s=5.5,
    groups=(TenantGroup("search", 3), TenantGroup("images", 1, "search")),
    forbidden_degradations=("smaller_model",),
    max_prompt_tokens=900,
    max_completion_tokens=80,
    cache="exact",
    latency_targets=(LatencyTarget("low", 500),),
    budgets=(Budget("tenant", "month", "XTS", None, 5),),
    guardrails=GuardrailPolicy(input=(GuardrailRule("secrets", "block", "closed"),)),
)
MODEL = ModelVersion(
    *("words", "1", "generate", "simulated", ("generate",), "words", 100, 50),
    dedicated_pools=("acme-gpu",),
    smaller_model="letters",
    dtype="bfloat16",
    tensor_parallel_size=2,
)


def record(topic: str, value: object, offset: int = 0, key: bytes | None = None) -> LogRecord:
    encoded = value if value is None or isinstance(value, bytes) else default_codec().encode(value)
    return LogRecord(topic, 0, offset, 1_234, key, encoded)


def projected(*records: LogRecord) -> Projection:
    return project(records, default_codec())


def row(projection: Projection, table: Table, index: int = 0) -> dict[str, Any]:
    rows = [entry for layer in projection.layers[table.name] for entry in layer]
    return dict(zip(table.columns, rows[index], strict=True))


@pytest.mark.parametrize("topic", [GATEWAY_REPLIES, JOBS_REPLIES])
def test_a_reply_on_a_shared_topic_is_its_tenants(topic: str) -> None:
    result = row(projected(record(topic, REPLY, offset=5)), RESULTS)
    assert (result["tenant"], result["reply_topic"], result["reply_offset"]) == ("acme", topic, 5)


def test_a_reply_becomes_a_result_with_both_of_its_places() -> None:
    reply = replace(
        REPLY,
        output=Output(labels=(LabelScore("seven", 0.75),)),
        usage=TokenUsage(1, 2, 3),
        timings=Timings(10, 20, 30, 40, 50, 60),
        degradations=("smaller-model",),
        passages=(PassageReference("p1", 0.5),),
        guardrails=(GuardrailVerdict("input", "pii", "redacted", ("PERSON",)),),
    )
    result = row(projected(record("replies.acme.search", reply, offset=5)), RESULTS)
    assert (result["source_topic"], result["source_partition"], result["source_offset"]) == ("requests.acme", 0, 7)
    assert (result["reply_topic"], result["reply_partition"], result["reply_offset"]) == ("replies.acme.search", 0, 5)
    assert result["replied_at_ms"] == 1_234
    assert json.loads(result["output"]) == {"labels": [{"label": "seven", "score": 0.75}]}
    assert json.loads(result["passages"]) == [{"passage_id": "p1", "score": 0.5}]
    assert json.loads(result["degradations"]) == ["smaller-model"]
    (verdict,) = json.loads(result["guardrails"])
    assert verdict == {"stage": "input", "check": "pii", "verdict": "redacted", "types": ["PERSON"]}
    assert (result["prompt_tokens"], result["completion_tokens"], result["cached_tokens"]) == (1, 2, 3)
    assert (result["submitted_at_ms"], result["engine_finished_at_ms"]) == (10, 60)
    assert (result["replies_seen"], result["replays_seen"]) == (1, 0)


def test_a_reply_to_a_copy_is_stored_beside_the_results_under_its_original() -> None:
    copy = InferenceReply(
        *("copy-1", EVALUATION_TENANT, "ok"),
        model="words",
        model_version="2",
        task="generate",
        output=Output(text="b"),
        usage=TokenUsage(1, 2, 3),
        timings=Timings(10, 20, 30, 40, 50, 65),
        cost=Cost(7, "XTS"),
        source=SOURCE,
        evaluation=EvaluationMark("shadow", "run-1", "candidate", "acme", "id-1"),
    )
    projection = projected(record(EVALUATION_REPLIES, copy, offset=5), record("replies.acme", REPLY))
    (stored,) = projection.layers[EVALUATION_RESULTS.name]
    assert len(stored) == 1
    result = row(projection, EVALUATION_RESULTS)
    assert [result[name] for name in EVALUATION_RESULTS.key] == ["run-1", "acme", "id-1", "candidate"]
    assert (result["source_topic"], result["source_offset"]) == (SOURCE.topic, SOURCE.offset)
    assert (result["kind"], result["ended"], result["model_version"]) == ("shadow", "completed", "2")
    assert json.loads(result["output"]) == {"text": "b"}
    assert (result["engine_ms"], result["copied_at_ms"], result["finished_at_ms"]) == (15, 10, 1_234)
    assert (result["completion_tokens"], result["cost_nanos"], result["log_offset"]) == (2, 7, 5)
    assert projection.count(RESULTS) == 1, "that of the original"


@pytest.mark.parametrize(
    ("outcome", "code", "ended"),
    [
        ("ok", None, "completed"),
        ("failed", "poison", "failed"),
        ("rejected", "unknown_model", "failed"),
        ("expired", None, "dropped"),
        ("cancelled", None, "dropped"),
        ("rejected", "forbidden", "dropped"),
    ],
)
def test_a_copy_ends_in_one_of_three_ways(outcome: str, code: str | None, ended: str) -> None:
    mark = EvaluationMark("replay", "run-1", "champion", "acme", "id-1")
    copy = InferenceReply("copy-1", EVALUATION_TENANT, outcome, code=code, source=SOURCE, evaluation=mark)
    result = row(projected(record(EVALUATION_REPLIES, copy)), EVALUATION_RESULTS)
    assert (result["ended"], result["engine_ms"]) == (ended, None)


def test_a_reply_without_a_mark_among_those_of_copies_is_skipped() -> None:
    projection = projected(record(EVALUATION_REPLIES, REPLY, offset=3))
    assert [(one.offset, one.problem) for one in projection.skipped] == [(3, "invalid_body")]
    assert not projection.layers


def test_a_replay_names_what_it_replays_and_log_probabilities_are_kept() -> None:
    tokens = (TokenLogprob("a", -0.5, (TopLogprob("a", -0.5), TopLogprob("b", -1.5))),)
    reply = replace(REPLY, output=Output(text="a", logprobs=tokens), replay_of="id-0", attempts=3)
    result = row(projected(record("replies.acme", reply)), RESULTS)
    assert (result["replay_of"], result["attempts"]) == ("id-0", 3)
    top = [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.5}]
    assert json.loads(result["output"]) == {"text": "a", "logprobs": [{"token": "a", "logprob": -0.5, "top": top}]}


def test_a_cost_becomes_an_amount_and_its_currency_and_none_stays_none() -> None:
    cost = Cost(2**63 - 1, "XTS")
    usage = replace(USAGE_EVENT, cost=cost, images=1, batch_size=8, requested_by="key:\0" + "0123456789abcdef")
    rows = projected(record("ledger.usage", usage), record("replies.acme", replace(REPLY, cost=cost)))
    spent = row(rows, USAGE)
    for stored in (spent, row(rows, RESULTS)):
        assert (stored["cost_nanos"], stored["currency"]) == (2**63 - 1, "XTS")
    assert (spent["images"], spent["batch_size"]) == (1, 8)
    assert spent["requested_by"].startswith("key:")
    assert "\0" not in spent["requested_by"]
    rows = projected(record("ledger.usage", USAGE_EVENT), record("replies.acme", REPLY))
    for stored in (row(rows, USAGE), row(rows, RESULTS)):
        assert (stored["cost_nanos"], stored["currency"]) == (None, None)


def test_a_copy_of_a_reply_is_counted_apart() -> None:
    result = row(projected(record("replies.acme", replace(REPLY, replayed=True))), RESULTS)
    assert (result["replies_seen"], result["replays_seen"]) == (0, 1)


TURN = ConversationTurn("talk", (Message("user", "2 + 2?"), Message("user", "And 3 + 3?")))


def test_an_answer_in_a_conversation_is_a_turn_of_it() -> None:
    reply = replace(REPLY, turn=TURN, output=Output(text="4 and 6"))
    projection = projected(record("replies.acme", reply))
    turn = row(projection, TURNS)
    assert (turn["tenant"], turn["conversation_id"], turn["request_id"]) == ("acme", "talk", "id-1")
    assert (turn["replied_at_ms"], turn["source_offset"], turn["answer"]) == (1_234, 7, "4 and 6")
    assert json.loads(turn["messages"]) == [
        {"role": "user", "content": "2 + 2?"},
        {"role": "user", "content": "And 3 + 3?"},
    ]
    assert turn["tokens"] == 4 + 5 + 3
    assert turn["submitted_at_ms"] == 1_234
    assert projection.count(RESULTS) == 1


def test_turns_stand_in_the_order_of_their_requests_by_the_brokers_clock() -> None:
    answered = replace(REPLY, turn=TURN, output=Output(text="4 and 6"), timings=Timings(submitted_at_ms=900))
    turn = row(projected(record("replies.acme", answered)), TURNS)
    assert (turn["submitted_at_ms"], turn["replied_at_ms"]) == (900, 1_234)


def test_what_no_prompt_has_room_for_is_left_out_of_the_middle() -> None:
    long = f"begin{'x' * MAX_TEXT_CHARACTERS}end"
    fitting = "y" * MAX_TEXT_CHARACTERS
    said = ConversationTurn("talk", (Message("user", long), Message("user", fitting)))
    turn = row(projected(record("replies.acme", replace(REPLY, turn=said, output=Output(text=long)))), TURNS)
    (asked, whole) = (message["content"] for message in json.loads(turn["messages"]))
    for text in (asked, turn["answer"]):
        assert MAX_TEXT_CHARACTERS - 1 <= len(text) <= MAX_TEXT_CHARACTERS
        assert text.startswith("beginx")
        assert text.endswith("xend")
        assert "x … x" in text
    assert whole == fitting
    assert turn["tokens"] == sum(map(reserved_tokens, (asked, fitting, turn["answer"])))


@pytest.mark.parametrize(
    "changed",
    [
        {"turn": None},
        {"replayed": True},
        {"outcome": "failed"},
        {"output": None},
        {"output": Output(scores=(1.0,))},
    ],
)
def test_what_is_no_new_answer_in_a_conversation_is_no_turn(changed: dict[str, Any]) -> None:
    reply = replace(REPLY, **{"turn": TURN, "output": Output(text="4"), **changed})
    assert TURNS.name not in projected(record("replies.acme", reply)).layers


def test_what_came_from_a_cache_and_what_was_said_before_are_told() -> None:
    used = replace(REPLY, cache_use=CacheUse("exact", "id-0", 900), history_use=HistoryUse(4, "shortened", 3))
    result = row(projected(record("replies.acme", used)), RESULTS)
    assert json.loads(result["cache_use"]) == {
        "mode": "exact",
        "request_id": "id-0",
        "answered_at_ms": 900,
        "similarity": 1.0,
    }
    assert json.loads(result["history_use"]) == {"messages": 4, "reason": "shortened", "took_ms": 3}
    plain = row(projected(record("replies.acme", REPLY)), RESULTS)
    assert (plain["cache_use"], plain["history_use"]) == (None, None)
    event = record("ledger.usage", replace(USAGE_EVENT, cached=True))
    assert row(projected(event), USAGE)["cached"] is True
    assert row(projected(record("ledger.usage", USAGE_EVENT)), USAGE)["cached"] is False


def test_usage_and_audit_carry_their_places() -> None:
    projection = projected(record("ledger.usage", USAGE_EVENT, 3), record("ledger.audit", AUDIT_EVENT, 4))
    usage, audit = row(projection, USAGE), row(projection, AUDIT_LOGS)
    assert (usage["work_topic"], usage["work_offset"], usage["log_offset"]) == ("priority.generate.normal", 9, 3)
    assert (usage["cost_tokens"], usage["engine_ms"], usage["events_seen"]) == (11, 25, 1)
    assert (audit["log_topic"], audit["log_offset"], audit["source_offset"]) == ("ledger.audit", 4, 7)
    assert json.loads(audit["inputs"]) == {"cost_tokens": "11"}


def test_rows_with_the_same_key_come_into_different_layers() -> None:
    other = replace(REPLY, request_id="id-2")
    layers = projected(
        record("replies.acme", REPLY, 0), record("replies.acme", other, 1), record("replies.acme", REPLY, 2)
    ).layers["results"]
    assert [[entry[0] for entry in layer] for layer in layers] == [["id-1", "id-2"], ["id-1"]]


def test_a_request_id_that_was_sent_again_has_a_row_of_its_own() -> None:
    again = replace(REPLY, source=replace(SOURCE, offset=8))
    assert len(projected(record("replies.acme", REPLY), record("replies.acme", again, 1)).layers["results"]) == 1


def test_of_a_compacted_topic_the_newest_record_counts() -> None:
    projection = projected(
        record("control.tenants", TENANT, 0, b"acme"),
        record("control.tenants", replace(TENANT, weight=3), 1, b"acme"),
        record("control.tenants", TenantSpec("globex"), 2, b"globex"),
        record("control.tenants", None, 3, b"globex"),
        record("control.models", None, 0, b"words/1"),
        record("control.models", MODEL, 1, b"words/1"),
    )
    tenant, model = row(projection, TENANTS), row(projection, MODEL_VERSIONS)
    assert (tenant["tenant"], tenant["weight"], json.loads(tenant["models"])) == ("acme", 3, ["words"])
    assert (model["model"], json.loads(model["tasks"]), model["max_batch_size"]) == ("words", ["generate"], 32)
    assert json.loads(tenant["groups"]) == [
        {"group": "search", "weight": 3, "parent": None},
        {"group": "images", "weight": 1, "parent": "search"},
    ]
    assert json.loads(tenant["forbidden_degradations"]) == ["smaller_model"]
    assert (tenant["max_prompt_tokens"], tenant["max_completion_tokens"]) == (900, 80)
    assert tenant["cache"] == "exact"
    assert json.loads(tenant["latency_targets"]) == [{"priority_class": "low", "target_ms": 500}]
    assert [budget["hard_nanos"] for budget in json.loads(tenant["budgets"])] == [5]
    assert json.loads(tenant["guardrails"])["input"] == [
        {"check": "secrets", "action": "block", "on_failure": "closed"}
    ]
    assert (json.loads(model["dedicated_pools"]), model["smaller_model"]) == (["acme-gpu"], "letters")
    assert (model["dtype"], model["quantization"], model["tensor_parallel_size"]) == ("bfloat16", None, 2)
    assert projection.withdrawn == {"tenants": ["globex"]}


def test_every_change_of_a_route_is_kept_and_takes_the_place_of_an_older_deployments_version() -> None:
    route = ModelRoute("words", 2, {"champion": "2"}, {"champion": "1"}, stopped=("1",), changed_by="rollout")
    projection = projected(
        record("control.models", MODEL, 0, b"words"),
        record("control.models", replace(route, revision=1), 1, b"words"),
        record("control.models", route, 2, b"words"),
        record("control.models", None, 3, b"words"),
    )
    (changes,) = projection.layers["model_routes"]
    columns = [dict(zip(MODEL_ROUTES.columns, change, strict=True)) for change in changes]
    assert [(one["revision"], one["log_offset"], json.loads(one["aliases"])) for one in columns] == [
        (1, 1, {"champion": "2"}),
        (2, 2, {"champion": "2"}),
        (0, 3, {}),
    ]
    assert (json.loads(columns[1]["stopped"]), columns[1]["changed_by"]) == (["1"], "rollout")
    assert projection.withdrawn == {"model_versions": ["words"]}
    assert "model_versions" not in projection.layers


@pytest.mark.parametrize(
    ("topic", "value", "problem"),
    [
        ("replies.acme", b"\xff\xfe random", "bad_magic"),
        ("replies.acme", b"", "empty"),
        ("replies.acme", None, "empty"),
        ("replies.acme", b"\x00\x00\x00\x03\xe7", "unknown_schema_id"),
        ("replies.acme", default_codec().encode(REPLY)[:-4], "truncated_body"),
        ("replies.acme", default_codec().encode(REPLY) + b"x", "trailing_bytes"),
        ("replies.acme", default_codec().encode(USAGE_EVENT), "unexpected_type"),
        ("ledger.usage", default_codec().encode(AUDIT_EVENT), "unexpected_type"),
        ("control.tenants", b"tenant", "bad_magic"),
    ],
)
def test_what_does_not_decode_is_skipped_with_its_place(topic: str, value: bytes | None, problem: str) -> None:
    projection = projected(record(topic, value, 5), record("replies.acme", REPLY, 6))
    assert [(entry.topic, entry.offset, entry.problem) for entry in projection.skipped] == [(topic, 5, problem)]
    assert projection.count(RESULTS) == 1


def test_a_tombstone_whose_key_is_no_text_is_skipped() -> None:
    assert [entry.problem for entry in projected(record("control.models", None, 1, b"\xff")).skipped] == [
        "invalid_body"
    ]


def test_nul_and_nan_do_not_cost_the_row() -> None:
    output = Output(text="a\x00b", scores=(float("nan"), float("inf"), -float("inf"), 0.5))
    result = row(projected(record("replies.acme", replace(REPLY, message="x\x00y", output=output))), RESULTS)
    assert result["message"] == "x\u2400y"
    assert json.loads(result["output"]) == {"text": "a\u2400b", "scores": ["NaN", "Infinity", "-Infinity", 0.5]}


def test_json_keeps_a_backslash_that_only_looks_like_a_nul() -> None:
    assert json.loads(json_text({"text": "\\u0000", "\x00": ("a\x00",)})) == {"text": "\\u0000", "\u2400": ["a\u2400"]}
    assert storable("plain") == "plain"
    assert storable(7) == 7


@pytest.mark.parametrize(("text", "longest"), [("天气很好", 12), ("🦆🧊", 8), ("é\u2028\x7f", 6), ("\x01\n", 8)])
def test_json_is_no_longer_than_what_it_says_but_for_control_characters(text: str, longest: int) -> None:
    encoded = json_text(text)
    assert len(encoded.encode()) == longest + 2
    assert json.loads(encoded) == text


def test_no_nul_comes_into_json_however_it_is_written() -> None:
    for said in ("\x00", "a\x00\x01", "\\\x00", "\\u0000\x00", "天\x00"):
        for value in (said, {said: [said]}, [{"content": said}]):
            assert "\x00" not in str(json.loads(json_text(value)))


def test_a_lone_surrogate_does_not_come_out_of_the_log() -> None:
    encoded = default_codec().encode(replace(REPLY, message="half MARK")).replace(b"half MARK", b"half \xed\xa0\x80x")
    assert [entry.problem for entry in projected(record("replies.acme", encoded)).skipped] == ["invalid_body"]


def test_a_key_is_part_of_its_table() -> None:
    for table in ALL_TABLES:
        assert set(table.key) <= set(table.columns)
