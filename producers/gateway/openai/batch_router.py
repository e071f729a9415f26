"""The routes of files and batches, together."""

from fastapi import APIRouter

from producers.gateway.openai import batches, files
from producers.gateway.openai.batch_deps import BatchDeps


def router(deps: BatchDeps) -> APIRouter:
    """All of them, below ``/v1``."""
    api = APIRouter(prefix="/v1", tags=["OpenAI"])
    for part in (files, batches):
        api.include_router(part.routes(deps))
    return api
