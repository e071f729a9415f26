"""OpenAI response bodies and stream events, made from replies. Pure."""

import base64
import struct
from dataclasses import dataclass
from typing import Literal

from fairlane.outcomes import FinishReason
from fairlane.records import InferenceReply, TokenLogprob, TopLogprob
from producers.openai_api import sse
from producers.openai_api.errors import GatewayError
from producers.openai_api.response_models import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Embedding,
    EmbeddingList,
    EmbeddingUsage,
    FairlaneDetails,
    TokenDetails,
    TokenLogprobPart,
    TopLogprobPart,
    Usage,
)


@dataclass(frozen=True, slots=True)
class RequestEcho:
    """Request fields that the response repeats. ``created_s``: seconds since the epoch."""

    request_id: str
    model: str
    created_s: int
    with_usage: bool = False


def chat_completion(reply: InferenceReply, asked: RequestEcho) -> bytes:
    """Response body of a chat completion, from an ``ok`` reply."""
    return (
        ChatCompletion(
            id=_chat_id(asked),
            created=asked.created_s,
            model=reply.model or asked.model,
            choices=[
                ChatChoice(
                    message=AssistantMessage(content=text_of(reply)),
                    finish_reason=_finish_reason(reply),
                    logprobs=_chat_logprobs(reply),
                )
            ],
            usage=_usage(reply),
            fairlane=_about(reply),
        )
        .model_dump_json()
        .encode()
    )


def completion(reply: InferenceReply, asked: RequestEcho) -> bytes:
    """Response body of a completion, from an ``ok`` reply."""
    choice = CompletionChoice(
        index=0, text=text_of(reply), finish_reason=_finish_reason(reply), logprobs=_completion_logprobs(reply)
    )
    return (
        _completion(asked, reply.model, [choice])
        .model_copy(update={"usage": _usage(reply), "fairlane": _about(reply)})
        .model_dump_json()
        .encode()
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
    return (
        EmbeddingList(
            model=reply.model or asked.model,
            data=[
                Embedding(index=index, embedding=_base64(vector) if as_base64 else list(vector))
                for index, vector in enumerate(vectors)
            ],
            usage=EmbeddingUsage(prompt_tokens=reply.usage.prompt_tokens, total_tokens=reply.usage.prompt_tokens),
            fairlane=_about(reply),
        )
        .model_dump_json()
        .encode()
    )


def text_of(reply: InferenceReply) -> str:
    """Text of a reply; empty if it has none."""
    return "" if reply.output is None else reply.output.text or ""


class ChatStream:
    """Server-sent events of a streamed chat completion."""

    def __init__(self, asked: RequestEcho) -> None:
        self._asked = asked

    def first(self) -> bytes:
        """The opening event, which carries the role."""
        return self._event(ChatDelta(role="assistant", content=""))

    def text(self, text: str) -> bytes:
        """An event with a piece of text."""
        return self._event(ChatDelta(content=text))

    def last(self, reply: InferenceReply) -> bytes:
        """The closing events: finish reason, ``fairlane`` field, and usage if requested.

        They carry the log probabilities of all tokens: the pipeline delivers these only with the reply.
        """
        chunk = self._chunk(
            ChatChunkChoice(
                index=0, delta=ChatDelta(), finish_reason=_finish_reason(reply), logprobs=_chat_logprobs(reply)
            )
        )
        events = _event(chunk.model_copy(update={"fairlane": _about(reply)}))
        if self._asked.with_usage:
            usage = self._chunk(None).model_copy(update={"usage": _usage(reply)})
            events += _event(usage)
        return events + sse.DONE

    def _event(self, delta: ChatDelta) -> bytes:
        return _event(self._chunk(ChatChunkChoice(index=0, delta=delta, finish_reason=None, logprobs=None)))

    def _chunk(self, choice: ChatChunkChoice | None) -> ChatChunk:
        asked = self._asked
        chunk = ChatChunk(
            id=_chat_id(asked),
            object="chat.completion.chunk",
            created=asked.created_s,
            model=asked.model,
            choices=[] if choice is None else [choice],
        )
        return chunk.model_copy(update={"usage": None}) if asked.with_usage else chunk


class CompletionStream:
    """Server-sent events of a streamed completion."""

    def __init__(self, asked: RequestEcho) -> None:
        self._asked = asked

    def first(self) -> bytes:
        """Empty: a completion stream has no opening event."""
        return b""

    def text(self, text: str) -> bytes:
        """An event with a piece of text."""
        return _event(self._chunk([CompletionChoice(index=0, text=text, finish_reason=None, logprobs=None)]))

    def last(self, reply: InferenceReply) -> bytes:
        """The closing events, as in ``ChatStream.last``."""
        choice = CompletionChoice(
            index=0, text="", finish_reason=_finish_reason(reply), logprobs=_completion_logprobs(reply)
        )
        events = _event(self._chunk([choice]).model_copy(update={"fairlane": _about(reply)}))
        if self._asked.with_usage:
            events += _event(self._chunk([]).model_copy(update={"usage": _usage(reply)}))
        return events + sse.DONE

    def _chunk(self, choices: list[CompletionChoice]) -> Completion:
        chunk = _completion(self._asked, None, choices)
        return chunk.model_copy(update={"usage": None}) if self._asked.with_usage else chunk


Stream = ChatStream | CompletionStream


def _event(chunk: ChatChunk | Completion) -> bytes:
    # OpenAI's chunks omit unset fields.
    return sse.event(chunk.model_dump_json(exclude_unset=True))


def _completion(asked: RequestEcho, model: str | None, choices: list[CompletionChoice]) -> Completion:
    return Completion(
        id=f"cmpl-{asked.request_id}",
        object="text_completion",
        created=asked.created_s,
        model=model or asked.model,
        choices=choices,
    )


def _chat_id(asked: RequestEcho) -> str:
    return f"chatcmpl-{asked.request_id}"


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
    return ChatLogprobs(
        content=[
            TokenLogprobPart(
                token=one.token,
                logprob=one.logprob,
                bytes=_bytes(one),
                top_logprobs=[
                    TopLogprobPart(token=other.token, logprob=other.logprob, bytes=_bytes(other)) for other in one.top
                ],
            )
            for one in tokens
        ]
    )


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


def _bytes(token: TokenLogprob | TopLogprob) -> list[int]:
    return list(token.token.encode(errors="replace"))


def _base64(vector: tuple[float, ...]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
