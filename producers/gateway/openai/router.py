"""Routes of inference and of models, in OpenAI's format below ``/v1``."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from fairlane.outcomes import Code
from fairlane.records import Output, TokenUsage
from producers.gateway import openapi
from producers.gateway.identity.identity import Identity, Permission, require
from producers.gateway.openai.streams import OpenAIDeps, json_response, text_response
from producers.gateway.openapi import (
    CREATED_S,
    EMBEDDER,
    EXAMPLE_ID,
    GENERATOR,
    READ_STATUSES,
    REPLY,
    SEND_STATUSES,
    ErrorDocs,
    Responses,
    errors,
    taking,
)
from producers.gateway.sending import publish, reply_in_time
from producers.openai_api.errors import MODEL_NOT_FOUND, UNSUPPORTED_PARAMETER, GatewayError
from producers.openai_api.request_models import (
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    chat_request,
    completion_request,
    embedding_request,
)
from producers.openai_api.responses import (
    ChatCompletion,
    ChatEvents,
    CompletionEvents,
    EmbeddingList,
    Model,
    ModelList,
    RequestEcho,
    TextCompletion,
    TextEvents,
    chat_completion,
    completion,
    embeddings,
)

_CHAT, _COMPLETIONS, _EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
_NO_MODEL: ErrorDocs = {404: (MODEL_NOT_FOUND, "No such model, or not for this tenant")}
_ERRORS = errors(
    (*SEND_STATUSES, 500, 504),
    {400: (UNSUPPORTED_PARAMETER, "The body is invalid, or too long for the model; `param` is the field"), **_NO_MODEL},
)

_QUESTION = {"role": "user", "content": "What is the capital of France?"}
_CHATS: Mapping[str, Mapping[str, Any]] = {
    "A question": {"model": GENERATOR, "messages": [_QUESTION], "max_tokens": 32, "temperature": 0},
    "A stream": {
        "model": GENERATOR,
        "messages": [{"role": "system", "content": "Answer in one sentence."}, _QUESTION],
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "From documents": {
        "model": GENERATOR,
        "messages": [_QUESTION],
        "fairlane": {"priority": "high", "timeout_ms": 30_000, "retrieval": {"collection": "atlas", "top_k": 2}},
    },
}
_PROMPTS: Mapping[str, Mapping[str, Any]] = {
    "A prompt": {"model": GENERATOR, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0},
    "A stream": {"model": GENERATOR, "prompt": "The capital of France is", "stream": True, "logprobs": 2},
}
_TEXTS: Mapping[str, Mapping[str, Any]] = {
    "A text": {"model": EMBEDDER, "input": "The capital of France"},
    "Several texts": {"model": EMBEDDER, "input": ["Paris", "Rome"], "encoding_format": "base64"},
}
_ECHO = RequestEcho(EXAMPLE_ID, GENERATOR, CREATED_S)
_VECTOR = replace(REPLY, model=EMBEDDER, output=Output(embeddings=((0.0123, -0.0456, 0.0789),)), usage=TokenUsage(6))
_VECTORS = EmbeddingList.model_validate_json(embeddings(_VECTOR, _ECHO, as_base64=False, dimensions=None))
_MODEL = Model(id=GENERATOR)
_EVENT = {
    "type": "object",
    "properties": {
        "event": {"description": "`error` for a failure after the first event", "type": "string"},
        "data": {"description": "A chunk as JSON, `[DONE]`, or the body of an error", "type": "string"},
    },
    "required": ["data"],
}


def router(deps: OpenAIDeps) -> APIRouter:
    """All routes. The application must turn GatewayErrors into answers."""
    api = APIRouter(tags=["OpenAI"])
    Sender = Annotated[Identity, Depends(require(deps.authenticate, Permission.REQUESTS_SEND))]  # noqa: N806 - a type
    Caller = Annotated[Identity, Depends(require(deps.authenticate, Permission.MODELS_READ))]  # noqa: N806 - a type

    @api.post(
        _CHAT,
        summary="Answer a chat",
        response_model=None,
        responses=_text_responses(ChatCompletion.model_validate_json(chat_completion(REPLY, _ECHO)), ChatEvents(_ECHO)),
        openapi_extra=taking(ChatBody, _CHATS),
    )
    async def chat_completions(request: Request, caller: Sender) -> Response:
        """Answer the last message; with `stream`, send the text as it is generated."""
        published, wish = await publish(deps, request, caller.tenant, _CHAT, ChatBody, chat_request, _wish_of_text)
        return await text_response(deps, request, published, wish, ChatEvents, chat_completion)

    @api.post(
        _COMPLETIONS,
        summary="Go on with a text",
        response_model=None,
        responses=_text_responses(
            TextCompletion.model_validate_json(completion(REPLY, _ECHO)), CompletionEvents(_ECHO)
        ),
        openapi_extra=taking(CompletionBody, _PROMPTS),
    )
    async def completions(request: Request, caller: Sender) -> Response:
        """Continue the prompt; with `stream`, send the text as it is generated."""
        published, wish = await publish(
            deps, request, caller.tenant, _COMPLETIONS, CompletionBody, completion_request, _wish_of_text
        )
        return await text_response(deps, request, published, wish, CompletionEvents, completion)

    @api.post(
        _EMBEDDINGS,
        summary="Texts as vectors",
        response_model=None,
        responses=openapi.answered(_VECTORS) | _ERRORS,
        openapi_extra=taking(EmbeddingBody, _TEXTS),
    )
    async def create_embeddings(request: Request, caller: Sender) -> Response:
        """One vector per text, in the order of the texts."""
        published, (encoding, dimensions) = await publish(
            deps,
            request,
            caller.tenant,
            _EMBEDDINGS,
            EmbeddingBody,
            embedding_request,
            lambda body: (body.encoding_format, body.dimensions),
        )
        reply = await reply_in_time(deps, published, request.receive)
        echo = deps.echo(published, reply)
        return json_response(reply, embeddings(reply, echo, as_base64=encoding == "base64", dimensions=dimensions))

    reading = errors(READ_STATUSES, _NO_MODEL)

    @api.get(
        "/v1/models",
        summary="The available models",
        responses=openapi.answered(ModelList(data=[_MODEL])) | reading,
    )
    async def list_models(caller: Caller) -> ModelList:
        """Models that this tenant may use, sorted by name."""
        names = sorted(model.model for model in deps.models_of(caller.tenant))
        return ModelList(data=[Model(id=name) for name in names])

    # A version has a slash in its name.
    @api.get("/v1/models/{model:path}", summary="One model", responses=openapi.answered(_MODEL) | reading)
    async def get_model(model: Annotated[str, Path(examples=[GENERATOR])], caller: Caller) -> Model:
        """A model that this tenant may use, or one of its versions (`digits/2`) or aliases (`digits@champion`)."""
        if not deps.may_name(caller.tenant, model):
            raise GatewayError(404, Code.UNKNOWN_MODEL, "no such model, or not for this tenant", field="model")
        return Model(id=model)

    return api


def _text_responses(whole: BaseModel, events: TextEvents) -> Responses:
    found = openapi.answered(whole)
    event = events.first() or events.text("The capital")
    found[200]["content"]["text/event-stream"] = {"itemSchema": _EVENT, "example": event.decode()}
    return found | _ERRORS


def _wish_of_text(body: ChatBody | CompletionBody) -> tuple[bool, bool]:
    """Whether the answer is streamed, and whether a stream ends with usage."""
    return bool(body.stream), body.wants_usage
