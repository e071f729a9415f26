"""OpenAI response models. ``fairlane`` is an extra field, which OpenAI's clients keep."""

from typing import Literal

from pydantic import BaseModel, ConfigDict


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


class UsedPassage(_Part):
    """A passage given to the model as context."""

    passage_id: str
    score: float


class UsedRetrieval(_Part):
    """Retrieval as it was done, and the reason if that is less than requested."""

    collection: str
    mode: str
    reason: str | None


class UsedCache(_Part):
    """The earlier request whose answer this is."""

    mode: str
    request_id: str
    answered_at_ms: int
    similarity: float


class UsedHistory(_Part):
    """Number of conversation messages added, and the reason if not all were."""

    messages: int
    reason: str | None


class FairlaneDetails(_Part):
    """Fairlane's details of the request."""

    request_id: str
    model_version: str | None
    degradations: list[str]
    passages: list[UsedPassage]
    retrieval: UsedRetrieval | None
    cache: UsedCache | None
    history: UsedHistory | None
    replayed: bool


class TopLogprobPart(_Part):
    """A candidate token at this position; ``bytes`` is its UTF-8."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobPart(TopLogprobPart):
    """A token of the answer, and the likeliest tokens at its position."""

    top_logprobs: list[TopLogprobPart]


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
    """The only choice."""

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
    """The only choice."""

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
    """The only choice."""

    index: int
    text: str
    finish_reason: Literal["stop", "length"] | None
    logprobs: CompletionLogprobs | None


class Completion(_Part):
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
