"""Routes that send requests, with or without waiting for the answer."""

from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from fairlane.records import InferenceReply
from fairlane_server.postgres.request_timeline import RecordedReply
from producers.gateway.edge.fast_path import ShortAnswer
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
    rank_answer,
    result_answer,
)
from producers.gateway.openapi import IDEMPOTENCY_KEY
from producers.gateway.results.request_status import RequestState
from producers.gateway.sending import ok_reply, publish, reply_in_time
from producers.openai_api.body import documented

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
    **openapi.SENDING,
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
        responses=openapi.answers(200, RankAnswer, "The documents, the best first") | openapi.SENDING,
        openapi_extra=documented(RankRequest, openapi.RANK) | IDEMPOTENCY_KEY,
        tags=["tasks"],
    )
    async def rank(request: Request, caller: Caller) -> Response:
        """Rank documents by a query, and wait for the result."""
        published, top_n = await publish(
            deps, request, require_send(caller), _RANK, RankRequest, RankRequest.to_request, lambda body: body.top_n
        )
        return answered(rank_answer(await reply_in_time(published, request.receive, deps.wait_s), top_n))

    @router.post(
        _CLASSIFY,
        responses=openapi.answers(200, ClassifyAnswer, "The classes, the likeliest first") | openapi.SENDING,
        openapi_extra=documented(ClassifyRequest, openapi.CLASSIFY) | IDEMPOTENCY_KEY,
        tags=["tasks"],
    )
    async def classify(request: Request, caller: Caller) -> Response:
        """Classify an image, and wait for the result."""
        published, top_n = await publish(
            deps,
            request,
            require_send(caller),
            _CLASSIFY,
            ClassifyRequest,
            ClassifyRequest.to_request,
            lambda body: body.top_n,
        )
        return answered(classify_answer(await reply_in_time(published, request.receive, deps.wait_s), top_n))


def short_answers(deps: NativeDeps) -> Mapping[str, ShortAnswer]:
    """Handlers of POST /v1/requests and its alias without a query, for ``ShortPath``."""

    async def created(request: Request) -> Response:
        return await _created(deps, request, await deps.authenticate(request), wait_s=0.0)

    return {_REQUESTS: created, _ALIAS: created}


async def _created(deps: NativeDeps, request: Request, caller: Identity, wait_s: float) -> Response:
    tenant = require_send(caller)
    published, is_streamed = await publish(
        deps, request, tenant, _REQUESTS, NewRequest, NewRequest.to_request, lambda body: body.parameters.stream
    )
    request_id, source = published.request_id, published.source
    if wait_s > 0:
        try:
            reply = await ok_reply(published, request.receive, min(wait_s, deps.wait_s))
        except TimeoutError:
            return accepted(request_id)
        return answered(result_answer(RecordedReply(reply, deps.clock_ms())))
    if isinstance(source, InferenceReply):
        return accepted(request_id, RequestState.DONE)
    if is_streamed:
        deps.kept.keep(tenant, source)
    else:
        source.forget()
    return accepted(request_id)
