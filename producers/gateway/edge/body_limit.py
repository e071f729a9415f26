"""Bounds on request bodies: on each, and on the bytes held in memory per tenant and in total.

An oversized Content-Length gets 413 before authentication: that costs nothing and reveals only a documented bound. All
other bodies are read by routes, after authentication.

CPython and glibc keep freed memory for later allocations. Blocks as large as bodies are mapped individually here, so
that freeing one returns it; memory split into smaller blocks is returned by a trim at a quiet moment after a peak.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fairlane import metrics
from fairlane.outcomes import Code
from producers.gateway.edge.error_responses import error_response
from producers.gateway.pipeline.call_context import current
from producers.gateway.tenant_bounds import TenantSlots
from producers.openai_api.errors import GatewayError

TOO_MANY_BYTES: Final = "too_many_body_bytes"
"""The gateway's own code: bodies of this tenant hold as much of this instance's memory as they may."""

_RETRY_AFTER_MS: Final = 1_000
_BODY: Final = "fairlane_body"
_NOBODY: Final = ""
"""Not a valid tenant: callers without identity share one budget, and no route reads their bodies."""


def body_budget(most_bytes: int, most_bytes_of_tenant: int) -> TenantSlots:
    """The budget of body bytes held in memory. Its errors are 429 for one tenant, 503 for all."""
    return TenantSlots(most_bytes, most_bytes_of_tenant, _full, _tenant_full, has_reserve=True)


class BodyLimit:
    """ASGI middleware. Reading a body over a bound raises GatewayError (413, 429, 503). The caller gets that error,
    whatever the application answers; then the connection is closed.

    ``streamed`` returns the bound by path of bodies that go to disk as they arrive and take none of the ``budget``,
    which is of the bytes in memory; None for all other paths.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        budget: TenantSlots,
        streamed: Callable[[str], int | None] = lambda _path: None,
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._budget = budget
        self._streamed = streamed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        streamed_bytes = self._streamed(scope["path"])
        most = self._max_bytes if streamed_bytes is None else streamed_bytes
        body = _Body(scope, receive, send, most, self._budget if streamed_bytes is None else None)
        declared = declared_bytes(scope)
        if declared is not None and declared > most:
            await body.refuse(partial(too_large, most))
            return
        scope[_BODY] = body
        try:
            await self._app(scope, body.receive, body.send)
        finally:
            body.release()


def release_body(scope: Scope) -> None:
    """Return the bytes of the call's body to the budget, once none of them is in memory; later ones are not counted.
    May be called again."""
    body = scope.get(_BODY)
    if isinstance(body, _Body):
        body.release()


def declared_bytes(scope: Scope) -> int | None:
    """The Content-Length, if there is a valid one."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else None
    return None


class _Body:
    """The body of one call while it is read."""

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
        """Whether bytes are held; otherwise they are read only to detect a disconnect, and dropped."""
        self._is_answered = False
        # A factory: the error itself has a traceback, which would keep the body alive in a reference cycle.
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
                self._refusal = partial(too_large, self._most_bytes)
            else:
                self._refusal = self._hold(size)
            if self._refusal is not None:
                raise self._refusal()
            self._is_read = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        if self._refusal is None:
            if not self._is_answered:
                # The answer may be a stream of hours, to a call with a body that no route reads.
                self.release()
            await self._send(message)
            self._is_answered = True
        elif not self._is_answered:
            await self.refuse(self._refusal)

    async def refuse(self, refusal: Callable[[], GatewayError]) -> None:
        """Answer with the error and close the connection."""
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
        """Take ``size`` bytes of the budget. Returns the error's factory if there is no room."""
        if self._budget is None or not size or not self._is_kept:
            return None
        if not self._held_bytes:
            # Routes read after authentication: the tenant is known at the first byte, and stays the same.
            self._tenant = current().tenant or _NOBODY
        try:
            self._budget.take(self._tenant, size)
        except GatewayError as error:
            is_of_tenant = error.code == TOO_MANY_BYTES
            metrics.GATEWAY_BODIES_REFUSED.labels(bound="tenant" if is_of_tenant else "all").inc()
            return _tenant_full if is_of_tenant else _full
        self._held_bytes += size
        metrics.GATEWAY_BODY_BYTES.set(self._budget.total)
        return None


def too_large(most_bytes: int) -> GatewayError:
    """413: a body over its bound."""
    return GatewayError(413, Code.INVALID, f"the body has more than {most_bytes} bytes", field="body")


def _tenant_full() -> GatewayError:
    message = "bodies of this tenant hold as much of this gateway's memory as they may; nothing was accepted"
    return GatewayError(429, TOO_MANY_BYTES, message, field="body", retry_after_ms=_RETRY_AFTER_MS)


def _full() -> GatewayError:
    message = "bodies hold as much of this gateway's memory as they may; nothing was accepted"
    return GatewayError(503, Code.OVERLOADED, message, field="body", retry_after_ms=_RETRY_AFTER_MS)


_M_MMAP_THRESHOLD: Final = -3
_MAPPED_BYTES: Final = 131_072
"""glibc's initial value. Setting it disables glibc's adjustment: otherwise freeing a block of up to 32 MiB raises it,
and the next block of that size comes from the heap, whose top is rarely free."""


@dataclass(slots=True)
class TrimWatch:
    """Detects the end of a peak. Pure.

    Args:
        peak_bytes: bytes held at once that make a trim worthwhile: it stops every thread's allocations for some
            milliseconds.
    """

    peak_bytes: int = 16 * 1024 * 1024
    _most_bytes: int = 0

    def is_due(self, held_bytes: int) -> bool:
        """Whether to trim now, with ``held_bytes`` held. Call periodically."""
        self._most_bytes = max(self._most_bytes, held_bytes)
        if self._most_bytes < self.peak_bytes or held_bytes > self._most_bytes // 4:
            return False
        self._most_bytes = 0
        return True


def map_large_blocks() -> None:
    """Map large blocks individually, if the C library is glibc. Call before the first large allocation."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def trim() -> None:
    """Return free memory to the system, if the C library is glibc. Blocks: call it off the event loop."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
        metrics.GATEWAY_MEMORY_TRIMS.inc()
