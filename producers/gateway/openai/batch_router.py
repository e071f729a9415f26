"""Router of the file and batch routes."""

from fastapi import APIRouter

from producers.gateway.openai import batches, files
from producers.gateway.openai.batch_deps import BatchDeps


def router(deps: BatchDeps) -> APIRouter:
    """All routes, below ``/v1``."""
    api = APIRouter(prefix="/v1", tags=["OpenAI"])
    for part in (files, batches):
        api.include_router(part.routes(deps))
    return api
