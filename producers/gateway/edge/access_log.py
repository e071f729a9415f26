"""Access log and metrics of calls, written when a call ends: caller, route, outcome, cost.

A WebSocket is one call; its status is 101 once accepted.
"""

import asyncio
from collections.abc import Iterable, Mapping
from functools import lru_cache
from time import monotonic
from traceback import extract_tb
from uuid import uuid4

from prometheus_client import Counter, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fairlane import headers, metrics
from fairlane.logs import get_logger
from fairlane.trace_context import TraceHeaders, trace_headers
from fairlane_server.admission_rule import cost_tokens
from producers.gateway.edge.error_responses import error_response
from producers.gateway.limits.rate_limits import headers_of
from producers.gateway.pipeline.call_context import CallContext, present
from producers.openai_api.errors import CLIENT_GONE, REQUEST_ID_HEADER, UNCERTAIN, WAITED_TOO_LONG, GatewayError

log = get_logger(__name__)

UNLOGGED = frozenset({"/health", "/health/ready"})

_HEADER = REQUEST_ID_HEADER.encode()
_TRACE = frozenset({headers.TRACE_PARENT.encode(), headers.TRACE_STATE.encode()})
_CHALLENGE = (b"www-authenticate", b'Bearer realm="fairlane"')
_NO_ROUTE = "none"
_ANSWER_STARTS = frozenset({"http.response.start", "websocket.http.response.start"})
_FAILED_CLOSE = 1011

INTERNAL_ERROR = "internal_error"
"""The gateway's own code: a defect of the gateway; the log has the details."""

_REFUSED = "refused"
# Outcome of a call without a reply, by error code; any other code is a refusal.
_OUTCOMES: Mapping[str, str] = {
    WAITED_TOO_LONG: "pending",
    UNCERTAIN: "uncertain",
    CLIENT_GONE: "abandoned",
    INTERNAL_ERROR: "failed",
}


class CallLog:
    """Outermost ASGI middleware; it also completes the headers of answers. Exceptions other than GatewayError end here:
    their texts may quote caller input, so neither the log nor the answer includes them.

    Attributes:
        open_calls: number of calls in progress.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.open_calls = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] in UNLOGGED:
            await self._app(scope, receive, send)
            return
        caller = CallContext(_trace(scope["headers"]))
        token = present.set(caller)
        began = monotonic()
        status = 0
        close_code: int | None = None

        async def send_named(message: Message) -> None:
            nonlocal status, close_code
            kind = message["type"]
            if kind in _ANSWER_STARTS:
                status = message["status"]
                _name(message, caller)
                if kind == "http.response.start":
                    _add_limits(message, caller)
            elif kind == "websocket.accept":
                status = 101
                _name(message, caller)
            elif kind == "websocket.close":
                # A WebSocket closed before it was accepted is answered with 403.
                status, close_code = status or 403, message.get("code", 1000)
            await send(message)

        self.open_calls += 1
        try:
            await self._app(scope, receive, send_named)
        except asyncio.CancelledError:
            # The process ends. Without this answer the client gets one that client libraries retry by themselves.
            if not status:
                message = "the gateway ended before it could answer; it is not known what became of the call"
                gone = GatewayError(503, UNCERTAIN, message, request_id=caller.request_id)
                await error_response(scope["path"], gone)(scope, receive, send_named)
            raise
        except Exception as error:  # noqa: BLE001 - any kind; logged without its text
            frames = [f"{frame.filename}:{frame.lineno}" for frame in extract_tb(error.__traceback__)[-4:]]
            log.error("call_failed", path=_route(scope), error=type(error).__name__, frames=frames)
            if not status:
                failure = GatewayError(500, INTERNAL_ERROR, "the gateway failed; nothing else is known")
                await error_response(scope["path"], failure)(scope, receive, send_named)
            elif status == 101 and close_code is None:
                await send_named({"type": "websocket.close", "code": _FAILED_CLOSE})
        finally:
            self.open_calls -= 1
            present.reset(token)
            _record(scope, caller, status, close_code, monotonic() - began)


def _record(scope: Scope, caller: CallContext, status: int, close_code: int | None, took_s: float) -> None:
    route, reply = _route(scope), caller.reply
    calls, seconds = _meters(route, status)
    calls.inc()
    seconds.observe(took_s)
    fields: dict[str, object] = {
        # A WebSocket's scope has no method; its handshake is a GET.
        "method": scope.get("method", "GET"),
        "route": route,
        # 0: the client disconnected before any answer.
        "status": status,
        "took_ms": round(1_000 * took_s, 1),
        "tenant": caller.tenant,
        "subject": caller.subject,
        "request_id": caller.request_id,
    }
    if scope["type"] == "websocket":
        # None: the client closed it, or was lost.
        fields["close_code"] = close_code
    if caller.object_id is not None:
        fields["object_id"] = caller.object_id
    if caller.answer_id is not None:
        fields["answer_id"] = caller.answer_id
    if reply is not None:
        usage = reply.usage
        is_free = caller.is_repeat or reply.cache_use is not None
        fields |= {
            "outcome": reply.outcome,
            "code": caller.code or reply.code,
            "cost_tokens": 0 if is_free else cost_tokens(usage.prompt_tokens, usage.completion_tokens),
        }
        if caller.is_repeat:
            fields["is_repeat"] = True
        elif reply.cost is not None:
            fields |= {"cost": reply.cost.amount, "currency": reply.cost.currency}
    elif caller.code is not None:
        fields |= {"outcome": _OUTCOMES.get(caller.code, _REFUSED), "code": caller.code}
    log.info("call", **fields)


@lru_cache(maxsize=256)
def _meters(route: str, status: int) -> tuple[Counter, Histogram]:
    return (
        metrics.GATEWAY_CALLS.labels(route=route, status=str(status)),
        metrics.GATEWAY_CALL_SECONDS.labels(route=route),
    )


def _route(scope: Scope) -> str:
    """The path template: text that a caller puts into a path must not become a label."""
    template = getattr(scope.get("route"), "path", None)
    if not isinstance(template, str):
        return _NO_ROUTE
    # A route included under a prefix does not know the prefix; it is our own text, so the path may supply it.
    parts = scope["path"].split("/")
    return "/".join(parts[: len(parts) - template.count("/")]) + template


def _name(message: Message, caller: CallContext) -> None:
    """Add ``x-request-id`` unless present: the request's id, else a new one by which the log line is found."""
    fields = message.setdefault("headers", [])
    if all(name.lower() != _HEADER for name, _ in fields):
        named = caller.request_id
        if named is None:
            named = caller.answer_id = str(uuid4())
        message["headers"] = [*fields, (_HEADER, named.encode())]


def _add_limits(message: Message, caller: CallContext) -> None:
    """Add the caller's remaining rate limit, and the challenge to a 401. No route sets these headers itself."""
    if message["status"] == 401:
        message["headers"] = [*message["headers"], _CHALLENGE]
    if caller.allowance is not None:
        limits = headers_of(caller.allowance).items()
        message["headers"] = [*message["headers"], *((name.encode(), value.encode()) for name, value in limits)]


def _trace(fields: Iterable[tuple[bytes, bytes]]) -> TraceHeaders:
    return trace_headers([(name.decode(), value) for name, value in fields if name in _TRACE])
