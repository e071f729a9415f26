"""Changes of published models: what a file, a command or a call makes of the present records. Pure.

A version is immutable in what determines its answers. Where it is served, and in which batches, may change.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace

from fairlane.records import ModelRoute, ModelVersion, RouteRule
from fairlane_server.models.catalog import ModelRecord, route_of_one
from fairlane_server.models.models_file import ModelsFile
from fairlane_server.models.rollout_arms import RolloutStatus, is_active
from fairlane_server.models.route_checks import check_route
from fairlane_server.models.routes import CHAMPION, model_of, version_key

FILE = "file"
API = "api"
"""Values of ``managed_by``: models.yaml manages the record, or commands and the admin API do."""

_SERVING = frozenset(
    {
        *("pool", "dedicated_pools", "smaller_model", "tensor_parallel_size"),
        *("max_context_tokens", "max_output_tokens", "max_batch_size", "max_batch_tokens"),
    }
)
"""The fields of a version that may change."""

_DESCRIPTION = ("artifact_digest", "source", "metrics", "signature", "requirements")
"""The fields that a file may leave to the registration: what was registered with them keeps them."""

_REGISTRATION = frozenset({"registered_at_ms", "registered_by", "managed_by"})

Published = Mapping[str, ModelRecord | None]
"""The records of the control topic; None for one that cannot be read."""


class ImmutableVersionError(ValueError):
    """A version was to be changed in a field that determines its answers."""


@dataclass(frozen=True, slots=True)
class Author:
    """The author of a change, its time and its reason."""

    name: str
    at_ms: int
    reason: str = ""


def versions_of(published: Published, model: str) -> dict[str, ModelVersion]:
    """The published versions of a model."""
    return {
        record.version: record
        for record in published.values()
        if isinstance(record, ModelVersion) and record.model == model
    }


def route_of(published: Published, model: str) -> ModelRoute | None:
    """The route of a model. That of a version under the name of its model, as before there were routes, is the one that
    makes it the champion."""
    found = published.get(model)
    return route_of_one(found) if isinstance(found, ModelVersion) else found


def moved_versions(published: Published, model: str) -> dict[str, ModelRecord]:
    """The version that is published under the name of the model, by the reference under which it has to be when a route
    takes its place."""
    found = published.get(model)
    return {version_key(model, found.version): found} if isinstance(found, ModelVersion) else {}


def check_all(published: Published, changed: Mapping[str, ModelRecord], withdrawn: Iterable[str]) -> None:
    """Check the routes of all models concerned with the versions that there will be. Raises ValueError with the model,
    the field and the reason: an alias or a rule must not name what is withdrawn."""
    gone = frozenset(withdrawn)
    after = {key: record for key, record in {**published, **changed}.items() if key not in gone}
    for model in sorted({model_of(key) for key in (*changed, *gone)}):
        route = after.get(model)
        if isinstance(route, ModelRoute):
            try:
                check_route(model, route, versions_of(after, model))
            except ValueError as error:
                raise ValueError(f"{model}: {error}") from None


def managed_by_api(published: Published) -> set[str]:
    """The keys of the records that a file does not manage."""
    return {key for key, record in published.items() if record is not None and record.managed_by == API}


def of_file(file: ModelsFile, published: Published, author: Author) -> dict[str, ModelRecord]:
    """The records that a file stands for, given those that are published; versions come first.

    Raises ImmutableVersionError.
    """
    records: dict[str, ModelRecord] = {}
    for version in file.versions:
        before = versions_of(published, version.model).get(version.version)
        records[version_key(version.model, version.version)] = registered(version, before, author, FILE)
    for model, aliases in file.aliases.items():
        records = {**moved_versions(published, model), **records}
        route = route_of(published, model)
        if route is None:
            records[model] = _first_route(model, aliases, author, FILE)
        elif {**route.aliases, **aliases} == route.aliases:
            records[model] = replace(route, managed_by=FILE)
        else:
            records[model] = changed(route, author, FILE, aliases={**route.aliases, **aliases})
    return records


def registered(version: ModelVersion, before: ModelVersion | None, author: Author, managed_by: str) -> ModelVersion:
    """The version as it is published. ``before`` is what is published of it; what only a registration knows stays.

    Raises ImmutableVersionError.
    """
    if before is None:
        return replace(version, registered_at_ms=author.at_ms, registered_by=author.name, managed_by=managed_by)
    described = {name: getattr(version, name) or getattr(before, name) for name in _DESCRIPTION}
    now = replace(version, **described, **{name: getattr(before, name) for name in _REGISTRATION})
    for field in fields(ModelVersion):
        if field.name not in _SERVING and getattr(now, field.name) != getattr(before, field.name):
            raise ImmutableVersionError(
                f"version {version.version} of {version.model} is published with another {field.name}: "
                "a version never changes in this; give the new one another name"
            )
    return now


def with_alias(published: Published, model: str, alias: str, version: str, author: Author) -> ModelRoute:
    """The route of a model with an alias moved to a version. The first alias of a model is its champion.

    Raises ValueError with the field and the reason.
    """
    route = route_of(published, model)
    aliases = {alias: version} if route is None else {**route.aliases, alias: version}
    if route is not None and aliases == route.aliases:
        return route
    made = _first_route(model, aliases, author, API) if route is None else changed(route, author, API, aliases=aliases)
    check_route(model, made, versions_of(published, model))
    return made


def without_alias(published: Published, model: str, alias: str, author: Author) -> ModelRoute:
    """The route of a model without an alias. Raises ValueError with the field and the reason."""
    route = route_of(published, model)
    if route is None or alias not in route.aliases:
        raise ValueError(f"it has no alias {alias!r}")
    made = changed(route, author, API, aliases={name: one for name, one in route.aliases.items() if name != alias})
    check_route(model, made, versions_of(published, model))
    return made


def with_rules(published: Published, model: str, rules: tuple[RouteRule, ...], author: Author) -> ModelRoute:
    """The route of a model with other rules; the present one if they are the same. Raises ValueError with the field and
    the reason."""
    route = route_of(published, model)
    if route is None:
        raise ValueError(f"it has no {CHAMPION}, which gets the requests of no rule")
    if rules == route.rules:
        return route
    made = changed(route, author, API, rules=rules)
    check_route(model, made, versions_of(published, model))
    return made


def with_stopped(published: Published, model: str, version: str, author: Author, *, stopped: bool) -> ModelRoute:
    """The route of a model with a version stopped or resumed. Raises ValueError with the field and the reason."""
    route = route_of(published, model)
    if route is None:
        raise ValueError("it has no route")
    others = tuple(one for one in route.stopped if one != version)
    rollout = route.rollout
    if stopped and rollout is not None and is_active(rollout) and rollout.candidate == version:
        # To stop its candidate is to end a rollout.
        rollout = replace(
            rollout,
            status=RolloutStatus.ROLLED_BACK,
            decided=RolloutStatus.ROLLED_BACK,
            approval=None,
            candidate_requests=0,
            control_requests=0,
            findings=(),
        )
    made = changed(route, author, API, stopped=(*others, version) if stopped else others, rollout=rollout)
    check_route(model, made, versions_of(published, model))
    return made


def changed(route: ModelRoute, author: Author, managed_by: str, **fields_changed: object) -> ModelRoute:
    """The next revision of a route."""
    made: ModelRoute = replace(route, **fields_changed)  # type: ignore[arg-type]  # the caller names fields of it
    moved = {alias for alias, version in made.aliases.items() if route.aliases.get(alias, version) != version}
    before = {alias: route.aliases[alias] for alias in moved}
    return replace(
        made,
        revision=route.revision + 1,
        previous={alias: version for alias, version in {**route.previous, **before}.items() if alias in made.aliases},
        changed_at_ms=author.at_ms,
        changed_by=author.name,
        reason=author.reason,
        managed_by=managed_by,
    )


def _first_route(model: str, aliases: Mapping[str, str], author: Author, managed_by: str) -> ModelRoute:
    return ModelRoute(
        model,
        1,
        dict(aliases),
        {},
        changed_at_ms=author.at_ms,
        changed_by=author.name,
        reason=author.reason,
        managed_by=managed_by,
    )
