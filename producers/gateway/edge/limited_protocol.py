"""HTTP/1.1 and WebSocket protocols with bounds on the head and on time, which uvicorn's own lack."""

import asyncio
import logging
from collections.abc import Sized
from typing import Any, Final

from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.http11 import Response

from producers.gateway.edge.connections import (
    CloseReason,
    Connection,
    Connections,
    CountedTransport,
    Inflow,
    ReceiveStage,
    count,
)

MOST_HEAD_BYTES: Final = 32_768
"""Bound of the request line and all headers; also of the bytes between two pieces of a body."""
MOST_HEADERS: Final = 100
MOST_PIPELINED: Final = 8
"""Calls that wait for the answer to an earlier call of their connection."""
MOST_PIPELINED_BYTES: Final = 65_536
"""Bytes of all such calls of one connection. Reading pauses after the first of them, but one read may bring several,
and the body budget does not count them before their turn."""
DEFAULT_HEADERS: Final = [("x-content-type-options", "nosniff")]
"""Headers of every answer, for uvicorn's ``headers`` option."""

_LAST: Final = b"x-content-type-options: nosniff\r\nconnection: close\r\n\r\n"
_TOO_LARGE: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\n" + _LAST
_FULL: Final = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nretry-after: 5\r\n" + _LAST

# Warnings that any client can trigger on every connection are counted as metrics instead; the WebSocket library would
# log the path with its query and, at debug level, every message.
_log = logging.getLogger(__name__)
_log.setLevel(logging.ERROR)


class _BoundExceededError(Exception):
    """Stops the parser; ``send_400_response`` answers."""


class _Flow(FlowControl):
    """Keeps reading paused while a call waits for its turn. The call being answered resumes reading when it checks for
    a disconnect; each time, one more read would go into memory."""

    def __init__(self, transport: asyncio.Transport, waiting: Sized) -> None:
        super().__init__(transport)
        self._waiting = waiting

    def resume_reading(self) -> None:
        if not self._waiting:
            super().resume_reading()


class LimitedProtocol(HttpToolsProtocol):
    """Answers 431 to an oversized head and 503 to a connection over the limit; closes a connection that is too slow in
    either direction."""

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
        """Bytes received since the parser last reported a piece of a body or a complete message."""
        self._own_bytes = 0
        """Bytes of the last read that belong to calls not waiting behind another."""
        self._is_understood = False
        self._is_pipelined = False
        """Whether the bounds on pipelining are exceeded."""
        self._is_refused = False
        """Whether a head was answered with an error instead of being passed on."""
        self._is_lingering = False
        """Whether the last answer was sent and further input is discarded."""
        self._running: RequestResponseCycle | None = None
        """The call being answered, which need not be the last received."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the base class has it
        self._inflow = Inflow(self._connections.timeouts, self.loop.time())
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
            # The base class notifies only the last call received.
            self._running.disconnected = True
            self._running.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._is_lingering:
            return
        self._is_understood = False
        self._own_bytes = 0
        super().data_received(data)
        if self._is_refused:
            return
        # All waiting calls came in this read, complete or not.
        waits = self._is_answering() and (bool(self.pipeline) or self._inflow.stage is ReceiveStage.HEAD)
        if waits and len(data) - self._own_bytes > MOST_PIPELINED_BYTES and not self.transport.is_closing():
            self._is_pipelined = True
            self.send_400_response("")
            return
        if self._is_understood:
            self._bare_bytes = 0
            return
        # The parser reports a header only when complete; one may be endless, also in the trailers of a body.
        self._bare_bytes += len(data)
        if (
            self._bare_bytes > MOST_HEAD_BYTES
            and self._inflow.stage in (ReceiveStage.HEAD, ReceiveStage.BODY, ReceiveStage.LEFTOVER)
            and not self.transport.is_closing()
        ):
            self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = self._bare_bytes = 0
        self._inflow.enter(ReceiveStage.HEAD, self.loop.time())

    def on_headers_complete(self) -> None:
        self._head_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if self._is_too_large():
            raise _BoundExceededError
        super().on_headers_complete()
        self._inflow.enter(ReceiveStage.BODY, self.loop.time())
        if not self.pipeline:
            self._own_bytes += self._head_bytes
        elif len(self.pipeline) > MOST_PIPELINED:
            self._is_pipelined = True
            raise _BoundExceededError

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
        is_answered = self._inflow.stage is ReceiveStage.LEFTOVER
        self._inflow.enter(ReceiveStage.IDLE if is_answered else ReceiveStage.NOTHING, self.loop.time())

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            # The base class resumes reading before it takes the next call off the pipeline, so ``_Flow`` ignores that.
            self.flow.resume_reading()
        if not self.cycle.response_complete:
            # Another call of this connection has arrived already.
            return
        if self._inflow.stage is ReceiveStage.NOTHING:
            self._inflow.enter(ReceiveStage.IDLE, self.loop.time())
        elif self._inflow.stage is ReceiveStage.BODY:
            self._inflow.enter(ReceiveStage.LEFTOVER, self.loop.time())

    def send_400_response(self, msg: str) -> None:
        is_too_large = self._is_too_large() or self._bare_bytes > MOST_HEAD_BYTES
        count(
            CloseReason.PIPELINED
            if self._is_pipelined
            else CloseReason.HEAD_TOO_LARGE
            if is_too_large
            else CloseReason.MALFORMED
        )
        if self._is_answering() or self._inflow.stage is not ReceiveStage.HEAD:
            # An error must not be written into the middle of an answer.
            self.transport.close()
            return
        self._is_refused = True
        if is_too_large:
            self.transport.write(_TOO_LARGE)
            self.transport.close()
        else:
            super().send_400_response(msg)

    def handle_websocket_upgrade(self) -> None:
        if self._is_answering():
            # The call being answered would not learn that the connection is lost.
            self.send_400_response("")
            return
        self.connections.discard(self)
        self.transport.lingers = None
        websocket = LimitedWebSocket(self._connection, self.config, self.server_state, self.app_state)
        websocket.connection_made(self.transport)
        # Before it reads: from here on it must get ``connection_lost``.
        self.transport.set_protocol(websocket)
        head = [self.scope["method"].encode(), b" ", self.url, b" HTTP/1.1\r\n"]
        for name, value in self.scope["headers"]:
            head += [name, b": ", value, b"\r\n"]
        websocket.data_received(b"".join([*head, b"\r\n"]))

    def _linger(self) -> bool:
        """Whether to postpone the close. With bytes of a body unread or still coming, the kernel would answer a close
        with a reset, which may overtake the answer. So our side is shut down, and theirs is read until it ends too, or
        for as long as the rest of a body may take."""
        is_answered = self.cycle is not None and self.cycle.response_complete  # type: ignore[redundant-expr]  # as below
        has_body = self._is_refused or (is_answered and self._inflow.stage is ReceiveStage.BODY)
        if self._is_lingering or not has_body:
            return False
        self._is_lingering = True
        self._inflow.enter(ReceiveStage.LEFTOVER, self.loop.time())
        self.transport.write_eof()
        self.flow.resume_reading()
        return True

    def _is_answering(self) -> bool:
        # None until the first call.
        return self.cycle is not None and not self.cycle.response_complete  # type: ignore[redundant-expr]  # as above

    def _is_too_large(self) -> bool:
        return self._head_bytes > MOST_HEAD_BYTES or len(self.headers or ()) > MOST_HEADERS

    def _late(self, now_s: float) -> CloseReason | None:
        if self.flow.read_paused and self.transport.has_left():
            # While reading is paused a disconnect goes unnoticed: the call being answered would not learn of it.
            self.transport.close()
            return None
        return self._inflow.late(now_s, is_paused=self.flow.read_paused)


_NO_SNIFF: Final = "x-content-type-options"
_BAD_REQUEST: Final = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n" + _LAST


class LimitedWebSocket(WebSocketsSansIOProtocol):
    """Pings detect a lost peer; the connection's checks detect one that does not read."""

    def __init__(
        self, connection: Connection, config: Config, server_state: ServerState, app_state: dict[str, Any]
    ) -> None:
        super().__init__(config, server_state, app_state)
        self.logger = self.conn.logger = _log
        self.conn.debug = False
        self._send_response = self.conn.send_response
        self.conn.send_response = self._send_named  # type: ignore[method-assign]  # nothing else sees every answer
        self._connection = connection
        connection.late = _never

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.lost()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.handshake_initiated and not self.transport.is_closing():
            # The whole head is here and is no valid handshake; uvicorn would not send the error.
            count(CloseReason.MALFORMED)
            self.handshake_complete = self.close_sent = True
            self.transport.write(b"".join(self.conn.data_to_send()) or _BAD_REQUEST)
            self.transport.close()

    def _send_named(self, response: Response) -> None:
        if _NO_SNIFF not in response.headers:
            response.headers[_NO_SNIFF] = "nosniff"
        self._send_response(response)

    def handle_ping(self) -> None:
        if self.writable.is_set():
            super().handle_ping()
        else:
            # The peer does not read: its pongs would pile up in memory.
            self.conn.data_to_send()


def _never(_now_s: float) -> CloseReason | None:
    return None
