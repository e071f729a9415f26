"""Lines of OpenAI batch files as requests, parsed as the gateway parses the same bodies."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json

from fairlane.outcomes import Priority
from fairlane.records import InferenceRequest
from producers.backfill.openai_responses import CHAT, COMPLETIONS, EMBEDDINGS, URLS
from producers.openai_api.body import parse
from producers.openai_api.errors import GatewayError, param_of
from producers.openai_api.request_models import (
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    chat_request,
    completion_request,
    embedding_request,
)

_LINE_FIELDS = frozenset({"custom_id", "method", "url", "body"})
_MODELS: Mapping[str, type[BaseModel]] = {CHAT: ChatBody, COMPLETIONS: CompletionBody, EMBEDDINGS: EmbeddingBody}
_MADE: Mapping[str, Callable[[Any, str, str], InferenceRequest]] = {
    CHAT: chat_request,
    COMPLETIONS: completion_request,
    EMBEDDINGS: embedding_request,
}
_NOT_IN_BATCHES = ("stream", "dimensions", "encoding_format")
"""Fields that may say only what is done anyway: an answer in a file is whole, and its vectors are numbers."""


@dataclass(frozen=True, slots=True)
class OpenAILine:
    """One line: where it was to be posted, and its request or what is wrong: a field and the reason."""

    url: str | None
    request: InferenceRequest | None = None
    field: str = ""
    reason: str = ""


def is_openai_line(found: Mapping[str, Any]) -> bool:
    """Whether this is a line of an OpenAI batch file, right or wrong."""
    return "body" in found or "url" in found


def read_line(found: Mapping[str, Any], tenant: str, request_id: str) -> OpenAILine:
    """The request of a line. Never raises because of the line."""
    url, body = found.get("url"), found.get("body")
    if url not in URLS:
        return OpenAILine(None, None, "url", f"must be one of {', '.join(URLS)}")
    if not isinstance(found.get("custom_id"), str) or not found["custom_id"]:
        return OpenAILine(url, None, "custom_id", "missing or not a text")
    if found.get("method") != "POST":
        return OpenAILine(url, None, "method", "must be POST")
    if found.keys() - _LINE_FIELDS:
        return OpenAILine(url, None, "row", "has fields other than custom_id, method, url and body")
    if not isinstance(body, dict):
        return OpenAILine(url, None, "body", "missing or not an object")
    for name in _NOT_IN_BATCHES:
        if body.get(name) not in (None, False, "float"):
            return OpenAILine(url, None, f"body.{name}", "is not supported in a batch")
    try:
        request = _MADE[url](parse(_MODELS[url], to_json(body)), tenant, request_id)
        if "priority" not in (body.get("fairlane") or {}):
            request = replace(request, priority=Priority.LOW.value)
        return OpenAILine(url, request)
    except GatewayError as error:
        field = "body" if error.field is None else f"body.{param_of(error.field)}"
        return OpenAILine(url, None, field, error.message.removeprefix(f"{error.field}: "))
