"""Bodies that are not what they should be: always told in OpenAI's shape, never quoted, never a 5xx."""

import asyncio
import json
import struct
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from fairlane.records import Output
from producers.gateway.edge.error_responses import install
from producers.gateway.openai.batch_deps import BatchDeps
from producers.gateway.openai.batches import router
from producers.openai_api.body import parse
from producers.openai_api.errors import GatewayError, param_of, speaks_openai
from producers.openai_api.request_models import ChatBody, CompletionBody, EmbeddingBody, chat_request
from tests.kit.openai_kit import EMBEDDER, KEY, MODEL, Script, ScriptedSubmitter, authenticate, build

SECRET = "planted-secret-text"
MESSAGES = [{"role": "user", "content": SECRET}]
CHAT = "/v1/chat/completions"
HEADERS = {"authorization": f"Bearer {KEY}"}
NO_JSON = [
    b"",
    b"[]",
    b"null",
    b"{",
    b'{"model": "m", "messages": NaN}',
    b'{"model": "m", "temperature": Infinity}',
    b'{"model": "\xff"}',
    b'{"model": "\xc3\x28"}',
    b'{"model": "\\ud800"}',
    b'{"messages": ' + b"[" * 100_000,
    b'{"messages": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
    b'{"a":' * 5_000,
    b'{"seed": ' + b"9" * 10_000 + b"}",
    b"\xef\xbb\xbf{}",
    json.dumps({"model": MODEL, "messages": MESSAGES}).encode("utf-16"),
    json.dumps({"model": MODEL, "messages": MESSAGES}).encode()[:-1] + b',"' + SECRET.encode() + b'" 1}',
]


@pytest.fixture(scope="module")
def batches() -> FastAPI:
    """The routes of files and batches, with nothing behind them."""

    def partitions() -> int:
        raise AssertionError("nothing is looked up")

    made = FastAPI()

    install(made)
    made.include_router(router(BatchDeps(authenticate, "", "", partitions)))
    return made


@pytest.fixture(scope="module")
def module_submitter() -> ScriptedSubmitter:
    return ScriptedSubmitter()


@pytest.fixture(scope="module")
def app(module_submitter: ScriptedSubmitter) -> FastAPI:
    return build(module_submitter)


@pytest.fixture
def submitter(module_submitter: ScriptedSubmitter) -> ScriptedSubmitter:
    module_submitter.clear()
    return module_submitter


@pytest.fixture
def post(app: FastAPI, submitter: ScriptedSubmitter) -> Callable[[str, Any], httpx.Response]:
    return lambda path, body: posted(app, path, body)


def posted(app: FastAPI, path: str, body: Any, headers: Mapping[str, str] = HEADERS) -> httpx.Response:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            return await http.post(path, content=raw, headers=httpx.Headers(headers, encoding="utf-8"))

    return asyncio.run(send())


def error_in(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert SECRET not in response.text
    return error


@pytest.mark.parametrize("raw", NO_JSON)
def test_no_json(post: Callable[[str, Any], httpx.Response], submitter: ScriptedSubmitter, raw: bytes) -> None:
    for path in (CHAT, "/v1/completions", "/v1/embeddings"):
        response = post(path, raw)
        assert response.status_code == 400
        assert error_in(response)["code"] == "invalid_json"
    assert submitter.submitted == []


@pytest.mark.parametrize("raw", NO_JSON)
def test_no_json_of_a_batch(batches: FastAPI, raw: bytes) -> None:
    response = posted(batches, "/v1/batches", raw)
    assert response.status_code == 400
    assert error_in(response)["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input_file_id": None}, "input_file_id", "invalid"),
        ({"input_file_id": SECRET * 9}, "input_file_id", "invalid"),
        ({"endpoint": SECRET}, "endpoint", "invalid"),
        ({"completion_window": "1h"}, "completion_window", "invalid"),
        ({"metadata": {SECRET + " ": 1}}, "metadata", "invalid"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata", "invalid"),
        ({"output_expires_after": {"seconds": 3_600}}, "output_expires_after", "invalid"),
        ({SECRET + " ": 1}, None, "invalid"),
    ],
)
def test_a_batch_that_is_wrong(batches: FastAPI, fields: dict[str, Any], param: str | None, code: str) -> None:
    whole = {"input_file_id": "file-1", "endpoint": "/v1/embeddings", "completion_window": "24h"}
    response = posted(batches, "/v1/batches", whole | fields)
    assert response.status_code == 400
    error = error_in(response)
    assert error["code"] == code, error
    if param is not None:
        assert (error["param"] or "").split(".")[0] == param


@pytest.mark.parametrize("key", ["", "k" * 256, "\u00e4"])
def test_a_key_that_is_none(batches: FastAPI, key: str) -> None:
    whole = {"input_file_id": "file-1", "endpoint": "/v1/embeddings", "completion_window": "24h"}
    response = posted(batches, "/v1/batches", whole, {**HEADERS, "idempotency-key": key})
    assert response.status_code == 400
    assert error_in(response)["param"] == "Idempotency-Key"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"model": None}, "model", "invalid"),
        ({"messages": []}, "messages", "invalid"),
        ({"messages": SECRET}, "messages", "invalid"),
        ({"messages": [{"role": SECRET, "content": "a"}]}, "messages[0].role", "invalid"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role", "invalid"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "invalid"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content", "invalid"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content", "invalid"),
        ({"messages": [*MESSAGES, {"role": "user", "content": "a", "name": "x"}]}, "messages[1].name", None),
        ({"messages": [{"role": "user", "content": "a", SECRET + " ": 1}]}, "messages[0]", "unknown_parameter"),
        ({"temperature": "1"}, "temperature", "invalid"),
        ({"temperature": 2.5}, "temperature", "invalid"),
        ({"temperature": True}, "temperature", "invalid"),
        ({"top_p": 0}, "top_p", "invalid"),
        ({"max_tokens": 1.5}, "max_tokens", "invalid"),
        ({"max_tokens": 2**40}, "max_tokens", "invalid"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "invalid"),
        ({"seed": -1}, "seed", "invalid"),
        ({"seed": 2**63}, "seed", "invalid"),
        ({"stop": [""]}, "stop[0]", "invalid"),
        ({"stop": ["a"] * 9}, "stop", "invalid"),
        ({"stop": 1}, "stop", "invalid"),
        ({"stream": "yes"}, "stream", "invalid"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid"),
        ({"logprobs": 1}, "logprobs", "invalid"),
        ({"metadata": {SECRET + " a": 1}}, "metadata", "invalid"),
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"n": True}, "n", "unsupported_parameter"),
        ({"store": True}, "store", "unsupported_parameter"),
        ({"tool_choice": "required"}, "tool_choice", "unsupported_parameter"),
        ({"audio": {"voice": "a"}}, "audio", "unsupported_parameter"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "unsupported_parameter"),
        ({"best_of": 1}, "best_of", "unknown_parameter"),
        ({SECRET + " ": 1}, None, "unknown_parameter"),
        ({"fairlane": {"retrieval": {"collection": ""}}}, "fairlane.retrieval.collection", "invalid"),
        (
            {"fairlane": {"retrieval": {"top_k": 1}}},
            "fairlane.retrieval.collection",
            "missing_required_parameter",
        ),
        ({"fairlane": {"timeout_ms": 0}}, "fairlane.timeout_ms", "invalid"),
        ({"fairlane": {"conversation_id": "c", "conversation_after": "x"}}, "fairlane.conversation_after", "invalid"),
        ({"fairlane": {SECRET + " ": 1}}, "fairlane", "invalid"),
    ],
)
def test_a_chat_that_is_wrong(
    post: Callable[[str, Any], httpx.Response],
    submitter: ScriptedSubmitter,
    fields: dict[str, Any],
    param: str | None,
    code: str | None,
) -> None:
    response = post(CHAT, {"model": MODEL, "messages": MESSAGES} | fields)
    assert response.status_code == 400
    error = error_in(response)
    assert error["param"] == param
    assert error["code"] == (code or "unsupported_parameter")
    assert error["type"] == "invalid_request_error"
    assert submitter.submitted == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"model": MODEL, "prompt": ["a", "b"]}, "prompt"),
        ("/v1/completions", {"model": MODEL, "prompt": [1, 2]}, "prompt"),
        ("/v1/completions", {"model": MODEL, "prompt": ""}, "prompt"),
        ("/v1/completions", {"model": MODEL, "prompt": "a", "echo": True}, "echo"),
        ("/v1/completions", {"model": MODEL, "prompt": "a", "suffix": "b"}, "suffix"),
        ("/v1/completions", {"model": MODEL, "prompt": "a", "best_of": 2}, "best_of"),
        ("/v1/completions", {"model": MODEL}, "prompt"),
        ("/v1/embeddings", {"model": EMBEDDER, "input": []}, "input"),
        ("/v1/embeddings", {"model": EMBEDDER, "input": [1, 2]}, "input"),
        ("/v1/embeddings", {"model": EMBEDDER, "input": [[1, 2]]}, "input"),
        ("/v1/embeddings", {"model": EMBEDDER, "input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/embeddings", {"model": EMBEDDER, "input": "a", "dimensions": 2}, "dimensions"),
        (
            "/v1/embeddings",
            {"model": EMBEDDER, "input": "a", "fairlane": {"retrieval": None}},
            "fairlane.retrieval",
        ),
    ],
)
def test_other_bodies_that_are_wrong(
    post: Callable[[str, Any], httpx.Response], path: str, body: dict[str, Any], param: str
) -> None:
    response = post(path, body)
    assert response.status_code == 400
    assert error_in(response)["param"] == param


def test_what_changes_nothing_is_taken(post: Callable[[str, Any], httpx.Response]) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "assistant", "content": "a", "refusal": None, "tool_calls": []}, *MESSAGES],
        "user": "u",
        "n": 1,
        "store": False,
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "logit_bias": {},
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "modalities": ["text"],
        "prompt_cache_key": "k",
        "max_tokens": None,
        "temperature": None,
        "stop": None,
        "stream": None,
        "metadata": None,
        "fairlane": None,
    }
    assert post(CHAT, body).status_code == 200


def test_vectors_are_floats_or_base64(post: Callable[[str, Any], httpx.Response], submitter: ScriptedSubmitter) -> None:
    vectors = ((1.0, -2.5), (0.0, float("nan")))
    submitter.scripts += [Script(outcome={"output": Output(embeddings=vectors)})] * 2
    floats = post("/v1/embeddings", {"model": EMBEDDER, "input": ["a", "b"]}).json()
    # A number that is none must not make the body no JSON.
    assert [item["embedding"] for item in floats["data"]] == [[1.0, -2.5], [0.0, None]]
    packed = post("/v1/embeddings", {"model": EMBEDDER, "input": ["a", "b"], "encoding_format": "base64"}).json()
    assert struct.unpack("<2f", b64decode(packed["data"][0]["embedding"])) == (1.0, -2.5)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("model", [ChatBody, CompletionBody, EmbeddingBody])
def test_any_json_is_a_body_or_an_error(model: type[ChatBody | CompletionBody | EmbeddingBody]) -> None:
    names = [*model.model_fields, "n", "tools", "x"]

    @given(st.dictionaries(st.sampled_from(names), JSON))
    def check(body: dict[str, Any]) -> None:
        given_body = {"model": MODEL, "messages": MESSAGES, "prompt": "a", "input": "a"} | body
        refusal = None
        try:
            parsed = parse(model, json.dumps(given_body).encode())
            if isinstance(parsed, ChatBody):
                request = chat_request(parsed, "acme", "0198a2f0-7c1e-7d3a-9f10-2b6a4c5d6e7f")
                assert request.model == parsed.model
        except GatewayError as error:
            refusal = error
        assert refusal is None or (refusal.status == 400 and SECRET not in refusal.message)

    check()


@given(st.binary(max_size=64))
def test_any_bytes_are_a_body_or_an_error(raw: bytes) -> None:
    with pytest.raises(GatewayError) as raised:
        parse(ChatBody, raw)
    assert raised.value.status == 400


def test_names_of_fields() -> None:
    assert param_of("parameters.max_tokens") == "max_tokens"
    assert param_of("input.texts[3]") == "input[3]"
    assert param_of("input.messages[0].role") == "messages[0].role"
    assert param_of("retrieval.collection") == "fairlane.retrieval.collection"
    assert param_of("timeout_ms") == "fairlane.timeout_ms"
    assert param_of("fairlane.timeout_ms") == "fairlane.timeout_ms"


def test_paths_of_openai() -> None:
    assert all(map(speaks_openai, ("/v1/chat/completions", "/v1/models", "/v1/models/a", "/v1/files/f/content")))
    assert not any(map(speaks_openai, ("/v1/requests", "/v1/modelsx", "/inference", "/", "/v1")))


def test_openapi_says_what_may_be_sent(app: FastAPI) -> None:
    document = app.openapi()
    text = json.dumps(document)
    assert "$defs" not in text
    chat = document["paths"][CHAT]["post"]
    schema = chat["requestBody"]["content"]["application/json"]["schema"]
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["model", "messages"]
    assert schema["properties"]["n"] == {"enum": [1, None]}
    for operation in operations(document):
        assert operation["summary"]
        assert "401" in operation["responses"]
        assert "422" not in operation["responses"] or "Idempotency-Key" in operation["responses"]["422"]["description"]
        content = operation["responses"]["200"]["content"]["application/json"]
        assert content["schema"]
        assert content["example"]
        for body in operation.get("requestBody", {}).get("content", {}).values():
            assert body["examples"]


def test_examples_are_taken(app: FastAPI, post: Callable[[str, Any], httpx.Response]) -> None:
    for path, methods in app.openapi()["paths"].items():
        for operation in methods.values():
            examples = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("examples")
            for example in (examples or {}).values():
                assert post(path, example["value"]).status_code == 200


def operations(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for methods in document["paths"].values():
        yield from methods.values()


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (b'{"model": "a", "model": "b"}', "model"),
        (b'{"model": "a", "messages": [{"role": "user", "content": "x", "content": "y"}]}', "content"),
        (b'{"a secret of the caller\'s": 1, "a secret of the caller\'s": 2}', None),
    ],
)
def test_a_key_that_is_there_twice_is_refused(raw: bytes, field: str | None) -> None:
    with pytest.raises(GatewayError) as raised:
        parse(ChatBody, raw)
    assert (raised.value.status, raised.value.field) == (400, field)
    assert "twice" in raised.value.message
    assert "secret" not in raised.value.message


def test_a_number_of_5000_digits_is_refused_by_its_place() -> None:
    raw = b'{"model": "a", "messages": [{"role": "user", "content": "x"}], "seed": ' + b"9" * 5_000 + b"}"
    with pytest.raises(GatewayError) as raised:
        parse(ChatBody, raw)
    assert (raised.value.status, raised.value.field) == (400, "body")
    assert "number" in raised.value.message
    assert "999" not in raised.value.message
