"""Between socket and routes: what is too large or too slow, what errors look like, and what is logged of a call."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import pytest
import structlog
from fastapi import APIRouter, FastAPI, Request, WebSocket
from prometheus_client import REGISTRY
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send
from structlog.testing import capture_logs

from fairlane.outcomes import Code
from fairlane.records import InferenceReply, TokenUsage
from producers.gateway.edge import access_log, error_responses
from producers.gateway.edge.access_log import CallLog
from producers.gateway.edge.body_limit import TOO_MANY_BYTES, BodyLimit, body_budget, release_body
from producers.gateway.pipeline.call_context import present
from producers.gateway.tenant_bounds import TenantSlots
from producers.openai_api.errors import GatewayError

SECRET = "the launch code is 4711"
MOST_BYTES = 1_000
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def application(budget: TenantSlots | None = None) -> FastAPI:
    app = FastAPI()
    error_responses.install(app)

    @app.post("/v1/chat/completions")
    @app.post("/v1/requests")
    async def echo(request: Request) -> dict[str, int]:
        return {"bytes": len(await request.body())}

    @app.post("/v1/broken/{name}")
    async def broken(name: str) -> None:
        raise RuntimeError(SECRET)

    @app.post("/v1/refused")
    async def refused() -> None:
        raise GatewayError(429, Code.OVERLOADED, "the queue is full", retry_after_ms=1_500, request_id="id-1")

    @app.get("/v1/typed")
    async def typed(limit: int) -> int:
        return limit

    @app.post("/v1/answered")
    async def answered() -> JSONResponse:
        caller = present.get()
        assert caller is not None
        caller.tenant, caller.subject, caller.request_id = "acme", "key-1", "id-7"
        caller.reply = InferenceReply("id-7", "acme", "ok", usage=TokenUsage(10, 5))
        return JSONResponse({"trace": [value.decode() for _, value in caller.trace]})

    prefixed = APIRouter(prefix="/v2")

    @prefixed.get("/things/{name}/parts")
    async def parts(name: str) -> str:
        return name

    app.include_router(prefixed)
    app.add_middleware(BodyLimit, max_bytes=MOST_BYTES, budget=budget or body_budget(2**30, 2**30))
    app.add_middleware(CallLog)
    return app


def call(method: str, path: str, app: FastAPI | None = None, **options: Any) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app or application())
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.request(method, path, **options)

    return asyncio.run(ask())


async def pieces(count: int, size: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b"x" * size


def error_of(answer: httpx.Response) -> Mapping[str, Any]:
    error: Mapping[str, Any] = answer.json()["error"]
    return error


def test_a_body_within_its_bound_is_read() -> None:
    assert call("POST", "/v1/requests", content=b"x" * MOST_BYTES).json() == {"bytes": MOST_BYTES}
    assert call("POST", "/v1/requests", content=pieces(10, 100)).json() == {"bytes": MOST_BYTES}


@pytest.mark.parametrize("path", ["/v1/requests", "/v1/chat/completions"])
def test_a_body_that_says_it_is_too_large_is_not_read(path: str) -> None:
    answer = call("POST", path, content=b"x" * (MOST_BYTES + 1))
    assert (answer.status_code, answer.headers["connection"]) == (413, "close")
    assert error_of(answer)["code"] == Code.INVALID
    assert ("param" if "chat" in path else "field") in error_of(answer)


def test_a_body_that_does_not_say_so_is_read_no_further_than_its_bound() -> None:
    taken = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal taken
        while True:
            taken += 100
            yield b"x" * 100

    assert call("POST", "/v1/requests", content=endless()).status_code == 413
    assert taken <= MOST_BYTES + 200


def test_every_error_has_the_shape_of_its_path() -> None:
    assert error_of(call("POST", "/v1/refused")) == {
        "code": "overloaded",
        "message": "the queue is full",
        "retry_after_ms": 1_500,
        "request_id": "id-1",
    }
    assert call("POST", "/v1/refused").headers["retry-after"] == "2"
    assert error_of(call("GET", "/v1/nothing"))["code"] == "not_found"
    assert error_of(call("GET", "/v1/requests"))["code"] == "method_not_allowed"
    missing = call("GET", "/v1/typed")
    assert (missing.status_code, error_of(missing)["field"]) == (400, "limit")
    wrong = call("GET", f"/v1/typed?limit={SECRET}")
    assert wrong.status_code == 400
    assert SECRET not in wrong.text
    assert set(error_of(call("GET", "/v1/chat/completions"))) == {"message", "type", "param", "code"}


def test_a_mistake_of_ours_is_told_and_logged_without_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_log, "log", structlog.get_logger())
    with capture_logs() as logged:
        answer = call("POST", "/v1/broken/name")
    assert (answer.status_code, error_of(answer)["code"]) == (500, "internal_error")
    (failed,) = [entry for entry in logged if entry["event"] == "call_failed"]
    assert failed["error"] == "RuntimeError"
    assert failed["path"] == "/v1/broken/{name}"
    assert SECRET not in answer.text + str(logged)


def test_a_call_is_logged_once_with_who_and_what_it_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_log, "log", structlog.get_logger())
    with capture_logs() as logged:
        answer = call("POST", "/v1/answered", headers={"traceparent": PARENT, "authorization": SECRET})
    assert answer.json() == {"trace": [PARENT]}
    assert answer.headers["x-request-id"] == "id-7"
    (entry,) = [entry for entry in logged if entry["event"] == "call"]
    assert entry.pop("took_ms") >= 0
    assert entry == {
        "event": "call",
        "log_level": "info",
        "method": "POST",
        "route": "/v1/answered",
        "status": 200,
        "tenant": "acme",
        "subject": "key-1",
        "request_id": "id-7",
        "outcome": "ok",
        "code": None,
        "cost_tokens": 20,
    }


@pytest.mark.parametrize(
    ("path", "status", "close_code"),
    [
        ("/v1/requests/a/events?key=" + SECRET.replace(" ", ""), 101, 1000),
        ("/v1/requests/broken/events", 101, 1011),
        ("/v1/requests/denied/events", 401, None),
        ("/v1/requests/early/events", 500, None),
        ("/v1/requests/closed/events", 403, 1000),
        ("/v1/requests/left/events", 101, None),
    ],
)
def test_a_websocket_is_a_call(path: str, status: int, close_code: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    app = FastAPI()

    @app.websocket("/v1/requests/{name}/events")
    async def events(websocket: WebSocket, name: str) -> None:
        caller = present.get()
        assert caller is not None
        caller.tenant, caller.subject = "acme", "key-1"
        if name == "denied":
            await websocket.send_denial_response(JSONResponse({}, 401))
        elif name == "early":
            raise RuntimeError(SECRET)
        else:
            if name != "closed":
                await websocket.accept()
            if name == "broken":
                raise RuntimeError(SECRET)
            if name == "left":
                await websocket.receive()
            else:
                await websocket.close()

    calls = CallLog(app)
    sent = asyncio.Queue[Message]()

    async def receive() -> Message:
        assert calls.open_calls == 1
        return {"type": "websocket.connect" if sent.empty() else "websocket.disconnect"}

    scope: Scope = {
        "type": "websocket",
        "path": path.partition("?")[0],
        "query_string": path.partition("?")[2].encode(),
        "headers": [(b"traceparent", PARENT.encode())],
        "subprotocols": [],
        "extensions": {"websocket.http.response": {}},
    }
    labels = {"route": "/v1/requests/{name}/events", "status": str(status)}
    counted = REGISTRY.get_sample_value("fairlane_gateway_calls_total", labels) or 0.0
    monkeypatch.setattr(access_log, "log", structlog.get_logger())
    with capture_logs() as logged:
        asyncio.run(calls(scope, receive, sent.put))
    assert calls.open_calls == 0
    (entry,) = [entry for entry in logged if entry["event"] == "call"]
    assert entry.pop("took_ms") >= 0
    first = sent.get_nowait()
    if first["type"] != "websocket.close":
        assert dict(first["headers"])[b"x-request-id"] == entry.pop("answer_id").encode()
    if status == 500:
        assert (entry.pop("outcome"), entry.pop("code")) == ("failed", "internal_error")
    assert entry == {
        "event": "call",
        "log_level": "info",
        "method": "GET",
        "route": "/v1/requests/{name}/events",
        "status": status,
        "tenant": "acme",
        "subject": "key-1",
        "request_id": None,
        "close_code": close_code,
    }
    assert SECRET.replace(" ", "") not in str(logged).replace(" ", "")
    assert REGISTRY.get_sample_value("fairlane_gateway_calls_total", labels) == counted + 1


def test_what_stands_in_a_path_names_no_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_log, "log", structlog.get_logger())
    with capture_logs() as logged:
        call("GET", f"/{SECRET}")
        call("GET", f"/v2/things/{SECRET}/parts")
    assert [entry["route"] for entry in logged] == ["none", "/v2/things/{name}/parts"]


def budgeted(budget: TenantSlots, tenant: str | None = None, **options: Any) -> httpx.Response:
    app = application(budget)

    @app.post("/v1/mine")
    async def mine(request: Request) -> dict[str, int]:
        caller = present.get()
        assert caller is not None
        caller.tenant = tenant
        size = len(await request.body())
        if request.headers.get("release"):
            release_body(request.scope)
            release_body(request.scope)
        return {"bytes": size, "held": budget.total}

    return call("POST", "/v1/mine", app, **options)


def test_the_bytes_of_a_body_are_held_until_its_call_is_over_or_lets_them_go() -> None:
    budget = body_budget(1_000, 500)
    assert budgeted(budget, "acme", content=b"x" * 400).json() == {"bytes": 400, "held": 400}
    assert budget.total == 0
    answer = budgeted(budget, "acme", content=pieces(4, 100), headers={"release": "1"})
    assert answer.json() == {"bytes": 400, "held": 0}
    assert budget.total == 0


@pytest.mark.parametrize(("held_by", "status", "code"), [("acme", 429, TOO_MANY_BYTES), ("others", 503, "overloaded")])
def test_a_body_beyond_a_budget_is_refused_while_it_is_read(held_by: str, status: int, code: str) -> None:
    budget = body_budget(1_000, 900)
    budget.take(held_by, 900)
    before = REGISTRY.get_sample_value("fairlane_gateway_bodies_refused_total", {"bound": "all"}) or 0.0
    taken = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal taken
        while True:
            taken += 50
            yield b"x" * 50

    answer = budgeted(budget, "acme", content=endless())
    assert (answer.status_code, error_of(answer)["code"], answer.headers["connection"]) == (status, code, "close")
    assert error_of(answer)["field"] == "body"
    assert "retry-after" in answer.headers
    assert taken <= 200
    assert budget.total == 900, "what was read of it is free again"
    after = REGISTRY.get_sample_value("fairlane_gateway_bodies_refused_total", {"bound": "all"}) or 0.0
    assert after == before + (status == 503)


def test_callers_without_identity_share_one_budget() -> None:
    budget = body_budget(1_000, 100)
    assert budgeted(budget, None, content=b"x" * 100).status_code == 200
    assert budgeted(budget, None, content=b"x" * 101).status_code == 429


@pytest.mark.parametrize("is_released", [False, True], ids=["an answer that has begun", "a body that was let go"])
def test_what_is_read_and_thrown_away_is_not_held(*, is_released: bool) -> None:
    """As whoever streams an answer does, to see whether the caller is there; the stream may last for hours."""
    budget, held = body_budget(1_000, 500), []

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        if is_released:
            release_body(scope)
        else:
            held.append(budget.total)
            await send({"type": "http.response.start", "status": 200, "headers": []})
        held.append(budget.total)
        await receive()
        held.append(budget.total)

    async def talk() -> None:
        pieces = iter([b"x" * 300, b"x" * 300])

        async def receive() -> Message:
            return {"type": "http.request", "body": next(pieces), "more_body": True}

        async def send(_message: Message) -> None:
            pass

        limited = BodyLimit(stream, MOST_BYTES, budget)
        await limited({"type": "http", "path": "/v1/events", "headers": []}, receive, send)

    asyncio.run(talk())
    assert held == ([0, 0] if is_released else [300, 0, 0])
