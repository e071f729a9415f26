"""``POST /v1/embeddings``."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from producers.gateway.edge.body_limit import release_body
from producers.gateway.idempotency import Published
from producers.gateway.identity.identity import Identity
from producers.gateway.openai.inference_calls import (
    OpenAIDeps,
    asked,
    body_of,
    json_response,
    publish,
    reply_of,
    senders,
)
from producers.gateway.openai.openapi import ABOUT, IDEMPOTENCY_KEY, SENDING, errors, success
from producers.openai_api.body import documented, parse
from producers.openai_api.request_models import EmbeddingBody, embedding_request
from producers.openai_api.response_bodies import embeddings
from producers.openai_api.response_models import EmbeddingList

_MODEL = "all-minilm-l6-v2"
_EXAMPLES: dict[str, dict[str, Any]] = {
    "A text": {"model": _MODEL, "input": "The capital of France"},
    "Several texts": {"model": _MODEL, "input": ["Paris", "Rome"], "encoding_format": "base64"},
}
_ANSWER = {
    "object": "list",
    "model": _MODEL,
    "data": [{"object": "embedding", "index": 0, "embedding": [0.0123, -0.0456, 0.0789]}],
    "usage": {"prompt_tokens": 6, "total_tokens": 6},
    "fairlane": ABOUT,
}


def routes(deps: OpenAIDeps) -> APIRouter:
    """The route."""
    api, sender = APIRouter(), senders(deps)

    @api.post(
        "/embeddings",
        summary="Texts as vectors",
        response_model=None,
        responses=errors(SENDING) | success(EmbeddingList, _ANSWER),
        openapi_extra=documented(EmbeddingBody, _EXAMPLES) | IDEMPOTENCY_KEY,
    )
    async def create_embeddings(request: Request, identity: Annotated[Identity, Depends(sender)]) -> Response:
        """One vector per text, in the order of the texts."""
        published, as_base64, dimensions = await _publish(deps, request, identity)
        reply = await reply_of(published, request.receive, deps.wait_s)
        answer = embeddings(reply, asked(deps, published, reply), as_base64=as_base64, dimensions=dimensions)
        return json_response(reply, answer)

    return api


async def _publish(deps: OpenAIDeps, request: Request, identity: Identity) -> tuple[Published, bool, int | None]:
    """Publish the request; returns also ``as_base64`` and ``dimensions``. Nothing holds the body afterwards."""
    raw = await body_of(request)
    body = parse(EmbeddingBody, raw)
    published = await publish(
        deps, request, identity, raw, lambda request_id: embedding_request(body, identity.tenant, request_id)
    )
    release_body(request.scope)
    return published, body.encoding_format == "base64", body.dimensions
