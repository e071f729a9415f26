"""OpenAPI responses and examples of the native routes."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field

from producers.gateway.native.response_bodies import (
    AcceptedAnswer,
    ClassifyAnswer,
    ErrorAnswer,
    HistoryAnswer,
    RankAnswer,
    ResponseBody,
    ResultAnswer,
    StatusAnswer,
    links_of,
)

Responses = dict[int | str, dict[str, Any]]

EXAMPLE_ID = "0b0f1b52-6a3f-4f0e-9a55-0c6f6f5d8a11"

_DESCRIPTIONS: Mapping[int, str] = {
    400: "A field is invalid; `field` names it",
    401: "No identity, or an invalid one",
    403: "The identity lacks the permission",
    404: "No such request, or its result has expired",
    409: "A request with this Idempotency-Key is in flight",
    413: "The body is too large",
    422: "This Idempotency-Key was used with another body",
    429: "A limit is reached; retry after `Retry-After`",
    499: "The request was cancelled",
    500: "The request failed",
    503: "Unavailable; retry after `Retry-After`",
    504: "No answer in time; the request in `request_id` continues, unless it has expired",
}
_EXAMPLES: Mapping[int, Mapping[str, Any]] = {
    400: {"code": "invalid", "message": "must be from 1 to 4096, not 9000", "field": "parameters.max_tokens"},
    401: {"code": "invalid_api_key", "message": "This API key or token is not valid."},
    403: {"code": "insufficient_scope", "message": "This API key has not the scope that this needs."},
    404: {"code": "unknown_request", "message": "there is no request with this id"},
    409: {
        "code": "request_in_flight",
        "message": f"the request with this key is in flight: {EXAMPLE_ID}",
        "field": "Idempotency-Key",
        "retry_after_ms": 1000,
        "request_id": EXAMPLE_ID,
    },
    413: {"code": "invalid", "message": "the body has more than 4194304 bytes", "field": "body"},
    422: {
        "code": "idempotency_key_reused",
        "message": "this key was used with another body",
        "field": "Idempotency-Key",
    },
    429: {"code": "overloaded", "message": "the queue of this tenant is full", "retry_after_ms": 1200},
    499: {"code": "cancelled", "message": "the request was cancelled", "request_id": EXAMPLE_ID},
    500: {"code": "engine_error", "message": "the request failed", "request_id": EXAMPLE_ID},
    503: {
        "code": "unavailable",
        "message": "the log does not take requests at present; nothing was accepted",
        "retry_after_ms": 1000,
    },
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

_AT_MS = 1_760_000_000_000
_USAGE = {"prompt_tokens": 36, "completion_tokens": 8, "cached_tokens": 0}
_LINKS = links_of(EXAMPLE_ID).model_dump()
_ENDED: Mapping[str, Any] = {
    "id": EXAMPLE_ID,
    "status": "done",
    "outcome": "ok",
    "model": "smollm2-135m-instruct",
    "model_version": "1",
    "task": "generate",
    "finish_reason": "stop",
    "usage": _USAGE,
    "timings": {
        "submitted_at_ms": _AT_MS,
        "admitted_at_ms": _AT_MS + 4,
        "dispatched_at_ms": _AT_MS + 6,
        "received_at_ms": _AT_MS + 9,
        "engine_started_at_ms": _AT_MS + 15,
        "engine_finished_at_ms": _AT_MS + 240,
    },
    "degradations": [],
    "attempts": 1,
    "ended_at_ms": _AT_MS + 243,
}
_ANSWERS: Mapping[type[ResponseBody], Mapping[str, Any]] = {
    AcceptedAnswer: {"id": EXAMPLE_ID, "status": "queued", "links": _LINKS},
    StatusAnswer: {
        "id": EXAMPLE_ID,
        "status": "queued",
        "model": "smollm2-135m-instruct",
        "task": "generate",
        "submitted_at_ms": _AT_MS,
        "links": _LINKS,
        "events": [
            {"at_ms": _AT_MS, "event": "arrived", "details": {}},
            {"at_ms": _AT_MS + 4, "event": "accepted", "actor": "dispatcher-1", "details": {"queued_requests": "3"}},
        ],
    },
    ResultAnswer: {**_ENDED, "output": {"text": "The capital of France is Paris."}, "passages": []},
    HistoryAnswer: {"data": [_ENDED], "has_more": False},
    RankAnswer: {
        "id": EXAMPLE_ID,
        "model": "all-minilm-l6-v2",
        "results": [{"index": 0, "score": 0.83}, {"index": 1, "score": 0.12}],
        "usage": {"prompt_tokens": 24, "completion_tokens": 0, "cached_tokens": 0},
    },
    ClassifyAnswer: {
        "id": EXAMPLE_ID,
        "model": "digits",
        "labels": [{"label": "seven", "score": 0.97}, {"label": "one", "score": 0.02}],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0},
    },
}

_COMMON = (401, 403, 429)
READING = (*_COMMON, 400, 404, 503)
SENDING = (*_COMMON, 400, 404, 409, 413, 422, 503)
WAITING = (*SENDING, 499, 500, 504)
"""A waiting call also gets the status that its final reply maps to."""


class Alive(BaseModel):
    """The process answers."""

    status: Literal["alive"] = "alive"


class Ready(BaseModel):
    """Whether requests can be accepted."""

    status: Literal["ready", "not_ready"]
    conditions: dict[str, str | None] = Field(description="Each dependency, and why it is missing; null: available")
    degraded: dict[str, str] = Field(description="Each missing optional dependency, and the effect")


ALIVE: Responses = {
    200: {
        "model": Alive,
        "description": "The process answers",
        "content": {"application/json": {"example": {"status": "alive"}}},
    }
}
READY: Responses = {
    200: {
        "model": Ready,
        "description": "Requests can be accepted",
        "content": {
            "application/json": {
                "example": {"status": "ready", "conditions": {"log": None, "serving": None}, "degraded": {}}
            }
        },
    },
    503: {
        "model": Ready,
        "description": "Requests cannot be accepted",
        "content": {
            "application/json": {
                "example": {
                    "status": "not_ready",
                    "conditions": {"log": None, "serving": "draining"},
                    "degraded": {"postgres": "recorded results and new keys are not found"},
                }
            }
        },
    },
}


def errors(*statuses: int) -> Responses:
    """Error responses of a route."""
    return {
        status: {
            "model": ErrorAnswer,
            "description": _DESCRIPTIONS[status],
            "content": {"application/json": {"example": {"error": _EXAMPLES[status]}}},
        }
        for status in sorted(statuses)
    } | {"default": {"model": ErrorAnswer, "description": "Any other error"}}


def answers(status: int, model: type[ResponseBody], description: str) -> Responses:
    """Success response of a route, with an example."""
    return {
        status: {
            "model": model,
            "description": description,
            "content": {"application/json": {"example": _ANSWERS[model]}},
        }
    }
