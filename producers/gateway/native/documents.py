"""What OpenAPI says of the native routes: errors, and bodies to try."""

from collections.abc import Mapping
from typing import Any

from producers.gateway.native.answer_bodies import ErrorAnswer

Responses = dict[int | str, dict[str, Any]]

EXAMPLE_ID = "0b0f1b52-6a3f-4f0e-9a55-0c6f6f5d8a11"

_DESCRIPTIONS: Mapping[int, str] = {
    400: "A field is wrong; `field` names it",
    401: "No identity, or none that counts",
    403: "This identity may not do this",
    404: "There is no such request, or its result is no longer told",
    409: "A request with this Idempotency-Key is in flight",
    413: "The body is too large",
    422: "This Idempotency-Key was used with another body",
    429: "Too much at once; `Retry-After` says when trying again makes sense",
    499: "The request was cancelled",
    500: "The request failed",
    503: "Not now; `Retry-After` says when trying again makes sense",
    504: "No answer in time; `request_id` names the request, which goes on, unless it has expired",
}
_EXAMPLES: Mapping[int, Mapping[str, Any]] = {
    400: {"code": "invalid", "message": "must be from 1 to 4096, not 9000", "field": "parameters.max_tokens"},
    404: {"code": "unknown_request", "message": "there is no request with this id"},
    429: {"code": "overloaded", "message": "the queue of this tenant is full", "retry_after_ms": 1200},
    504: {
        "code": "timeout",
        "message": f"no answer within 60 s; the request goes on, ask for /v1/results/{EXAMPLE_ID}",
        "request_id": EXAMPLE_ID,
    },
}

GENERATE = {
    "model": "smollm2-135m-instruct",
    "input": {"messages": [{"role": "user", "content": "What is the capital of France?"}]},
    "parameters": {"max_tokens": 16},
    "timeout_ms": 30_000,
}
NEW_REQUESTS: Mapping[str, Mapping[str, Any]] = {
    "An answer": GENERATE,
    "An answer from documents": GENERATE | {"retrieval": {"collection": "atlas", "top_k": 2}},
    "Vectors": {"model": "all-minilm-l6-v2", "task": "embed", "input": {"texts": ["one text", "another"]}},
    "Scores": {
        "model": "all-minilm-l6-v2",
        "task": "rank",
        "input": {"query": "Who manages the warehouse?", "documents": ["The night shift does.", "Parking is free."]},
    },
    "A class": {"model": "digits", "task": "classify", "input": {"image": "iVBORw0KGgo="}},
}
RANK: Mapping[str, Mapping[str, Any]] = {
    "The best document": {
        "model": "all-minilm-l6-v2",
        "query": "Who manages the warehouse?",
        "documents": ["The night shift does.", "Parking is free."],
        "top_n": 1,
    }
}
CLASSIFY: Mapping[str, Mapping[str, Any]] = {"A picture": {"model": "digits", "image": "iVBORw0KGgo=", "top_n": 3}}

_COMMON = (401, 403, 429)
READING = (*_COMMON, 400, 404, 503)
SENDING = (*_COMMON, 400, 404, 409, 413, 422, 503)
WAITING = (*SENDING, 499, 500, 504)
"""A call that waits is answered with the status that its reply stands for."""


def errors(*statuses: int) -> Responses:
    """What a route may answer instead."""
    return {
        status: {
            "model": ErrorAnswer,
            "description": _DESCRIPTIONS[status],
            **(
                {"content": {"application/json": {"example": {"error": _EXAMPLES[status]}}}}
                if status in _EXAMPLES
                else {}
            ),
        }
        for status in sorted(statuses)
    } | {"default": {"model": ErrorAnswer, "description": "Any other error"}}


def answers(status: int, model: type, description: str) -> Responses:
    """What a route answers when all is well."""
    return {status: {"model": model, "description": description}}
