"""Steps of a call that sends a request: publish once, wait for the reply, and cancel if the client disconnects."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from fairlane.clock import ClockMs, now_ms
from fairlane.logs import get_logger
from fairlane.records import InferenceReply, InferenceRequest
from producers.gateway.edge.body_limit import release_body
from producers.gateway.idempotency import HEADER, Idempotency, IdempotentCall
from producers.gateway.identity.identity import Authenticate
from producers.gateway.pipeline.call_context import current
from producers.gateway.pipeline.pending import PendingReply
from producers.gateway.pipeline.submitter import Submitter
from producers.openai_api.body import parse
from producers.openai_api.errors import UNCERTAIN, GatewayError, client_gone, error_of, waited_too_long

log = get_logger(__name__)

_CANCEL_TIMEOUT_S: Final = 5.0

BodyT = TypeVar("BodyT", bound=BaseModel)
WishT = TypeVar("WishT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class SendingDeps:
    """Dependencies of all routes that send requests.

    Attributes:
        submitter: publishes requests and waits for replies.
        authenticate: FastAPI dependency that returns the caller's identity; raises GatewayError.
        idempotency: deduplicates calls by key.
        wait_s: longest wait of a call for its answer, and of a stream for its next piece.
        on_accepted: called with tenant and request for each one that is, or may be, in the log.
        clock_ms: milliseconds since the epoch.
    """

    submitter: Submitter
    authenticate: Authenticate
    idempotency: Idempotency
    wait_s: float
    on_accepted: Callable[[str, InferenceRequest], None]
    clock_ms: ClockMs = now_ms


@dataclass(frozen=True, slots=True)
class Published:
    """A request accepted now, or earlier under the same key.

    Attributes:
        call: state of its idempotency key.
        request_id: id it was published with.
        model: model it asks for. The request itself is not kept: it may be large, and its answer far off.
        source: of the reply: a waiter, which must be forgotten in the end, or the earlier reply.
    """

    call: IdempotentCall
    request_id: str
    model: str
    source: PendingReply | InferenceReply


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


async def publish(
    deps: SendingDeps,
    request: Request,
    tenant: str,
    route: str,
    model: type[BodyT],
    make: Callable[[BodyT, str, str], InferenceRequest],
    wish_of: Callable[[BodyT], WishT],
) -> tuple[Published, WishT]:
    """Publish the request in the body, once per idempotency key. The caller must wait for its source, or forget it.

    On return nothing holds the body any more, except what ``wish_of`` took from it. ``route`` is the path template;
    idempotency keys belong to it. ``make`` makes the request from body, tenant and request id.

    Raises GatewayError: nothing was accepted, or that is uncertain (code ``UNCERTAIN``); 400, 409 or 422 because of the
    key.
    """
    raw = await body_of(request)
    body = parse(model, raw)
    asked = make(body, tenant, deps.submitter.new_request_id())
    call = await deps.idempotency.begin(tenant, route, request.headers.get(HEADER), raw, asked.request_id)
    del raw
    if call.request_id != asked.request_id:
        asked = replace(asked, request_id=call.request_id)
    source: PendingReply | InferenceReply
    if call.reply is None:
        source = await _submitted(deps, tenant, asked, call)
    else:
        caller, source = current(), call.reply
        caller.request_id, caller.reply, caller.is_repeat = call.request_id, source, True
    release_body(request.scope)
    return Published(call, asked.request_id, asked.model, source), wish_of(body)


async def _submitted(deps: SendingDeps, tenant: str, request: InferenceRequest, call: IdempotentCall) -> PendingReply:
    """Submit a request, and note in its idempotency key what became of it. Raises GatewayError."""
    try:
        waiting = await deps.submitter.submit(tenant, request)
    except GatewayError as error:
        if error.code != UNCERTAIN:
            await call.give_back()
            raise
        deps.on_accepted(tenant, request)
        await call.doubt()
        raise
    deps.on_accepted(tenant, request)
    try:
        await call.confirm()
    except BaseException:
        waiting.forget()
        raise
    return waiting


class ClientGoneError(Exception):
    """The client disconnected before its answer."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The result of ``work``. If the client disconnects first, cancels the work and raises ClientGoneError.

    Args:
        receive: ASGI receive of a request whose body has been read.
        work: makes the answer.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return await working
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def ok_reply(deps: SendingDeps, published: Published, receive: Receive, wait_s: float) -> InferenceReply:
    """Wait for an ``ok`` reply, then release the waiter.

    Raises:
        TimeoutError: no reply within ``wait_s``; the request goes on.
        GatewayError: the reply is not ``ok``, or the client has disconnected (499).
    """
    waiting = published.source
    if isinstance(waiting, InferenceReply):
        return checked(waiting)
    try:
        reply = await unless_gone(receive, waiting.reply(wait_s))
    except ClientGoneError:
        await leave(deps, published)
        raise client_gone(published.request_id) from None
    finally:
        waiting.forget()
    await published.call.settle(reply)
    return checked(reply)


async def reply_in_time(deps: SendingDeps, published: Published, receive: Receive) -> InferenceReply:
    """As ``ok_reply``, with GatewayError 504 instead of TimeoutError."""
    try:
        return await ok_reply(deps, published, receive, deps.wait_s)
    except TimeoutError:
        raise waited_too_long(published.request_id, deps.wait_s) from None


async def leave(deps: SendingDeps, published: Published) -> None:
    """Cancel the request of a disconnected client, unless the client may fetch the answer with its idempotency key."""
    waiting = published.source
    if isinstance(waiting, InferenceReply) or published.call.has_key or waiting.answer is not None:
        return
    try:
        async with asyncio.timeout(_CANCEL_TIMEOUT_S):
            await deps.submitter.cancel(waiting.tenant, waiting.request_id)
    except (GatewayError, TimeoutError) as error:
        # The request runs on; nobody reads its answer.
        log.warning("cancel_failed", request_id=published.request_id, error=type(error).__name__)


def checked(reply: InferenceReply) -> InferenceReply:
    """Return the reply. Raises GatewayError if it is neither ``ok`` nor an answer that guardrails withheld."""
    error = error_of(reply)
    if error is not None:
        raise error
    return reply
