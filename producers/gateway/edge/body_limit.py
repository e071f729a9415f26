"""Bounds on bodies: of each, and of the bytes that are held for one tenant and for all.

A body that declares to be too large is refused by its head alone, before it is known who calls: that is no work and
says nothing that the documentation does not. All others are read by routes, which know their callers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fairlane import metrics
from fairlane.outcomes import Code
from producers.gateway.edge.error_answers import error_response
from producers.gateway.errors import GatewayError
from producers.gateway.pipeline.caller import present
from producers.gateway.tenant_slots import TenantSlots

TOO_MANY_BYTES: Final = "too_many_body_bytes"
"""The gateway's own code: bodies of this tenant hold as much memory of this instance as they may."""

_RETRY_AFTER_MS: Final = 1_000
_BODY: Final = "fairlane_body"
_NOBODY: Final = ""
"""No tenant's name: callers without identity share one budget, and no route reads their bodies."""


def body_budget(most_bytes: int, most_bytes_of_tenant: int) -> TenantSlots:
    """The bytes of bodies that may be held. Raises GatewayError: 429 of one tenant, 503 of all."""
    return TenantSlots(most_bytes, most_bytes_of_tenant, _full, _tenant_full, has_reserve=True)


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """What bodies may be.

    Attributes:
        max_bytes: of one, by its path.
        budget: of those that are held.
        streamed: paths whose bodies are not held: they go to disk as they come.
    """

    max_bytes: Callable[[str], int]
    budget: TenantSlots
    streamed: frozenset[str] = frozenset()


class BodyLimit:
    """ASGI middleware. Whoever reads the body of a call that is over a bound is told with a GatewayError (413, 429,
    503), and so is the caller, whatever is made of that; then the connection is closed."""

    def __init__(self, app: ASGIApp, limits: BodyLimits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limits, path = self._limits, scope["path"]
        most = limits.max_bytes(path)
        body = _Body(scope, receive, send, most, None if path in limits.streamed else limits.budget)
        declared = declared_bytes(scope)
        if declared is not None and declared > most:
            await body.refuse(partial(_too_large, most))
            return
        scope[_BODY] = body
        try:
            await self._app(scope, body.receive, body.send)
        finally:
            body.release()


def release_body(scope: Scope) -> None:
    """Nothing of the call's body is in memory any more: its bytes are free for others, and of those that still come
    none counts. May be called again."""
    body = scope.get(_BODY)
    if isinstance(body, _Body):
        body.release()


def declared_bytes(scope: Scope) -> int | None:
    """The length of the body, where its head says it."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else None
    return None


class _Body:
    """The body of one call, as it is read."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, most_bytes: int, budget: TenantSlots | None) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._most_bytes = most_bytes
        self._budget = budget
        self._tenant = _NOBODY
        self._held_bytes = 0
        self._read_bytes = 0
        self._is_read = False
        self._is_kept = True
        """Whether what comes of it is kept: else it is read to see whether the caller is there, and thrown away."""
        self._is_answered = False
        # Not the error itself: with its traceback it would hold what was read, in a cycle, for a long time.
        self._refusal: Callable[[], GatewayError] | None = None

    async def receive(self) -> Message:
        if self._is_read:
            return await self._receive()
        if self._refusal is not None:
            raise self._refusal()
        message = await self._receive()
        if message["type"] == "http.request":
            size = len(message.get("body", b""))
            self._read_bytes += size
            if self._read_bytes > self._most_bytes:
                self._refusal = partial(_too_large, self._most_bytes)
            else:
                self._refusal = self._hold(size)
            if self._refusal is not None:
                raise self._refusal()
            self._is_read = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        if self._refusal is None:
            if not self._is_answered:
                # Who listens to a stream may have sent a body that nobody wants, and the stream may last for hours.
                self.release()
            await self._send(message)
            self._is_answered = True
        elif not self._is_answered:
            await self.refuse(self._refusal)

    async def refuse(self, refusal: Callable[[], GatewayError]) -> None:
        """Answer, and take nothing more on this connection."""
        self._refusal, self._is_answered = refusal, True
        answer = error_response(self._scope["path"], refusal())
        answer.headers["connection"] = "close"
        await answer(self._scope, self._receive, self._send)

    def release(self) -> None:
        self._is_kept = False
        if self._budget is not None and self._held_bytes:
            self._budget.give_back(self._tenant, self._held_bytes)
            self._held_bytes = 0
            metrics.GATEWAY_BODY_BYTES.set(self._budget.total)

    def _hold(self, size: int) -> Callable[[], GatewayError] | None:
        """Why not, if there is no room for so much more."""
        if self._budget is None or not size or not self._is_kept:
            return None
        if not self._held_bytes:
            # Known by the first byte that is read, since no route reads one before; and the same until the last.
            caller = present.get()
            self._tenant = _NOBODY if caller is None or caller.tenant is None else caller.tenant
        try:
            self._budget.take(self._tenant, size)
        except GatewayError as error:
            is_of_tenant = error.code == TOO_MANY_BYTES
            metrics.GATEWAY_BODIES_REFUSED.labels(bound="tenant" if is_of_tenant else "all").inc()
            return _tenant_full if is_of_tenant else _full
        self._held_bytes += size
        metrics.GATEWAY_BODY_BYTES.set(self._budget.total)
        return None


def _too_large(most_bytes: int) -> GatewayError:
    return GatewayError(413, Code.INVALID, f"the body has more than {most_bytes} bytes", field="body")


def _tenant_full() -> GatewayError:
    message = "bodies of this tenant hold as much of this gateway's memory as they may; nothing was accepted"
    return GatewayError(429, TOO_MANY_BYTES, message, field="body", retry_after_ms=_RETRY_AFTER_MS)


def _full() -> GatewayError:
    message = "bodies hold as much of this gateway's memory as they may; nothing was accepted"
    return GatewayError(503, Code.OVERLOADED, message, field="body", retry_after_ms=_RETRY_AFTER_MS)
