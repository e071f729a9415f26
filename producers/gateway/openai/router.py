"""Router of the inference and model routes."""

from fastapi import APIRouter

from producers.gateway.openai import chat, completions, embeddings, models
from producers.gateway.openai.inference_calls import OpenAIDeps


def router(deps: OpenAIDeps) -> APIRouter:
    """All routes, below ``/v1``."""
    api = APIRouter(prefix="/v1", tags=["OpenAI"])
    for part in (chat, completions, embeddings, models):
        api.include_router(part.routes(deps))
    return api
