"""Routes of shadows."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from fairlane.evaluation_records import Shadow
from fairlane_server.administration.model_routes import ModelRoutes
from fairlane_server.api_keys.permissions import Permission
from fairlane_server.evaluation.comparison import MeanScore, PairedComparison, RatioOfMeans
from fairlane_server.evaluation.pairs import PairReport
from fairlane_server.evaluation.shadow_plan import shadow_plan_of_json
from fairlane_server.evaluation.shadow_report import MOST_PAIRS, ShadowCounts, ShadowReport
from fairlane_server.evaluation.shadows import with_shadow, without_shadow
from fairlane_server.models.changes import route_of
from producers.admin.blocking import Serial
from producers.admin.deps import AT_MS, AdminDeps
from producers.admin.file_bodies import file_body, parsed
from producers.admin.models import ROUTE_ANSWER, IfRevision, ModelName, Reason, changed_route, route_author
from producers.admin.problems import CHANGING_MODELS, READING_ONE, answered_errors, not_found
from producers.gateway.identity.identity import Identity
from producers.gateway.native.response_bodies import ResponseBody
from producers.gateway.native.response_bodies import answered as answer
from producers.gateway.openapi import answered
from producers.gateway.sending import body_of


class ShadowAnswer(ResponseBody):
    """The latest shadow of a model."""

    shadow: Shadow


class ShadowReportAnswer(ResponseBody):
    """Copies of a shadow beside their originals."""

    report: ShadowReport


Run = Annotated[str | None, Query(max_length=200, pattern=r"^[^\x00]*$", description="This shadow, not the latest")]
Pairs = Annotated[int, Query(ge=1, le=MOST_PAIRS, description="Compare at most so many")]

_PLAN = {"candidate": "3", "percent": 5, "max_share": 0.05}
_SHADOW = Shadow(
    *("digits-3-1764201600000", "3", 10.0, 16, 0.1, 600_000, AT_MS),
    sticky_by="request",
)
_REPORT = ShadowReport(
    _SHADOW.run,
    ShadowCounts({"copied": 120, "load": 7}, {"completed": 119, "dropped": 1}),
    (
        PairReport(
            *("classify", 119, 119, {"completed": 119, "dropped": 1}, 0),
            MeanScore(0.975, 0.928, 0.991, 119),
            MeanScore(0.975, 0.928, 0.991, 119),
            PairedComparison(119, 0, 0, 0.0, 0.0, 0.0, 1.0, is_exact=True),
            RatioOfMeans(119, 1.02, 0.97, 1.08),
            RatioOfMeans(119, 1.0, 1.0, 1.0),
            {},
        ),
    ),
)


def router(deps: AdminDeps, routes: ModelRoutes, history: Serial) -> APIRouter:
    """All routes of shadows. ``history``: the thread of what reads Postgres."""
    api = APIRouter(tags=["shadows"])
    Reader = Annotated[Identity, deps.caller(Permission.REGISTRY_READ)]  # noqa: N806 - a type
    Starter = Annotated[Identity, deps.caller(Permission.REGISTRY_WRITE)]  # noqa: N806 - a type
    Writer = Annotated[Identity, deps.caller(Permission.ROLLOUTS_STEER)]  # noqa: N806 - a type
    changed = answered(ROUTE_ANSWER, "The changed route") | CHANGING_MODELS

    async def latest(model: str) -> Shadow:
        with answered_errors():
            published = await deps.kafka_calls.run(routes.read)
        route = route_of(published, model)
        if route is None or route.shadow is None:
            raise not_found("there is no such model, or it has had no shadow")
        return route.shadow

    @api.get("/models/{model}/shadow", responses=answered(ShadowAnswer(shadow=_SHADOW), "The shadow") | READING_ONE)
    async def get_shadow(
        model: ModelName,
        caller: Reader,  # noqa: ARG001 - its permission
    ) -> Response:
        """The latest shadow of a model."""
        return answer(ShadowAnswer(shadow=await latest(model)))

    @api.get(
        "/models/{model}/shadow/report",
        responses=answered(ShadowReportAnswer(report=_REPORT), "The report") | READING_ONE,
    )
    async def get_report(
        model: ModelName,
        caller: Reader,  # noqa: ARG001 - its permission
        run: Run = None,
        pairs: Pairs = MOST_PAIRS,
    ) -> Response:
        """Counts of copies, and how they compare with their originals, without any text. Of tenants that allow
        evaluation now."""
        wanted = run or (await latest(model)).run
        with answered_errors():
            report = await history.run(partial(routes.shadow_report, wanted, pairs))
        return answer(ShadowReportAnswer(report=report))

    @api.post(
        "/models/{model}/shadow",
        status_code=201,
        responses=answered(ROUTE_ANSWER, "The changed route", 201) | CHANGING_MODELS,
        openapi_extra=file_body("The candidate, and what of the plan differs from the defaults", "Five percent", _PLAN),
    )
    async def start_shadow(
        request: Request, model: ModelName, caller: Starter, if_match: IfRevision = None, reason: Reason = ""
    ) -> Response:
        """Start to copy a sample of the requests of a model to a version, whose answers nobody gets."""
        plan, author = parsed(shadow_plan_of_json, await body_of(request)), route_author(caller, reason)
        return await changed_route(
            *(deps, routes, model, if_match),
            lambda published: with_shadow(published, model, plan, author),
            status=201,
        )

    @api.post("/models/{model}/shadow/stop", responses=changed)
    async def stop_shadow(
        model: ModelName, caller: Writer, if_match: IfRevision = None, reason: Reason = ""
    ) -> Response:
        """Make no more copies. Those that wait still run."""
        author = route_author(caller, reason)
        return await changed_route(
            *(deps, routes, model, if_match), lambda published: without_shadow(published, model, author)
        )

    return api
