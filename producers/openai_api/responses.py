"""OpenAI responses and stream events, made from replies. Pure.

``fairlane`` is an extra field, which OpenAI's clients keep.
"""

import base64
import json
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, computed_field
from pydantic_core import to_json

from fairlane.outcomes import FinishReason
from fairlane.records import CacheUse, InferenceReply, PassageReference
from producers.openai_api.errors import GatewayError

FinishedBy = Literal["stop", "length", "content_filter"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, from_attributes=True, validate_by_name=True, validate_by_alias=True)


class TokenDetails(_Part):
    """Number of prompt tokens found in the model's cache."""

    cached_tokens: int


class Usage(_Part):
    """Token counts by the model's tokenizer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: TokenDetails


class UsedRetrieval(_Part):
    """Retrieval as it was done, and the reason if that is less than requested."""

    collection: str
    mode: str
    reason: str | None


class UsedHistory(_Part):
    """Number of conversation messages added, and the reason if not all were."""

    messages: int
    reason: str | None


class UsedCost(_Part):
    """What was charged, as a decimal number of units of the currency (ISO 4217)."""

    amount: str
    currency: str


class UsedGuardrail(_Part):
    """A check of the request's input or output, or the post-processing of the answer, and what it decided: ``passed``,
    ``logged``, ``redacted``, ``changed``, ``blocked``, ``failed_open`` or ``failed_closed``. ``types`` names what was
    found or done, never the text."""

    stage: str
    check: str
    verdict: str
    types: tuple[str, ...] = ()


class ReachedBudget(_Part):
    """A soft budget that is reached. Amounts are in billionths of one unit of the currency."""

    limit: str
    of: str
    period: str
    currency: str
    limit_nanos: int
    spent_nanos: int
    reserved_nanos: int
    renews_at_ms: int
    caller: str | None


class FairlaneDetails(_Part):
    """Fairlane's details of the request."""

    request_id: str
    model_version: str | None
    degradations: tuple[str, ...]
    passages: tuple[PassageReference, ...]
    retrieval: UsedRetrieval | None = Field(validation_alias="retrieval_use")
    cache: CacheUse | None = Field(validation_alias="cache_use")
    history: UsedHistory | None = Field(validation_alias="history_use")
    replayed: bool
    cost: UsedCost | None = None
    guardrails: tuple[UsedGuardrail, ...] = ()
    budget: ReachedBudget | None = None


class TopLogprobPart(_Part):
    """A candidate token at this position; ``bytes`` is its UTF-8."""

    token: str
    logprob: float

    @computed_field  # type: ignore[prop-decorator]  # as pydantic documents it
    @property
    def bytes(self) -> list[int]:
        return list(self.token.encode(errors="replace"))


class TokenLogprobPart(TopLogprobPart):
    """A token of the answer, and the likeliest tokens at its position."""

    top_logprobs: list[TopLogprobPart] = Field(validation_alias="top")


class ChatLogprobs(_Part):
    """One entry per token."""

    content: list[TokenLogprobPart]
    refusal: None = None


class AssistantMessage(_Part):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(_Part):
    index: int = 0
    message: AssistantMessage
    finish_reason: FinishedBy
    logprobs: ChatLogprobs | None


class ChatCompletion(_Part):
    """The answer to a chat."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    fairlane: FairlaneDetails


class CompletionLogprobs(_Part):
    """One entry per token in each list; ``text_offset`` counts characters."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(_Part):
    index: int
    text: str
    finish_reason: FinishedBy | None
    logprobs: CompletionLogprobs | None


class TextCompletion(_Part):
    """The answer to a prompt."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    fairlane: FairlaneDetails | None = None


class Embedding(_Part):
    """Vector of one text: numbers, or base64 of its little-endian 32-bit floats."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(_Part):
    """Token counts over all texts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(_Part):
    """One vector per text, in the order of the texts."""

    object: Literal["list"] = "list"
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage
    fairlane: FairlaneDetails


class Model(_Part):
    """A model that this tenant may use. ``created`` is 0: the time is not recorded."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "fairlane"


class ModelList(_Part):
    """Models, sorted by name."""

    object: Literal["list"] = "list"
    data: list[Model]


class ErrorDetail(_Part):
    """``param`` is the invalid field; ``code`` is machine-readable."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(_Part):
    """Body of every error response."""

    error: ErrorDetail


KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients ignore it, and proxies see that the connection is in use."""

STREAM_HEADERS: Mapping[str, str] = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # nginx would buffer the events.
    "x-accel-buffering": "no",
}


def error_event(body: Mapping[str, object]) -> bytes:
    """Last event of a stream that failed after it began."""
    return f"event: error\ndata: {json.dumps(body)}\n\n".encode()


@dataclass(frozen=True, slots=True)
class RequestEcho:
    """Request fields that the response repeats. ``created_s``: seconds since the epoch."""

    request_id: str
    model: str
    created_s: int
    with_usage: bool = False


def chat_completion(reply: InferenceReply, asked: RequestEcho) -> bytes:
    """Response body of a chat completion, from an ``ok`` reply or one whose answer was withheld."""
    message = AssistantMessage(content=text_of(reply))
    choice = ChatChoice(message=message, finish_reason=_finish_reason(reply), logprobs=_chat_logprobs(reply))
    return _json(
        ChatCompletion(
            id=f"chatcmpl-{asked.request_id}",
            created=asked.created_s,
            model=reply.model or asked.model,
            choices=[choice],
            usage=_usage(reply),
            fairlane=FairlaneDetails.model_validate(reply),
        )
    )


def completion(reply: InferenceReply, asked: RequestEcho) -> bytes:
    """Response body of a completion, from an ``ok`` reply or one whose answer was withheld."""
    choice = CompletionChoice(
        index=0, text=text_of(reply), finish_reason=_finish_reason(reply), logprobs=_completion_logprobs(reply)
    )
    return _json(
        TextCompletion(
            id=f"cmpl-{asked.request_id}",
            created=asked.created_s,
            model=reply.model or asked.model,
            choices=[choice],
            usage=_usage(reply),
            fairlane=FairlaneDetails.model_validate(reply),
        )
    )


def embeddings(reply: InferenceReply, asked: RequestEcho, *, as_base64: bool, dimensions: int | None) -> bytes:
    """Response body of an embedding request, from an ``ok`` reply.

    Raises GatewayError: 400 if the vectors do not have ``dimensions`` dimensions.
    """
    vectors = () if reply.output is None else reply.output.embeddings or ()
    if dimensions is not None and any(len(vector) != dimensions for vector in vectors):
        raise GatewayError(
            400,
            "unsupported_parameter",
            f"dimensions: vectors of this model have {len(vectors[0])}, and are not shortened",
            field="dimensions",
            request_id=reply.request_id,
        )
    data = [
        Embedding(index=index, embedding=_base64(vector) if as_base64 else list(vector))
        for index, vector in enumerate(vectors)
    ]
    usage = EmbeddingUsage(prompt_tokens=reply.usage.prompt_tokens, total_tokens=reply.usage.prompt_tokens)
    about = FairlaneDetails.model_validate(reply)
    return _json(EmbeddingList(model=reply.model or asked.model, data=data, usage=usage, fairlane=about))


def _json(body: BaseModel) -> bytes:
    return body.model_dump_json().encode()


def text_of(reply: InferenceReply) -> str:
    """Text of a reply; empty if it has none."""
    return "" if reply.output is None else reply.output.text or ""


class TextEvents(ABC):
    """Server-sent events of a streamed answer (WHATWG HTML, "Server-sent events")."""

    _prefix: ClassVar[str]
    _object: ClassVar[str]

    def __init__(self, asked: RequestEcho) -> None:
        self._asked = asked

    def first(self) -> bytes:
        """The opening event; may be empty."""
        return b""

    @abstractmethod
    def text(self, text: str) -> bytes:
        """An event with a piece of text."""

    def last(self, reply: InferenceReply) -> bytes:
        """The closing events: finish reason, ``fairlane`` field, and usage if requested.

        They carry the log probabilities of all tokens: the pipeline delivers these only with the reply.
        """
        events = self._event(self._closing(reply), fairlane=FairlaneDetails.model_validate(reply))
        if self._asked.with_usage:
            events += self._event(usage=_usage(reply))
        return events + b"data: [DONE]\n\n"

    @abstractmethod
    def _closing(self, reply: InferenceReply) -> dict[str, Any]:
        """The choice without text, with the finish reason."""

    def _event(self, *choices: Mapping[str, Any], **fields: Any) -> bytes:
        asked = self._asked
        chunk = {
            "id": f"{self._prefix}-{asked.request_id}",
            "object": self._object,
            "created": asked.created_s,
            "model": asked.model,
            "choices": choices,
            # OpenAI's chunks omit unset fields. Where usage is requested, it is null in all but the last.
            **({"usage": None} if asked.with_usage else {}),
            **fields,
        }
        return b"data: " + to_json(chunk, inf_nan_mode="null") + b"\n\n"


class ChatEvents(TextEvents):
    """Events of a chat completion; the opening one carries the role."""

    _prefix, _object = "chatcmpl", "chat.completion.chunk"

    def first(self) -> bytes:
        return self._event(_choice(delta={"role": "assistant", "content": ""}))

    def text(self, text: str) -> bytes:
        return self._event(_choice(delta={"content": text}))

    def _closing(self, reply: InferenceReply) -> dict[str, Any]:
        return _choice(_finish_reason(reply), _chat_logprobs(reply), delta={})


class CompletionEvents(TextEvents):
    """Events of a completion, without an opening one."""

    _prefix, _object = "cmpl", "text_completion"

    def text(self, text: str) -> bytes:
        return self._event(_choice(text=text))

    def _closing(self, reply: InferenceReply) -> dict[str, Any]:
        return _choice(_finish_reason(reply), _completion_logprobs(reply), text="")


def _choice(finish_reason: str | None = None, logprobs: BaseModel | None = None, **content: Any) -> dict[str, Any]:
    return {"index": 0, **content, "finish_reason": finish_reason, "logprobs": logprobs}


def _finish_reason(reply: InferenceReply) -> FinishedBy:
    if reply.finish_reason == FinishReason.CONTENT_FILTER:
        return "content_filter"
    return "length" if reply.finish_reason == FinishReason.LENGTH else "stop"


def _usage(reply: InferenceReply) -> Usage:
    used = reply.usage
    return Usage(
        prompt_tokens=used.prompt_tokens,
        completion_tokens=used.completion_tokens,
        total_tokens=used.prompt_tokens + used.completion_tokens,
        prompt_tokens_details=TokenDetails(cached_tokens=used.cached_tokens),
    )


def _chat_logprobs(reply: InferenceReply) -> ChatLogprobs | None:
    tokens = None if reply.output is None else reply.output.logprobs
    if tokens is None:
        return None
    return ChatLogprobs(content=[TokenLogprobPart.model_validate(token) for token in tokens])


def _completion_logprobs(reply: InferenceReply) -> CompletionLogprobs | None:
    tokens = None if reply.output is None else reply.output.logprobs
    if tokens is None:
        return None
    offsets, at = [], 0
    for one in tokens:
        offsets.append(at)
        at += len(one.token)
    return CompletionLogprobs(
        tokens=[one.token for one in tokens],
        token_logprobs=[one.logprob for one in tokens],
        top_logprobs=[{other.token: other.logprob for other in one.top} for one in tokens],
        text_offset=offsets,
    )


def _base64(vector: tuple[float, ...]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
