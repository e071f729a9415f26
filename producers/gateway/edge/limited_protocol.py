"""HTTP/1.1 with bounds on what comes before the body, which uvicorn's faster parser does not have by itself."""

import asyncio
from typing import Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD_BYTES: Final = 32_768
"""Of the request line and all headers."""
MOST_HEADERS: Final = 100
HEAD_TIMEOUT_S: Final = 10.0
"""From the beginning of a connection, or the first byte of a head, to the end of the head."""
BODY_TIMEOUT_S: Final = 30.0
"""Between two pieces of a body."""

_TOO_LARGE: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class HeadTooLargeError(Exception):
    """More comes before the body than may."""


class LimitedProtocol(HttpToolsProtocol):
    """A head that is too large is answered with 431; a head or a body that is too slow ends its connection."""

    _head_bytes = 0
    _is_in_head = True
    _is_in_body = False
    _late_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the base class has it
        super().connection_made(transport)
        self._wait_for_more(HEAD_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_in_head = self._is_in_head
        before = self._head_bytes if was_in_head else 0
        super().data_received(data)
        if self._is_in_head:
            # The parser tells of a header when it is complete, and one may go on for ever.
            self._head_bytes = before + len(data)
            if self._head_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response("")
            elif not was_in_head:
                self._wait_for_more(HEAD_TIMEOUT_S)
        elif self._is_in_body:
            self._wait_for_more(BODY_TIMEOUT_S)
        else:
            self._stop_waiting()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True

    def on_headers_complete(self) -> None:
        self._head_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if self._head_bytes > MOST_HEAD_BYTES or len(self.headers) > MOST_HEADERS:
            # Ends the parsing; what it raises is answered below.
            raise HeadTooLargeError
        self._is_in_head, self._is_in_body = False, True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_body = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if self._is_in_head and (self._head_bytes > MOST_HEAD_BYTES or len(self.headers or ()) > MOST_HEADERS):
            self.transport.write(_TOO_LARGE)
            self.transport.close()
        else:
            super().send_400_response(msg)

    def handle_websocket_upgrade(self) -> None:
        self._is_in_body = False
        self._stop_waiting()
        super().handle_websocket_upgrade()

    def _wait_for_more(self, timeout_s: float) -> None:
        self._stop_waiting()
        self._late_timer = self.loop.call_later(timeout_s, self._is_late)

    def _stop_waiting(self) -> None:
        if self._late_timer is not None:
            self._late_timer.cancel()
            self._late_timer = None

    def _is_late(self) -> None:
        if self.flow.read_paused:
            # It is we who do not read on.
            self._wait_for_more(BODY_TIMEOUT_S)
        elif not self.transport.is_closing():
            self.transport.close()
