"""How a gateway ends: what still waits is answered, by whom it was taken, and is not sent again."""

import asyncio
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
import uvicorn
import uvloop
from fastapi import FastAPI, Request
from starlette.responses import Response
from websockets.exceptions import ConnectionClosed

from fairlane.outcomes import Decision
from fairlane.schema_files import default_codec
from producers.gateway import server as gateway_server
from producers.gateway.edge import error_responses
from producers.gateway.edge.access_log import CallLog
from producers.gateway.idempotency import Idempotency, LocalClaims
from producers.gateway.openai.router import router
from producers.gateway.openai.streams import OpenAIDeps
from producers.gateway.pipeline.early_rejection import LatestLoad, RegistrySnapshot
from producers.gateway.pipeline.pending import Pending
from producers.gateway.pipeline.submitter import Submitter
from producers.gateway.server import GatewayServer
from tests.kit.native_kit import ID, Bench, decided
from tests.kit.native_socket import following, said
from tests.kit.native_socket import socket as websocket_of
from tests.kit.openai_kit import KEY, MODEL, accept, authenticate, may_name, models_of
from tests.kit.submitter_doubles import Chunks, Log, Recorded
from tests.kit.waiting import eventually

# Only bounds a hang.
TIMEOUT_S = 60.0


class Gateway:
    """The routes of OpenAI's over a log that answers nothing."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self.log = Log()
        recorded = Recorded()
        self.submitter = Submitter(
            default_codec(),
            self.log,  # type: ignore[arg-type]  # a double
            Pending(8, Chunks(), recorded.find),  # type: ignore[arg-type]  # a double
            RegistrySnapshot,
            LatestLoad(),
        )
        self.submitter.pending.owned(frozenset(range(6)), 6)
        self.calls: CallLog | None = None
        self.app = FastAPI()
        error_responses.install(self.app)
        idempotency = Idempotency(LocalClaims(), recorded.find)
        deps = OpenAIDeps(
            self.submitter,
            authenticate,
            idempotency,
            TIMEOUT_S,
            accept,
            models_of=models_of,
            may_name=may_name,
            keep_alive_s=0.05,
        )
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
        """Calls go on."""

    def refuse(self) -> None:
        self.submitter.is_draining = True

    def end_waiting(self) -> None:
        self.refuse()
        self.submitter.pending.end_waiting()

    def _call_log(self, app: object) -> CallLog:
        self.calls = CallLog(app)  # type: ignore[arg-type]  # starlette hands the next application to a factory
        return self.calls


class Followed:
    """The native routes."""

    failure: BaseException | None = None

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.app = CallLog(bench.app)

    @property
    def open_calls(self) -> int:
        return self.app.open_calls

    def drain(self) -> None:
        self._bench.deps.ending.set()

    def refuse(self) -> None:
        """Nobody sends."""

    def end_waiting(self) -> None:
        raise AssertionError("nobody waits")


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
def serving(gateway: Gateway | Followed, drain_timeout_s: float) -> Iterator[tuple[str, GatewayServer]]:
    config = uvicorn.Config(
        gateway.app, port=0, ws="websockets-sansio", lifespan="off", log_config=None, timeout_graceful_shutdown=1
    )
    server = GatewayServer(config, gateway, drain_timeout_s)  # type: ignore[arg-type]  # a double
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


CALL = b"GET /quick HTTP/1.1\r\nhost: gateway\r\n\r\n"
WAITS = b"GET /held HTTP/1.1\r\nhost: gateway\r\n\r\n"


class Held(Gateway):
    """With a call that waits until it is let go, and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

        @self.app.get("/quick")
        async def quick() -> Response:
            return Response("quick")

        @self.app.get("/held")
        async def held() -> Response:
            await asyncio.to_thread(self.let_go.wait, TIMEOUT_S)
            return Response("held")


@contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port or 80), TIMEOUT_S) as peer:
        yield peer


def answer_on(peer: socket.socket) -> bytes:
    """Everything up to the end of the connection; a reset raises."""
    came = b""
    while piece := peer.recv(65_536):
        came += piece
    return came


def answers_on(peer: socket.socket, count: int) -> bytes:
    """So many short answers, after which the connection stays open."""
    came = b""
    while came.count(b"\r\n\r\nquick") < count:
        piece = peer.recv(65_536)
        assert piece, "the connection was closed"
        came += piece
    return came


def test_a_draining_instance_takes_no_connection_and_the_last_call_of_each_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Until there is no connection.
    monkeypatch.setattr(gateway_server, "_LAST_CALLS_S", TIMEOUT_S)
    gateway = Held()
    with serving(gateway, TIMEOUT_S) as (url, server), connected(url) as waiting, connected(url) as idle:
        idle.sendall(CALL)
        assert b"connection: close" not in answers_on(idle, 1)
        waiting.sendall(WAITS)
        eventually(lambda: gateway.open_calls == 1, what="the call that waits")
        server.handle_exit(signal.SIGTERM, None)
        eventually(lambda: not is_open(url), what="the end of the port")
        idle.sendall(CALL)
        for peer in (idle, waiting):
            gateway.let_go.set()
            said = answer_on(peer)
            assert said.startswith(b"HTTP/1.1 200 "), said
            assert b"connection: close" in said
    assert gateway.submitter.is_draining


def is_open(url: str) -> bool:
    try:
        with connected(url):
            return True
    except ConnectionRefusedError:
        return False


def test_an_idle_connection_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_server, "_LAST_CALLS_S", 0.2)
    gateway = Held()
    with serving(gateway, 10 * TIMEOUT_S) as (url, server), connected(url) as idle:
        idle.sendall(CALL)
        answers_on(idle, 1)
        server.handle_exit(signal.SIGTERM, None)
        assert answer_on(idle) == b""


def test_calls_in_the_queue_of_a_port_that_is_closed_are_answered() -> None:
    """The kernel has accepted their connections, so their callers have sent them."""
    gateway = Held()
    config = uvicorn.Config(gateway.app, port=0, loop="uvloop", lifespan="off", log_config=None)
    server = GatewayServer(config, gateway, TIMEOUT_S)

    async def test() -> None:
        config.load()
        server.lifespan = config.lifespan_class(config)
        await server.startup()
        port = server.servers[0].sockets[0].getsockname()[1]
        with ExitStack() as opened:
            # The event loop does not run meanwhile.
            peers = [opened.enter_context(connected(f"http://127.0.0.1:{port}")) for _ in range(5)]
            for peer in peers:
                peer.sendall(CALL)
            await server._take_last_calls()
            answers = await asyncio.gather(*(asyncio.to_thread(answer_on, peer) for peer in peers))
        assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in answers)
        await server.shutdown()

    uvloop.run(test())


def test_a_signal_handler_only_sets_flags() -> None:
    """The thread that it interrupts may hold any lock that the work needs."""

    class Counted(Gateway):
        drained = 0

        def drain(self) -> None:
            self.drained += 1

    gateway = Counted()
    server = GatewayServer(uvicorn.Config(gateway.app, log_config=None), gateway, TIMEOUT_S)
    server.handle_exit(signal.SIGTERM, None)
    assert gateway.drained == 0
    # With no call to wait for, the next look ends it.
    assert asyncio.run(server.on_tick(1))
    asyncio.run(server.on_tick(2))
    assert gateway.drained == 1
    assert not server.force_exit
    server.handle_exit(signal.SIGTERM, None)
    assert server.force_exit


class StuckServer(GatewayServer):
    """Its event loop heeds nothing until it is let go; whether it had started before."""

    def __init__(self, *, is_started: bool) -> None:
        super().__init__(uvicorn.Config("nothing", log_config=None), Gateway(), 30.0)
        self.started = is_started
        self.is_running = threading.Event()
        self.let_go = threading.Event()

    async def serve(self, sockets: Any = None) -> None:
        self.is_running.set()
        self.let_go.wait(TIMEOUT_S)


@pytest.mark.parametrize(("is_started", "first_s"), [(True, 36.0), (False, 6.0)])
def test_a_process_ends_though_its_event_loop_heeds_no_signal(
    is_started: bool, first_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[float] = []
    monkeypatch.setattr(gateway_server, "exit_after", ends.append)
    server = StuckServer(is_started=is_started)
    thread = threading.Thread(target=server.run, name="gateway", daemon=True)
    thread.start()
    try:
        assert server.is_running.wait(TIMEOUT_S)
        server.handle_exit(signal.SIGTERM, None)
        eventually(lambda: ends == [first_s], what="an end in time")
        server.handle_exit(signal.SIGTERM, None)
        eventually(lambda: ends == [first_s, 5.0], what="an end soon")
        server.handle_exit(signal.SIGTERM, None)
    finally:
        server.let_go.set()
        thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert ends == [first_s, 5.0]
    assert "signals" not in {each.name for each in threading.enumerate()}


def test_who_only_listens_does_not_hold_up_the_end() -> None:
    bench = Bench()
    bench.store.decide(decided(Decision.ACCEPTED, 1))
    with (
        serving(Followed(bench), 10 * TIMEOUT_S) as (url, server),
        following(url) as events,
        websocket_of(url) as websocket,
    ):
        assert next(events)[0] == said(websocket)[0] == "status"
        server.handle_exit(signal.SIGTERM, None)
        assert list(events) == [("timeout", {})]
        assert said(websocket) == ("timeout", {})
        with pytest.raises(ConnectionClosed) as caught:
            websocket.recv(TIMEOUT_S)
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1000
    assert bench.deps.slots.total == 0


def test_who_comes_to_listen_too_late_is_sent_elsewhere() -> None:
    bench = Bench()
    bench.store.decide(decided(Decision.ACCEPTED, 1))

    async def test(http: httpx.AsyncClient) -> None:
        bench.deps.ending.set()
        answer = await http.get(f"/v1/requests/{ID}/events")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        assert "retry-after" in answer.headers

    bench.run(test)


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


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "room"),
    [
        (100_000, 100_000, None, 20_000),
        (1_024, 100_000, 20_512, 20_000),
        (1_024, resource.RLIM_INFINITY, 20_512, 20_000),
        (1_024, 4_096, 4_096, 3_584),
        (256, 256, 256, 1),
    ],
)
def test_there_are_no_more_connections_than_descriptors(
    soft: int, hard: int, raised: int | None, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _which, limit: limits.append(limit))
    assert gateway_server._room_for(20_000) == room
    assert limits == ([] if raised is None else [(raised, hard)])
