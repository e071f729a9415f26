"""How a gateway ends: what still waits is answered, by whom it was taken, and is not sent again."""

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import Response

from fairlane.schema_files import default_codec
from producers.gateway import server as gateway_server
from producers.gateway.claim_stores import LocalClaims
from producers.gateway.edge import error_answers
from producers.gateway.edge.call_log import CallLog
from producers.gateway.idempotency import Idempotency
from producers.gateway.openai.deps import OpenAIDeps
from producers.gateway.openai.router import router
from producers.gateway.pipeline.early_answer import LoadPicture, Registry
from producers.gateway.pipeline.pending import Pending
from producers.gateway.pipeline.submitter import LogSubmitter
from producers.gateway.server import GatewayServer
from tests.unit.openai_kit import KEY, MODEL, ScriptedCatalog, authenticate
from tests.unit.test_gateway_submitter import Chunks, Log, Recorded
from tests.waiting import eventually

# Only bounds a hang.
TIMEOUT_S = 60.0


class Gateway:
    """The routes of OpenAI's over a log that answers nothing."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self.log = Log()
        recorded = Recorded()
        self.submitter = LogSubmitter(
            default_codec(), self.log, Chunks(), Pending(8), Registry, LoadPicture(), recorded.find
        )
        self.submitter.owned(frozenset(range(6)), 6)
        self.calls: CallLog | None = None
        self.app = FastAPI()
        error_answers.install(self.app)
        idempotency = Idempotency(LocalClaims(), recorded.find)
        deps = OpenAIDeps(self.submitter, authenticate, ScriptedCatalog(), idempotency, TIMEOUT_S, keep_alive_s=0.05)
        self.app.include_router(router(deps))

        @self.app.get("/stuck")
        async def stuck(_request: Request) -> Response:
            await asyncio.sleep(TIMEOUT_S)
            raise AssertionError("the test is over")

        self.app.add_middleware(self._call_log)

    @property
    def open_calls(self) -> int:
        return 0 if self.calls is None else self.calls.open_calls

    def drain(self) -> None:
        self.submitter.is_draining = True

    def end_waiting(self) -> None:
        self.submitter.end_waiting()

    def _call_log(self, app: object) -> CallLog:
        self.calls = CallLog(app)  # type: ignore[arg-type]  # starlette hands the next application to a factory
        return self.calls


class Caller(threading.Thread):
    """One call, which waits."""

    def __init__(self, url: str, *, stream: bool = False, method: str = "POST", path: str = "/v1/chat/completions"):
        super().__init__(name="caller", daemon=True)
        self._ask = method, url + path
        self._body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": stream}
        self.status: int | None = None
        self.headers = httpx.Headers()
        self.body = ""
        self.start()

    def run(self) -> None:
        headers = {"authorization": f"Bearer {KEY}"}
        method, url = self._ask
        with (
            httpx.Client(timeout=TIMEOUT_S) as http,
            http.stream(method, url, json=self._body, headers=headers) as answer,
        ):
            self.headers, self.status = answer.headers, answer.status_code
            self.body = "".join(answer.iter_text())

    def answered(self) -> "Caller":
        self.join(TIMEOUT_S)
        assert self.status is not None, "no answer"
        return self


@contextmanager
def serving(gateway: Gateway, drain_timeout_s: float) -> Iterator[tuple[str, GatewayServer]]:
    config = uvicorn.Config(gateway.app, port=0, lifespan="off", log_config=None, timeout_graceful_shutdown=1)
    server = GatewayServer(config, gateway, drain_timeout_s)
    thread = threading.Thread(target=server.run, name="gateway", daemon=True)
    thread.start()
    try:
        eventually(lambda: server.started, what="the server")
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", server
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), "it must end by itself"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(TIMEOUT_S)


@pytest.fixture(autouse=True)
def _no_end_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_server, "exit_after", lambda _timeout_s: None)


@pytest.mark.parametrize("why", ["drained", "failed"])
def test_who_still_waits_at_the_end_is_told_that_the_request_goes_on(why: str) -> None:
    gateway = Gateway()
    with serving(gateway, 0.1 if why == "drained" else TIMEOUT_S) as (url, server):
        waiting, streaming = Caller(url), Caller(url, stream=True)
        eventually(lambda: len(gateway.log.records) == 2 and streaming.status, what="calls that wait")
        if why == "drained":
            server.handle_exit(signal.SIGTERM, None)
        else:
            gateway.failure = RuntimeError("a thread has died")
    ids = {request_id for _, request_id, _, _ in gateway.log.records}
    answer = waiting.answered()
    assert answer.status == 504
    assert answer.headers["x-should-retry"] == "false"
    assert {answer.headers["x-request-id"], streaming.answered().headers["x-request-id"]} == ids
    assert streaming.status == 200
    assert '"code":"timeout"' in streaming.body.replace('": "', '":"'), "the stream ends with an error"
    assert gateway.open_calls == 0


def test_what_is_cut_off_is_not_sent_again_by_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_server, "_ANSWERS_S", 0.1)
    gateway = Gateway()
    with serving(gateway, 0.1) as (url, server):
        stuck = Caller(url, method="GET", path="/stuck")
        eventually(lambda: gateway.open_calls == 1, what="the call")
        server.handle_exit(signal.SIGTERM, None)
    answer = stuck.answered()
    assert (answer.status, answer.headers["x-should-retry"]) == (503, "false")
    assert '"uncertain"' in answer.body
    assert "x-request-id" in answer.headers
