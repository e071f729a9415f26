"""HTTP/1.1 with bounds on what comes before the body and on time, which uvicorn's faster parser has not by itself."""

import asyncio
import logging
from collections.abc import Callable, Sized
from functools import partial
from typing import Any, Final

from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from producers.gateway.edge.connections import Connection, Connections, CountedTransport, count
from producers.gateway.edge.limited_websocket import LimitedWebSocket
from producers.gateway.edge.patience import Cut, Inflow, Stage

MOST_HEAD_BYTES: Final = 32_768
"""Of the request line and all headers; also of what comes between two pieces of a body."""
MOST_HEADERS: Final = 100
MOST_PIPELINED: Final = 8
"""Calls that wait for the answer to an earlier one of their connection."""
MOST_PIPELINED_BYTES: Final = 65_536
"""Of all such calls of one connection. Nothing is read behind the first of them, but one read may bring several, and no
budget of bodies knows of them before their turn."""
DEFAULT_HEADERS: Final = [("x-content-type-options", "nosniff")]
"""Of every answer; for uvicorn's ``headers``."""

_LAST: Final = b"x-content-type-options: nosniff\r\nconnection: close\r\n\r\n"
_TOO_LARGE: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\n" + _LAST
_FULL: Final = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nretry-after: 5\r\n" + _LAST

# What a stranger can make it say of every connection is counted instead.
_log = logging.getLogger(__name__)
_log.setLevel(logging.ERROR)


class HeadTooLargeError(Exception):
    """More comes before the body than may."""


class PipelinedError(Exception):
    """More waits behind a call than may."""


class _Flow(FlowControl):
    """Reads nothing while a call waits for its turn, though the one that is answered asks whether its caller is there:
    each time it would let one more read into memory."""

    def __init__(self, transport: asyncio.Transport, waiting: Sized) -> None:
        super().__init__(transport)
        self._waiting = waiting

    def resume_reading(self) -> None:
        if not self._waiting:
            super().resume_reading()


def limited_protocol(connections: Connections) -> Callable[..., "LimitedProtocol"]:
    """What uvicorn takes as ``http``."""
    return partial(LimitedProtocol, connections)


class LimitedProtocol(HttpToolsProtocol):
    """A head that is too large is answered with 431; a connection that is too slow in either direction is ended; one
    too many is answered with 503."""

    def __init__(
        self,
        connections: Connections,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.logger = _log
        self._connections = connections
        self._head_bytes = 0
        self._bare_bytes = 0
        """That came since anything was understood of them."""
        self._own_bytes = 0
        """Of the last read: of calls that wait for none."""
        self._is_understood = False
        self._is_pipelined = False
        """More waits behind a call than may."""
        self._is_lingering = False
        """It is answered for the last time, and what still comes is thrown away."""
        self._running: RequestResponseCycle | None = None
        """The call that is answered, which need not be the last that came."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the base class has it
        self._inflow = Inflow(self._connections.patience, self.loop.time())
        self._connection = Connection(self._connections, transport, self.loop, self._late)
        super().connection_made(self._connection.transport)
        self.transport: CountedTransport = self._connection.transport
        self.flow = _Flow(self.transport, self.pipeline)
        self.transport.lingers = self._linger
        if self._connection.refused is not None:
            self.transport.write(_FULL)
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.lost()
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            # The base class tells only the last call that came.
            self._running.disconnected = True
            self._running.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._is_lingering:
            return
        self._is_understood = False
        self._own_bytes = 0
        super().data_received(data)
        # All that waits came in this read, whole or not.
        waits = self._is_answering() and (bool(self.pipeline) or self._inflow.stage is Stage.HEAD)
        if waits and len(data) - self._own_bytes > MOST_PIPELINED_BYTES and not self.transport.is_closing():
            self._is_pipelined = True
            self.send_400_response("")
            return
        if self._is_understood:
            self._bare_bytes = 0
            return
        # The parser tells of a header when it is complete, and one may go on for ever, also behind a body.
        self._bare_bytes += len(data)
        if (
            self._bare_bytes > MOST_HEAD_BYTES
            and self._inflow.stage in (Stage.HEAD, Stage.BODY, Stage.LEFTOVER)
            and not self.transport.is_closing()
        ):
            self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = self._bare_bytes = 0
        self._inflow.enter(Stage.HEAD, self.loop.time())

    def on_headers_complete(self) -> None:
        self._head_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if self._is_too_large():
            # Ends the parsing; what it raises is answered below.
            raise HeadTooLargeError
        super().on_headers_complete()
        self._inflow.enter(Stage.BODY, self.loop.time())
        if not self.pipeline:
            self._own_bytes += self._head_bytes
        elif len(self.pipeline) > MOST_PIPELINED:
            self._is_pipelined = True
            raise PipelinedError

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._is_understood = True
        self._inflow.take(len(body))
        super().on_body(body)
        if not self.pipeline:
            self._own_bytes += len(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_understood = True
        is_answered = self._inflow.stage is Stage.LEFTOVER
        self._inflow.enter(Stage.IDLE if is_answered else Stage.NOTHING, self.loop.time())

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            # The base class asks while the call whose turn it is still waits.
            self.flow.resume_reading()
        if not self.cycle.response_complete:
            # Another call of this connection is there already.
            return
        if self._inflow.stage is Stage.NOTHING:
            self._inflow.enter(Stage.IDLE, self.loop.time())
        elif self._inflow.stage is Stage.BODY:
            self._inflow.enter(Stage.LEFTOVER, self.loop.time())

    def send_400_response(self, msg: str) -> None:
        is_too_large = self._is_too_large() or self._bare_bytes > MOST_HEAD_BYTES
        count(Cut.PIPELINED if self._is_pipelined else Cut.HEAD_TOO_LARGE if is_too_large else Cut.MALFORMED)
        if self._is_answering() or self._inflow.stage is not Stage.HEAD:
            # Nothing may come in the middle of an answer.
            self.transport.close()
        elif is_too_large:
            self.transport.write(_TOO_LARGE)
            self.transport.close()
        else:
            super().send_400_response(msg)

    def handle_websocket_upgrade(self) -> None:
        if self._is_answering():
            # Its call would never be told that the connection is lost.
            self.send_400_response("")
            return
        self.connections.discard(self)
        self.transport.lingers = None
        websocket = LimitedWebSocket(self._connection, self.config, self.server_state, self.app_state)
        websocket.connection_made(self.transport)
        # Before it reads anything: from here on it is told when the connection is lost.
        self.transport.set_protocol(websocket)
        head = [self.scope["method"].encode(), b" ", self.url, b" HTTP/1.1\r\n"]
        for name, value in self.scope["headers"]:
            head += [name, b": ", value, b"\r\n"]
        websocket.data_received(b"".join([*head, b"\r\n"]))

    def _linger(self) -> bool:
        """Whether the connection is closed later. With bytes of a body unread, the system would answer a close with a
        reset, which may overtake the answer: so our side of it ends, and theirs is read until it ends too, or for as
        long as a rest of a body may take."""
        is_answered = self.cycle is not None and self.cycle.response_complete  # type: ignore[redundant-expr]  # as below
        if self._is_lingering or not is_answered or self._inflow.stage is not Stage.BODY:
            return False
        self._is_lingering = True
        self._inflow.enter(Stage.LEFTOVER, self.loop.time())
        self.transport.write_eof()
        self.flow.resume_reading()
        return True

    def _is_answering(self) -> bool:
        # None until the first call.
        return self.cycle is not None and not self.cycle.response_complete  # type: ignore[redundant-expr]  # as above

    def _is_too_large(self) -> bool:
        return self._head_bytes > MOST_HEAD_BYTES or len(self.headers or ()) > MOST_HEADERS

    def _late(self, now_s: float) -> Cut | None:
        if self.flow.read_paused and self.transport.has_left():
            # Who is not read from is not seen to leave: the call that is answered would never be told.
            self.transport.close()
            return None
        return self._inflow.late(now_s, is_paused=self.flow.read_paused)
