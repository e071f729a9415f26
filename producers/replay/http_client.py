"""A small HTTP/1.1 client for load: keep-alive, prebuilt requests, streamed responses.

A library for everyday use takes as much of a core as the server that it is to measure. This one does what a load
generator needs and no more: no redirects, no cookies, no compression, and no second try, since a failure is a result.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import cast
from urllib.parse import urlsplit

import httptools

CONNECT_TIMEOUT_S = 5.0
# Below the five seconds after which uvicorn closes a connection that rests.
_MOST_REST_S = 4.0
_MOST_BODY_BYTES = 64 * 1024 * 1024

OnBody = Callable[[bytes], None]


class HttpError(Exception):
    """No connection, one that broke, or an invalid answer. Quotes nothing of the request."""


@dataclass(slots=True)
class HttpReply:
    """An answer. ``body`` is empty where a callback took it; the names of ``headers`` are in lower case."""

    status: int = 0
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


class HttpClient:
    """Client of one server, with a connection for each concurrent call; the caller bounds those. Raises ValueError."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("url: not http://HOST[:PORT] or https://HOST[:PORT]")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname
        self._port = parts.port or (443 if self._tls else 80)
        self._authority = parts.netloc.rpartition("@")[2]
        self._path = parts.path.rstrip("/")
        self._idle: deque[_Connection] = deque()

    def request(self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> bytes:
        """The bytes of a request. Raises ValueError for an invalid header; the message does not show its value."""
        fixed = {"Host": self._authority, "Content-Length": str(len(body))}
        lines = [f"{method} {self._path}{path} HTTP/1.1"]
        for name, value in (fixed | dict(headers)).items():
            if not (value.isascii() and value.isprintable()):
                raise ValueError(f"header {name}: holds a character that a header cannot")
            lines.append(f"{name}: {value}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii") + body

    async def send(self, request: bytes, on_body: OnBody | None = None) -> HttpReply:
        """Send a request of ``request`` and wait for the whole answer. When cancelled, the connection is closed.

        ``on_body`` receives the body in pieces. Raises HttpError.
        """
        connection = self._resting() or await self._connect()
        try:
            reply = await connection.exchange(request, on_body)
        except BaseException:
            connection.close()
            raise
        if connection.is_open:
            connection.rests_since_s = monotonic()
            self._idle.append(connection)
        return reply

    def close(self) -> None:
        """Close what rests."""
        while self._idle:
            self._idle.pop().close()

    def _resting(self) -> "_Connection | None":
        now_s = monotonic()
        while self._idle and (not self._idle[0].is_open or now_s - self._idle[0].rests_since_s > _MOST_REST_S):
            self._idle.popleft().close()
        while self._idle:
            # The latest used one: those that are not needed grow old and go.
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        except (OSError, TimeoutError) as error:
            raise HttpError(f"no connection: {type(error).__name__}") from error
        return connection


class _Connection(asyncio.Protocol):
    """One connection, one exchange at a time. The methods named ``on_*`` are called by the parser."""

    def __init__(self) -> None:
        self.rests_since_s = 0.0
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._answered: asyncio.Future[HttpReply] | None = None
        self._reply = HttpReply()
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._on_body: OnBody | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def exchange(self, request: bytes, on_body: OnBody | None) -> HttpReply:
        if self._transport is None:
            raise HttpError("the connection is closed")
        self._answered = asyncio.get_running_loop().create_future()
        self._on_body = on_body
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request)
        return await self._answered

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._fail("the connection broke" if exc else "the connection was closed before the answer was whole")

    def data_received(self, data: bytes) -> None:
        if self._parser is None or self._answered is None or self._answered.done():
            # Nobody asked.
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"not an answer of HTTP: {type(error).__name__}")
            self.close()

    def on_message_begin(self) -> None:
        self._reply, self._body, self._body_bytes = HttpReply(), [], 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._reply.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._on_body is not None:
            self._on_body(body)
        elif self._body_bytes <= _MOST_BODY_BYTES:
            self._body.append(body)
        else:
            self._fail(f"the answer is longer than {_MOST_BODY_BYTES:,} bytes")
            self.close()

    def on_message_complete(self) -> None:
        if self._parser is None:
            return
        self._reply.status = self._parser.get_status_code()
        self._reply.body = b"".join(self._body)
        if self._reply.status < 200:
            # A word in between, such as 100 Continue.
            return
        keep = self._parser.should_keep_alive()
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(self._reply)
        if not keep and self._transport is not None:
            self._transport.close()

    def _fail(self, why: str) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(HttpError(why))
