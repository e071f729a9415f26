"""What OpenAI's clients are answered with. ``fairlane`` is a field of our own, which they keep and do not need."""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class TokenDetails(_Part):
    """How many of the prompt's tokens were in the model's cache."""

    cached_tokens: int


class Usage(_Part):
    """Tokens as the model's own tokenizer counted them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: TokenDetails


class UsedPassage(_Part):
    """A passage that the answer was given to go by."""

    passage_id: str
    score: float


class UsedRetrieval(_Part):
    """How far the search for passages went, and why not as far as it was asked to."""

    collection: str
    mode: str
    reason: str | None


class UsedCache(_Part):
    """Whose answer this is: that of an earlier request."""

    mode: str
    request_id: str
    answered_at_ms: int
    similarity: float


class UsedHistory(_Part):
    """How many messages of the conversation were added, and why not all."""

    messages: int
    reason: str | None


class About(_Part):
    """What Fairlane says of the request."""

    request_id: str
    model_version: str | None
    degradations: list[str]
    passages: list[UsedPassage]
    retrieval: UsedRetrieval | None
    cache: UsedCache | None
    history: UsedHistory | None
    replayed: bool


class TopLogprobPart(_Part):
    """A token that could have stood here; ``bytes`` are its UTF-8."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobPart(TopLogprobPart):
    """A token of the answer, and the likeliest at its place."""

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
    """The one choice there is."""

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
    fairlane: About


class ChatDelta(_Part):
    """What is new of the answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(_Part):
    """The one choice there is."""

    index: int
    delta: ChatDelta
    finish_reason: Literal["stop", "length"] | None
    logprobs: ChatLogprobs | None


class ChatChunk(_Part):
    """One event of a stream. ``usage`` is there if it was asked for, and null in all but the last."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    fairlane: About | None = None


class CompletionLogprobs(_Part):
    """One entry per token in each list; ``text_offset`` counts characters."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(_Part):
    """The one choice there is."""

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
    fairlane: About | None = None


class Embedding(_Part):
    """One text's vector: numbers, or in base64 its little-endian 32-bit floats."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(_Part):
    """Tokens of all texts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(_Part):
    """One vector per text, in their order."""

    object: Literal["list"] = "list"
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage
    fairlane: About


class Model(_Part):
    """A model that this tenant may use. ``created`` is 0: nobody keeps when it came."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "fairlane"


class ModelList(_Part):
    """In the order of their names."""

    object: Literal["list"] = "list"
    data: list[Model]


class ErrorDetail(_Part):
    """``param`` is the field at fault; ``code`` is for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(_Part):
    """Every answer that is not a success."""

    error: ErrorDetail
