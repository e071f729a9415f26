"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request

from fairlane.outcomes import Code
from producers.gateway.identity.identity import Identity
from producers.gateway.openai.inference_calls import OpenAIDeps
from producers.gateway.openai.openapi import READ_STATUSES, errors
from producers.openai_api.errors import GatewayError
from producers.openai_api.response_models import Model, ModelList

_MODEL = {"id": "smollm2-135m-instruct", "object": "model", "created": 0, "owned_by": "fairlane"}


def routes(deps: OpenAIDeps) -> APIRouter:
    """The routes."""
    api = APIRouter(responses=errors(READ_STATUSES))

    @api.get(
        "/models",
        summary="The available models",
        responses={200: {"content": {"application/json": {"example": {"object": "list", "data": [_MODEL]}}}}},
    )
    async def list_models(identity: Annotated[Identity, Depends(deps.authenticate)]) -> ModelList:
        """Models that this tenant may use, sorted by name."""
        names = sorted(model.model for model in deps.catalog.models_of(identity.tenant))
        return ModelList(data=[Model(id=name) for name in names])

    @api.get(
        "/models/{model}",
        summary="One model",
        responses={200: {"content": {"application/json": {"example": _MODEL}}}},
        openapi_extra={
            "parameters": [
                {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}, "example": _MODEL["id"]}
            ]
        },
    )
    async def get_model(request: Request, identity: Annotated[Identity, Depends(deps.authenticate)]) -> Model:
        """A model that this tenant may use."""
        model: str = request.path_params["model"]
        if all(model != known.model for known in deps.catalog.models_of(identity.tenant)):
            raise GatewayError(404, Code.UNKNOWN_MODEL, "no such model, or not for this tenant", field="model")
        return Model(id=model)

    return api
