"""What OpenAPI says of these routes beside their bodies."""

from typing import Any

from producers.gateway.openai.responses import ErrorBody

_ERRORS = {
    400: "The body is not what it should be, or too long for the model; `param` is the field",
    401: "No identity",
    403: "This identity may not do it",
    404: "No such model",
    408: "The body did not come in time",
    409: "The request with this Idempotency-Key is in flight; `x-request-id` is its id",
    413: "The body is too large",
    422: "This Idempotency-Key was used with another body",
    429: "Too much at once; `retry-after` says when to try again",
    500: "The request was run and failed",
    503: "Nothing is accepted now; `retry-after` says when to try again",
    504: "No answer in time; `x-request-id` is the id to ask for",
}
READING = (401, 403, 404, 429, 503)
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
            "name": "Idempotency-Key",
            "in": "header",
            "required": False,
            "description": "The same key with the same body is done once within 24 hours.",
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
        "event": {"description": "`error` for what went wrong after the first event", "type": "string"},
        "data": {"description": "A chunk as JSON, `[DONE]`, or the body of an error", "type": "string"},
    },
    "required": ["data"],
}


def errors(statuses: tuple[int, ...]) -> dict[int | str, dict[str, Any]]:
    """The answers that are no success."""
    return {status: {"model": ErrorBody, "description": _ERRORS[status]} for status in statuses}


def success(
    model: type[object], example: dict[str, Any], streamed: str | None = None
) -> dict[int | str, dict[str, Any]]:
    """The answer that is one; ``streamed`` is what a stream begins with."""
    content: dict[str, Any] = {"application/json": {"example": example}}
    if streamed is not None:
        content["text/event-stream"] = {"itemSchema": _EVENT, "example": streamed}
    return {200: {"model": model, "description": "The answer", "content": content, "headers": _RESPONSE_HEADERS}}
