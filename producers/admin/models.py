"""Routes of models: their versions, aliases and rules, and rollouts."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from fairlane.clock import now_ms
from fairlane.names import MODEL_PATTERN
from fairlane.records import ModelRoute, ModelVersion
from fairlane_server.administration.model_routes import ModelRoutes
from fairlane_server.api_keys.permissions import Permission
from fairlane_server.models.catalog import ModelRecord
from fairlane_server.models.changes import (
    API,
    Author,
    Published,
    route_of,
    with_alias,
    with_rules,
    with_stopped,
    without_alias,
)
from fairlane_server.models.models_file import version_of_json
from fairlane_server.models.routes import ALIAS_PATTERN, CHAMPION, VERSION_PATTERN
from fairlane_server.models.rules_file import rules_of_json
from fairlane_server.postgres.model_history import RouteChange
from producers.admin.blocking import Serial
from producers.admin.deps import AT_MS, AdminDeps, Cursor, Limit
from producers.admin.file_bodies import file_body, parsed
from producers.admin.problems import CHANGING_MODELS, READING, READING_ONE, answered_errors, not_found
from producers.gateway.identity.identity import Identity
from producers.gateway.native.cursors import Cursors
from producers.gateway.native.response_bodies import Page, ResponseBody, page_of
from producers.gateway.native.response_bodies import answered as answer
from producers.gateway.openapi import answered, taking
from producers.gateway.sending import body_of
from producers.openai_api.body import parse

MOST_REASON_CHARACTERS = 1_000


class AliasBody(BaseModel):
    """The version that an alias is to name."""

    model_config = ConfigDict(extra="forbid")

    version: str = Field(pattern=rf"^{VERSION_PATTERN.pattern}$")


class ModelAnswer(ResponseBody):
    """A version of a model, or the route of one. Both are left out if this version of Fairlane cannot read it."""

    reference: str = Field(description="`model/version` of a version, the model's name of a route")
    version: ModelVersion | None = Field(None, description="The version")
    route: ModelRoute | None = Field(None, description="Aliases, rules and rollout of the model")


class RouteChangeAnswer(ResponseBody):
    """A route as a change left it. The revision 0 took it back."""

    revision: int
    aliases: dict[str, str]
    previous: dict[str, str]
    rules: list[dict[str, Any]]
    stopped: list[str]
    changed_at_ms: int
    changed_by: str
    reason: str
    managed_by: str
    rollout: dict[str, Any] | None = None


class HistoryAnswer(ResponseBody):
    """Changes of a route."""

    data: tuple[RouteChangeAnswer, ...]


ModelName = Annotated[
    str, Path(pattern=rf"^{MODEL_PATTERN.pattern}$", description="Name of the model", examples=["digits"])
]
VersionName = Annotated[
    str, Path(pattern=rf"^{VERSION_PATTERN.pattern}$", description="Name of the version", examples=["2"])
]
AliasName = Annotated[str, Path(pattern=rf"^{ALIAS_PATTERN.pattern}$", description="The alias", examples=[CHAMPION])]
Reason = Annotated[
    str,
    Query(max_length=MOST_REASON_CHARACTERS, pattern=r"^[^\x00]*$", description="Why; it is kept with the change"),
]
IfRevision = Annotated[
    str | None,
    Header(
        alias="if-match",
        pattern=r'^"\d{1,18}"$',
        description="The `revision` that was read, in quotation marks; without it, whatever there is is changed",
    ),
]
_VERSION = ModelVersion("digits", "2", "classify", "torch-classifier", ("classify",), "digits-2", 1, 1)
_ROUTE = ModelRoute("digits", 1, {CHAMPION: "1"}, {}, changed_at_ms=AT_MS, changed_by="ops@desk")
_VERSION_ANSWER = ModelAnswer(reference="digits/2", version=_VERSION)
ROUTE_ANSWER = ModelAnswer(reference="digits", route=_ROUTE)
HISTORY = HistoryAnswer(
    data=(
        RouteChangeAnswer(
            revision=2,
            aliases={CHAMPION: "2"},
            previous={CHAMPION: "1"},
            rules=[],
            stopped=[],
            changed_at_ms=AT_MS,
            changed_by="user:u-17",
            reason="0.981 on the holdout set",
            managed_by=API,
        ),
    )
)
_RULES = {"rules": [{"rule": "pinned", "tenants": ["globex"], "arms": [{"arm": "old", "target": "1", "percent": 100}]}]}
_cursors = Cursors(str)


def router(deps: AdminDeps, routes: ModelRoutes, history: Serial) -> APIRouter:
    """Routes of versions, aliases and rules. ``history``: the thread of what reads Postgres."""
    api = APIRouter(tags=["models"])
    _add_reading(api, deps, routes, history)
    _add_changes(api, deps, routes)
    return api


def _add_reading(api: APIRouter, deps: AdminDeps, routes: ModelRoutes, history: Serial) -> None:
    Reader = Annotated[Identity, deps.caller(Permission.REGISTRY_READ)]  # noqa: N806 - a type
    page = Page[ModelAnswer](data=(_VERSION_ANSWER, ROUTE_ANSWER), has_more=False)

    @api.get("/models", responses=answered(page, "A page") | READING)
    async def list_models(caller: Reader, limit: Limit = 50, cursor: Cursor = None) -> Response:
        """The published versions of models with their pools, and the routes, by reference."""
        after = _cursors.decode(caller.tenant, cursor) or ""
        with answered_errors():
            published: dict[str, Any] = await deps.kafka_calls.run(routes.read)
        found = sorted(name for name in published if name > after)
        return page_of(
            *(Page[ModelAnswer], found, limit),
            lambda name: _answer_of(name, published[name]),
            lambda last: _cursors.encode(caller.tenant, last),
        )

    @api.get("/models/{model}", responses=answered(ROUTE_ANSWER, "The route") | READING_ONE)
    async def get_route(model: ModelName, caller: Reader) -> Response:  # noqa: ARG001 - its permission
        """Aliases, rules and the latest rollout of a model."""
        with answered_errors():
            published = await deps.kafka_calls.run(routes.read)
        route = route_of(published, model)
        if route is None:
            raise not_found("there is no such model")
        return _route_answer(route)

    @api.get("/models/{model}/history", responses=answered(HISTORY, "The changes") | READING)
    async def get_history(model: ModelName, caller: Reader, limit: Limit = 50) -> Response:  # noqa: ARG001
        """Who changed the aliases and rules of a model, when and why; the newest first. A change of a moment ago may
        not be recorded yet."""
        with answered_errors():
            found = await history.run(partial(routes.history, model, limit))
        return answer(HistoryAnswer(data=tuple(map(change_answer, found))))


def _add_changes(api: APIRouter, deps: AdminDeps, routes: ModelRoutes) -> None:
    Writer = Annotated[Identity, deps.caller(Permission.REGISTRY_WRITE)]  # noqa: N806 - a type
    Steerer = Annotated[Identity, deps.caller(Permission.ROLLOUTS_STEER)]  # noqa: N806 - a type
    changed = answered(ROUTE_ANSWER, "The changed route") | CHANGING_MODELS

    @api.put(
        "/models/{model}/versions/{version}",
        responses=answered(_VERSION_ANSWER, "The version") | CHANGING_MODELS,
        openapi_extra=file_body(
            "The version, with the keys of an entry of models.yaml that say how it is served, and what it is",
            "A classifier",
            {
                "pool": "classify",
                "engine": "torch-classifier",
                "tasks": ["classify"],
                "path": "digits-2",
                "limits": {"max_context_tokens": 1, "max_output_tokens": 0},
            },
        ),
    )
    async def register_version(
        request: Request, model: ModelName, version: VersionName, caller: Writer, reason: Reason = ""
    ) -> Response:
        """Publish a version, which gets only requests that name it until an alias, a rule or a rollout does. What
        determines its answers never changes: 409."""
        wanted = parsed(partial(version_of_json, model, version), await body_of(request))
        with answered_errors():
            made = await deps.kafka_calls.run(partial(routes.register, wanted, route_author(caller, reason)))
        return answer(_answer_of(f"{model}/{version}", made))

    @api.put(
        "/models/{model}/aliases/{alias}",
        responses=changed,
        openapi_extra=taking(AliasBody, {"Another version": {"version": "2"}}, has_key=False),
    )
    async def set_alias(
        request: Request,
        model: ModelName,
        alias: AliasName,
        caller: Writer,
        if_match: IfRevision = None,
        reason: Reason = "",
    ) -> Response:
        """Move an alias to a version. The champion gets the requests that name the model alone."""
        version = parse(AliasBody, await body_of(request)).version
        author = route_author(caller, reason)
        return await changed_route(
            deps, routes, model, if_match, lambda published: with_alias(published, model, alias, version, author)
        )

    @api.delete("/models/{model}/aliases/{alias}", responses=changed)
    async def remove_alias(
        model: ModelName, alias: AliasName, caller: Writer, if_match: IfRevision = None, reason: Reason = ""
    ) -> Response:
        """Remove an alias other than the champion. Requests that name it are refused from then on."""
        author = route_author(caller, reason)
        return await changed_route(
            deps, routes, model, if_match, lambda published: without_alias(published, model, alias, author)
        )

    @api.put(
        "/models/{model}/rules",
        responses=changed,
        openapi_extra=file_body(
            "All rules of the model, with the keys of a file of rules", "A version of its own", _RULES
        ),
    )
    async def set_rules(
        request: Request, model: ModelName, caller: Writer, if_match: IfRevision = None, reason: Reason = ""
    ) -> Response:
        """Replace the rules of a model, all or none."""
        rules, author = parsed(rules_of_json, await body_of(request)), route_author(caller, reason)
        return await changed_route(
            deps, routes, model, if_match, lambda published: with_rules(published, model, rules, author)
        )

    @api.post("/models/{model}/versions/{version}/stop", responses=changed)
    async def stop_version(
        model: ModelName, version: VersionName, caller: Steerer, if_match: IfRevision = None, reason: Reason = ""
    ) -> Response:
        """Give a version no more requests, at once: those that wait for it are routed again. Ends its rollout."""
        author = route_author(caller, reason)
        return await changed_route(
            *(deps, routes, model, if_match),
            lambda published: with_stopped(published, model, version, author, stopped=True),
        )

    @api.post("/models/{model}/versions/{version}/resume", responses=changed)
    async def resume_version(
        model: ModelName, version: VersionName, caller: Steerer, if_match: IfRevision = None, reason: Reason = ""
    ) -> Response:
        """Let a stopped version have requests again."""
        author = route_author(caller, reason)
        return await changed_route(
            *(deps, routes, model, if_match),
            lambda published: with_stopped(published, model, version, author, stopped=False),
        )


async def changed_route(
    deps: AdminDeps,
    routes: ModelRoutes,
    model: str,
    if_match: str | None,
    decide: Callable[[Published], ModelRoute],
    status: int = 200,
) -> Response:
    """Change a route, and answer with it."""
    revision = None if if_match is None else int(if_match[1:-1])
    with answered_errors():
        route = await deps.kafka_calls.run(partial(routes.change, model, revision, decide))
    return _route_answer(route, status)


def route_author(caller: Identity, reason: str) -> Author:
    """The caller as author of a change of a route."""
    return Author(caller.requested_by, now_ms(), reason)


def _answer_of(reference: str, record: ModelRecord | None) -> ModelAnswer:
    return ModelAnswer(
        reference=reference,
        version=record if isinstance(record, ModelVersion) else None,
        route=record if isinstance(record, ModelRoute) else None,
    )


def _route_answer(route: ModelRoute, status: int = 200) -> Response:
    return answer(_answer_of(route.model, route), status, {"etag": f'"{route.revision}"'})


def change_answer(change: RouteChange) -> RouteChangeAnswer:
    """A change as the API shows it."""
    return RouteChangeAnswer(**asdict(change))
