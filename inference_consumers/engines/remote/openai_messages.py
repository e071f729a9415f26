"""Requests and answers of OpenAI's interface, as its many servers have it in common. Pure.

Completions take the tokens of a prompt, or its text; chat completions take messages. Both stream.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from fairlane.outcomes import Code, FinishReason
from fairlane.records import Message, Parameters, TokenLogprob, TokenUsage, TopLogprob
from fairlane_server.text import clean_text
from inference_consumers.engines.generated_text import outcome_of_text
from inference_consumers.engines.prompts import has_broken_text
from inference_consumers.engines.protocol import NOT_FINITE, EngineItem, Failure, ItemOutcome
from inference_consumers.engines.remote.errors import (
    UNREADABLE,
    EndpointFailedError,
    ItemRefusedError,
    unreadable_numbers,
)

COMPLETIONS = "/v1/completions"
CHAT_COMPLETIONS = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"
MODELS = "/v1/models"

DONE = b"[DONE]"

_REASONS = {
    "stop": FinishReason.STOP,
    "eos_token": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "content_filter": FinishReason.CONTENT_FILTER,
}
_GAVE_UP = frozenset({"abort", "error"})


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """One generation. ``prompt`` are token ids, the text of a plain prompt, or messages; ``prompt_tokens`` are counted
    where there are token ids, otherwise estimated; ``max_prompt_tokens`` bounds what a server can have counted."""

    item: EngineItem
    prompt: Sequence[int] | str | tuple[Message, ...]
    prompt_tokens: int
    max_prompt_tokens: int
    max_tokens: int
    stop: tuple[str, ...]

    @property
    def path(self) -> str:
        return CHAT_COMPLETIONS if isinstance(self.prompt, tuple) else COMPLETIONS

    def content(self, served_name: str) -> bytes:
        parameters = self.item.parameters
        body: dict[str, Any] = {
            "model": served_name,
            "max_tokens": self.max_tokens,
            "temperature": parameters.temperature,
            "top_p": parameters.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.stop:
            body["stop"] = self.stop
        if parameters.seed is not None:
            body["seed"] = parameters.seed
        if isinstance(self.prompt, tuple):
            body["messages"] = [{"role": one.role, "content": clean_text(one.content)} for one in self.prompt]
            if parameters.logprobs is not None:
                body |= {"logprobs": True, "top_logprobs": parameters.logprobs}
        else:
            body["prompt"] = self.prompt
            if parameters.logprobs is not None:
                body["logprobs"] = parameters.logprobs
        return msgspec.json.encode(body)


class _Top(msgspec.Struct):
    token: str
    logprob: float


class _Chosen(msgspec.Struct):
    token: str
    logprob: float
    top_logprobs: list[_Top] = []


class _Logprobs(msgspec.Struct):
    """``content`` in a chat, the three lists otherwise."""

    content: list[_Chosen] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Vector(msgspec.Struct):
    index: int
    embedding: list[float | None]
    """Servers write null for a number that is not finite."""


class _Embeddings(msgspec.Struct):
    data: list[_Vector]
    usage: _Usage | None = None


class _ServedModel(msgspec.Struct):
    id: str


class _ServedModels(msgspec.Struct):
    data: list[_ServedModel]


_chunks = msgspec.json.Decoder(_Chunk)
_embeddings = msgspec.json.Decoder(_Embeddings)
_models = msgspec.json.Decoder(_ServedModels)


@dataclass(slots=True)
class StreamedAnswer:
    """The answer to one generation while it comes."""

    call: GenerateCall
    is_done: bool = False
    _texts: list[str] = field(default_factory=list)
    _parts: int = 0
    _usage: _Usage | None = None
    _finish_reason: str | None = None
    _logprobs: list[TokenLogprob] = field(default_factory=list)

    def take(self, data: bytes) -> str:
        """The text of one event. Raises EndpointFailedError."""
        if data.strip() == DONE:
            self.is_done = True
            return ""
        try:
            chunk = _chunks.decode(data)
        except UNREADABLE as error:
            raise EndpointFailedError("its answer is not what this interface answers") from error
        if chunk.error is not None:
            raise EndpointFailedError("it ended its answer with an error")
        self._usage = chunk.usage or self._usage
        text = ""
        for choice in chunk.choices[:1]:
            text = choice.text or (choice.delta.content if choice.delta is not None else None) or ""
            self._finish_reason = choice.finish_reason or self._finish_reason
            if choice.logprobs is not None:
                self._logprobs += _named_logprobs(choice.logprobs, self.call.item.parameters)
        if text:
            self._parts += 1
            self._texts.append(text)
        return text

    @property
    def usage(self) -> TokenUsage:
        """As the server counts. In place of a count that is missing or cannot be, that of the prompt before it was
        sent, and each part of the answer as one token."""
        given, most = self._usage or _Usage(), self.call.max_tokens
        details = given.prompt_tokens_details or _PromptDetails()
        prompt_tokens = _possible(given.prompt_tokens, self.call.max_prompt_tokens, self.call.prompt_tokens)
        return TokenUsage(
            prompt_tokens,
            _possible(given.completion_tokens, most, min(self._parts, most)),
            _possible(details.cached_tokens, prompt_tokens, 0),
        )

    def outcome(self) -> ItemOutcome:
        """After the last event. Raises EndpointFailedError where the end is missing."""
        reason = self._finish_reason
        if reason is None or reason in _GAVE_UP:
            raise EndpointFailedError("its answer has no end")
        if reason not in _REASONS:
            return Failure(Code.ENGINE_ERROR, "the server ended its answer with something else than text")
        text = "".join(self._texts)
        return outcome_of_text(
            text,
            self.usage,
            _REASONS[reason],
            self._logprobs_of_text(len(text)),
            may_be_empty=bool(self.call.stop) or reason == "content_filter",
            may_be_broken=partial(has_broken_text, self.call.item),
        )

    def _logprobs_of_text(self, length: int) -> tuple[TokenLogprob, ...] | None:
        """Of the tokens that wrote some of the text: those of a stop string and the end token have some too."""
        if self.call.item.parameters.logprobs is None:
            return None
        written, start = [], 0
        for one in self._logprobs:
            if start >= length:
                break
            written.append(one)
            start += len(one.token)
        return tuple(written)


def _possible(stated: int | None, most: int, ours: int) -> int:
    """A server's count, or ours if it cannot be: a tenant pays for it, and no record takes any integer."""
    return ours if stated is None or not 0 <= stated <= most else stated


def _named_logprobs(given: _Logprobs, parameters: Parameters) -> Iterator[TokenLogprob]:
    most = parameters.logprobs or 0
    if given.content is not None:
        for one in given.content:
            top = tuple(TopLogprob(other.token, other.logprob) for other in one.top_logprobs[:most])
            yield TokenLogprob(one.token, one.logprob, top)
        return
    tokens, values = given.tokens or [], given.token_logprobs or []
    tops: Sequence[dict[str, float] | None] = given.top_logprobs or [None] * len(tokens)
    for token, value, others in zip(tokens, values, tops, strict=False):
        if value is not None:
            ranked = sorted((others or {}).items(), key=lambda pair: -pair[1])[:most]
            yield TokenLogprob(token, value, tuple(TopLogprob(name, other) for name, other in ranked))


def embedding_content(served_name: str, texts: Sequence[str]) -> bytes:
    given = [clean_text(text) for text in texts]
    return msgspec.json.encode({"model": served_name, "input": given, "encoding_format": "float"})


def vectors_of(body: bytes, count: int, estimated_tokens: int, most_tokens: int) -> tuple[list[list[float]], int]:
    """The vectors of ``count`` texts in their order, and their tokens as the server counts them, or the estimate if it
    says none or more than ``most_tokens``. Raises EndpointFailedError, and ItemRefusedError for numbers that are not
    finite."""
    try:
        given = _embeddings.decode(body)
    except UNREADABLE as error:
        raise unreadable_numbers(body, f"its answer is not what {EMBEDDINGS} answers") from error
    found = sorted(given.data, key=lambda vector: vector.index)
    if [vector.index for vector in found] != list(range(count)):
        raise EndpointFailedError("its answer does not have one vector for each text")
    vectors = [[value for value in one.embedding if value is not None and math.isfinite(value)] for one in found]
    if any(len(vector) != len(one.embedding) for vector, one in zip(vectors, found, strict=True)):
        raise ItemRefusedError(NOT_FINITE)
    return vectors, _possible((given.usage or _Usage()).prompt_tokens, most_tokens, estimated_tokens)


def served_names(body: bytes) -> list[str]:
    """Raises EndpointFailedError."""
    try:
        return [model.id for model in _models.decode(body).data]
    except UNREADABLE as error:
        raise EndpointFailedError(f"its answer is not what {MODELS} answers") from error
