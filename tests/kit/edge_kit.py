"""The gateway's edge before a small application, on a real socket and the event loop that it has in service."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import uvicorn
from fastapi import FastAPI, Request, WebSocket
from prometheus_client import REGISTRY
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp

from producers.gateway.edge.connections import CloseReason, Connections
from producers.gateway.edge.limited_protocol import DEFAULT_HEADERS, LimitedProtocol
from tests.kit.waiting import PATIENCE_S, eventually

LARGE_BYTES = 64 * 1024 * 1024
_PIECE = b"x" * 65_536


def application() -> FastAPI:
    app = FastAPI()

    @app.post("/read")
    async def read(request: Request) -> dict[str, int]:
        return {"bytes": len(await request.body())}

    @app.post("/refused")
    async def refused() -> Response:
        return Response(status_code=401)

    @app.post("/closed")
    async def closed() -> Response:
        return Response(status_code=401, headers={"connection": "close"})

    @app.get("/waits")
    async def waits(request: Request) -> Response:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        return Response()

    @app.get("/large")
    async def large() -> Response:
        return Response(b"x" * LARGE_BYTES)

    @app.get("/endless")
    async def endless() -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            while True:
                yield _PIECE
                await asyncio.sleep(0)

        return StreamingResponse(pieces())

    @app.websocket("/socket")
    async def endless_socket(websocket: WebSocket) -> None:
        await websocket.accept()
        if await websocket.receive_text() == "tell":
            while True:
                await websocket.send_bytes(_PIECE)
        await websocket.close()

    return app


@dataclass(frozen=True)
class Edge:
    """A server.

    Attributes:
        port: of 127.0.0.1.
        server: in a thread of its own.
    """

    port: int
    server: uvicorn.Server

    @contextmanager
    def connected(self, sent: bytes = b"") -> Iterator[socket.socket]:
        """A connection that takes little before it is read from."""
        with socket.socket() as peer:
            peer.settimeout(PATIENCE_S)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            peer.connect(("127.0.0.1", self.port))
            peer.sendall(sent)
            yield peer

    @property
    def tasks(self) -> int:
        """Calls under way."""
        return len(self.server.server_state.tasks)


@contextmanager
def edge(connections: Connections, app: ASGIApp | None = None) -> Iterator[Edge]:
    """Served until the end of the block; whatever came, nothing is left of it."""
    config = uvicorn.Config(
        app or application(),
        http=partial(LimitedProtocol, connections),  # type: ignore[arg-type]  # uvicorn only calls it
        ws="websockets-sansio",
        loop="uvloop",
        port=0,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        headers=DEFAULT_HEADERS,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="edge", daemon=True)
    thread.start()
    try:
        eventually(lambda: server.started, what="the server")
        yield Edge(server.servers[0].sockets[0].getsockname()[1], server)
        eventually(lambda: not len(connections), what="the end of all connections")
        eventually(lambda: not server.server_state.connections, what="the end of all that speak on them")
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the server did not end"


def everything(peer: socket.socket) -> bytes:
    """What is said until the connection ends."""
    said = b""
    try:
        while piece := peer.recv(65_536):
            said += piece
    except ConnectionError:
        pass
    return said


def cut(why: CloseReason) -> float:
    """How many connections were cut for this."""
    return REGISTRY.get_sample_value("fairlane_gateway_connections_cut_total", {"reason": why}) or 0.0


def drip(peer: socket.socket, drop: bytes) -> None:
    """Send this again and again until the other side ends the connection."""
    ended = threading.Event()

    def listen() -> None:
        everything(peer)
        ended.set()

    listener = threading.Thread(target=listen, name="listener", daemon=True)
    listener.start()

    async def send() -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not ended.is_set():
                try:
                    peer.sendall(drop)
                except ConnectionError:
                    break
                await asyncio.sleep(0.01)

    asyncio.run(send())
    listener.join(PATIENCE_S)
    assert not listener.is_alive()
