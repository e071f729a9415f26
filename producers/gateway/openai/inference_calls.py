"""Steps of a call that sends work: authorize, publish once, wait, and cancel if the client disconnects."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive

from fairlane.clock import ClockMs, now_ms
from fairlane.logs import get_logger
from fairlane.records import InferenceReply, InferenceRequest, ModelVersion
from producers.gateway.disconnects import ClientGoneError, unless_gone
from producers.gateway.idempotency import HEADER, Idempotency, OnAccepted, Published, publish_once
from producers.gateway.identity.identity import Authenticate, Identity, Scope, require
from producers.gateway.ports import Submitter
from producers.openai_api.errors import REQUEST_ID_HEADER, GatewayError, client_gone, error_of, waited_too_long
from producers.openai_api.response_bodies import RequestEcho

KEEP_ALIVE_S = 10.0


class Catalog(Protocol):
    """Models of the deployment."""

    def models_of(self, tenant: str) -> Sequence[ModelVersion]:
        """Models that this tenant may use, in any order."""
        ...


def _nobody(_tenant: str, _request: InferenceRequest) -> None:
    pass


@dataclass(frozen=True, slots=True)
class OpenAIDeps:
    """Dependencies of ``router``.

    Attributes:
        submitter: publishes requests and waits for replies.
        authenticate: FastAPI dependency that returns the caller's identity; raises GatewayError.
        catalog: models by tenant.
        idempotency: deduplicates calls by key.
        wait_s: longest wait of a call for its answer, and of a stream for its next piece.
        keep_alive_s: longest silence of a stream before a keep-alive. The status of a stream is held back as long, so
            that a request that fails by then gets an error status.
        clock_ms: milliseconds since the epoch.
        on_accepted: see ``publish_once``.
    """

    submitter: Submitter
    authenticate: Authenticate
    catalog: Catalog
    idempotency: Idempotency
    wait_s: float
    keep_alive_s: float = KEEP_ALIVE_S
    clock_ms: ClockMs = now_ms
    on_accepted: OnAccepted = _nobody


log = get_logger(__name__)

_CANCEL_TIMEOUT_S: Final = 5.0

MakeRequest = Callable[[str], InferenceRequest]
"""Makes the request with this id. Raises GatewayError: 400."""


def senders(deps: OpenAIDeps) -> Authenticate:
    """FastAPI dependency that authorizes a route to send work."""
    return require(deps.authenticate, Scope.INFERENCE, writes=True)


async def body_of(request: Request) -> bytes:
    """Read the body without caching it on the request. Raises GatewayError: 413, 429, 499, 503."""
    # Not a list of chunks: each may be a single byte in an object of its own.
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
    except BaseException as error:
        # A stored exception keeps this frame alive, and the body with it.
        body.clear()
        if isinstance(error, ClientDisconnect):
            raise client_gone(None) from None
        raise
    return bytes(body)


async def publish(deps: OpenAIDeps, request: Request, identity: Identity, raw: bytes, make: MakeRequest) -> Published:
    """Publish the request made from a body. Raises GatewayError."""
    record = make(deps.submitter.new_request_id())
    key = request.headers.get(HEADER)
    return await publish_once(
        deps.submitter, deps.idempotency, deps.on_accepted, identity.tenant, request.url.path, key, raw, record
    )


async def reply_of(published: Published, receive: Receive, wait_s: float) -> InferenceReply:
    """Wait for an ``ok`` reply, then release the waiter. Raises GatewayError."""
    waiting = published.source
    if isinstance(waiting, InferenceReply):
        return checked(waiting)
    try:
        reply = await unless_gone(receive, waiting.reply(wait_s))
        await published.call.settle(reply)
        return checked(reply)
    except TimeoutError:
        raise waited_too_long(published.request_id, wait_s) from None
    except ClientGoneError:
        await leave(published)
        raise client_gone(published.request_id) from None
    finally:
        waiting.forget()


async def leave(published: Published) -> None:
    """Cancel the request of a disconnected client, unless the client may fetch the answer with its idempotency key."""
    if isinstance(published.source, InferenceReply) or published.call.has_key:
        return
    try:
        async with asyncio.timeout(_CANCEL_TIMEOUT_S):
            await published.source.cancel()
    except (GatewayError, TimeoutError) as error:
        # The request runs on; nobody reads its answer.
        log.warning("cancel_failed", request_id=published.request_id, error=type(error).__name__)


def checked(reply: InferenceReply) -> InferenceReply:
    """Return the reply. Raises GatewayError if it is not ``ok``."""
    error = error_of(reply)
    if error is not None:
        raise error
    return reply


def asked(
    deps: OpenAIDeps, published: Published, reply: InferenceReply | None = None, *, with_usage: bool = False
) -> RequestEcho:
    """Request fields that the response repeats. The time is the reply's, the same in a repeated response."""
    submitted_at_ms = None if reply is None else reply.timings.submitted_at_ms
    at_ms = deps.clock_ms() if submitted_at_ms is None else submitted_at_ms
    return RequestEcho(published.request_id, published.model, at_ms // 1_000, with_usage)


def json_response(reply: InferenceReply, body: bytes) -> Response:
    """JSON response with the request id in a header."""
    return Response(body, media_type="application/json", headers={REQUEST_ID_HEADER: reply.request_id})
