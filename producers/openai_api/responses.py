"""OpenAI responses and stream events, made from replies. Pure.

``fairlane`` is an extra field, which OpenAI's clients keep.
"""

import base64
import json
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, computed_field

from fairlane.outcomes import FinishReason
from fairlane.records import CacheUse, InferenceReply, PassageReference
from producers.openai_api.errors import GatewayError


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, from_attributes=True)


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


class FairlaneDetails(_Part):
    """Fairlane's details of the request."""

    request_id: str
    model_version: str | None
    degradations: tuple[str, ...]
    passages: tuple[PassageReference, ...]
    retrieval: UsedRetrieval | None
    cache: CacheUse | None
    history: UsedHistory | None
    replayed: bool


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
    finish_reason: Literal["stop", "length"]
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


class ChatDelta(_Part):
    """The next piece of the answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(_Part):
    index: int
    delta: ChatDelta
    finish_reason: Literal["stop", "length"] | None
    logprobs: ChatLogprobs | None


class ChatChunk(_Part):
    """One event of a stream. ``usage`` is present only if requested, and null in all but the last."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    fairlane: FairlaneDetails | None = None


class CompletionLogprobs(_Part):
    """One entry per token in each list; ``text_offset`` counts characters."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(_Part):
    index: int
    text: str
    finish_reason: Literal["stop", "length"] | None
    logprobs: CompletionLogprobs | None


class TextCompletion(_Part):
    """The answer to a prompt, or one event of its stream."""

    id: str
    object: Literal["text_completion"]
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
    """Response body of a chat completion, from an ``ok`` reply."""
    message = AssistantMessage(content=text_of(reply))
    choice = ChatChoice(message=message, finish_reason=_finish_reason(reply), logprobs=_chat_logprobs(reply))
    return _json(
        ChatCompletion(
            id=f"chatcmpl-{asked.request_id}",
            created=asked.created_s,
            model=reply.model or asked.model,
            choices=[choice],
            usage=_usage(reply),
            fairlane=_about(reply),
        )
    )


def completion(reply: InferenceReply, asked: RequestEcho) -> bytes:
    """Response body of a completion, from an ``ok`` reply."""
    whole = _completion(asked, reply.model, [_completion_choice(reply, text_of(reply))])
    return _json(whole.model_copy(update={"usage": _usage(reply), "fairlane": _about(reply)}))


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
    return _json(EmbeddingList(model=reply.model or asked.model, data=data, usage=usage, fairlane=_about(reply)))


def _json(body: BaseModel) -> bytes:
    return body.model_dump_json().encode()


def text_of(reply: InferenceReply) -> str:
    """Text of a reply; empty if it has none."""
    return "" if reply.output is None else reply.output.text or ""


class TextEvents(ABC):
    """Server-sent events of a streamed answer (WHATWG HTML, "Server-sent events")."""

    def __init__(self, asked: RequestEcho) -> None:
        self._asked = asked

    @abstractmethod
    def first(self) -> bytes:
        """The opening event; may be empty."""

    @abstractmethod
    def text(self, text: str) -> bytes:
        """An event with a piece of text."""

    def last(self, reply: InferenceReply) -> bytes:
        """The closing events: finish reason, ``fairlane`` field, and usage if requested.

        They carry the log probabilities of all tokens: the pipeline delivers these only with the reply.
        """
        events = self._event(self._closing(reply), fairlane=_about(reply))
        if self._asked.with_usage:
            events += self._event(usage=_usage(reply))
        return events + b"data: [DONE]\n\n"

    @abstractmethod
    def _chunk(self, *choices: Any) -> "ChatChunk | TextCompletion":
        """The data of an event."""

    @abstractmethod
    def _closing(self, reply: InferenceReply) -> "ChatChunkChoice | CompletionChoice":
        """The choice without text, with the finish reason."""

    def _event(self, *choices: Any, **fields: Any) -> bytes:
        if self._asked.with_usage:
            fields = {"usage": None} | fields
        chunk = self._chunk(*choices)
        if fields:
            chunk = chunk.model_copy(update=fields)
        # OpenAI's chunks omit unset fields.
        return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n".encode()


class ChatEvents(TextEvents):
    """Events of a chat completion; the opening one carries the role."""

    def first(self) -> bytes:
        return self._event(_chat_choice(ChatDelta(role="assistant", content="")))

    def text(self, text: str) -> bytes:
        return self._event(_chat_choice(ChatDelta(content=text)))

    def _closing(self, reply: InferenceReply) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=0, delta=ChatDelta(), finish_reason=_finish_reason(reply), logprobs=_chat_logprobs(reply)
        )

    def _chunk(self, *choices: ChatChunkChoice) -> ChatChunk:
        asked = self._asked
        return ChatChunk(
            id=f"chatcmpl-{asked.request_id}",
            object="chat.completion.chunk",
            created=asked.created_s,
            model=asked.model,
            choices=list(choices),
        )


class CompletionEvents(TextEvents):
    """Events of a completion, without an opening one."""

    def first(self) -> bytes:
        return b""

    def text(self, text: str) -> bytes:
        return self._event(CompletionChoice(index=0, text=text, finish_reason=None, logprobs=None))

    def _closing(self, reply: InferenceReply) -> CompletionChoice:
        return _completion_choice(reply, "")

    def _chunk(self, *choices: CompletionChoice) -> TextCompletion:
        return _completion(self._asked, None, list(choices))


def _chat_choice(delta: ChatDelta) -> ChatChunkChoice:
    return ChatChunkChoice(index=0, delta=delta, finish_reason=None, logprobs=None)


def _completion_choice(reply: InferenceReply, text: str) -> CompletionChoice:
    return CompletionChoice(
        index=0, text=text, finish_reason=_finish_reason(reply), logprobs=_completion_logprobs(reply)
    )


def _completion(asked: RequestEcho, model: str | None, choices: list[CompletionChoice]) -> TextCompletion:
    return TextCompletion(
        id=f"cmpl-{asked.request_id}",
        object="text_completion",
        created=asked.created_s,
        model=model or asked.model,
        choices=choices,
    )


def _finish_reason(reply: InferenceReply) -> Literal["stop", "length"]:
    return "length" if reply.finish_reason == FinishReason.LENGTH else "stop"


def _usage(reply: InferenceReply) -> Usage:
    used = reply.usage
    return Usage(
        prompt_tokens=used.prompt_tokens,
        completion_tokens=used.completion_tokens,
        total_tokens=used.prompt_tokens + used.completion_tokens,
        prompt_tokens_details=TokenDetails(cached_tokens=used.cached_tokens),
    )


def _about(reply: InferenceReply) -> FairlaneDetails:
    return FairlaneDetails.model_validate(
        {
            "request_id": reply.request_id,
            "model_version": reply.model_version,
            "degradations": reply.degradations,
            "passages": reply.passages,
            "retrieval": reply.retrieval_use,
            "cache": reply.cache_use,
            "history": reply.history_use,
            "replayed": reply.replayed,
        }
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
