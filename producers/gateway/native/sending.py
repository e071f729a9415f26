"""From a body to a request in the log, and to its reply where the caller waits for that."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request

from fairlane.records import InferenceReply
from fairlane_server.postgres.request_timeline import RecordedReply
from producers.gateway.disconnects import ClientGoneError, unless_gone
from producers.gateway.edge.body_limit import release_body
from producers.gateway.idempotency import HEADER, Call
from producers.gateway.identity.principal import Identity
from producers.gateway.native.deps import NativeDeps, may_send
from producers.gateway.native.request_bodies import ClassifyRequest, NewRequest, RankRequest
from producers.gateway.openai.body import parse
from producers.gateway.openai.calls import body_of
from producers.gateway.publish_once import publish_once
from producers.gateway.seams import Waiting

BodyT = TypeVar("BodyT", NewRequest, RankRequest, ClassifyRequest)
WishT = TypeVar("WishT")


@dataclass(frozen=True, slots=True)
class Sent:
    """A request that was accepted.

    Attributes:
        tenant: whose it is.
        request_id: of the request.
        call: what its key keeps.
        source: of its reply: what waits for it, to be forgotten in the end, or the reply of before.
    """

    tenant: str
    request_id: str
    call: Call
    source: Waiting | InferenceReply


async def send(
    deps: NativeDeps,
    identity: Identity,
    route: str,
    request: Request,
    model: type[BodyT],
    wish_of: Callable[[BodyT], WishT],
) -> tuple[Sent, WishT]:
    """Publish what the body says. Whoever calls must wait for what it returned, or forget it.

    Nothing holds the body any more when this returns, but for what ``wish_of`` took of it.

    Raises GatewayError: nothing was accepted, or nobody knows (its code says so).
    """
    may_send(identity)
    tenant, submitter = identity.tenant, deps.submitter
    raw = await body_of(request)
    body = parse(model, raw)
    asked = body.to_request(submitter.new_request_id(), tenant)
    key = request.headers.get(HEADER)
    published = await publish_once(submitter, deps.idempotency, deps.results.accepted, tenant, route, key, raw, asked)
    release_body(request.scope)
    return Sent(tenant, published.request_id, published.call, published.source), wish_of(body)


async def reply_to(deps: NativeDeps, sent: Sent, request: Request, wait_s: float) -> RecordedReply:
    """Wait for the reply, and forget it. A caller that goes away meanwhile does not want it any more.

    Raises:
        TimeoutError: it did not come in this time; it goes on.
        ClientGoneError: there is nobody to answer.
    """
    waiting = sent.source
    if isinstance(waiting, InferenceReply):
        return RecordedReply(waiting, deps.clock_ms())
    try:
        reply = await unless_gone(request.receive, waiting.reply(wait_s))
    except ClientGoneError:
        if not sent.call.has_key:
            # Nobody was told its id, and without a key nobody can come back for it.
            await waiting.cancel()
        raise
    finally:
        waiting.forget()
    await sent.call.settle(reply)
    return RecordedReply(reply, deps.clock_ms())
