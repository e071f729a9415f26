"""Lines of OpenAI batch files, parsed as the gateway parses the same bodies."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json

from fairlane.outcomes import Priority
from fairlane.records import InferenceRequest
from producers.backfill.answers import CHAT, COMPLETIONS, EMBEDDINGS
from producers.backfill.row import BadRow, GoodRow, ParsedRow
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
_KINDS: Mapping[str, tuple[type[BaseModel], Callable[[Any, str, str], InferenceRequest]]] = {
    CHAT: (ChatBody, chat_request),
    COMPLETIONS: (CompletionBody, completion_request),
    EMBEDDINGS: (EmbeddingBody, embedding_request),
}
_NOT_IN_BATCHES = ("stream", "dimensions", "encoding_format")
"""Fields that only accept their default: answers in a file are complete, and vectors are numbers."""


def is_openai_line(found: Mapping[str, Any]) -> bool:
    """Whether this is a line of an OpenAI batch file, valid or not."""
    return "body" in found or "url" in found


def read_line(row_id: str | None, found: Mapping[str, Any], tenant: str, request_id: str) -> ParsedRow:
    """The request of a line. Never raises because of the line."""
    url, body = found.get("url"), found.get("body")
    if not isinstance(url, str) or url not in _KINDS:
        return BadRow(row_id, "url", f"must be one of {', '.join(_KINDS)}")
    if not isinstance(found.get("custom_id"), str) or not found["custom_id"]:
        return BadRow(row_id, "custom_id", "missing or not a text", url)
    if found.get("method") != "POST":
        return BadRow(row_id, "method", "must be POST", url)
    if found.keys() - _LINE_FIELDS:
        return BadRow(row_id, "row", "has fields other than custom_id, method, url and body", url)
    if not isinstance(body, dict):
        return BadRow(row_id, "body", "missing or not an object", url)
    for name in _NOT_IN_BATCHES:
        if body.get(name) not in (None, False, "float"):
            return BadRow(row_id, f"body.{name}", "is not supported in a batch", url)
    model, request_of = _KINDS[url]
    try:
        request = request_of(parse(model, to_json(body)), tenant, request_id)
    except GatewayError as error:
        field = "body" if error.field is None else f"body.{param_of(error.field)}"
        return BadRow(row_id, field, error.message.removeprefix(f"{error.field}: "), url)
    if "priority" not in (body.get("fairlane") or {}):
        request = replace(request, priority=Priority.LOW.value)
    return GoodRow(row_id, request, url)
