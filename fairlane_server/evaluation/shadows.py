"""Shadows of models: the sample, and the changes of a route that start and stop one. Pure."""

from dataclasses import dataclass, replace

from fairlane.evaluation_records import Shadow
from fairlane.records import InferenceRequest, ModelRoute
from fairlane_server.models.changes import API, Author, Published, changed, route_of, versions_of
from fairlane_server.models.route_checks import check_route
from fairlane_server.models.routes import CHAMPION, share_of, sticky_key


class NoShadowError(ValueError):
    """The model has no shadow, or none that a change can be made of."""


@dataclass(frozen=True, slots=True)
class ShadowPlan:
    """What is asked of a shadow. Its fields are those of ``Shadow``."""

    candidate: str
    percent: float = 10.0
    max_concurrent: int = 16
    max_share: float = 0.1
    max_age_ms: int = 600_000
    sticky_by: str = "request"
    arm: str | None = None
    max_tokens_per_s: float | None = None
    from_ms: int | None = None
    until_ms: int | None = None


def is_running(shadow: Shadow, now_ms: int) -> bool:
    """Whether it copies requests at this time."""
    return (
        shadow.stopped_at_ms is None
        and (shadow.from_ms is None or now_ms >= shadow.from_ms)
        and (shadow.until_ms is None or now_ms < shadow.until_ms)
    )


def is_sampled(
    shadow: Shadow, request: InferenceRequest, tenant: str, version: str, arm: str | None, now_ms: int
) -> bool:
    """Whether a request that this version answers, by this arm, is in the sample. The candidate's own requests are
    not."""
    if not is_running(shadow, now_ms) or version == shadow.candidate:
        return False
    if shadow.arm is not None and arm != shadow.arm:
        return False
    share = share_of(f"{shadow.run}\0{tenant}\0{sticky_key(shadow.sticky_by, request)}")
    return 100 * share < shadow.percent


def with_shadow(published: Published, model: str, plan: ShadowPlan, author: Author) -> ModelRoute:
    """The route with a shadow. Raises ValueError with the field and the reason, NoShadowError while another one
    runs."""
    route = route_of(published, model)
    if route is None:
        raise ValueError(f"it has no {CHAMPION}, whose requests are copied")
    before = route.shadow
    if before is not None and before.stopped_at_ms is None:
        raise NoShadowError(f"the shadow of version {before.candidate} is under way; stop it first")
    if plan.candidate == route.aliases.get(CHAMPION):
        raise ValueError(f"candidate: {plan.candidate!r} is the {CHAMPION}")
    if plan.candidate in route.stopped:
        raise ValueError(f"candidate: {plan.candidate!r} is stopped")
    shadow = Shadow(
        run=f"{model}-{plan.candidate}-{author.at_ms}",
        candidate=plan.candidate,
        percent=plan.percent,
        max_concurrent=plan.max_concurrent,
        max_share=plan.max_share,
        max_age_ms=plan.max_age_ms,
        started_at_ms=author.at_ms,
        sticky_by=plan.sticky_by,
        arm=plan.arm,
        max_tokens_per_s=plan.max_tokens_per_s,
        from_ms=plan.from_ms,
        until_ms=plan.until_ms,
    )
    made = changed(route, author, API, shadow=shadow)
    check_route(model, made, versions_of(published, model))
    return made


def without_shadow(published: Published, model: str, author: Author) -> ModelRoute:
    """The route with its shadow stopped: no more copies are made, and those that wait still run. Raises
    NoShadowError."""
    route = route_of(published, model)
    if route is None or route.shadow is None or route.shadow.stopped_at_ms is not None:
        raise NoShadowError("no shadow is under way")
    return changed(route, author, API, shadow=replace(route.shadow, stopped_at_ms=author.at_ms))
