"""Parses an input row to a request or an error; no error quotes the row. Pure.

A line of an OpenAI batch file is parsed as the gateway parses the same body.
"""

import base64
import binascii
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic_core import from_json, to_json

from fairlane.client.requests import build_request, check_request
from fairlane.outcomes import Priority, Task
from fairlane.records import InferenceRequest, Retrieval
from producers.backfill.answers import CHAT, COMPLETIONS, EMBEDDINGS
from producers.backfill.job import BadRow, GoodRow, ParsedRow, RowContent
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

MOST_ID_CHARS = 512
_MOST_NAME_CHARS = 64
NO_ID = "00000000-0000-0000-0000-000000000000"
"""Request id of a row until it is sent."""

_FROM_JSON = frozenset({"messages", "texts", "documents", "stop", "retrieval", "metadata"})
"""Fields that a CSV column holds as JSON: lists and mappings."""

_LINE_FIELDS = frozenset({"custom_id", "method", "url", "body"})
_KINDS: Mapping[str, tuple[type[BaseModel], Callable[[Any, str, str], InferenceRequest]]] = {
    CHAT: (ChatBody, chat_request),
    COMPLETIONS: (CompletionBody, completion_request),
    EMBEDDINGS: (EmbeddingBody, embedding_request),
}
_NOT_IN_BATCHES = ("stream", "dimensions", "encoding_format")
"""Fields that only accept their default: answers in a file are complete, and vectors are numbers."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)


class _Turn(_Strict):
    role: str
    content: str


class _Retrieval(_Strict):
    collection: str
    top_k: int = 4
    mode: str = "hybrid"


class _Fields(_Strict):
    """Fields of a request that a row may set."""

    id: Annotated[str, StringConstraints(max_length=MOST_ID_CHARS)] | int | None = None
    model: str
    task: Literal["generate", "embed", "rank", "classify"] | None = None
    messages: list[_Turn] | None = None
    prompt: str | None = None
    texts: list[str] | None = None
    query: str | None = None
    documents: list[str] | None = None
    image: str | bytes | None = None
    max_tokens: int | None = None
    temperature: float = Field(0.0, allow_inf_nan=False)
    top_p: float = Field(1.0, allow_inf_nan=False)
    stop: str | list[str] = ()  # type: ignore[assignment]  # as build_request has it: none
    seed: int | None = None
    logprobs: int | None = None
    priority: str = "low"
    retrieval: _Retrieval | None = None
    group: str | None = None
    cache: str | None = None
    metadata: dict[str, str] = Field(default_factory=dict)


FIELD_NAMES = frozenset({*_Fields.model_fields, "custom_id"})
"""Names of columns that are used without ``--column``."""


def parse_row(
    content: RowContent, tenant: str, defaults: Mapping[str, Any], openai_url: str | None = None
) -> ParsedRow:
    """The request of a row, or what is wrong with it; never raises because of the row. With ``openai_url`` it must be
    an OpenAI batch line for that URL."""
    found = _parsed(content, tenant, defaults, openai_url)
    if isinstance(found, BadRow) and found.url is None and openai_url is not None:
        return replace(found, url=openai_url)
    return found


def _parsed(content: RowContent, tenant: str, defaults: Mapping[str, Any], openai_url: str | None) -> ParsedRow:
    if isinstance(content, BadRow):
        return content
    if isinstance(content, bytes):
        try:
            found = from_json(content, allow_inf_nan=False)
        except ValueError as error:
            return BadRow(None, "row", f"not JSON: {error}")
        if not isinstance(found, dict):
            return BadRow(None, "row", "not a JSON object")
        strict = True
    else:
        found, strict = {name: value for name, value in content.items() if value is not None}, False
    row_id = _id_of(found)
    if openai_url is not None and found.get("url") != openai_url:
        return BadRow(row_id, "url", f"must be {openai_url}, as the batch's endpoint")
    if "body" in found or "url" in found:
        return _openai_row(row_id, found, tenant)
    if "id" not in found:
        found.pop("custom_id", None)
    try:
        return GoodRow(row_id, _request({**defaults, **found}, tenant, strict=strict))
    except _WrongFieldError as error:
        return BadRow(row_id, error.field, error.reason)


def _openai_row(row_id: str | None, found: Mapping[str, Any], tenant: str) -> ParsedRow:
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
        request = request_of(parse(model, to_json(body)), tenant, NO_ID)
    except GatewayError as error:
        field = "body" if error.field is None else f"body.{param_of(error.field)}"
        return BadRow(row_id, field, error.message.removeprefix(f"{error.field}: "), url)
    if "priority" not in (body.get("fairlane") or {}):
        request = replace(request, priority=Priority.LOW.value)
    return GoodRow(row_id, request, url)


class _WrongFieldError(Exception):
    def __init__(self, field: str, reason: str) -> None:
        super().__init__(field, reason)
        self.field = field
        self.reason = reason


def _request(found: Mapping[str, Any], tenant: str, *, strict: bool) -> InferenceRequest:
    try:
        given = _Fields.model_validate(found if strict else _decoded(found), strict=strict)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise _WrongFieldError(_name(first["loc"]), first["msg"].removeprefix("Value error, ")) from None
    fields: dict[str, Any] = dict(given)
    del fields["id"]
    fields |= {
        "task": given.task or _task_of(given),
        "messages": None if given.messages is None else [turn.model_dump() for turn in given.messages],
        "image": _image(given.image),
        "retrieval": None if given.retrieval is None else Retrieval(**given.retrieval.model_dump()),
        "request_id": NO_ID,
    }
    try:
        request = build_request(**fields)
        check_request(request, tenant)
    except ValueError as error:
        field, _, reason = str(error).partition(": ")
        raise _WrongFieldError(field, reason) from None
    return request


def _task_of(given: _Fields) -> str:
    """The task, derived from the input."""
    if given.texts is not None:
        return Task.EMBED.value
    if given.documents is not None or given.query is not None:
        return Task.RANK.value
    if given.image is not None:
        return Task.CLASSIFY.value
    return Task.GENERATE.value


def _image(given: str | bytes | None) -> bytes | None:
    if given is None or isinstance(given, bytes):
        return given
    try:
        return base64.b64decode(given, validate=True)
    except (binascii.Error, ValueError):
        raise _WrongFieldError("image", "not base64") from None


def _decoded(found: Mapping[str, Any]) -> dict[str, Any]:
    """Columns as fields; values that are neither text nor number are parsed as JSON."""
    fields = dict(found)
    for name in _FROM_JSON & fields.keys():
        value = fields[name]
        if isinstance(value, str) and (name != "stop" or value.startswith("[")):
            try:
                fields[name] = json.loads(value)
            except (ValueError, RecursionError):
                raise _WrongFieldError(name, "not JSON") from None
    return fields


def _id_of(found: Mapping[str, Any]) -> str | None:
    value = found.get("custom_id", found.get("id"))
    if isinstance(value, str) and len(value) <= MOST_ID_CHARS:
        return value
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else None


def _name(location: tuple[int | str, ...]) -> str:
    """Path of a field; a name from the row itself is cut."""
    return ".".join(str(part) for part in location)[:_MOST_NAME_CHARS] or "row"
