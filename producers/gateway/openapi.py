"""The OpenAPI document: what FastAPI does not derive from models, with examples."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import FastAPI, Path
from fastapi.routing import APIRoute, iter_route_contexts
from pydantic import BaseModel

from fairlane.outcomes import Code, Outcome
from fairlane.records import Cost, InferenceReply, LabelScore, Output, Timings, TokenUsage
from fairlane_server.postgres.request_timeline import RecordedReply, TimelineEvent
from producers.gateway.idempotency import HEADER, IN_FLIGHT, MOST_KEY_CHARS, OTHER_BODY
from producers.gateway.identity.identity import INVALID_KEY, permissions_of
from producers.gateway.limits.rate_limits import RATE_LIMITED
from producers.gateway.native.deps import UNKNOWN_REQUEST
from producers.gateway.native.response_bodies import (
    BudgetPage,
    BudgetState,
    CostAnswer,
    EndedAnswer,
    ErrorAnswer,
    FeedbackAnswer,
    HistoryAnswer,
    ResponseBody,
    StatusAnswer,
    UsageAnswer,
    UsagePage,
    accepted_answer,
    classify_answer,
    ended_fields,
    links_of,
    rank_answer,
    result_answer,
)
from producers.gateway.results.request_status import RequestState
from producers.openai_api.errors import REQUEST_ID_HEADER, UNAVAILABLE, WAITED_TOO_LONG, GatewayError, error_body
from producers.openai_api.responses import ErrorBody

Responses = dict[int | str, dict[str, Any]]

ErrorDocs = Mapping[int, tuple[str, str]]
"""Errors by status: an error code, and when it occurs."""

EXAMPLE_ID = "0b0f1b52-6a3f-4f0e-9a55-0c6f6f5d8a11"
CREATED_S = 1_760_000_000
GENERATOR, EMBEDDER = "smollm2-135m-instruct", "all-minilm-l6-v2"
READ_STATUSES = (401, 403, 404, 429, 503)
SEND_STATUSES = (*READ_STATUSES, 400, 409, 413, 422)

_RETRY_AFTER_MS = 1_000
_COMMON: ErrorDocs = {
    401: (INVALID_KEY, "No identity, or an invalid one"),
    403: ("insufficient_scope", "The identity lacks the permission"),
    409: (IN_FLIGHT, "The request with this Idempotency-Key is in flight; `x-request-id` is its id"),
    413: (Code.INVALID, "The body is too large"),
    422: (OTHER_BODY, "This Idempotency-Key was used with another body"),
    429: (RATE_LIMITED, "A limit is reached; retry after `retry-after`"),
    500: ("engine_error", "The request ran and failed"),
    503: (UNAVAILABLE, "Unavailable; retry after `retry-after`"),
    504: (WAITED_TOO_LONG, "No answer in time; the request in `x-request-id` continues, unless it has expired"),
}
_NATIVE: ErrorDocs = {
    400: (Code.INVALID, "A field is invalid; `field` names it"),
    404: (UNKNOWN_REQUEST, "No such request, or its result has expired"),
    499: (Outcome.CANCELLED, "The request was cancelled"),
}

_CONVERTER = re.compile(r":[a-z]+\}")

RequestId = Annotated[str, Path(description="Id of the request", examples=[EXAMPLE_ID])]

IDEMPOTENCY_KEY: dict[str, Any] = {
    "parameters": [
        {
            "name": HEADER,
            "in": "header",
            "required": False,
            "description": "Calls with the same key and body run once, for at least 24 hours.",
            "schema": {"type": "string", "minLength": 1, "maxLength": MOST_KEY_CHARS, "pattern": "^[ -~]+$"},
        }
    ]
}


def answered(example: BaseModel, description: str = "The answer", status: int = 200) -> Responses:
    """A response in JSON, by an example."""
    shown = example.as_json() if isinstance(example, ResponseBody) else example.model_dump_json()
    content = {"application/json": {"example": json.loads(shown)}}
    headers = {REQUEST_ID_HEADER: {"description": "The request's id", "schema": {"type": "string"}}}
    return {status: {"model": type(example), "description": description, "content": content, "headers": headers}}


def errors(statuses: Sequence[int], own: ErrorDocs, *, is_native: bool = False) -> Responses:
    """Error responses of a route: these statuses, and a default of the same shape. ``own`` replaces or extends the
    common errors; ``is_native``: the shape is Fairlane's own, not OpenAI's."""
    known = {**_COMMON, **own}
    documented: Responses = {
        "default": {"model": ErrorAnswer if is_native else ErrorBody, "description": "Any other error"}
    }
    for status in sorted(statuses):
        code, description = known[status]
        retry_after_ms = _RETRY_AFTER_MS if status in (429, 503) else None
        error = GatewayError(status, code, description, retry_after_ms=retry_after_ms)
        example = ErrorAnswer.of(error) if is_native else ErrorBody.model_validate(error_body(error))
        documented |= answered(example, description, status)
    return documented


READING = errors((*READ_STATUSES, 400), _NATIVE, is_native=True)
SENDING = errors((*SEND_STATUSES, 499, 500, 504), _NATIVE, is_native=True)
"""A waiting call also gets the status that its final reply maps to."""
TAKING_FEEDBACK = errors((*READ_STATUSES, 400, 413), _NATIVE, is_native=True)


def taking(
    model: type[BaseModel], examples: Mapping[str, Mapping[str, Any]], *, has_key: bool = True
) -> dict[str, Any]:
    """OpenAPI request body of a route that parses it itself, and its idempotency key.

    Args:
        model: model of the body.
        examples: example bodies by summary.
        has_key: whether it takes an idempotency key.
    """
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})
    named = {
        summary.lower().replace(" ", "_"): {"summary": summary, "value": value} for summary, value in examples.items()
    }
    content = {"application/json": {"schema": _in_place(schema, definitions), "examples": named}}
    return {"requestBody": {"required": True, "content": content}} | (IDEMPOTENCY_KEY if has_key else {})


def _in_place(node: Any, definitions: Mapping[str, Any]) -> Any:
    """The schema with its references replaced by their definitions. No body model is recursive."""
    if isinstance(node, dict):
        reference = node.get("$ref")
        if isinstance(reference, str):
            return _in_place(definitions[reference.removeprefix("#/$defs/")], definitions)
        return {key: _in_place(value, definitions) for key, value in node.items()}
    if isinstance(node, list):
        return [_in_place(item, definitions) for item in node]
    return node


def install(app: FastAPI) -> None:
    """Name the permission of each route, and restore nulls in examples of answers: FastAPI drops them, and with them
    fields that the schema requires."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        document = make()
        for context in iter_route_contexts(app.routes):
            route = context.original_route
            if isinstance(route, APIRoute) and route.include_in_schema and context.path is not None:
                needed = sorted(permissions_of(route.dependant))
                # The document names a parameter without its converter.
                path = _CONVERTER.sub("}", context.path)
                for method in route.methods or ():
                    operation = document["paths"][path][method.lower()]
                    if needed:
                        operation["x-permission"] = ", ".join(needed)
                    answers = operation["responses"]
                    for status, documented in route.responses.items():
                        for media_type, content in documented.get("content", {}).items():
                            if "example" in content:
                                answers[str(status)]["content"][media_type]["example"] = content["example"]
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI documents it


_AT_MS = 1_000 * CREATED_S

REPLY = InferenceReply(
    EXAMPLE_ID,
    "acme",
    Outcome.OK,
    model=GENERATOR,
    model_version="1",
    task="generate",
    output=Output(text="The capital of France is Paris."),
    finish_reason="stop",
    usage=TokenUsage(36, 8),
    cost=Cost(6_800, "XTS"),
    timings=Timings(_AT_MS, _AT_MS + 4, _AT_MS + 6, _AT_MS + 9, _AT_MS + 15, _AT_MS + 240),
)
"""A final reply, from which the examples of answers are made."""

_ENDED = RecordedReply(REPLY, _AT_MS + 243)
ACCEPTED = accepted_answer(EXAMPLE_ID)
FEEDBACK = FeedbackAnswer(request_id=EXAMPLE_ID)
RESULT = result_answer(_ENDED)
HISTORY = HistoryAnswer(data=(EndedAnswer.model_validate(ended_fields(_ENDED)),), has_more=False)
RANKING = rank_answer(replace(REPLY, model=EMBEDDER, output=Output(scores=(0.83, 0.12))), None)
CLASSES = classify_answer(
    replace(REPLY, model="digits", output=Output(labels=(LabelScore("seven", 0.97), LabelScore("one", 0.02)))), None
)
USAGE = UsagePage(
    data=(
        UsageAnswer(
            day="2026-01-31",
            model=GENERATOR,
            requests=1_250,
            cached_answers=40,
            prompt_tokens=48_210,
            completion_tokens=20_480,
            cached_tokens=0,
            images=0,
            engine_ms=310_000,
            cost=CostAnswer(amount="0.013013", currency="XTS"),
        ),
    ),
    has_more=False,
)
BUDGETS = BudgetPage(
    data=(
        BudgetState(
            of="tenant",
            period="month",
            currency="XTS",
            soft="80",
            hard="100",
            at_soft="degrade",
            spent="81.5",
            reserved="0.0021",
            renews_at_ms=1_769_904_000_000,
        ),
    )
)
STATUS = StatusAnswer(
    id=EXAMPLE_ID,
    status=RequestState.QUEUED,
    model=GENERATOR,
    task="generate",
    submitted_at_ms=_AT_MS,
    links=links_of(EXAMPLE_ID),
    events=(
        TimelineEvent(_AT_MS, "arrived"),
        TimelineEvent(_AT_MS + 4, "accepted", "dispatcher-1", details={"queued_requests": "3"}),
    ),
)
