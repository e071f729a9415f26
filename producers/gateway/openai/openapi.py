"""OpenAPI responses, headers and examples of the OpenAI routes."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from producers.openai_api.errors import error_type
from producers.openai_api.response_models import ErrorBody

Responses = dict[int | str, dict[str, Any]]


_KEY = "Idempotency-Key"


class ErrorDoc(NamedTuple):
    """Documented error of a route: when it occurs, and an example."""

    description: str
    code: str
    message: str
    param: str | None = None


_ERRORS: Mapping[int, ErrorDoc] = {
    400: ErrorDoc(
        "The body is invalid, or too long for the model; `param` is the field",
        "unsupported_parameter",
        "n: only 1 is supported",
        "n",
    ),
    401: ErrorDoc("No identity", "invalid_api_key", "This API key or token is not valid."),
    403: ErrorDoc("The identity lacks the permission", "insufficient_scope", "This API key lacks the scope for this."),
    404: ErrorDoc("No such model", "model_not_found", "no such model, or not for this tenant", "model"),
    408: ErrorDoc("The body did not arrive in time", "invalid", "the body took more than 3600 s"),
    409: ErrorDoc(
        "The request with this Idempotency-Key is in flight; `x-request-id` is its id",
        "request_in_flight",
        "the request with this key is in flight",
        _KEY,
    ),
    411: ErrorDoc(
        "The request has no Content-Length",
        "length_required",
        "the length of the body must be given",
        "content-length",
    ),
    413: ErrorDoc("The body is too large", "invalid", "the body has more than 4194304 bytes", "body"),
    422: ErrorDoc(
        "This Idempotency-Key was used with another body",
        "idempotency_key_reused",
        "this key was used with another body",
        _KEY,
    ),
    429: ErrorDoc(
        "A limit is reached; retry after `retry-after`",
        "rate_limit_exceeded",
        "Too many calls with this key or of this user.",
    ),
    500: ErrorDoc("The request ran and failed", "engine_error", "the request failed"),
    503: ErrorDoc(
        "Nothing is accepted now; retry after `retry-after`",
        "unavailable",
        "the log does not take requests at present; nothing was accepted",
    ),
    504: ErrorDoc(
        "No answer in time; `x-request-id` is the id for a lookup",
        "timeout",
        "no answer within 60 s; the request goes on",
    ),
}
READ_STATUSES = (401, 403, 404, 429, 503)
SENDING = tuple(_ERRORS)

REQUEST_ID = "0198a2f0-7c1e-7d3a-9f10-2b6a4c5d6e7f"
ABOUT: dict[str, Any] = {
    "request_id": REQUEST_ID,
    "model_version": "1",
    "degradations": [],
    "passages": [],
    "retrieval": None,
    "cache": None,
    "history": None,
    "replayed": False,
}
USAGE: dict[str, Any] = {
    "prompt_tokens": 36,
    "completion_tokens": 8,
    "total_tokens": 44,
    "prompt_tokens_details": {"cached_tokens": 0},
}
CREATED_S = 1_760_000_000
IDEMPOTENCY_KEY: dict[str, Any] = {
    "parameters": [
        {
            "name": _KEY,
            "in": "header",
            "required": False,
            "description": "Calls with the same key and body run once, for at least 24 hours.",
            "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[ -~]+$"},
        }
    ]
}
_RESPONSE_HEADERS = {
    "x-request-id": {"description": "The request's id", "schema": {"type": "string"}},
}
_EVENT = {
    "type": "object",
    "properties": {
        "event": {"description": "`error` for a failure after the first event", "type": "string"},
        "data": {"description": "A chunk as JSON, `[DONE]`, or the body of an error", "type": "string"},
    },
    "required": ["data"],
}


def errors(statuses: tuple[int, ...], own: Mapping[int, ErrorDoc] | None = None) -> Responses:
    """OpenAPI error responses: the given statuses, and a default of the same shape.

    Args:
        statuses: error statuses of the route.
        own: rows that replace or extend the common ones.
    """
    rows = {**_ERRORS, **(own or {})}
    documented: Responses = {}
    for status in statuses:
        row = rows[status]
        error = {"message": row.message, "type": error_type(status), "param": row.param, "code": row.code}
        documented[status] = {
            "model": ErrorBody,
            "description": row.description,
            "content": {"application/json": {"example": {"error": error}}},
        }
    return documented | {"default": {"model": ErrorBody, "description": "Any other error"}}


def success(model: type[object], example: dict[str, Any], streamed: str | None = None) -> Responses:
    """OpenAPI success response; ``streamed`` is an example of a stream's first event."""
    content: dict[str, Any] = {"application/json": {"example": example}}
    if streamed is not None:
        content["text/event-stream"] = {"itemSchema": _EVENT, "example": streamed}
    return {200: {"model": model, "description": "The answer", "content": content, "headers": _RESPONSE_HEADERS}}
