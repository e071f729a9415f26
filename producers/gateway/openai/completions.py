"""``POST /v1/completions``."""

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
from producers.openai_api.request_models import CompletionBody, completion_request
from producers.openai_api.response_bodies import CompletionStream, completion
from producers.openai_api.response_models import Completion

_MODEL = "smollm2-135m-instruct"
_EXAMPLES: dict[str, dict[str, Any]] = {
    "A prompt": {"model": _MODEL, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0},
    "A stream": {"model": _MODEL, "prompt": "The capital of France is", "stream": True, "logprobs": 2},
}
_ANSWER = {
    "id": f"cmpl-{REQUEST_ID}",
    "object": "text_completion",
    "created": CREATED_S,
    "model": _MODEL,
    "choices": [{"index": 0, "text": " Paris.", "finish_reason": "stop", "logprobs": None}],
    "usage": USAGE,
    "fairlane": ABOUT,
}
_CHUNK = (
    f'data: {{"id":"cmpl-{REQUEST_ID}","object":"text_completion","created":{CREATED_S},"model":"{_MODEL}",'
    '"choices":[{"index":0,"text":" Paris","finish_reason":null,"logprobs":null}]}\n\n'
)


def routes(deps: OpenAIDeps) -> APIRouter:
    """The route."""
    api, sender = APIRouter(), senders(deps)

    @api.post(
        "/completions",
        summary="Go on with a text",
        response_model=None,
        responses=errors(SENDING) | success(Completion, _ANSWER, _CHUNK),
        openapi_extra=documented(CompletionBody, _EXAMPLES) | IDEMPOTENCY_KEY,
    )
    async def completions(request: Request, identity: Annotated[Identity, Depends(sender)]) -> Response:
        """Continue the prompt; with `stream`, send the text as it is generated."""
        published, wish = await _publish(deps, request, identity)
        return await text_response(deps, request, published, wish, CompletionStream, completion)

    return api


async def _publish(deps: OpenAIDeps, request: Request, identity: Identity) -> tuple[Published, ResponseOptions]:
    """Publish the request. Nothing holds the body afterwards."""
    raw = await body_of(request)
    body = parse(CompletionBody, raw)
    published = await publish(
        deps, request, identity, raw, lambda request_id: completion_request(body, identity.tenant, request_id)
    )
    release_body(request.scope)
    return published, ResponseOptions.of(body)
