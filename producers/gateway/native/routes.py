"""Native routes: sending requests, one request by its id, and the history of ended requests."""

from types import SimpleNamespace
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends, Query, Request
from pydantic import AwareDatetime
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from fairlane.outcomes import Code, Outcome
from fairlane.records import InferenceReply
from fairlane_server.caching.entries import Canonical
from fairlane_server.postgres.request_timeline import RecordedReply
from fairlane_server.text import NUL
from producers.gateway import openapi
from producers.gateway.edge.error_responses import error_response
from producers.gateway.identity.identity import Identity, Permission, permit, require
from producers.gateway.native.budgets import add_budgets_route
from producers.gateway.native.cursors import MOST_CURSOR_CHARS, Cursors
from producers.gateway.native.deps import NativeDeps, checked_id, result_gone, unknown_request
from producers.gateway.native.events import add_event_routes
from producers.gateway.native.feedback import add_feedback_route
from producers.gateway.native.request_bodies import ClassifyRequest, NewRequest, RankRequest
from producers.gateway.native.response_bodies import (
    EndedAnswer,
    HistoryAnswer,
    accepted,
    accepted_answer,
    answered,
    classify_answer,
    ended_fields,
    not_yet,
    page_of,
    rank_answer,
    result_answer,
    status_answer,
)
from producers.gateway.native.usage import add_usage_route
from producers.gateway.openapi import EMBEDDER, GENERATOR, READING, SENDING, RequestId, taking
from producers.gateway.results.request_status import RequestState
from producers.gateway.results.request_store import EndedCursor, EndedFilter
from producers.gateway.sending import ok_reply, publish, reply_in_time
from producers.openai_api.errors import GatewayError, budget_headers

_REQUESTS, _ALIAS = "/v1/requests", "/inference"
MOST_WAIT_S = 3_600.0

Wait = Annotated[
    float,
    Query(ge=0, le=MOST_WAIT_S, description="Wait so many seconds for the answer, up to the gateway's own limit"),
]
TaskT = TypeVar("TaskT", RankRequest, ClassifyRequest)

_GENERATE = {
    "model": GENERATOR,
    "input": {"messages": [{"role": "user", "content": "What is the capital of France?"}]},
    "parameters": {"max_tokens": 16},
    "timeout_ms": 30_000,
}
_RANKED = {"query": "Who manages the warehouse?", "documents": ["The night shift does.", "Parking is free."]}
_PICTURE = "iVBORw0KGgo="
_TAKING = taking(
    NewRequest,
    {
        "An answer": _GENERATE,
        "An answer from documents": _GENERATE | {"retrieval": {"collection": "atlas", "top_k": 2}},
        "Vectors": {"model": EMBEDDER, "task": "embed", "input": {"texts": ["one text", "another"]}},
        "Scores": {"model": EMBEDDER, "task": "rank", "input": _RANKED},
        "A class": {"model": "digits", "task": "classify", "input": {"image": _PICTURE}},
    },
)


def router(deps: NativeDeps) -> APIRouter:
    """All native routes, to be included by the application, which must turn GatewayErrors into answers and close
    ``deps.kept``."""
    made = APIRouter()
    add_requests = (_add_sending, _add_lookups, _add_history)
    for add in (*add_requests, add_feedback_route, add_usage_route, add_budgets_route, add_event_routes):
        add(made, deps)
    return made


def _add_sending(router: APIRouter, deps: NativeDeps) -> None:
    """POST /v1/requests with its alias, /v1/rank and /v1/classify."""
    Caller = Annotated[Identity, Depends(require(deps.authenticate, Permission.REQUESTS_SEND))]  # noqa: N806 - a type
    created = {
        **openapi.answered(openapi.RESULT, "With `wait`: the answer came in time"),
        **openapi.answered(openapi.ACCEPTED, "Accepted: it gets exactly one final reply", 202),
        **SENDING,
    }

    @router.post(_ALIAS, status_code=202, responses=created, openapi_extra=_TAKING, tags=["aliases"])
    @router.post(_REQUESTS, status_code=202, responses=created, openapi_extra=_TAKING, tags=["requests"])
    async def create_request(request: Request, caller: Caller, wait: Wait = 0.0) -> Response:
        """Send a request. With an `Idempotency-Key` the call can be repeated, and the work is done once."""
        return await _created(deps, request, caller, wait)

    @router.post(
        "/v1/rank",
        responses=openapi.answered(openapi.RANKING, "The documents, the best first") | SENDING,
        openapi_extra=taking(RankRequest, {"The best document": {"model": EMBEDDER, **_RANKED, "top_n": 1}}),
        tags=["tasks"],
    )
    async def rank(request: Request, caller: Caller) -> Response:
        """Rank documents by a query, and wait for the result."""
        reply, top_n = await _waited(deps, request, caller, "/v1/rank", RankRequest)
        return answered(rank_answer(reply, top_n), headers=budget_headers(reply.budget))

    @router.post(
        "/v1/classify",
        responses=openapi.answered(openapi.CLASSES, "The classes, the likeliest first") | SENDING,
        openapi_extra=taking(ClassifyRequest, {"A picture": {"model": "digits", "image": _PICTURE, "top_n": 3}}),
        tags=["tasks"],
    )
    async def classify(request: Request, caller: Caller) -> Response:
        """Classify an image, and wait for the result."""
        reply, top_n = await _waited(deps, request, caller, "/v1/classify", ClassifyRequest)
        return answered(classify_answer(reply, top_n), headers=budget_headers(reply.budget))


class ShortPath:
    """Innermost ASGI middleware: answers POST /v1/requests and its alias without a query as the route does, and passes
    all else to FastAPI, whose overhead exceeds the work of these calls."""

    def __init__(self, app: ASGIApp, deps: NativeDeps) -> None:
        self._app = app
        self._deps = deps
        # The access log reads the path of the route.
        self._routes = {path: SimpleNamespace(path=path) for path in (_REQUESTS, _ALIAS)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get(scope["path"]) if scope["type"] == "http" else None
        if route is None or scope["query_string"] or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        scope["route"], request = route, Request(scope, receive, send)
        try:
            caller = permit(await self._deps.authenticate(request), Permission.REQUESTS_SEND)
            response = await _created(self._deps, request, caller, wait_s=0.0)
        except GatewayError as error:
            response = error_response(scope["path"], error)
        await response(scope, receive, send)


async def _waited(
    deps: NativeDeps, request: Request, caller: Identity, route: str, model: type[TaskT]
) -> tuple[InferenceReply, int | None]:
    """The ``ok`` reply, and how many of its items to answer with."""
    published, top_n = await publish(
        deps, request, caller.tenant, route, model, model.to_request, lambda body: body.top_n
    )
    return await reply_in_time(deps, published, request.receive), top_n


async def _created(deps: NativeDeps, request: Request, caller: Identity, wait_s: float) -> Response:
    tenant = caller.tenant
    published, is_streamed = await publish(
        deps, request, tenant, _REQUESTS, NewRequest, NewRequest.to_request, lambda body: body.parameters.stream
    )
    request_id, source = published.request_id, published.source
    if wait_s > 0:
        try:
            reply = await ok_reply(deps, published, request.receive, min(wait_s, deps.wait_s))
        except TimeoutError:
            return accepted(request_id)
        answer = result_answer(RecordedReply(reply, deps.clock_ms()))
        return answered(answer, headers=budget_headers(reply.budget))
    if isinstance(source, InferenceReply):
        return accepted(request_id, RequestState.DONE)
    if is_streamed:
        deps.kept.keep(source)
    else:
        source.forget()
    return accepted(request_id)


def _add_lookups(router: APIRouter, deps: NativeDeps) -> None:
    """GET and DELETE /v1/requests/{id}, GET /v1/results/{id} with its alias."""
    Caller = Annotated[Identity, Depends(require(deps.authenticate, Permission.REQUESTS_READ))]  # noqa: N806 - a type
    Canceller = Annotated[Identity, Depends(require(deps.authenticate, Permission.REQUESTS_SEND))]  # noqa: N806 - a type
    result = {
        **openapi.answered(openapi.RESULT, "The final reply, whatever its outcome"),
        **openapi.answered(openapi.ACCEPTED, "No final reply so far", 202),
        **READING,
    }
    status = openapi.answered(openapi.STATUS, "Its status") | READING
    cancelled = {
        **openapi.answered(openapi.STATUS, "The request had ended; nothing was cancelled"),
        **openapi.answered(openapi.ACCEPTED, "The cancellation was sent; the final reply follows", 202),
        **READING,
    }

    @router.get("/v1/requests/{request_id}", responses=status, tags=["requests"])
    async def get_request(request_id: RequestId, caller: Caller) -> Response:
        """The status of a request, when it passed each stage, and every decision about it with its reasons."""
        found = await deps.results.status(caller.tenant, checked_id(request_id))
        if found is None:
            raise unknown_request()
        return answered(status_answer(found))

    @router.get("/results/{request_id}", responses=result, tags=["aliases"])
    @router.get("/v1/results/{request_id}", responses=result, tags=["requests"])
    async def get_result(request_id: RequestId, caller: Caller) -> Response:
        """The final reply to a request, by default for 24 hours from its end; 202 while there is none yet."""
        tenant = caller.tenant
        found = await deps.results.find(tenant, checked_id(request_id))
        if found is not None:
            if deps.clock_ms() - found.replied_at_ms > deps.results.kept_ms:
                raise result_gone(deps, request_id)
            return answered(result_answer(found), headers=budget_headers(found.reply.budget))
        known = await deps.results.status(tenant, request_id)
        if known is None:
            raise unknown_request()
        if known.status is RequestState.DONE and known.reply is None:
            raise result_gone(deps, request_id, is_erased=known.is_erased)
        return not_yet(request_id, known.status)

    @router.delete("/v1/requests/{request_id}", status_code=202, responses=cancelled, tags=["requests"])
    async def cancel_request(request_id: RequestId, caller: Canceller) -> Response:
        """Cancel a request. Its final reply still comes: `cancelled`, unless it ended sooner."""
        tenant = caller.tenant
        try:
            known = await deps.results.status(tenant, checked_id(request_id))
        except GatewayError as error:
            if error.status != 503:
                raise
            # The request may exist. Cancelling an unknown id has no effect, and a cancel reaches only this tenant's.
            await deps.submitter.cancel(tenant, request_id)
            return answered(accepted_answer(request_id), 202)
        if known is None:
            raise unknown_request()
        if known.status is RequestState.DONE:
            return answered(status_answer(known))
        await deps.submitter.cancel(tenant, request_id)
        return answered(accepted_answer(request_id, known.status), 202)


_cursors = Cursors(EndedCursor)


def cursor_of(tenant: str, wanted: EndedFilter, place: EndedCursor) -> str:
    """Cursor of the page after this place, for the same tenant and filter."""
    return _cursors.encode(_query(tenant, wanted), place)


def place_of(tenant: str, wanted: EndedFilter, cursor: str | None) -> EndedCursor | None:
    """The place in a cursor, if there is one. Raises GatewayError: 400 for an invalid one, or one of another filter."""
    return _cursors.decode(_query(tenant, wanted), cursor)


def _query(tenant: str, wanted: EndedFilter) -> Canonical:
    return tenant, wanted.outcome, wanted.model, wanted.since_ms, wanted.until_ms


MOST_OF_PAGE = 100

Limit = Annotated[int, Query(ge=1, le=MOST_OF_PAGE, description="Most requests of a page")]
Cursor = Annotated[
    str | None, Query(max_length=MOST_CURSOR_CHARS, description="`next_cursor` of the page before; same filters")
]
Model = Annotated[str | None, Query(min_length=1, max_length=128, description="The model that answered")]
Ended = Annotated[Outcome | None, Query(description="How they ended")]
Since = Annotated[AwareDatetime | None, Query(description="Those that ended then or later, RFC 3339")]
Until = Annotated[AwareDatetime | None, Query(description="Those that ended before")]


def _add_history(router: APIRouter, deps: NativeDeps) -> None:
    """GET /v1/requests."""
    Caller = Annotated[Identity, Depends(require(deps.authenticate, Permission.REQUESTS_READ))]  # noqa: N806 - a type

    @router.get("/v1/requests", responses=openapi.answered(openapi.HISTORY, "A page") | READING, tags=["requests"])
    async def list_requests(
        caller: Caller,
        status: Ended = None,
        model: Model = None,
        since: Since = None,
        until: Until = None,
        limit: Limit = 20,
        cursor: Cursor = None,
    ) -> Response:
        """Ended requests, newest first; requests that end meanwhile do not shift the pages."""
        tenant = caller.tenant
        if model is not None and NUL in model:
            raise GatewayError(400, Code.INVALID, "holds a NUL character", field="model")
        since_ms, until_ms = (None if at is None else round(at.timestamp() * 1_000) for at in (since, until))
        wanted = EndedFilter(None if status is None else status.value, model, since_ms, until_ms)
        found = await deps.results.ended(tenant, wanted, place_of(tenant, wanted, cursor), limit + 1)
        return page_of(
            *(HistoryAnswer, found, limit),
            lambda one: EndedAnswer.model_validate(ended_fields(one)),
            lambda last: cursor_of(tenant, wanted, _place(last)),
        )


def _place(recorded: RecordedReply) -> EndedCursor:
    source = recorded.reply.source
    assert source is not None  # noqa: S101 - what comes from a row has one
    return EndedCursor(recorded.replied_at_ms, recorded.reply.request_id, source.topic, source.partition, source.offset)
