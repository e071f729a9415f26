"""Routes of models and of loads, which change nothing."""

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from fairlane.records import ModelRoute, ModelVersion
from fairlane_server.administration.observer import Observer
from fairlane_server.api_keys.permissions import Permission
from fairlane_server.kafka.load_board import LoadView, PoolRow, TenantRow
from fairlane_server.models.catalog import ModelRecord
from producers.admin.blocking import Serial
from producers.admin.deps import AT_MS, AdminDeps, Cursor, Limit
from producers.admin.problems import READING, answered_errors
from producers.gateway.identity.identity import Identity
from producers.gateway.native.cursors import Cursors
from producers.gateway.native.response_bodies import Page, ResponseBody, page_of
from producers.gateway.native.response_bodies import answered as answer
from producers.gateway.openapi import answered


class ModelAnswer(ResponseBody):
    """A version of a model, or the route of one. Both are left out if this version of Fairlane cannot read it."""

    reference: str = Field(description="`model/version` of a version, the model's name of a route")
    version: ModelVersion | None = Field(None, description="The version")
    route: ModelRoute | None = Field(None, description="Aliases and rules of the model")


class LoadsAnswer(ResponseBody):
    """The load of all pools and tenants at one moment, as `fairlane top` shows it; tokens are cost tokens."""

    at_ms: int
    dispatchers: int
    dispatchers_gone: int
    pools: tuple[PoolRow, ...]
    tenants: tuple[TenantRow, ...]
    trouble: str | None = Field(None, description="Why no reports come in")


_MODEL = ModelAnswer(
    reference="smollm2-135m-instruct/1",
    version=ModelVersion("smollm2-135m-instruct", "1", "generate", "causal-lm", ("generate",), "models/x", 2048, 512),
)
_ROUTE = ModelAnswer(
    reference="smollm2-135m-instruct",
    route=ModelRoute("smollm2-135m-instruct", 1, {"champion": "1"}, {}, changed_at_ms=AT_MS, changed_by="ops@desk"),
)
_POOL = PoolRow("generate", 1, 0, 0, 900.0, 0.5, 4_000, 1_200, 3, 2_000, {"high": 1, "normal": 2}, 1)
_LOADS = LoadsAnswer(
    at_ms=AT_MS,
    dispatchers=1,
    dispatchers_gone=0,
    pools=(_POOL,),
    tenants=(TenantRow("acme", "generate", 2.0, 3, 2_000, 1_200, 450.0, 0.5, 0.5, 120.0),),
)
_cursors = Cursors(str)


def router(deps: AdminDeps, observer: Observer, calls: Serial) -> APIRouter:
    """GET /models and /loads. ``calls`` is the thread that uses the observer."""
    api = APIRouter(tags=["models and loads"])
    ModelReader = Annotated[Identity, deps.caller(Permission.REGISTRY_READ)]  # noqa: N806 - a type
    LoadReader = Annotated[Identity, deps.caller(Permission.LOADS_READ)]  # noqa: N806 - a type
    page = Page[ModelAnswer](data=(_MODEL, _ROUTE), has_more=False)

    @api.get("/models", responses=answered(page, "A page") | READING)
    async def list_models(caller: ModelReader, limit: Limit = 50, cursor: Cursor = None) -> Response:
        """The published versions of models with their pools, and the routes, by reference. `fairlane models` changes
        them."""
        after = _cursors.decode(caller.tenant, cursor) or ""
        with answered_errors():
            published: dict[str, Any] = await calls.run(observer.models)
        found = sorted(name for name in published if name > after)
        return page_of(
            *(Page[ModelAnswer], found, limit),
            lambda name: _model_answer(name, published[name]),
            lambda last: _cursors.encode(caller.tenant, last),
        )

    @api.get("/loads", responses=answered(_LOADS, "The load") | READING)
    async def get_loads(caller: LoadReader) -> Response:  # noqa: ARG001 - its permission
        """Queues and loads of all pools and tenants. The first call after a minute without takes a second."""
        with answered_errors():
            view, trouble = await calls.run(partial(observer.loads))
        return answer(_loads_answer(view, trouble))

    return api


def _model_answer(reference: str, record: ModelRecord | None) -> ModelAnswer:
    return ModelAnswer(
        reference=reference,
        version=record if isinstance(record, ModelVersion) else None,
        route=record if isinstance(record, ModelRoute) else None,
    )


def _loads_answer(view: LoadView, trouble: str | None) -> LoadsAnswer:
    return LoadsAnswer(
        at_ms=view.at_ms,
        dispatchers=view.dispatchers,
        dispatchers_gone=view.dispatchers_gone,
        pools=view.pools,
        tenants=view.tenants,
        trouble=trouble,
    )
