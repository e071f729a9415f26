"""OpenAI request bodies, and their conversion to ``InferenceRequest``."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from fairlane.client.requests import build_request, check_request
from fairlane.names import MOST_REFERENCE_CHARS
from fairlane.outcomes import Code, Task
from fairlane.records import MOST_INPUT_ITEMS, InferenceRequest, Message, Retrieval
from producers.openai_api.errors import UNKNOWN_PARAMETER, UNSUPPORTED_PARAMETER, GatewayError

AcceptedValues = Mapping[str, Sequence[object] | None]
"""Accepted values by field, those that change nothing; None: any value."""

_SAMPLING: AcceptedValues = {
    "n": (1, None),
    "frequency_penalty": (0, 0.0, None),
    "presence_penalty": (0, 0.0, None),
    "logit_bias": ({}, None),
}

CHAT: AcceptedValues = {
    **_SAMPLING,
    "user": None,
    "safety_identifier": None,
    "prompt_cache_key": None,
    "prompt_cache_retention": None,
    "prompt_cache_options": None,
    "parallel_tool_calls": None,
    "store": (False, None),
    "service_tier": ("auto", "default", None),
    "response_format": ({"type": "text"}, None),
    "modalities": (["text"], None),
    "tools": ([], None),
    "tool_choice": ("none", "auto", None),
    "functions": ([], None),
    "function_call": ("none", "auto", None),
    "audio": (None,),
    "prediction": (None,),
    "moderation": (None,),
    "reasoning_effort": ("none", None),
    "verbosity": ("medium", None),
    "web_search_options": (None,),
}

MESSAGE: AcceptedValues = {
    "name": (None,),
    "refusal": (None,),
    "audio": (None,),
    "annotations": ([], None),
    "function_call": (None,),
    "tool_calls": ([], None),
}
"""Includes the fields that an assistant message of an earlier answer carries."""

COMPLETION: AcceptedValues = {
    **_SAMPLING,
    "user": None,
    "best_of": (1, None),
    "echo": (False, None),
    "suffix": ("", None),
}

EMBEDDING: AcceptedValues = {"user": None}


def refuse_unsupported(extra: Mapping[str, Any] | None, neutral: AcceptedValues, within: str = "") -> None:
    """Reject fields that would be expected to change the answer and cannot. ``within`` is the path of the fields, with
    a trailing dot.

    Raises GatewayError: 400, naming the first such field.
    """
    for name, value in (extra or {}).items():
        if name not in neutral:
            shown = within + name if _is_field(name) else within.rstrip(".") or None
            raise GatewayError(400, UNKNOWN_PARAMETER, "this field is not known", field=shown)
        allowed = neutral[name]
        if allowed is not None and not any(value == one and type(value) is type(one) for one in allowed):
            reason = "only 1 is supported" if name in ("n", "best_of") else "is not supported"
            raise GatewayError(400, UNSUPPORTED_PARAMETER, f"{name}: {reason}", field=within + name)


def _is_field(name: str) -> bool:
    return len(name) <= 64 and name.isascii() and name.isidentifier()


_MOST_TOKENS = 2**31 - 1
_LARGEST_INT = 2**63 - 1
_DEFAULT_TEMPERATURE = 1.0
_DEFAULT_COMPLETION_TOKENS = 16
_MOST_STOPS = 8
_IGNORED = "Taken, and changes nothing."
_TEXT_SCHEMA = {"type": "string"}
_SOME_TEXT_SCHEMA = {"type": "string", "minLength": 1}


def _text_of_parts(content: object) -> object:
    """Text of a message: a string, or concatenated text parts."""
    if not isinstance(content, list):
        return content
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise PydanticCustomError("part", "part {index} is no text; only text is supported", {"index": index})
        text = part.get("text")
        if not isinstance(text, str):
            raise PydanticCustomError("part", "part {index} needs a text that is a string", {"index": index})
        texts.append(text)
    return "".join(texts)


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _one_prompt(value: object) -> object:
    if isinstance(value, list):
        if len(value) != 1 or not isinstance(value[0], str):
            raise PydanticCustomError("prompt", "must be a string, or a list of one; tokens are not supported")
        return value[0]
    return value


def _no_tokens(value: object) -> object:
    if isinstance(value, list) and value and not all(isinstance(item, str) for item in value):
        raise PydanticCustomError("input", "must be a string or a list of strings; tokens are not supported")
    return _listed(value)


def _one_or_more(item: dict[str, Any], one: dict[str, Any] | None = None, **bounds: Any) -> WithJsonSchema:
    """Schema of an item, or a list of items within bounds."""
    return WithJsonSchema({"anyOf": [one or item, {"type": "array", "items": item, **bounds}]})


_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _TEXT_SCHEMA},
    "required": ["type", "text"],
}
Content = Annotated[str, BeforeValidator(_text_of_parts), _one_or_more(_TEXT_PART, _TEXT_SCHEMA)]
Stop = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=256)]],
    BeforeValidator(_listed),
    Field(max_length=_MOST_STOPS),
    _one_or_more({"type": "string", "minLength": 1, "maxLength": 256}, maxItems=_MOST_STOPS),
]
Prompt = Annotated[str, BeforeValidator(_one_prompt), _one_or_more(_SOME_TEXT_SCHEMA, minItems=1, maxItems=1)]
Input = Annotated[
    list[str],
    BeforeValidator(_no_tokens),
    Field(min_length=1, max_length=MOST_INPUT_ITEMS, description="A text, or several; one vector each."),
    _one_or_more(_SOME_TEXT_SCHEMA, minItems=1, maxItems=MOST_INPUT_ITEMS),
]
ModelName = Annotated[
    str,
    Field(
        min_length=1,
        max_length=MOST_REFERENCE_CHARS,
        description="As /v1/models names it, or `model/version` or `model@alias`.",
    ),
]
MaxTokens = Annotated[int, Field(ge=1, le=_MOST_TOKENS)]


def _taking(neutral: AcceptedValues) -> ConfigDict:
    """Config of a model whose extra fields are left to ``refuse_unsupported`` and listed in the schema."""

    def add(schema: dict[str, Any]) -> None:
        for name, allowed in neutral.items():
            # 0 and 0.0 are the same JSON value.
            distinct = [value for index, value in enumerate(allowed or ()) if value not in (allowed or ())[:index]]
            schema["properties"][name] = {"enum": distinct} if distinct else {"description": _IGNORED}
        schema["additionalProperties"] = False

    return ConfigDict(extra="allow", json_schema_extra=add, hide_input_in_errors=True)


class ClosedBody(BaseModel):
    """A body in which unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)


class RetrievalOptions(ClosedBody):
    """Retrieval of context before generation."""

    collection: Annotated[str, Field(min_length=1, max_length=128)]
    top_k: Annotated[int, Field(ge=1, le=64, description="Most passages.")] = 4
    mode: Literal["hybrid", "vector", "cached"] = "hybrid"


class SchedulingOptions(ClosedBody):
    """Fairlane's options of any request."""

    priority: Literal["high", "normal", "low"] = Field("normal", description="The class it waits in")
    timeout_ms: int | None = Field(
        None, ge=1, le=_LARGEST_INT, description="The deadline, from its receipt; none: the service's own"
    )
    cache: Literal["none", "exact", "semantic"] | None = Field(
        None, description="Which earlier answers may be given again; none given: the tenant's own default"
    )
    group: str | None = Field(
        None, min_length=1, max_length=128, description="One of the tenant's groups, which share its weight"
    )


class GenerateOptions(SchedulingOptions):
    """Fairlane's options for text generation."""

    retrieval: RetrievalOptions | None = None
    conversation_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    conversation_after: Annotated[str, Field(max_length=36)] | None = None


class StreamOptions(ClosedBody):
    """Content of a stream besides text."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[bool | None, Field(description=_IGNORED)] = None


class ChatMessage(BaseModel):
    """One turn. ``developer`` is treated as ``system``."""

    model_config = _taking(MESSAGE)

    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class _Generate(BaseModel):
    model: ModelName
    max_tokens: MaxTokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stop: Stop | None = None
    seed: Annotated[int, Field(ge=0, le=_LARGEST_INT)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    fairlane: GenerateOptions | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with usage."""
        return self.stream_options is not None and self.stream_options.include_usage is True


class ChatBody(_Generate):
    """Body of ``POST /v1/chat/completions``."""

    model_config = _taking(CHAT)

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_INPUT_ITEMS)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None


class CompletionBody(_Generate):
    """Body of ``POST /v1/completions``."""

    model_config = _taking(COMPLETION)

    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class EmbeddingBody(BaseModel):
    """Body of ``POST /v1/embeddings``."""

    model_config = _taking(EMBEDDING)

    model: ModelName
    input: Input
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: (
        Annotated[int, Field(ge=1, le=_MOST_TOKENS, description="Taken if the model's vectors have as many.")] | None
    ) = None
    fairlane: SchedulingOptions | None = None


def chat_request(body: ChatBody, tenant: str, request_id: str) -> InferenceRequest:
    """Request of a chat. Raises GatewayError: 400."""
    refuse_unsupported(body.model_extra, CHAT)
    for index, message in enumerate(body.messages):
        refuse_unsupported(message.model_extra, MESSAGE, f"messages[{index}].")
    given = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(given) > 1:
        raise _invalid("max_tokens", "says something else than max_completion_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise _invalid("top_logprobs", "needs logprobs to be true")
    messages = [
        Message("system" if message.role == "developer" else message.role, message.content) for message in body.messages
    ]
    return _generate(
        body,
        tenant,
        request_id,
        messages=messages,
        max_tokens=next(iter(given), None),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        metadata=body.metadata,
    )


def completion_request(body: CompletionBody, tenant: str, request_id: str) -> InferenceRequest:
    """Request of a completion. Raises GatewayError: 400."""
    refuse_unsupported(body.model_extra, COMPLETION)
    max_tokens = _DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    return _generate(body, tenant, request_id, prompt=body.prompt, max_tokens=max_tokens, logprobs=body.logprobs)


def embedding_request(body: EmbeddingBody, tenant: str, request_id: str) -> InferenceRequest:
    """Request for embeddings. Raises GatewayError: 400."""
    refuse_unsupported(body.model_extra, EMBEDDING)
    options = body.fairlane or SchedulingOptions()
    return _built(
        tenant,
        request_id=request_id,
        model=body.model,
        task=Task.EMBED.value,
        texts=body.input,
        **options.model_dump(),
    )


def _generate(body: _Generate, tenant: str, request_id: str, **fields: Any) -> InferenceRequest:
    if body.stream_options is not None and not body.stream:
        raise _invalid("stream_options", "is for streams alone")
    options = body.fairlane or GenerateOptions()
    retrieval = options.retrieval
    return _built(
        tenant,
        request_id=request_id,
        model=body.model,
        temperature=_DEFAULT_TEMPERATURE if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        stop=body.stop or (),
        seed=body.seed,
        stream=bool(body.stream),
        retrieval=None if retrieval is None else Retrieval(retrieval.collection, retrieval.top_k, retrieval.mode),
        **options.model_dump(exclude={"retrieval"}),
        **fields,
    )


def _built(tenant: str, **fields: Any) -> InferenceRequest:
    request = build_request(**fields)
    try:
        check_request(request, tenant)
    except ValueError as error:
        field, _, message = str(error).partition(": ")
        raise _invalid(field, message) from None
    return request


def _invalid(field: str, message: str) -> GatewayError:
    return GatewayError(400, Code.INVALID, f"{field}: {message}", field=field)
