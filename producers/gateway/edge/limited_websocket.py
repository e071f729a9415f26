"""WebSocket protocol on a checked ``Connection``."""

import logging
from typing import Any, Final

from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.http11 import Response

from producers.gateway.edge.connections import Connection, count
from producers.gateway.edge.timeouts import CloseReason

_NO_SNIFF: Final = "x-content-type-options"
_BAD_REQUEST: Final = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nx-content-type-options: nosniff\r\nconnection: close\r\n\r\n"
)

# The library would log the path with its query and, at debug level, every message.
_log = logging.getLogger(__name__)
_log.setLevel(logging.ERROR)


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
