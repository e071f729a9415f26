"""Routes of inference and of models, in OpenAI's format below ``/v1``."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path
from starlette.requests import Request
from starlette.responses import Response

from fairlane.outcomes import Code
from fairlane_server.api_keys.api_key import Scope
from producers.gateway.identity.identity import Identity, require
from producers.gateway.openai.deps import OpenAIDeps
from producers.gateway.openai.streams import json_response, text_response
from producers.gateway.openapi import (
    CREATED_S,
    EXAMPLE_ID,
    IDEMPOTENCY_KEY,
    READ_STATUSES,
    SEND_STATUSES,
    Responses,
    answered,
    errors,
)
from producers.gateway.sending import publish, reply_in_time
from producers.openai_api.body import documented
from producers.openai_api.errors import MODEL_NOT_FOUND, UNSUPPORTED_PARAMETER, GatewayError
from producers.openai_api.request_models import (
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    chat_request,
    completion_request,
    embedding_request,
)
from producers.openai_api.response_bodies import ChatStream, CompletionStream, chat_completion, completion, embeddings
from producers.openai_api.response_models import ChatCompletion, Completion, EmbeddingList, Model, ModelList

_CHAT, _COMPLETIONS, _EMBEDDINGS = "/chat/completions", "/completions", "/embeddings"
_PREFIX = "/v1"

_NO_MODEL = (
    GatewayError(404, MODEL_NOT_FOUND, "no such model, or not for this tenant", field="model"),
    "No such model",
)
_INVALID = (
    GatewayError(400, UNSUPPORTED_PARAMETER, "n: only 1 is supported", field="n"),
    "The body is invalid, or too long for the model; `param` is the field",
)
_ERRORS = errors((*SEND_STATUSES, 500, 504), _INVALID, _NO_MODEL)

_GENERATOR, _EMBEDDER = "smollm2-135m-instruct", "all-minilm-l6-v2"
_QUESTION = {"role": "user", "content": "What is the capital of France?"}
_CHATS: dict[str, dict[str, Any]] = {
    "A question": {"model": _GENERATOR, "messages": [_QUESTION], "max_tokens": 32, "temperature": 0},
    "A stream": {
        "model": _GENERATOR,
        "messages": [{"role": "system", "content": "Answer in one sentence."}, _QUESTION],
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "From documents": {
        "model": _GENERATOR,
        "messages": [_QUESTION],
        "fairlane": {"priority": "high", "timeout_ms": 30_000, "retrieval": {"collection": "atlas", "top_k": 2}},
    },
}
_PROMPTS: dict[str, dict[str, Any]] = {
    "A prompt": {"model": _GENERATOR, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0},
    "A stream": {"model": _GENERATOR, "prompt": "The capital of France is", "stream": True, "logprobs": 2},
}
_TEXTS: dict[str, dict[str, Any]] = {
    "A text": {"model": _EMBEDDER, "input": "The capital of France"},
    "Several texts": {"model": _EMBEDDER, "input": ["Paris", "Rome"], "encoding_format": "base64"},
}
_USAGE = {
    "prompt_tokens": 36,
    "completion_tokens": 8,
    "total_tokens": 44,
    "prompt_tokens_details": {"cached_tokens": 0},
}
_FAIRLANE: dict[str, Any] = {
    "request_id": EXAMPLE_ID,
    "model_version": "1",
    "degradations": [],
    "passages": [],
    "retrieval": None,
    "cache": None,
    "history": None,
    "replayed": False,
}
_MESSAGE = {"role": "assistant", "content": "The capital of France is Paris.", "refusal": None}
_CHOICE = {"index": 0, "finish_reason": "stop", "logprobs": None}
_VECTOR = {"object": "embedding", "index": 0, "embedding": [0.0123, -0.0456, 0.0789]}
_MODEL = {"id": _GENERATOR, "object": "model", "created": 0, "owned_by": "fairlane"}
_EVENT = {
    "type": "object",
    "properties": {
        "event": {"description": "`error` for a failure after the first event", "type": "string"},
        "data": {"description": "A chunk as JSON, `[DONE]`, or the body of an error", "type": "string"},
    },
    "required": ["data"],
}


def _inferred(model: type[Any], example: dict[str, Any], chunk: str | None = None) -> Responses:
    """Responses of an inference route; ``chunk``: the last fields of a stream's first event."""
    found = answered(model, {"model": _GENERATOR, "usage": _USAGE, "fairlane": _FAIRLANE} | example)
    if chunk is not None:
        data = f'"id":"{example["id"]}","created":{CREATED_S},"model":"{_GENERATOR}",{chunk}'
        found[200]["content"]["text/event-stream"] = {"itemSchema": _EVENT, "example": f"data: {{{data}}}\n\n"}
    return found | _ERRORS


_CHAT_ANSWERS = _inferred(
    ChatCompletion,
    {
        "id": f"chatcmpl-{EXAMPLE_ID}",
        "object": "chat.completion",
        "created": CREATED_S,
        "choices": [_CHOICE | {"message": _MESSAGE}],
    },
    '"object":"chat.completion.chunk","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]',
)
_COMPLETION_ANSWERS = _inferred(
    Completion,
    {
        "id": f"cmpl-{EXAMPLE_ID}",
        "object": "text_completion",
        "created": CREATED_S,
        "choices": [_CHOICE | {"text": " Paris."}],
    },
    '"object":"text_completion","choices":[{"index":0,"text":" Paris"}]',
)
_EMBEDDING_ANSWERS = _inferred(
    EmbeddingList,
    {"object": "list", "model": _EMBEDDER, "data": [_VECTOR], "usage": {"prompt_tokens": 6, "total_tokens": 6}},
)


def router(deps: OpenAIDeps) -> APIRouter:
    """All routes. The application must turn GatewayErrors into answers."""
    api = APIRouter(prefix=_PREFIX, tags=["OpenAI"])
    Sender = Annotated[Identity, Depends(require(deps.authenticate, Scope.INFERENCE, writes=True))]  # noqa: N806 - a type
    Caller = Annotated[Identity, Depends(deps.authenticate)]  # noqa: N806 - a type
    reading = errors(READ_STATUSES, _NO_MODEL)

    @api.post(
        _CHAT,
        summary="Answer a chat",
        response_model=None,
        responses=_CHAT_ANSWERS,
        openapi_extra=documented(ChatBody, _CHATS) | IDEMPOTENCY_KEY,
    )
    async def chat_completions(request: Request, caller: Sender) -> Response:
        """Answer the last message; with `stream`, send the text as it is generated."""
        published, wish = await publish(
            deps, request, caller.tenant, _PREFIX + _CHAT, ChatBody, chat_request, _wish_of_text
        )
        return await text_response(deps, request, published, wish, ChatStream, chat_completion)

    @api.post(
        _COMPLETIONS,
        summary="Go on with a text",
        response_model=None,
        responses=_COMPLETION_ANSWERS,
        openapi_extra=documented(CompletionBody, _PROMPTS) | IDEMPOTENCY_KEY,
    )
    async def completions(request: Request, caller: Sender) -> Response:
        """Continue the prompt; with `stream`, send the text as it is generated."""
        published, wish = await publish(
            deps, request, caller.tenant, _PREFIX + _COMPLETIONS, CompletionBody, completion_request, _wish_of_text
        )
        return await text_response(deps, request, published, wish, CompletionStream, completion)

    @api.post(
        _EMBEDDINGS,
        summary="Texts as vectors",
        response_model=None,
        responses=_EMBEDDING_ANSWERS,
        openapi_extra=documented(EmbeddingBody, _TEXTS) | IDEMPOTENCY_KEY,
    )
    async def create_embeddings(request: Request, caller: Sender) -> Response:
        """One vector per text, in the order of the texts."""
        published, (encoding, dimensions) = await publish(
            deps,
            request,
            caller.tenant,
            _PREFIX + _EMBEDDINGS,
            EmbeddingBody,
            embedding_request,
            lambda body: (body.encoding_format, body.dimensions),
        )
        reply = await reply_in_time(published, request.receive, deps.wait_s)
        echo = deps.echo(published, reply)
        return json_response(reply, embeddings(reply, echo, as_base64=encoding == "base64", dimensions=dimensions))

    @api.get(
        "/models",
        summary="The available models",
        responses=answered(ModelList, {"object": "list", "data": [_MODEL]}) | reading,
    )
    async def list_models(caller: Caller) -> ModelList:
        """Models that this tenant may use, sorted by name."""
        names = sorted(model.model for model in deps.models_of(caller.tenant))
        return ModelList(data=[Model(id=name) for name in names])

    @api.get("/models/{model}", summary="One model", responses=answered(Model, _MODEL) | reading)
    async def get_model(model: Annotated[str, Path(examples=[_GENERATOR])], caller: Caller) -> Model:
        """A model that this tenant may use."""
        if all(model != known.model for known in deps.models_of(caller.tenant)):
            raise GatewayError(404, Code.UNKNOWN_MODEL, "no such model, or not for this tenant", field="model")
        return Model(id=model)

    return api


def _wish_of_text(body: ChatBody | CompletionBody) -> tuple[bool, bool]:
    """Whether the answer is streamed, and whether a stream ends with usage."""
    return bool(body.stream), body.wants_usage
