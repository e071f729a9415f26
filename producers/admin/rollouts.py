"""Routes of rollouts."""

from collections.abc import Callable
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import Field
from starlette.responses import Response

from fairlane.records import ModelRoute
from fairlane.rollout_records import Rollout
from fairlane_server.administration.model_routes import ModelRoutes
from fairlane_server.api_keys.permissions import Permission
from fairlane_server.models.changes import Author, Published, route_of
from fairlane_server.models.routes import CHAMPION
from fairlane_server.rollouts.changes import (
    RolloutPlan,
    aborted,
    approved,
    first_step,
    paused,
    resumed,
    rolled_back,
    with_rollout,
)
from fairlane_server.rollouts.controller import RolloutController
from fairlane_server.rollouts.plan_file import plan_of_json
from fairlane_server.rollouts.steps import StepApproval
from fairlane_server.rollouts.verdict import StepVerdict
from producers.admin.blocking import Serial
from producers.admin.deps import AT_MS, AdminDeps, Limit
from producers.admin.file_bodies import file_body, parsed
from producers.admin.models import (
    HISTORY,
    ROUTE_ANSWER,
    HistoryAnswer,
    IfRevision,
    ModelName,
    Reason,
    change_answer,
    changed_route,
    route_author,
)
from producers.admin.problems import CHANGING_MODELS, READING, READING_ONE, answered_errors, not_found
from producers.gateway.identity.identity import Identity
from producers.gateway.native.response_bodies import ResponseBody
from producers.gateway.native.response_bodies import answered as answer
from producers.gateway.openapi import answered
from producers.gateway.sending import body_of


class RolloutAnswer(ResponseBody):
    """A rollout. The verdict is left out when it is over, and before this process has judged it."""

    rollout: Rollout
    verdict: StepVerdict | None = Field(None, description="Of the present step so far, with its reason and findings")


AtOnce = Annotated[bool, Query(description="Without waiting for evidence; not if the candidate is worse")]
Step = Annotated[int | None, Query(ge=1, description="The step that is meant, from 1; 409 if it is another by now")]
RolloutId = Annotated[
    str | None, Query(max_length=200, pattern=r"^[^\x00]*$", description="This rollout, not the latest")
]

_PLAN = {"candidate": "2", "steps": [5, 50, 100], "guards": {"most_added_failures": 0.005}}


_PRESENT = RolloutAnswer(rollout=first_step(RolloutPlan("2"), "1", AT_MS))


def router(deps: AdminDeps, routes: ModelRoutes, history: Serial, controller: RolloutController) -> APIRouter:
    """All routes of rollouts. ``history``: the thread of what reads Postgres."""
    api = APIRouter(tags=["rollouts"])
    Reader = Annotated[Identity, deps.caller(Permission.REGISTRY_READ)]  # noqa: N806 - a type
    Starter = Annotated[Identity, deps.caller(Permission.REGISTRY_WRITE)]  # noqa: N806 - a type
    Writer = Annotated[Identity, deps.caller(Permission.ROLLOUTS_STEER)]  # noqa: N806 - a type
    changed = answered(ROUTE_ANSWER, "The changed route") | CHANGING_MODELS

    @api.get("/models/{model}/rollout", responses=answered(_PRESENT, "The rollout") | READING_ONE)
    async def get_rollout(
        model: ModelName,
        caller: Reader,  # noqa: ARG001 - its permission
    ) -> Response:
        """The latest rollout of a model, and while it is under way, the verdict of a second ago and what is missing."""
        with answered_errors():
            published = await deps.kafka_calls.run(routes.read)
        route = route_of(published, model)
        if route is None or route.rollout is None:
            raise not_found("there is no such model, or it has had no rollout")
        return answer(RolloutAnswer(rollout=route.rollout, verdict=controller.latest.get(model)))

    @api.get("/models/{model}/rollout/decisions", responses=answered(HISTORY, "The decisions") | READING)
    async def get_decisions(
        model: ModelName,
        caller: Reader,  # noqa: ARG001 - its permission
        rollout: RolloutId = None,
        limit: Limit = 50,
    ) -> Response:
        """Every decision of a rollout with its evidence, the oldest first; the newest ones if there are more."""
        with answered_errors():
            found = await history.run(partial(routes.decisions, model, rollout, limit))
        return answer(HistoryAnswer(data=tuple(map(change_answer, found))))

    @api.post(
        "/models/{model}/rollout",
        status_code=201,
        responses=answered(ROUTE_ANSWER, "The route with the rollout", 201) | CHANGING_MODELS,
        openapi_extra=file_body("The candidate, and what of the plan differs from the defaults", "Three steps", _PLAN),
    )
    async def start_rollout(
        request: Request, model: ModelName, caller: Starter, if_match: IfRevision = None, reason: Reason = ""
    ) -> Response:
        """Start to give requests to a version in steps. This process judges it, and takes it back if it is worse."""
        plan, author = parsed(plan_of_json, await body_of(request)), route_author(caller, reason)
        return await changed_route(
            *(deps, routes, model, if_match),
            lambda published: with_rollout(published, model, plan, author),
            status=201,
        )

    @api.post("/models/{model}/rollout/approve", responses=changed)
    async def approve_step(
        model: ModelName,
        caller: Writer,
        step: Step = None,
        at_once: AtOnce = False,
        if_match: IfRevision = None,
        reason: Reason = "",
    ) -> Response:
        """Approve the end of the present step."""
        approval = StepApproval.AT_ONCE if at_once else StepApproval.WHEN_PASSED
        return await _present(
            *(deps, routes, model, if_match, route_author(caller, reason)),
            lambda route, author: approved(route, approval, author, None if step is None else step - 1),
        )

    @api.post("/models/{model}/rollout/pause", responses=changed)
    async def pause_rollout(
        model: ModelName, caller: Writer, if_match: IfRevision = None, reason: Reason = ""
    ) -> Response:
        """Keep the rollout at its step. A candidate that is worse is rolled back all the same."""
        return await _present(deps, routes, model, if_match, route_author(caller, reason), paused)

    @api.post("/models/{model}/rollout/resume", responses=changed)
    async def resume_rollout(
        model: ModelName, caller: Writer, if_match: IfRevision = None, reason: Reason = ""
    ) -> Response:
        """Let a paused rollout go on."""
        return await _present(deps, routes, model, if_match, route_author(caller, reason), resumed)

    @api.post("/models/{model}/rollout/abort", responses=changed)
    async def abort_rollout(
        model: ModelName, caller: Writer, if_match: IfRevision = None, reason: Reason = ""
    ) -> Response:
        """End the rollout: new requests go to the champion, and what waits for the candidate is answered by it."""
        return await _present(deps, routes, model, if_match, route_author(caller, reason), aborted)

    @api.post("/models/{model}/rollout/rollback", responses=changed)
    async def roll_back(model: ModelName, caller: Writer, if_match: IfRevision = None, reason: Reason = "") -> Response:
        """End the rollout and stop its candidate: what waits for it goes to the champion within a second."""
        return await _present(
            *(deps, routes, model, if_match, route_author(caller, reason)),
            lambda route, author: rolled_back(route, None, author),
        )

    return api


async def _present(
    deps: AdminDeps,
    routes: ModelRoutes,
    model: str,
    if_match: str | None,
    author: Author,
    decide: Callable[[ModelRoute, Author], ModelRoute],
) -> Response:
    def decided(published: Published) -> ModelRoute:
        route = route_of(published, model)
        if route is None:
            raise ValueError(f"it has no {CHAMPION}")
        return decide(route, author)

    return await changed_route(deps, routes, model, if_match, decided)
