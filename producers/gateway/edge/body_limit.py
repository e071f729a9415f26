"""Bodies that are too large are refused before they are read whole.

One that declares so is refused by its head alone, before it is known who calls: that is no work and says nothing that
the documentation does not. All others are read by routes, which know their callers.
"""

from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fairlane.outcomes import Code
from producers.gateway.edge.error_answers import error_response
from producers.gateway.errors import GatewayError


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """What a body may be.

    Attributes:
        max_bytes: of a path.
    """

    max_bytes: Callable[[str], int]


class BodyLimit:
    """ASGI middleware. Whoever reads the body of such a call is told with a GatewayError (413), and so is the
    caller, whatever is made of that."""

    def __init__(self, app: ASGIApp, limits: BodyLimits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        most = self._limits.max_bytes(scope["path"])
        body = _Body(scope, receive, send, most)
        declared = _declared_bytes(scope)
        if declared is not None and declared > most:
            await body.refuse(_too_large(most))
            return
        await self._app(scope, body.receive, body.send)


class _Body:
    """The body of one call, as it is read."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, most_bytes: int) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._most_bytes = most_bytes
        self._read_bytes = 0
        self._is_read = False
        self._is_answered = False
        self._error: GatewayError | None = None

    async def receive(self) -> Message:
        if self._is_read:
            return await self._receive()
        if self._error is not None:
            raise self._error
        message = await self._receive()
        if message["type"] == "http.request":
            self._read_bytes += len(message.get("body", b""))
            self._is_read = not message.get("more_body", False)
            if self._read_bytes > self._most_bytes:
                self._error = _too_large(self._most_bytes)
                self._is_read = False
                raise self._error
        return message

    async def send(self, message: Message) -> None:
        if self._error is None:
            await self._send(message)
            self._is_answered = True
        elif not self._is_answered:
            await self.refuse(self._error)

    async def refuse(self, error: GatewayError) -> None:
        """Answer, and take nothing more on this connection."""
        self._error, self._is_answered = error, True
        answer = error_response(self._scope["path"], error)
        answer.headers["connection"] = "close"
        await answer(self._scope, self._receive, self._send)


def _declared_bytes(scope: Scope) -> int | None:
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else None
    return None


def _too_large(most_bytes: int) -> GatewayError:
    return GatewayError(413, Code.INVALID, f"the body has more than {most_bytes} bytes", field="body")
