"""Gateways of a test of the edge: one that has the real one's protocol and answers what it got, and one that breaks."""

import asyncio
import json
import socket
import socketserver
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.types import Receive, Scope, Send

from producers.gateway.edge.connections import Connections, ConnectionTimeouts
from producers.openai_api.responses import STREAM_HEADERS
from tests.kit.edge_kit import Edge, edge
from tests.kit.waiting import PATIENCE_S

STREAM = "/v1/chat/completions"
PIECES = 3
LARGE = "/v1/results/large"
LARGE_BYTES = 16_000_000
"""More than the systems on the way buffer."""
_BLOCK = b" " * 64_000
REQUEST_ID = "0b0f1b52-6a3f-4f0e-9a55-0c6f6f5d8a11"


@dataclass(frozen=True, slots=True)
class Call:
    """What arrived, when it was complete."""

    method: str
    path: str
    headers: Sequence[tuple[str, str]]
    body_bytes: int
    peer: tuple[str, int]

    def values(self, name: str) -> list[str]:
        return [value for each, value in self.headers if each == name]


@dataclass
class StubGateway:
    """Answers every call with what it got.

    Attributes:
        name: in its answers.
        calls: those that were complete.
        begun: how many heads have arrived.
        pieces: released once for each piece of a stream that may be sent.
        refusal: status, headers and body of every answer instead.
    """

    name: str
    calls: list[Call] = field(default_factory=list)
    begun: int = 0
    pieces: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    refusal: tuple[int, dict[str, str], bytes] | None = None
    server: Edge | None = None

    @property
    def address(self) -> str:
        assert self.server is not None
        return f"127.0.0.1:{self.server.port}"

    @property
    def under_way(self) -> int:
        """Calls that have not been answered whole."""
        assert self.server is not None
        return self.server.tasks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun += 1
        if scope["type"] == "websocket":
            await self._echo(receive, send)
            return
        body_bytes = 0
        while (message := await receive())["type"] == "http.request":
            body_bytes += len(message.get("body", b""))
            if not message.get("more_body", False):
                break
        headers = [(name.decode(), value.decode("latin-1")) for name, value in scope["headers"]]
        call = Call(scope["method"], scope["path"], headers, body_bytes, scope["client"])
        self.calls.append(call)
        if self.refusal is not None:
            status, given, body = self.refusal
            await _answer(send, status, given, body)
        elif scope["path"] == STREAM:
            await self._stream(send)
        elif scope["path"] == LARGE:
            await self._large(send)
        else:
            got = {
                "gateway": self.name,
                "path": call.path,
                "forwarded_for": call.values("x-forwarded-for"),
                "body_bytes": body_bytes,
            }
            await _answer(send, 200, {"x-request-id": REQUEST_ID}, json.dumps(got).encode())

    async def _large(self, send: Send) -> None:
        """In blocks, each when the one before was taken."""
        headers = _raw({"content-length": str(LARGE_BYTES)})
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for sent in range(0, LARGE_BYTES, len(_BLOCK)):
            await send({"type": "http.response.body", "body": _BLOCK, "more_body": sent + len(_BLOCK) < LARGE_BYTES})

    async def _stream(self, send: Send) -> None:
        """Each piece when it may be sent."""
        await send({"type": "http.response.start", "status": 200, "headers": _raw(dict(STREAM_HEADERS))})
        for number in range(PIECES):
            await asyncio.to_thread(self.pieces.acquire, timeout=PATIENCE_S)
            piece = f"data: {number}\n\n".encode()
            await send({"type": "http.response.body", "body": piece, "more_body": number + 1 < PIECES})

    async def _echo(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            await send({"type": "websocket.send", "text": message["text"]})


async def _answer(send: Send, status: int, headers: dict[str, str], body: bytes) -> None:
    given = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    await send({"type": "http.response.start", "status": status, "headers": _raw(given)})
    await send({"type": "http.response.body", "body": body})


def _raw(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]


@contextmanager
def stub_gateway(name: str, timeouts: ConnectionTimeouts | None = None) -> Iterator[StubGateway]:
    stub = StubGateway(name)
    with edge(Connections(1_000, 1_000, timeouts), stub) as stub.server:
        yield stub


class BreakingGateway(socketserver.ThreadingTCPServer):
    """Reads each call to its end, and closes the connection without an answer.

    Attributes:
        calls: first lines.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Break)
        self.calls: list[str] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class _Break(socketserver.StreamRequestHandler):
    server: BreakingGateway

    def handle(self) -> None:
        first = self.rfile.readline().decode()
        if not first:
            return
        length = 0
        while (line := self.rfile.readline().strip()) and b":" in line:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        self.rfile.read(length)
        self.server.calls.append(first.strip())


@contextmanager
def breaking_gateway() -> Iterator[BreakingGateway]:
    with BreakingGateway() as server:
        thread = threading.Thread(target=server.serve_forever, name="breaking", daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(PATIENCE_S)


@contextmanager
def silent_gateway() -> Iterator[str]:
    """Takes connections, and says nothing. Its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
