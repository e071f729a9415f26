"""The route of loads, which changes nothing."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from fairlane_server.administration.observer import Observer
from fairlane_server.api_keys.permissions import Permission
from fairlane_server.kafka.load_board import LOADED, LoadView, PoolRow, TenantRow, VersionRow
from producers.admin.blocking import Serial
from producers.admin.deps import AT_MS, AdminDeps
from producers.admin.problems import READING, answered_errors
from producers.gateway.identity.identity import Identity
from producers.gateway.native.response_bodies import ResponseBody
from producers.gateway.native.response_bodies import answered as answer
from producers.gateway.openapi import answered


class LoadsAnswer(ResponseBody):
    """The load of all pools and tenants at one moment, as `fairlane top` shows it; tokens are cost tokens."""

    at_ms: int
    dispatchers: int
    dispatchers_gone: int
    pools: tuple[PoolRow, ...]
    tenants: tuple[TenantRow, ...]
    versions: tuple[VersionRow, ...] = Field((), description="Which consumers have loaded which versions of models")
    trouble: str | None = Field(None, description="Why no reports come in")


_POOL = PoolRow("generate", 1, 0, 0, 900.0, 0.5, 4_000, 1_200, 3, 2_000, {"high": 1, "normal": 2}, 1)
_LOADS = LoadsAnswer(
    at_ms=AT_MS,
    dispatchers=1,
    dispatchers_gone=0,
    pools=(_POOL,),
    tenants=(TenantRow("acme", "generate", 2.0, 3, 2_000, 1_200, 450.0, 0.5, 0.5, 120.0),),
    versions=(VersionRow("generate", "smollm2-135m-instruct/2", "consumer-1", LOADED),),
)


def router(deps: AdminDeps, observer: Observer, calls: Serial) -> APIRouter:
    """GET /loads. ``calls`` is the thread that uses the observer."""
    api = APIRouter(tags=["loads"])
    LoadReader = Annotated[Identity, deps.caller(Permission.LOADS_READ)]  # noqa: N806 - a type

    @api.get("/loads", responses=answered(_LOADS, "The load") | READING)
    async def get_loads(caller: LoadReader) -> Response:  # noqa: ARG001 - its permission
        """Queues and loads of all pools and tenants. The first call after a minute without takes a second."""
        with answered_errors():
            view, trouble = await calls.run(partial(observer.loads))
        return answer(_loads_answer(view, trouble))

    return api


def _loads_answer(view: LoadView, trouble: str | None) -> LoadsAnswer:
    return LoadsAnswer(
        at_ms=view.at_ms,
        dispatchers=view.dispatchers,
        dispatchers_gone=view.dispatchers_gone,
        pools=view.pools,
        tenants=view.tenants,
        versions=view.versions,
        trouble=trouble,
    )
