"""What the line of a call says of the request, the file or the batch it is about, and of why it was refused."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import pytest
import structlog
from fastapi import FastAPI, Response
from structlog.testing import capture_logs

from fairlane.client.reassembly import TextDelta
from fairlane.outcomes import Code, Decision, Outcome
from fairlane.records import CacheUse, Cost, InferenceReply, TokenUsage
from producers.gateway.edge import access_log, error_responses
from producers.gateway.edge.access_log import CallLog
from producers.gateway.limits.rate_buckets import Allowance
from producers.gateway.limits.rate_limits import refusal
from producers.gateway.pipeline.call_context import current, present
from producers.gateway.pipeline.publisher import not_confirmed
from producers.openai_api.errors import GatewayError, client_gone, error_of, waited_too_long
from tests.kit.native_kit import ID, OTHER_KEY, QUESTION, Bench, decided, recorded
from tests.kit.openai_kit import KEY, MODEL, Gate, Script, ScriptedSubmitter, build

REPLY = InferenceReply(ID, "acme", Outcome.OK, usage=TokenUsage(10, 5))


@pytest.fixture(autouse=True)
def _fresh_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_log, "log", structlog.get_logger())


def line_of(answer: Callable[[], Any]) -> dict[str, Any]:
    """What is told of a call that is answered so."""
    app = FastAPI()
    error_responses.install(app)

    @app.get("/v1/things")
    async def things() -> Response:
        answer()
        return Response()

    app.add_middleware(CallLog)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.get("/v1/things")

    with capture_logs() as logged:
        answered = asyncio.run(ask())
    (line,) = [entry for entry in logged if entry["event"] == "call"]
    assert answered.headers["x-request-id"] == line.get("answer_id", line["request_id"])
    return dict(line)


def raises(error: GatewayError) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "outcome", "code", "request_id"),
    [
        (refusal(Allowance(1, 0, 1, 1)), "refused", "rate_limit_exceeded", None),
        (GatewayError(429, Code.OVERLOADED, "full", retry_after_ms=1), "refused", "overloaded", None),
        (GatewayError(409, "request_in_flight", "wait", request_id=ID), "refused", "request_in_flight", ID),
        (not_confirmed(ID), "uncertain", "uncertain", ID),
        (waited_too_long(ID, 1.0), "pending", "timeout", ID),
        (client_gone(ID), "abandoned", "client_closed_request", ID),
    ],
    ids=lambda value: value.code if isinstance(value, GatewayError) else None,
)
def test_why_a_call_got_no_answer_is_told(error: GatewayError, outcome: str, code: str, request_id: str | None) -> None:
    line = line_of(partial(raises, error))
    assert (line["status"], line["outcome"], line["code"]) == (error.status, outcome, code)
    assert line["request_id"] == request_id
    assert ("answer_id" in line) == (request_id is None)


def answered_with(reply: InferenceReply, *, is_repeat: bool = False) -> None:
    caller = present.get()
    assert caller is not None
    caller.request_id, caller.reply, caller.is_repeat = reply.request_id, reply, is_repeat
    error = error_of(reply)
    if error is not None:
        raise error


def test_what_was_run_before_costs_nothing_again() -> None:
    line = line_of(partial(answered_with, REPLY))
    assert (line["outcome"], line["cost_tokens"], line.get("is_repeat")) == ("ok", 20, None)
    line = line_of(partial(answered_with, REPLY, is_repeat=True))
    assert (line["outcome"], line["cost_tokens"], line["is_repeat"]) == ("ok", 0, True)
    line = line_of(partial(answered_with, replace(REPLY, cache_use=CacheUse("exact", "other", 1))))
    assert (line["outcome"], line["cost_tokens"]) == ("ok", 0)
    assert "cost" not in line
    priced = replace(REPLY, cost=Cost(153_600, "XTS"))
    line = line_of(partial(answered_with, priced))
    assert (line["cost"], line["currency"]) == ("0.0001536", "XTS")
    assert "cost" not in line_of(partial(answered_with, priced, is_repeat=True))


def test_the_outcome_of_a_reply_goes_before_that_of_its_error() -> None:
    line = line_of(partial(answered_with, replace(REPLY, outcome=Outcome.EXPIRED, usage=TokenUsage())))
    assert (line["status"], line["outcome"], line["code"], line["cost_tokens"]) == (504, "expired", "expired", 0)


def test_a_file_or_a_batch_is_no_request() -> None:
    line = line_of(lambda: setattr(current(), "object_id", "file-1"))
    assert (line["object_id"], line["request_id"]) == ("file-1", None)


# --- the native routes


def told(bench: Bench, method: str, path: str, **options: Any) -> tuple[httpx.Response, dict[str, Any]]:
    """A call of one of the routes, and its line."""

    async def test(client: httpx.AsyncClient) -> httpx.Response:
        return await client.request(method, path, **options)

    with capture_logs() as logged:
        answer = bench.run(test)
    (line,) = [entry for entry in logged if entry["event"] == "call"]
    return answer, dict(line)


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.app.add_middleware(CallLog)
    bench.store.record(recorded(1, request_id=ID))
    bench.store.decide(decided(Decision.ACCEPTED, 1_760_000_000_000))
    bench.now_ms = 1_760_000_002_000
    return bench


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/requests/{}"),
        ("DELETE", "/v1/requests/{}"),
        ("GET", "/v1/results/{}"),
        ("GET", "/results/{}"),
        ("GET", "/v1/requests/{}/events"),
    ],
)
def test_a_call_about_a_request_names_it(bench: Bench, method: str, path: str) -> None:
    answer, line = told(bench, method, path.format(ID))
    assert (answer.status_code, line["status"], line["request_id"]) == (200, 200, ID)
    assert answer.headers["x-request-id"] == ID
    # One that nobody may see is named all the same: somebody asked for it.
    answer, line = told(bench, method, path.format(ID), headers={"authorization": f"Bearer {OTHER_KEY}"})
    assert (answer.status_code, line["request_id"], line["outcome"]) == (404, ID, "refused")
    answer, line = told(bench, method, path.format("launch-code-4711"))
    assert (answer.status_code, line["request_id"], line["code"]) == (404, None, "unknown_request")
    assert "4711" not in json.dumps(line)


def test_a_cancel_names_what_it_cancels(bench: Bench) -> None:
    bench.store.replies.clear()
    answer, line = told(bench, "DELETE", f"/v1/requests/{ID}")
    assert (answer.status_code, line["request_id"]) == (202, ID)
    assert bench.submitter.cancelled == [("acme", ID)]


def test_what_is_given_again_under_a_key_is_told_as_a_repeat(bench: Bench) -> None:
    key = {"idempotency-key": "once"}
    answer, line = told(bench, "POST", "/v1/requests?wait=60", json=QUESTION, headers=key)
    assert (answer.status_code, line.get("is_repeat")) == (200, None)
    again, line = told(bench, "POST", "/v1/requests?wait=60", json=QUESTION, headers=key)
    assert again.json()["id"] == answer.json()["id"] == line["request_id"]
    assert (line["outcome"], line["cost_tokens"], line["is_repeat"]) == ("ok", 0, True)


def test_a_stream_that_was_refused_says_why_and_of_what() -> None:
    full = Bench(most_streams=0)
    full.app.add_middleware(CallLog)
    answer, line = told(full, "GET", f"/v1/requests/{ID}/events")
    assert answer.status_code == 429
    assert (line["code"], line["request_id"]) == (answer.json()["error"]["code"], ID)


def test_a_stream_that_fails_after_its_status_says_why() -> None:
    submitter = ScriptedSubmitter()
    failed = {"outcome": "failed", "code": "engine_error", "message": "the engine failed", "output": None}
    submitter.scripts.append(Script(outcome=failed, deltas=(TextDelta("The"),)))
    app = build(submitter)
    app.add_middleware(CallLog)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "why?"}], "stream": True}

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {KEY}"})

    with capture_logs() as logged:
        answer = asyncio.run(ask())
    (line,) = [entry for entry in logged if entry["event"] == "call"]
    assert "engine_error" in answer.text
    assert (line["status"], line["code"]) == (200, "engine_error")


def test_a_stream_that_was_left_is_told_so() -> None:
    submitter = ScriptedSubmitter()
    submitter.scripts.append(Script(deltas=(TextDelta("The"), Gate())))
    app = build(submitter)
    app.add_middleware(CallLog)
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "why?"}], "stream": True}).encode()
    path = "/v1/chat/completions"
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"authorization", f"Bearer {KEY}".encode()), (b"content-length", b"%d" % len(body))],
    }

    async def call() -> None:
        said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        said.put_nowait({"type": "http.request", "body": body, "more_body": False})

        async def send(message: Any) -> None:
            if b"The" in message.get("body", b""):
                said.put_nowait({"type": "http.disconnect"})

        await app(scope, said.get, send)

    with capture_logs() as logged:
        asyncio.run(call())
    (line,) = [entry for entry in logged if entry["event"] == "call"]
    assert submitter.cancelled
    assert (line["status"], line["outcome"], line["code"]) == (200, "abandoned", "client_closed_request")
    assert line["request_id"] == submitter.submitted[0][1].request_id
