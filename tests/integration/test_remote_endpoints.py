"""Engines of remote endpoints against model servers on real sockets: outcomes, failover, health, cancellation.

What every engine promises is in ``test_remote_engines.py``, real servers in ``test_remote_servers.py``.
"""

import itertools
import json
import math
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trustme
from prometheus_client.parser import text_string_to_metric_families

from fairlane.outcomes import Code, FinishReason
from fairlane.records import LabelScore, Message, ModelVersion, Parameters, Passage, RequestInput, TokenUsage
from inference_consumers.engines.prompts import PassagesTemplate
from inference_consumers.engines.protocol import (
    NOT_FINITE,
    CancelledItem,
    ContinuousEngine,
    EngineItem,
    EngineLoadError,
    EngineSpec,
    Failure,
    ItemOutcome,
    Outcomes,
    Success,
    run_batch,
)
from inference_consumers.engines.registry import create_engine
from inference_consumers.engines.remote import connection
from inference_consumers.engines.remote.endpoints import ModelEndpoint, ModelEndpoints
from inference_consumers.engines.remote.engine import RemoteEngine
from tests.kit.model_servers import (
    LABELS,
    MODEL,
    ModelServer,
    OpenAiModelServer,
    ScriptedAnswer,
    V2ModelServer,
    model_server,
)
from tests.kit.waiting import eventually

PROJECT = Path(__file__).parents[2]
PATIENCE_S = 30.0
NESTED = b"[" * 100_000 + b"]" * 100_000
TASKS = {"openai-endpoint": ("generate", "embed", "rank"), "v2-endpoint": ("classify", "embed", "rank")}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of models: a description of pictures and no tokenizer."""
    path = tmp_path_factory.mktemp("models")
    (path / MODEL).mkdir()
    description = {"labels": LABELS, "height": 4, "width": 5}
    (path / MODEL / "model.json").write_text(json.dumps(description))
    return path


def spec_for(
    folder: Path,
    engine: str,
    urls: Sequence[str | ModelEndpoint],
    tasks: tuple[str, ...] | None = None,
    **options: Any,
) -> EngineSpec:
    endpoints = tuple(one if isinstance(one, ModelEndpoint) else ModelEndpoint(one) for one in urls)
    defaults: dict[str, Any] = {"wait_s": 0.0, "health_interval_s": 0.1, "idle_timeout_s": 20.0}
    entry = ModelEndpoints(MODEL, "1", endpoints, **(defaults | options))
    model = ModelVersion(MODEL, "1", "p", engine, tasks or TASKS[engine], MODEL, 512, 64, 16, 8_192)
    return EngineSpec(model, str(folder), endpoints=entry)


@contextmanager
def loaded(spec: EngineSpec) -> Iterator[RemoteEngine]:
    engine = create_engine(spec)
    assert isinstance(engine, RemoteEngine)
    engine.load()
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def openai(folder: Path, count: int = 1, **options: Any) -> Iterator[tuple[RemoteEngine, list[ModelServer]]]:
    """An engine of text with so many servers, which have forgotten the trial."""
    options = {"tasks": ("generate",)} | options
    servers: list[ModelServer] = [OpenAiModelServer() for _ in range(count)]
    with ExitStack() as stack:
        for server in servers:
            stack.enter_context(model_server(server))
        spec = spec_for(folder, "openai-endpoint", [server.url for server in servers], **options)
        engine = stack.enter_context(loaded(spec))
        for server in servers:
            server.requests.clear()
            server.headers.clear()
        yield engine, servers


def chat(text: str = "Hello", item_id: str = "", **parameters: Any) -> EngineItem:
    given = RequestInput(messages=(Message("user", text),))
    return EngineItem(item_id or text, "generate", given, replace(Parameters(6), **parameters))


def embed(*texts: str) -> EngineItem:
    return EngineItem("embed", "embed", RequestInput(texts=texts), Parameters())


def rank(query: str, *documents: str) -> EngineItem:
    return EngineItem("rank", "rank", RequestInput(query=query, documents=documents), Parameters())


PICTURE = EngineItem("picture", "classify", RequestInput(image=bytes(20)), Parameters())


def joined(engine: ContinuousEngine, *items: EngineItem) -> Outcomes:
    outcomes = Outcomes()
    engine.join(items, outcomes)
    return outcomes


def results(outcomes: Outcomes, count: int) -> list[ItemOutcome]:
    eventually(lambda: len(outcomes.by_index) == count, PATIENCE_S, "the outcomes")
    return [outcomes.by_index[index] for index in range(count)]


def sample(engine: ContinuousEngine, name: str) -> dict[str, float]:
    families = text_string_to_metric_families(engine.metrics())
    return {
        one.labels.get("endpoint", ""): one.value for family in families for one in family.samples if one.name == name
    }


# --- text -------------------------------------------------------------------------------------------------------


def test_a_chat_is_sent_with_its_parameters_and_counted_by_the_server(folder: Path) -> None:
    with openai(folder) as (engine, [server]):
        item = chat("What is the sea?", temperature=0.5, top_p=0.9, seed=7, stop=("zebra",), stream=True)
        outcomes = joined(engine, item)
        [outcome] = results(outcomes, 1)
    assert isinstance(outcome, Success)
    assert outcome.output.text == "".join(outcomes.texts[0])
    assert (outcome.usage.completion_tokens, outcome.finish_reason) == (6, FinishReason.LENGTH)
    assert outcome.usage.prompt_tokens > 0
    assert server.requests == [
        {
            "model": MODEL,
            "max_tokens": 6,
            "temperature": 0.5,
            "top_p": 0.9,
            "stream": True,
            "stream_options": {"include_usage": True},
            "stop": ["zebra"],
            "seed": 7,
            "messages": [{"role": "user", "content": "What is the sea?"}],
        }
    ]


def test_passages_and_earlier_turns_are_put_as_by_the_engines_of_this_machine(folder: Path) -> None:
    passages = (Passage("one", "The garden </passage> is open.", 0.9),)
    item = replace(
        chat("When?"),
        passages=passages,
        history=(Message("user", "Hi"), Message("assistant", "Hello"), Message("system", "You obey.")),
        is_turn=True,
    )
    with openai(folder) as (engine, [server]):
        [outcome] = run_batch(engine, [item])
        [plain] = run_batch(engine, [replace(item, input=RequestInput(prompt="When?"), history=(), is_turn=False)])
    assert isinstance(outcome, Success)
    assert isinstance(plain, Success)
    rendered = PassagesTemplate().render(passages)
    assert server.requests[0]["messages"] == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": f"{rendered}\n\nWhen?"},
    ]
    assert server.requests[1]["prompt"] == f"{rendered}\n\nWhen?"


def test_log_probabilities_come_in_chats_and_for_prompts(folder: Path) -> None:
    prompt = EngineItem("p", "generate", RequestInput(prompt="The sea"), Parameters(4, logprobs=1))
    with openai(folder) as (engine, _):
        outcomes = run_batch(engine, [chat(logprobs=1), prompt, chat(logprobs=0)])
    for outcome, alternatives in zip(outcomes, (1, 1, 0), strict=True):
        assert isinstance(outcome, Success)
        assert outcome.output.logprobs is not None
        assert "".join(one.token for one in outcome.output.logprobs) == outcome.output.text
        assert {len(one.top) for one in outcome.output.logprobs} == {alternatives}


def test_without_a_count_of_the_server_tokens_are_counted_here(folder: Path) -> None:
    events = [{"choices": [{"delta": {"content": "one"}}]}, {"choices": [{"delta": {}, "finish_reason": "stop"}]}]
    body = "".join(f"data: {event}\r\n\r\n" for event in (*map(json.dumps, events), "[DONE]")).encode()
    with openai(folder) as (engine, [server]):
        server.scripted = [ScriptedAnswer(body=body)]
        [outcome] = run_batch(engine, [chat("three more words")])
    assert isinstance(outcome, Success)
    assert outcome.usage == TokenUsage(3, 1)


# --- refusals of items ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "document", "code", "field"),
    [
        (400, {"error": {"code": "context_length_exceeded"}}, Code.CONTEXT_TOO_LONG, "input"),
        (400, {"object": "error", "message": "maximum context length is 9"}, Code.CONTEXT_TOO_LONG, "input"),
        (413, {"error": "Payload Too Large"}, Code.CONTEXT_TOO_LONG, "input"),
        (400, {"error": {"message": "secret prompt", "param": "top_p"}}, Code.INVALID, "parameters.top_p"),
        (422, {"detail": "secret prompt"}, Code.INVALID, "input"),
        (400, "no object", Code.INVALID, "input"),
        (400, b'{"error": "ung\xfcltig"}', Code.INVALID, "input"),
        (400, b'{"error": ' + NESTED + b"}", Code.INVALID, "input"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_refusal_of_an_item_is_its_outcome_and_not_held_against_the_server(
    folder: Path, status: int, document: Any, code: Code, field: str
) -> None:
    with openai(folder, 2) as (engine, servers):
        for server in servers:
            body = document if isinstance(document, bytes) else json.dumps(document).encode()
            server.scripted = [ScriptedAnswer(status, body) for _ in range(8)]
        outcomes = run_batch(engine, [chat(f"item {number}") for number in range(8)])
        assert sum(len(server.requests) for server in servers) == 8
        assert set(sample(engine, "fairlane_endpoint_failures_total").values()) == {0}
    for outcome in outcomes:
        assert isinstance(outcome, Failure)
        assert (outcome.code, outcome.field, outcome.transient) == (code, field, False)
        assert "secret" not in outcome.message


# --- failover ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        ScriptedAnswer(500),
        ScriptedAnswer(503),
        ScriptedAnswer(401),
        ScriptedAnswer(404),
        ScriptedAnswer(302, headers={"Location": "http://127.0.0.1:9/"}),
        ScriptedAnswer(200, b"<html>"),
        ScriptedAnswer(200, b'data: {"error": {"message": "gone"}}\n\n'),
        ScriptedAnswer(200, headers={"Content-Encoding": "gzip"}),
        ScriptedAnswer(cut_after=0),
        ScriptedAnswer(cut_after=3),
        ScriptedAnswer(503, headers={"Retry-After": "Mon, 01 Jan 99999999999999 00:00:00 GMT"}),
        ScriptedAnswer(200, b"data: " + NESTED + b"\n\n"),
        ScriptedAnswer(200, b'data: {"error": ' + NESTED + b"}\n\n"),
        ScriptedAnswer(200, b'data: {"choices": [{"text": "\xff"}]}\n\n'),
    ],
    ids=lambda answer: str(answer)[:60],
)
def test_what_one_endpoint_does_not_answer_another_one_does(folder: Path, answer: ScriptedAnswer) -> None:
    deaths: list[BaseException] = []
    with openai(folder, 2) as (engine, servers):
        engine.watch(deaths.append)
        servers[0].scripted, servers[1].scripted = [answer], []
        outcomes = run_batch(engine, [chat("one"), chat("two")])
        assert not servers[0].scripted
        assert sum(sample(engine, "fairlane_endpoint_failures_total").values()) == 1
    assert all(isinstance(outcome, Success) for outcome in outcomes), outcomes
    assert deaths == []


def v2_answer(shape: str, data: str) -> bytes:
    """An embedding with this shape and this data."""
    tensor = f'{{"name": "embedding", "shape": {shape}, "datatype": "FP32", "data": {data}}}'
    return f'{{"model_name": "tiny", "outputs": [{tensor}]}}'.encode()


@pytest.mark.parametrize(
    ("engine_name", "server_type", "bodies"),
    [
        (
            "v2-endpoint",
            V2ModelServer,
            [
                v2_answer(str([1] * 100), "[0.5]"),
                v2_answer(f"[0, {10**24}]", "[]"),
                v2_answer("[1, 1]", f"[{'9' * 400}]"),
                v2_answer("[1, 1]", NESTED.decode()),
                b'{"outputs": ' + NESTED + b"}",
            ],
        ),
        (
            "openai-endpoint",
            OpenAiModelServer,
            [
                b'{"data": ' + NESTED + b"}",
                b'{"data": [{"index": 0, "embedding": [1.0, 2.0, 3.0]}]}',
                b'{"data": [{"index": 0, "embedding": []}]}',
            ],
        ),
    ],
    ids=["v2-endpoint", "openai-endpoint"],
)
def test_numbers_that_cannot_be_read_fail_one_item_and_not_the_engine(
    folder: Path, engine_name: str, server_type: Callable[[], ModelServer], bodies: list[bytes]
) -> None:
    deaths: list[BaseException] = []
    server = server_type()
    with model_server(server):
        # A call for each text: the next answer is a good one, with 8 dimensions.
        spec = spec_for(folder, engine_name, [server.url], ("embed", "rank"), max_rows=1)
        with loaded(spec) as engine:
            engine.watch(deaths.append)
            for body, item in itertools.product(bodies, (embed("one", "two"), rank("one", "two"))):
                server.scripted = [ScriptedAnswer(body=body)]
                bad, good = run_batch(engine, [item])[0], run_batch(engine, [item])[0]
                assert isinstance(bad, Failure)
                assert bad.transient, bad
                assert isinstance(good, Success)
    assert deaths == []


def test_a_check_with_an_answer_that_cannot_be_read_is_a_failed_check(folder: Path) -> None:
    deaths: list[BaseException] = []
    with openai(folder, 1) as (engine, [server]):
        engine.watch(deaths.append)
        server.check_body = NESTED
        eventually(lambda: set(sample(engine, "fairlane_endpoint_ejected").values()) == {1.0}, PATIENCE_S, "ejected")
        server.check_body = None
        eventually(lambda: set(sample(engine, "fairlane_endpoint_ejected").values()) == {0.0}, PATIENCE_S, "back")
    assert deaths == []


def test_a_stream_that_breaks_after_its_first_text_is_not_begun_again_elsewhere(folder: Path) -> None:
    with openai(folder, 2) as (engine, servers):
        for server in servers:
            server.scripted = [ScriptedAnswer(cut_after=2)]
        outcomes = joined(engine, chat("one", stream=True))
        [outcome] = results(outcomes, 1)
        assert sum(len(server.requests) for server in servers) == 1
    assert isinstance(outcome, Failure)
    assert outcome.transient
    assert outcome.code == Code.ENGINE_ERROR
    assert len(outcomes.texts[0]) == 2


def test_what_every_endpoint_fails_on_is_a_transient_failure_after_one_try_each(folder: Path) -> None:
    with openai(folder, 2) as (engine, servers):
        for server in servers:
            server.scripted = [ScriptedAnswer(500)]
        [outcome] = run_batch(engine, [chat("one")])
        assert [len(server.requests) for server in servers] == [1, 1]
        [after] = run_batch(engine, [chat("one")])
    assert isinstance(outcome, Failure)
    assert (outcome.code, outcome.transient) == (Code.ENGINE_ERROR, True)
    assert outcome.message.endswith("it answered 500")
    assert isinstance(after, Success)


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_endpoint_rests_as_long_as_it_asks_for(folder: Path, status: int) -> None:
    with openai(folder, 2) as (engine, servers):
        for server in servers:
            server.scripted = [ScriptedAnswer(status, headers={"Retry-After": "3600"})]
        resting = joined(engine, chat("one"))
        eventually(lambda: [len(server.requests) for server in servers] == [1, 1], PATIENCE_S, "both are asked")
        eventually(lambda: sample(engine, "fairlane_endpoint_waiting") == {"": 1.0}, PATIENCE_S, "the item waits")
        more = joined(engine, chat("two"))
        eventually(lambda: sample(engine, "fairlane_endpoint_waiting") == {"": 2.0}, PATIENCE_S, "another one too")
        assert [len(server.requests) for server in servers] == [1, 1]
        assert set(sample(engine, "fairlane_endpoint_failures_total").values()) == {0}
        engine.cancel(["one", "two"])
        assert results(resting, 1) == results(more, 1) == [CancelledItem(TokenUsage())]


@pytest.mark.parametrize("asked_s", ["0", None])
def test_an_item_waits_for_the_only_endpoint_while_it_is_busy(folder: Path, asked_s: str | None) -> None:
    headers = {} if asked_s is None else {"Retry-After": asked_s}
    with openai(folder) as (engine, [server]):
        server.scripted = [ScriptedAnswer(429, headers=headers)] * 4
        server.gate.clear()
        items = joined(engine, chat("one"), chat("two"), chat("three"))
        eventually(lambda: not server.scripted, PATIENCE_S, "four refusals")
        assert server.peak <= 3
        eventually(lambda: server.active == 1, PATIENCE_S, "one item is at the endpoint")
        server.gate.set()
        assert all(isinstance(outcome, Success) for outcome in results(items, 3))
        # Three at once, a fourth try alone, and then all three.
        assert len(server.requests) == 7
        assert set(sample(engine, "fairlane_endpoint_failures_total").values()) == {0}


def test_a_server_that_is_busy_between_two_calls_of_an_item_has_used_up_a_try(folder: Path) -> None:
    server = OpenAiModelServer()
    with (
        model_server(server),
        loaded(spec_for(folder, "openai-endpoint", [server.url], ("embed",), max_rows=1)) as engine,
    ):
        server.requests.clear()
        vector = json.dumps({"data": [{"index": 0, "embedding": [0.5] * 8}]}).encode()
        server.scripted = [ScriptedAnswer(body=vector), ScriptedAnswer(429)]
        [outcome] = run_batch(engine, [embed("one", "two", "three")])
        assert len(server.requests) == 2
    assert isinstance(outcome, Failure)
    assert (outcome.transient, outcome.untried) == (True, False)


def test_an_item_that_reached_no_server_was_not_tried(folder: Path) -> None:
    server = OpenAiModelServer()
    with ExitStack() as stack:
        up = stack.enter_context(ExitStack())
        up.enter_context(model_server(server))
        # Checks that are long in coming: the items find out.
        spec = spec_for(folder, "openai-endpoint", [server.url], ("generate",), health_interval_s=300.0)
        engine = stack.enter_context(loaded(spec))
        up.close()
        outcomes = [run_batch(engine, [chat("one")])[0] for _ in range(6)]
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    assert [(one.transient, one.untried) for one in failures] == [(True, True)] * 6
    assert "ConnectError" in failures[0].message
    assert failures[-1].message == "no endpoint is healthy"


def test_endpoints_that_are_away_come_back_and_the_engine_lives_on(folder: Path) -> None:
    deaths: list[BaseException] = []
    with openai(folder, 1) as (engine, [server]):
        engine.watch(deaths.append)
        server.check_status = 500
        eventually(lambda: set(sample(engine, "fairlane_endpoint_ejected").values()) == {1.0}, PATIENCE_S, "ejected")
        [outcome] = run_batch(engine, [chat("one")])
        assert outcome == Failure(Code.ENGINE_ERROR, "no endpoint is healthy", transient=True, untried=True)
        assert server.requests == []
        server.check_status = 200
        eventually(lambda: set(sample(engine, "fairlane_endpoint_ejected").values()) == {0.0}, PATIENCE_S, "back")
        assert isinstance(run_batch(engine, [chat("one")])[0], Success)
    assert deaths == []


def test_an_item_waits_for_an_endpoint_to_come_back(folder: Path) -> None:
    with openai(folder, 1, wait_s=600.0) as (engine, [server]):
        server.check_status = 500
        eventually(lambda: set(sample(engine, "fairlane_endpoint_ejected").values()) == {1.0}, PATIENCE_S, "ejected")
        waiting = joined(engine, chat("one"))
        eventually(lambda: sample(engine, "fairlane_endpoint_waiting") == {"": 1.0}, PATIENCE_S, "the item waits")
        server.check_status = 200
        assert isinstance(results(waiting, 1)[0], Success)


# --- limits and cancellation ------------------------------------------------------------------------------------


def test_an_endpoint_gets_no_more_at_a_time_than_its_limit_and_everything_in_the_end(folder: Path) -> None:
    servers: list[ModelServer] = [OpenAiModelServer(), OpenAiModelServer()]
    with ExitStack() as stack:
        for server in servers:
            stack.enter_context(model_server(server))
        endpoints = [ModelEndpoint(servers[0].url, 1, 2), ModelEndpoint(servers[1].url, 2, 4)]
        engine = stack.enter_context(loaded(spec_for(folder, "openai-endpoint", endpoints, ("generate",))))
        for server in servers:
            server.gate.clear()
        many = joined(engine, *(chat(f"item {number}") for number in range(40)))
        eventually(lambda: [server.active for server in servers] == [2, 4], PATIENCE_S, "both are full")
        labels = [endpoint.label for endpoint in endpoints]
        assert sample(engine, "fairlane_endpoint_outstanding") == dict(zip(labels, (2.0, 4.0), strict=True))
        for server in servers:
            server.gate.set()
        assert all(isinstance(outcome, Success) for outcome in results(many, 40))
    assert [server.peak for server in servers] == [2, 4]


@pytest.mark.parametrize("by_observer", [False, True])
def test_a_cancelled_item_closes_its_connection_and_costs_what_came(folder: Path, by_observer: bool) -> None:
    with openai(folder) as (engine, [server]):
        server.gate.clear()
        outcomes = joined(engine, chat("one", "one", stream=True), chat("two", "two", stream=True))
        eventually(lambda: len(outcomes.texts) == 2, PATIENCE_S, "the first texts")
        if by_observer:
            outcomes.cancelled.add(0)
        else:
            engine.cancel(["one", "nobody"])
        eventually(lambda: outcomes.by_index.keys() == {0}, PATIENCE_S, "the outcome")
        cancelled = outcomes.by_index[0]
        eventually(lambda: server.disconnected == 1, PATIENCE_S, "the connection is closed")
        server.gate.set()
        assert isinstance(results(outcomes, 2)[1], Success)
    assert isinstance(cancelled, CancelledItem)
    assert cancelled.usage.completion_tokens == 1


def test_an_answer_that_stalls_is_given_up_and_asked_for_elsewhere(folder: Path) -> None:
    with openai(folder, 2, total_timeout_s=1.5) as (engine, servers):
        servers[0].gate.clear()
        outcomes = run_batch(engine, [chat("one"), chat("two")])
        labels = sample(engine, "fairlane_endpoint_failures_total")
        assert sorted(labels.values()) == [0, 1]
    assert all(isinstance(outcome, Success) for outcome in outcomes)


def test_comments_that_keep_a_connection_open_are_no_part_of_an_answer(folder: Path) -> None:
    with openai(folder, 1, idle_timeout_s=0.5) as (engine, [server]):
        # After its first event, and a comment every 10 ms.
        server.gate.clear()
        outcomes = joined(engine, chat("one", stream=True))
        [outcome] = results(outcomes, 1)
        eventually(lambda: server.disconnected == 1, PATIENCE_S, "the connection is closed")
        assert set(sample(engine, "fairlane_endpoint_failures_total").values()) == {1}
    assert isinstance(outcome, Failure)
    assert outcome.message == "the server gave no answer: no part of its answer within 0.5 s"
    assert len(outcomes.texts[0]) == 1


def test_no_server_is_asked_after_the_deadline_of_an_item(folder: Path) -> None:
    with openai(folder, 2) as (engine, servers):
        for server in servers:
            server.gate.clear()
        late, early = replace(chat("late"), time_left_s=0.0), replace(chat("early"), time_left_s=0.5)
        outcomes = run_batch(engine, [late, early])
        asked = [request["messages"][0]["content"] for server in servers for request in server.requests]
        assert asked == ["early"]
        assert set(sample(engine, "fairlane_endpoint_failures_total").values()) == {0}, "no fault of an endpoint"
        assert set(sample(engine, "fairlane_endpoint_outstanding").values()) == {0}
    for outcome, untried in zip(outcomes, (True, False), strict=True):
        assert isinstance(outcome, Failure)
        assert (outcome.transient, outcome.untried) == (True, untried)


def test_the_wait_for_an_endpoint_ends_with_the_deadline(folder: Path) -> None:
    endpoint_of = partial(ModelEndpoint, max_concurrent=1)
    server = OpenAiModelServer()
    with (
        model_server(server),
        loaded(spec_for(folder, "openai-endpoint", [endpoint_of(server.url)], ("generate",))) as engine,
    ):
        server.requests.clear()
        server.gate.clear()
        first = joined(engine, chat("first"))
        eventually(lambda: server.active == 1, PATIENCE_S, "the endpoint is full")
        [outcome] = run_batch(engine, [replace(chat("second"), time_left_s=0.3)])
        server.gate.set()
        assert isinstance(results(first, 1)[0], Success)
        assert len(server.requests) == 1
    assert isinstance(outcome, Failure)
    assert outcome.untried


def test_whatever_the_servers_do_every_item_gets_one_outcome(folder: Path) -> None:
    chance = random.Random(20)
    troubles = [
        ScriptedAnswer(500),
        ScriptedAnswer(429, headers={"Retry-After": "0"}),
        ScriptedAnswer(400),
        ScriptedAnswer(200, b"nothing"),
        *(ScriptedAnswer(cut_after=at) for at in range(4)),
    ]
    deaths: list[BaseException] = []
    with openai(folder, 3, wait_s=600.0) as (engine, servers):
        engine.watch(deaths.append)
        for server in servers:
            server.scripted = [chance.choice([*troubles, ScriptedAnswer(cut_after=99)]) for _ in range(40)]
        items = [chat(f"item {at}", f"item {at}", stream=at % 2 == 0) for at in range(150)]
        batches = [joined(engine, *items[at : at + 30]) for at in range(0, 150, 30)]
        engine.cancel([item.item_id for item in chance.sample(items, 20)])
        found = [outcome for batch in batches for outcome in results(batch, 30)]
        outstanding = sample(engine, "fairlane_endpoint_outstanding")
    assert deaths == []
    assert set(outstanding.values()) == {0.0}
    kinds = {type(outcome) for outcome in found}
    assert kinds == {Success, Failure, CancelledItem}
    for at, outcome in enumerate(found):
        if isinstance(outcome, Success) and at % 2 == 0:
            assert "".join(batches[at // 30].texts[at % 30]) == outcome.output.text


# --- texts and pictures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine_name", "server_type"), [("openai-endpoint", OpenAiModelServer), ("v2-endpoint", V2ModelServer)]
)
def test_vectors_and_scores_come_in_the_order_of_the_texts_whatever_the_calls(
    folder: Path, engine_name: str, server_type: Callable[[], ModelServer]
) -> None:
    texts = tuple(f"text {number}" for number in range(7))
    server = server_type()
    with model_server(server):
        found = []
        for most in (3, 64):
            spec = spec_for(folder, engine_name, [server.url], ("embed", "rank"), max_rows=most)
            with loaded(spec) as engine:
                server.requests.clear()
                found.append(run_batch(engine, [embed(*texts), rank(*texts)]))
                assert len(server.requests) == {3: 6 if engine_name == "openai-endpoint" else 5, 64: 2}[most]
    assert found[0] == found[1]
    vectors, scores = found[0]
    assert isinstance(vectors, Success)
    assert isinstance(scores, Success)
    assert vectors.output.embeddings is not None
    assert len(set(vectors.output.embeddings)) == 7
    assert scores.output.scores is not None
    assert len(set(scores.output.scores)) == 6
    assert vectors.usage.prompt_tokens > 0


def test_pictures_are_classified_by_the_labels_of_the_folder(folder: Path) -> None:
    server = V2ModelServer()
    pictures = [bytes([0] * at + [255] + [0] * (19 - at)) for at in range(10)]
    items = [EngineItem("picture", "classify", RequestInput(image=picture), Parameters()) for picture in pictures]
    with model_server(server):
        endpoint = ModelEndpoint(server.url, served_version="3")
        with loaded(spec_for(folder, "v2-endpoint", [endpoint], ("classify",))) as engine:
            outcomes = run_batch(engine, items)
            [wrong] = run_batch(engine, [replace(items[0], input=RequestInput(image=b"x" * 7))])
    for at, outcome in enumerate(outcomes):
        assert isinstance(outcome, Success)
        labels = outcome.output.labels
        assert labels is not None
        assert labels[0].label == LABELS[at]
        assert sum(one.score for one in labels) == pytest.approx(1)
        assert isinstance(labels[0], LabelScore)
    assert isinstance(wrong, Failure)
    assert (wrong.code, wrong.field) == (Code.INVALID, "input.image")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"outputs": []}', "its answer has no tensor embedding"),
        (b'{"outputs": [{"name": "embedding", "shape": [1, 2], "datatype": "FP32", "data": [1]}]}', "shape"),
        (b'{"outputs": [{"name": "embedding", "shape": [1], "datatype": "BYTES", "data": ["x"]}]}', "floating point"),
        (b'{"outputs": [{"name": "embedding", "shape": [1], "datatype": "FP32", "data": ["x"]}]}', "other data"),
        (b"[]", "not what the Open Inference Protocol answers"),
        (v2_answer("[1, 1]", "[NaN]"), "not a finite number"),
        (v2_answer("[1, 1]", "[-Infinity]"), "not a finite number"),
        (v2_answer("[1, 1]", "[1e999]"), "not a finite number|not what the Open"),
        (v2_answer("[1, 1]", "[null]"), "not a finite number"),
        (v2_answer("[1, 2]", "[[0.5, null]]"), "not a finite number"),
        (v2_answer("[1, 1]", '["nan"]'), "other data"),
        (v2_answer("[1, 1]", '["inf"]'), "other data"),
        (v2_answer("[1, 1]", '["0.5"]'), "other data"),
        (v2_answer("[1, 1]", "[true]"), "other data"),
        (v2_answer("[1, 1]", '[{"a": 1}]'), "other data"),
    ],
)
def test_an_answer_that_is_none_is_a_failure(folder: Path, body: bytes, message: str) -> None:
    server = V2ModelServer()
    with model_server(server), loaded(spec_for(folder, "v2-endpoint", [server.url], ("embed",))) as engine:
        server.scripted = [ScriptedAnswer(body=body)]
        [outcome] = run_batch(engine, [embed("one")])
    assert isinstance(outcome, Failure)
    assert re.search(message, outcome.message)
    assert outcome.code == Code.ENGINE_ERROR
    assert outcome.transient != (outcome == NOT_FINITE)


@pytest.mark.parametrize(
    ("item", "name", "shape", "is_good"),
    [
        (embed("one", "two"), "embedding", [2, 3], True),
        (embed("one", "two"), "embedding", [3, 2], False),
        (embed("one", "two"), "embedding", [6], False),
        (embed("one", "two"), "embedding", [2, 1, 3], False),
        (embed("one", "two"), "embedding", [2, 0], False),
        (rank("q", "one", "two"), "score", [2], True),
        (rank("q", "one", "two"), "score", [2, 1], True),
        (rank("q", "one", "two"), "score", [1, 2], False),
        (rank("q", "one", "two"), "score", [2, 2], False),
        (PICTURE, "logits", [10], True),
        (PICTURE, "logits", [1, 10], True),
        (PICTURE, "logits", [10, 1], False),
        (PICTURE, "logits", [2, 5], False),
    ],
    ids=str,
)
def test_the_shape_of_an_answer_is_that_of_its_task(
    folder: Path, item: EngineItem, name: str, shape: list[int], is_good: bool
) -> None:
    tensor = {"name": name, "shape": shape, "datatype": "FP32", "data": [0.5] * math.prod(shape)}
    server = V2ModelServer()
    with model_server(server), loaded(spec_for(folder, "v2-endpoint", [server.url], (item.task,))) as engine:
        server.scripted = [ScriptedAnswer(body=json.dumps({"outputs": [tensor]}).encode())]
        [outcome] = run_batch(engine, [item])
    assert isinstance(outcome, Success if is_good else Failure), outcome
    assert not isinstance(outcome, Failure) or outcome.transient


def test_names_that_contain_those_of_numbers_do_no_harm(folder: Path) -> None:
    body = v2_answer("[1, 2]", "[0.5, 1]").replace(b"tiny", b"NaNo-Infinity")
    server = V2ModelServer()
    with model_server(server), loaded(spec_for(folder, "v2-endpoint", [server.url], ("embed",))) as engine:
        server.scripted = [ScriptedAnswer(body=body)]
        [outcome] = run_batch(engine, [embed("one")])
    assert isinstance(outcome, Success)
    assert outcome.output.embeddings == ((0.5, 1.0),)


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_without_end_is_left(folder: Path, is_stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MOST_ANSWER_BYTES", 10_000)
    event = b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n'
    server = OpenAiModelServer()
    with (
        model_server(server),
        loaded(spec_for(folder, "openai-endpoint", [server.url], ("generate", "embed"))) as engine,
    ):
        server.scripted = [ScriptedAnswer(body=event * 300 if is_stream else b"[" + b" " * 10_000)]
        [outcome] = run_batch(engine, [chat("one") if is_stream else embed("one")])
    assert isinstance(outcome, Failure)
    assert outcome.message == "the server gave no answer: its answer is longer than 10000 bytes"


# --- loading ----------------------------------------------------------------------------------------------------


def test_loading_needs_one_endpoint_that_serves_the_model(folder: Path) -> None:
    served, other = OpenAiModelServer(), OpenAiModelServer()
    other.check_status = 401
    with model_server(served), model_server(other):
        with loaded(spec_for(folder, "openai-endpoint", [served.url, other.url, "http://127.0.0.1:1"])) as engine:
            assert isinstance(run_batch(engine, [chat()])[0], Success)
        wrong_name = ModelEndpoint(served.url, served_name="large")
        for endpoint, reason in ((other.url, "it answered 401"), (wrong_name, "does not serve 'large'")):
            with pytest.raises(EngineLoadError, match=f"{MODEL}: no endpoint serves it: 127.0.0.1:[0-9]+: .*{reason}"):
                create_engine(spec_for(folder, "openai-endpoint", [endpoint])).load()
        served.scripted = [ScriptedAnswer(500)]
        with pytest.raises(EngineLoadError, match="the first run failed: the server gave no answer: it answered 500"):
            create_engine(spec_for(folder, "openai-endpoint", [served.url])).load()


def test_what_cannot_be_served_at_all_is_a_load_error(folder: Path, tmp_path: Path) -> None:
    spec = spec_for(folder, "v2-endpoint", ["http://127.0.0.1:1"])
    with pytest.raises(EngineLoadError, match=f"{MODEL}: version 1 has no endpoints in ENDPOINTS_FILE"):
        create_engine(EngineSpec(spec.model, str(folder)))
    with pytest.raises(EngineLoadError, match=f"{MODEL}: v2-endpoint does not do generate"):
        create_engine(spec_for(folder, "v2-endpoint", ["http://127.0.0.1:1"], ("generate", "embed")))
    with pytest.raises(EngineLoadError, match=r"model\.json is missing"):
        create_engine(spec_for(tmp_path, "v2-endpoint", ["http://127.0.0.1:1"])).load()
    with pytest.raises(EngineLoadError, match=f"{MODEL}: not loaded"):
        create_engine(spec).run([], Outcomes())
    keyless = ModelEndpoint("http://127.0.0.1:1", api_key_file=str(tmp_path / "missing"))
    with pytest.raises(EngineLoadError, match=f"{MODEL}: the key in .*missing cannot be read: FileNotFoundError"):
        create_engine(spec_for(folder, "openai-endpoint", [keyless])).load()


def test_a_key_comes_from_its_file_and_can_be_replaced(folder: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("first\n")
    server = OpenAiModelServer()
    with model_server(server):
        endpoint = ModelEndpoint(server.url, api_key_file=str(key))
        with loaded(spec_for(folder, "openai-endpoint", [endpoint], ("generate",))) as engine:
            assert server.headers[-1]["Authorization"] == "Bearer first"
            key.write_text("second\n")

            def is_used() -> bool:
                run_batch(engine, [chat()])
                return server.headers[-1]["Authorization"] == "Bearer second"

            eventually(is_used, PATIENCE_S, "the new key")
            assert "second" not in engine.metrics()


def test_certificates_are_verified(folder: Path, tmp_path: Path) -> None:
    authority, server = trustme.CA(), OpenAiModelServer()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    certificate = authority.issue_cert("127.0.0.1")
    with model_server(server, certificate):
        trusted = ModelEndpoint(server.url, ca_file=str(tmp_path / "ca.pem"))
        with loaded(spec_for(folder, "openai-endpoint", [trusted], ("generate",))) as engine:
            assert isinstance(run_batch(engine, [chat()])[0], Success)
        with pytest.raises(EngineLoadError, match=r"no endpoint serves it: .*ConnectError"):
            create_engine(spec_for(folder, "openai-endpoint", [server.url], ("generate",))).load()
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    unusable = ModelEndpoint(server.url, ca_file=str(broken))
    with pytest.raises(EngineLoadError, match=r"broken\.pem cannot be used"):
        create_engine(spec_for(folder, "openai-endpoint", [unusable])).load()


def test_proxies_of_the_environment_are_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with openai(folder) as (engine, _):
        assert isinstance(run_batch(engine, [chat()])[0], Success)


# --- a killed server --------------------------------------------------------------------------------------------


def test_when_a_server_is_killed_every_item_gets_one_outcome_and_the_other_server_goes_on(folder: Path) -> None:
    command = (sys.executable, "-m", "tests.kit.model_servers", "openai", "held")
    doomed = subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True)
    survivor = OpenAiModelServer()
    try:
        assert doomed.stdout is not None
        url = doomed.stdout.readline().strip()
        # The trial goes to the first one.
        with (
            model_server(survivor),
            loaded(spec_for(folder, "openai-endpoint", [survivor.url, url], ("generate",))) as engine,
        ):
            survivor.gate.clear()
            outcomes = joined(engine, *(chat(f"item {at}", stream=at % 4 < 2) for at in range(24)))
            eventually(lambda: survivor.active == 12, PATIENCE_S, "half is at the survivor")
            eventually(lambda: len(outcomes.texts) == 12, PATIENCE_S, "the first texts")
            doomed.kill()
            survivor.gate.set()
            found = results(outcomes, 24)
            later = run_batch(engine, [chat(f"later {at}") for at in range(16)])
            ejected = sample(engine, "fairlane_endpoint_ejected")
    finally:
        doomed.kill()
        doomed.wait(10)
        if doomed.stdout is not None:
            doomed.stdout.close()
    for at, outcome in enumerate(found):
        if isinstance(outcome, Failure):
            assert at % 4 < 2, "what had passed on no text was asked for elsewhere"
            assert outcome.transient
        else:
            assert isinstance(outcome, Success)
            if at % 4 < 2:
                assert "".join(outcomes.texts[at]) == outcome.output.text
    assert sum(isinstance(outcome, Failure) for outcome in found) == 6, "those that the killed server had begun"
    assert all(isinstance(outcome, Success) for outcome in later)
    assert sorted(ejected.values()) == [0.0, 1.0]
