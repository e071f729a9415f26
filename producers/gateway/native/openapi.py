"""OpenAPI responses and examples of the native routes."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field

from fairlane.outcomes import Code
from producers.gateway.native.errors import unknown_request
from producers.gateway.native.response_bodies import (
    AcceptedAnswer,
    ClassifyAnswer,
    HistoryAnswer,
    RankAnswer,
    ResponseBody,
    ResultAnswer,
    StatusAnswer,
    links_of,
)
from producers.gateway.openapi import (
    EXAMPLE_ID,
    READ_STATUSES,
    SEND_STATUSES,
    Responses,
    answered,
    errors,
)
from producers.openai_api.errors import GatewayError

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

_INVALID = (
    GatewayError(400, Code.INVALID, "must be from 1 to 4096, not 9000", field="parameters.max_tokens"),
    "A field is invalid; `field` names it",
)
_UNKNOWN = (unknown_request(), "No such request, or its result has expired")
_CANCELLED = (GatewayError(499, "cancelled", "the request was cancelled"), "The request was cancelled")
READING = errors((*READ_STATUSES, 400), _INVALID, _UNKNOWN, is_native=True)
SENDING = errors((*SEND_STATUSES, 499, 500, 504), _INVALID, _UNKNOWN, _CANCELLED, is_native=True)
"""A waiting call also gets the status that its final reply maps to."""


class Alive(BaseModel):
    """The process answers."""

    status: Literal["alive"] = "alive"


class Ready(BaseModel):
    """Whether requests can be accepted."""

    status: Literal["ready", "not_ready"]
    conditions: dict[str, str | None] = Field(description="Each dependency, and why it is missing; null: available")
    degraded: dict[str, str] = Field(description="Each missing optional dependency, and the effect")


ALIVE = answered(Alive, {"status": "alive"}, "The process answers")
READY = answered(
    Ready,
    {"status": "ready", "conditions": {"log": None, "serving": None}, "degraded": {}},
    "Requests can be accepted",
) | answered(
    Ready,
    {
        "status": "not_ready",
        "conditions": {"log": None, "serving": "draining"},
        "degraded": {"postgres": "recorded results and new keys are not found"},
    },
    "Requests cannot be accepted",
    503,
)


def answers(status: int, model: type[ResponseBody], description: str) -> Responses:
    """Success response of a route, with an example."""
    return answered(model, _ANSWERS[model], description, status)
