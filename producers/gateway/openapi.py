"""Parts of the OpenAPI document that all routes share: errors and answers with examples, and the idempotency key."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute, iter_route_contexts
from pydantic import BaseModel

from producers.gateway.edge.body_limit import too_large
from producers.gateway.idempotency import HEADER, MOST_KEY_CHARS, in_flight, other_body
from producers.gateway.identity.refusals import AuthRefusal, answer
from producers.gateway.limits.call_limits import refusal
from producers.gateway.limits.rate_buckets import Allowance
from producers.gateway.native import errors as native
from producers.gateway.native.response_bodies import ErrorAnswer
from producers.gateway.pipeline.publisher import away
from producers.openai_api import errors as openai
from producers.openai_api.errors import REQUEST_ID_HEADER, GatewayError, waited_too_long
from producers.openai_api.response_models import ErrorBody

Responses = dict[int | str, dict[str, Any]]

ErrorDoc = tuple[GatewayError, str]
"""An error of a route as an example, and when it occurs."""

EXAMPLE_ID = "0b0f1b52-6a3f-4f0e-9a55-0c6f6f5d8a11"
CREATED_S = 1_760_000_000
READ_STATUSES = (401, 403, 404, 429, 503)
SEND_STATUSES = (*READ_STATUSES, 400, 409, 413, 422)

_COMMON: Sequence[ErrorDoc] = (
    (answer(AuthRefusal.WRONG_KEY), "No identity, or an invalid one"),
    (answer(AuthRefusal.NO_SCOPE), "The identity lacks the permission"),
    (in_flight(EXAMPLE_ID), "The request with this Idempotency-Key is in flight; `x-request-id` is its id"),
    (too_large(4_194_304), "The body is too large"),
    (other_body(), "This Idempotency-Key was used with another body"),
    (refusal(Allowance(100, 0, 10_000, 100)), "A limit is reached; retry after `retry-after`"),
    (GatewayError(500, "engine_error", "the request failed", request_id=EXAMPLE_ID), "The request ran and failed"),
    (away(), "Unavailable; retry after `retry-after`"),
    (
        waited_too_long(EXAMPLE_ID, 60),
        "No answer in time; the request in `x-request-id` continues, unless it has expired",
    ),
)

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


def answered(
    model: type[BaseModel], example: Mapping[str, Any], description: str = "The answer", status: int = 200
) -> Responses:
    """A response in JSON."""
    content = {"application/json": {"example": example}}
    headers = {REQUEST_ID_HEADER: {"description": "The request's id", "schema": {"type": "string"}}}
    return {status: {"model": model, "description": description, "content": content, "headers": headers}}


def errors(statuses: Sequence[int], *own: ErrorDoc, is_native: bool = False) -> Responses:
    """Error responses of a route: these statuses, and a default of the same shape.

    Args:
        statuses: error statuses of the route.
        own: replace or extend the common ones.
        is_native: the shape is Fairlane's own, not OpenAI's.
    """
    model: type[BaseModel] = ErrorAnswer if is_native else ErrorBody
    body_of = native.error_body if is_native else openai.error_body
    known = {error.status: (error, description) for error, description in (*_COMMON, *own)}
    documented: Responses = {"default": {"model": model, "description": "Any other error"}}
    for status in sorted(statuses):
        error, description = known[status]
        documented |= answered(model, body_of(error), description, status)
    return documented


def install(app: FastAPI) -> None:
    """Restore nulls in examples of answers: FastAPI drops them, and with them fields that the schema requires."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = make()
            for context in iter_route_contexts(app.routes):
                route = context.original_route
                if isinstance(route, APIRoute) and route.include_in_schema and context.path is not None:
                    for method in route.methods or ():
                        _restore(document["paths"][context.path][method.lower()]["responses"], route)
        made = app.openapi_schema
        assert made is not None  # noqa: S101 - kept by FastAPI's own
        return made

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI documents it


def _restore(answers: dict[str, Any], route: APIRoute) -> None:
    for status, documented in route.responses.items():
        for media_type, content in documented.get("content", {}).items():
            if "example" in content:
                answers[str(status)]["content"][media_type]["example"] = content["example"]
