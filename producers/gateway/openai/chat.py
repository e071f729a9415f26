"""``POST /v1/chat/completions``."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from producers.gateway.edge.body_limit import release_body
from producers.gateway.idempotency import Published
from producers.gateway.identity.identity import Identity
from producers.gateway.openai.inference_calls import OpenAIDeps, body_of, publish, senders
from producers.gateway.openai.openapi import (
    ABOUT,
    CREATED_S,
    IDEMPOTENCY_KEY,
    REQUEST_ID,
    SENDING,
    USAGE,
    errors,
    success,
)
from producers.gateway.openai.streams import ResponseOptions, text_response
from producers.openai_api.body import documented, parse
from producers.openai_api.request_models import ChatBody, chat_request
from producers.openai_api.response_bodies import ChatStream, chat_completion
from producers.openai_api.response_models import ChatCompletion

_MODEL = "smollm2-135m-instruct"
_QUESTION = {"role": "user", "content": "What is the capital of France?"}
_EXAMPLES: dict[str, dict[str, Any]] = {
    "A question": {"model": _MODEL, "messages": [_QUESTION], "max_tokens": 32, "temperature": 0},
    "A stream": {
        "model": _MODEL,
        "messages": [{"role": "system", "content": "Answer in one sentence."}, _QUESTION],
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "From documents": {
        "model": _MODEL,
        "messages": [_QUESTION],
        "fairlane": {"priority": "high", "timeout_ms": 30_000, "retrieval": {"collection": "atlas", "top_k": 2}},
    },
}
_ANSWER = {
    "id": f"chatcmpl-{REQUEST_ID}",
    "object": "chat.completion",
    "created": CREATED_S,
    "model": _MODEL,
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "The capital of France is Paris.", "refusal": None},
            "finish_reason": "stop",
            "logprobs": None,
        }
    ],
    "usage": USAGE,
    "fairlane": ABOUT,
}
_CHUNK = (
    f'data: {{"id":"chatcmpl-{REQUEST_ID}","object":"chat.completion.chunk","created":{CREATED_S},"model":"{_MODEL}",'
    '"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null,"logprobs":null}]}\n\n'
)


def routes(deps: OpenAIDeps) -> APIRouter:
    """The route."""
    api, sender = APIRouter(), senders(deps)

    @api.post(
        "/chat/completions",
        summary="Answer a chat",
        response_model=None,
        responses=errors(SENDING) | success(ChatCompletion, _ANSWER, _CHUNK),
        openapi_extra=documented(ChatBody, _EXAMPLES) | IDEMPOTENCY_KEY,
    )
    async def chat_completions(request: Request, identity: Annotated[Identity, Depends(sender)]) -> Response:
        """Answer the last message; with `stream`, send the text as it is generated."""
        published, wish = await _publish(deps, request, identity)
        return await text_response(deps, request, published, wish, ChatStream, chat_completion)

    return api


async def _publish(deps: OpenAIDeps, request: Request, identity: Identity) -> tuple[Published, ResponseOptions]:
    """Publish the request. Nothing holds the body afterwards."""
    raw = await body_of(request)
    body = parse(ChatBody, raw)
    published = await publish(
        deps, request, identity, raw, lambda request_id: chat_request(body, identity.tenant, request_id)
    )
    release_body(request.scope)
    return published, ResponseOptions.of(body)
