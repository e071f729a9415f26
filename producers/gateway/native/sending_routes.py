"""Routes that send requests, with or without waiting for the answer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from fairlane.records import InferenceReply
from fairlane_server.postgres.request_timeline import RecordedReply
from producers.gateway.disconnects import ClientGoneError, unless_gone
from producers.gateway.edge.body_limit import release_body
from producers.gateway.edge.fast_path import ShortAnswer
from producers.gateway.idempotency import HEADER, IdempotentCall, publish_once
from producers.gateway.identity.identity import Identity
from producers.gateway.native import openapi
from producers.gateway.native.deps import NativeDeps, require_send
from producers.gateway.native.request_bodies import ClassifyRequest, NewRequest, RankRequest
from producers.gateway.native.response_bodies import (
    AcceptedAnswer,
    ClassifyAnswer,
    RankAnswer,
    ResultAnswer,
    accepted,
    answered,
    classify_answer,
    gone,
    rank_answer,
    result_answer,
)
from producers.gateway.openai.inference_calls import body_of
from producers.gateway.openai.openapi import IDEMPOTENCY_KEY
from producers.gateway.ports import PendingReply
from producers.gateway.results.request_status import RequestState
from producers.openai_api.body import documented, parse
from producers.openai_api.errors import error_of, waited_too_long

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


_MOST_WAIT_S = 3_600.0
_REQUESTS, _RANK, _CLASSIFY = "/v1/requests", "/v1/rank", "/v1/classify"
_ALIAS = "/inference"

Wait = Annotated[
    float,
    Query(ge=0, le=_MOST_WAIT_S, description="Wait so many seconds for the answer, up to the gateway's own limit"),
]

_CREATED = {
    **openapi.answers(200, ResultAnswer, "With `wait`: the answer came in time"),
    **openapi.answers(202, AcceptedAnswer, "Accepted: it gets exactly one final reply"),
    **openapi.errors(*openapi.WAITING),
}


def add_sending_routes(router: APIRouter, deps: NativeDeps) -> None:
    """POST /v1/requests with its alias, /v1/rank and /v1/classify."""
    Caller = Annotated[Identity, Depends(deps.authenticate)]  # noqa: N806 - a type

    takes = documented(NewRequest, openapi.NEW_REQUESTS) | IDEMPOTENCY_KEY

    async def create_request(request: Request, caller: Caller, wait: Wait = 0.0) -> Response:
        """Send a request. With an `Idempotency-Key` the call can be repeated, and the work is done once."""
        return await _created(deps, request, caller, wait)

    for path, tag in ((_REQUESTS, "requests"), (_ALIAS, "aliases")):
        router.add_api_route(
            path,
            create_request,
            methods=["POST"],
            status_code=202,
            responses=_CREATED,
            openapi_extra=takes,
            tags=[tag],
        )

    @router.post(
        _RANK,
        responses=_waited(RankAnswer, "The documents, the best first"),
        openapi_extra=documented(RankRequest, openapi.RANK) | IDEMPOTENCY_KEY,
        tags=["tasks"],
    )
    async def rank(request: Request, caller: Caller) -> Response:
        """Rank documents by a query, and wait for the result."""
        sent, top_n = await send(deps, caller, _RANK, request, RankRequest, lambda body: body.top_n)
        reply = await _ok(deps, sent, request)
        return gone() if reply is None else answered(rank_answer(reply, top_n))

    @router.post(
        _CLASSIFY,
        responses=_waited(ClassifyAnswer, "The classes, the likeliest first"),
        openapi_extra=documented(ClassifyRequest, openapi.CLASSIFY) | IDEMPOTENCY_KEY,
        tags=["tasks"],
    )
    async def classify(request: Request, caller: Caller) -> Response:
        """Classify an image, and wait for the result."""
        sent, top_n = await send(deps, caller, _CLASSIFY, request, ClassifyRequest, lambda body: body.top_n)
        reply = await _ok(deps, sent, request)
        return gone() if reply is None else answered(classify_answer(reply, top_n))


def short_answers(deps: NativeDeps) -> Mapping[str, ShortAnswer]:
    """Handlers of POST /v1/requests and its alias without a query, for ``ShortPath``."""

    async def created(request: Request) -> Response:
        return await _created(deps, request, await deps.authenticate(request), wait_s=0.0)

    return {_REQUESTS: created, _ALIAS: created}


async def _created(deps: NativeDeps, request: Request, caller: Identity, wait_s: float) -> Response:
    sent, is_streamed = await send(deps, caller, _REQUESTS, request, NewRequest, lambda body: body.parameters.stream)
    if wait_s > 0:
        return await _answered(deps, sent, request, min(wait_s, deps.wait_s))
    if isinstance(sent.source, InferenceReply):
        return accepted(sent.request_id, RequestState.DONE)
    if is_streamed:
        deps.kept.keep(sent.tenant, sent.source)
    else:
        sent.source.forget()
    return accepted(sent.request_id)


def _waited(model: type, description: str) -> openapi.Responses:
    return {**openapi.answers(200, model, description), **openapi.errors(*openapi.WAITING)}


async def _answered(deps: NativeDeps, sent: Sent, request: Request, wait_s: float) -> Response:
    """The result, or the id if it takes longer than ``wait_s``."""
    try:
        recorded = await reply_to(deps, sent, request, wait_s)
    except TimeoutError:
        return accepted(sent.request_id)
    except ClientGoneError:
        return gone()
    error = error_of(recorded.reply)
    if error is not None:
        raise error
    return answered(result_answer(recorded))


async def _ok(deps: NativeDeps, sent: Sent, request: Request) -> InferenceReply | None:
    """The reply; None if the client disconnected. Raises GatewayError: it is not ``ok``, or did not come in time."""
    try:
        recorded = await reply_to(deps, sent, request, deps.wait_s)
    except TimeoutError:
        raise waited_too_long(sent.request_id, deps.wait_s) from None
    except ClientGoneError:
        return None
    error = error_of(recorded.reply)
    if error is not None:
        raise error
    return recorded.reply
