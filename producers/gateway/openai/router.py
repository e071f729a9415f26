"""The routes of OpenAI's API, together."""

from fastapi import APIRouter

from producers.gateway.openai import chat, completions, embeddings, models
from producers.gateway.openai.deps import OpenAIDeps


def router(deps: OpenAIDeps) -> APIRouter:
    """All of them, below ``/v1``."""
    api = APIRouter(prefix="/v1", tags=["OpenAI"])
    for part in (chat, completions, embeddings, models):
        api.include_router(part.routes(deps))
    return api
