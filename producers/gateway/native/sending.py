"""Publish the request in a body, and wait for its reply."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request

from fairlane.records import InferenceReply
from fairlane_server.postgres.request_timeline import RecordedReply
from producers.gateway.disconnects import ClientGoneError, unless_gone
from producers.gateway.edge.body_limit import release_body
from producers.gateway.idempotency import HEADER, IdempotentCall
from producers.gateway.identity.identity import Identity
from producers.gateway.native.deps import NativeDeps, require_send
from producers.gateway.native.request_bodies import ClassifyRequest, NewRequest, RankRequest
from producers.gateway.openai.inference_calls import body_of
from producers.gateway.ports import PendingReply
from producers.gateway.publish_once import publish_once
from producers.openai_api.body import parse

BodyT = TypeVar("BodyT", NewRequest, RankRequest, ClassifyRequest)
WishT = TypeVar("WishT")


@dataclass(frozen=True, slots=True)
class Sent:
    """An accepted request.

    Attributes:
        tenant: tenant of the request.
        request_id: id of the request.
        call: state of its idempotency key.
        source: of the reply: a waiter, which must be forgotten in the end, or the earlier reply.
    """

    tenant: str
    request_id: str
    call: IdempotentCall
    source: PendingReply | InferenceReply


async def send(
    deps: NativeDeps,
    identity: Identity,
    route: str,
    request: Request,
    model: type[BodyT],
    wish_of: Callable[[BodyT], WishT],
) -> tuple[Sent, WishT]:
    """Publish the request in the body. The caller must wait for the returned source, or forget it.

    On return nothing holds the body any more, except what ``wish_of`` took from it.

    Raises GatewayError: nothing was accepted, or that is uncertain (code ``UNCERTAIN``).
    """
    require_send(identity)
    tenant, submitter = identity.tenant, deps.submitter
    raw = await body_of(request)
    body = parse(model, raw)
    asked = body.to_request(submitter.new_request_id(), tenant)
    key = request.headers.get(HEADER)
    published = await publish_once(submitter, deps.idempotency, deps.results.accepted, tenant, route, key, raw, asked)
    release_body(request.scope)
    return Sent(tenant, published.request_id, published.call, published.source), wish_of(body)


async def reply_to(deps: NativeDeps, sent: Sent, request: Request, wait_s: float) -> RecordedReply:
    """Wait for the reply, then stop waiting. Without a key, a disconnect cancels the request.

    Raises:
        TimeoutError: no reply within ``wait_s``; the request goes on.
        ClientGoneError: the client disconnected.
    """
    waiting = sent.source
    if isinstance(waiting, InferenceReply):
        return RecordedReply(waiting, deps.clock_ms())
    try:
        reply = await unless_gone(request.receive, waiting.reply(wait_s))
    except ClientGoneError:
        if not sent.call.has_key:
            # The client does not know the id, and without a key cannot come back for the result.
            await waiting.cancel()
        raise
    finally:
        waiting.forget()
    await sent.call.settle(reply)
    return RecordedReply(reply, deps.clock_ms())
