"""Routes that send requests, with or without waiting for the answer."""

from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from fairlane.records import InferenceReply
from producers.gateway.disconnects import ClientGoneError
from producers.gateway.edge.fast_path import ShortAnswer
from producers.gateway.identity.identity import Identity
from producers.gateway.native import openapi
from producers.gateway.native.deps import NativeDeps
from producers.gateway.native.request_bodies import ClassifyRequest, NewRequest, RankRequest
from producers.gateway.native.response_bodies import (
    AcceptedAnswer,
    ClassifyAnswer,
    RankAnswer,
    ResultAnswer,
    classify_answer,
    rank_answer,
    result_answer,
)
from producers.gateway.native.responses import accepted, answered, gone
from producers.gateway.native.sending import Sent, reply_to, send
from producers.gateway.openai.openapi import IDEMPOTENCY_KEY
from producers.gateway.results.request_status import RequestState
from producers.openai_api.body import documented
from producers.openai_api.reply_errors import error_of, waited_too_long

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
