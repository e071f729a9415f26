"""Changes of a rollout: what a command, a call or the controller makes of a model's route. Pure.

All of a change is in one record: the part of the candidate, the champion, the stopped version, and why.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from fairlane.records import ModelRoute, ModelVersion
from fairlane.rollout_records import Rollout, RolloutGuards
from fairlane_server.models.changes import API, Author, Published, changed, route_of, versions_of
from fairlane_server.models.rollout_arms import RolloutStatus, is_active
from fairlane_server.models.route_checks import check_route
from fairlane_server.models.routes import CHAMPION
from fairlane_server.rollouts.guards import check_guards
from fairlane_server.rollouts.steps import StepApproval
from fairlane_server.rollouts.verdict import StepVerdict


class RolloutDecision(StrEnum):
    """What a change did with a rollout."""

    STARTED = "started"
    ADVANCED = "advanced"
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled_back"
    PAUSED = "paused"
    RESUMED = "resumed"
    APPROVED = "approved"
    ABORTED = "aborted"


class NoRolloutError(ValueError):
    """The model has no rollout under way, or not in the state that a change needs."""


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """What is asked of a rollout. Its fields are those of ``Rollout``; ``steps`` end with 100."""

    candidate: str
    steps: tuple[float, ...] = (1.0, 5.0, 25.0, 50.0, 100.0)
    guards: RolloutGuards = RolloutGuards()  # noqa: RUF009 - frozen
    least_step_ms: int = 60_000
    sticky_by: str = "conversation"
    needs_approval: bool = False


def with_rollout(published: Published, model: str, plan: RolloutPlan, author: Author) -> ModelRoute:
    """The route with a rollout at its first step. Raises ValueError with the field and the reason, NoRolloutError when
    another one is under way."""
    route = route_of(published, model)
    if route is None:
        raise ValueError(f"it has no {CHAMPION}, with which the candidate is compared")
    if route.rollout is not None and is_active(route.rollout):
        raise NoRolloutError(f"the rollout of version {route.rollout.candidate} is under way; abort it first")
    check_guards(plan.guards)
    _check_replaces(versions_of(published, model), plan.candidate, route.aliases[CHAMPION])
    made = changed(route, author, API, rollout=first_step(plan, route.aliases[CHAMPION], author.at_ms))
    check_route(model, made, versions_of(published, model))
    return made


def _check_replaces(versions: Mapping[str, ModelVersion], candidate: str, champion: str) -> None:
    """A candidate that cannot take what the champion takes would refuse requests that were fine before."""
    new, old = versions.get(candidate), versions.get(champion)
    if new is None or old is None:
        return
    if missing := sorted({*old.tasks} - {*new.tasks}):
        raise ValueError(f"candidate: it does not do {', '.join(missing)}, which the champion does")
    for name in ("max_context_tokens", "max_output_tokens"):
        if getattr(new, name) < getattr(old, name):
            raise ValueError(f"candidate: its {name} is {getattr(new, name)}, and the champion's {getattr(old, name)}")


def first_step(plan: RolloutPlan, champion: str, now_ms: int) -> Rollout:
    """A rollout that begins now."""
    return Rollout(
        rollout=f"{plan.candidate}-{now_ms}",
        candidate=plan.candidate,
        champion=champion,
        steps=plan.steps,
        guards=plan.guards,
        least_step_ms=plan.least_step_ms,
        sticky_by=plan.sticky_by,
        needs_approval=plan.needs_approval,
        status=RolloutStatus.RUNNING,
        step=0,
        started_at_ms=now_ms,
        step_started_at_ms=now_ms,
        decided=RolloutDecision.STARTED,
    )


def advanced(route: ModelRoute, verdict: StepVerdict, author: Author) -> ModelRoute:
    """The route with the rollout at its next step; after the last one that is compared, the candidate is the
    champion."""
    rollout = active_rollout(route)
    if rollout.step + 2 >= len(rollout.steps):
        aliases = {**route.aliases, CHAMPION: rollout.candidate}
        ended = _decided(rollout, RolloutDecision.PROMOTED, verdict, status=RolloutStatus.PROMOTED)
        return changed(route, author, API, aliases=aliases, rollout=ended)
    made = _decided(
        rollout,
        RolloutDecision.ADVANCED,
        verdict,
        step=rollout.step + 1,
        step_started_at_ms=author.at_ms,
        approval=None,
    )
    return changed(route, author, API, rollout=made)


def rolled_back(route: ModelRoute, verdict: StepVerdict | None, author: Author) -> ModelRoute:
    """The route with the candidate stopped: what waits for it goes to the champion, and new requests do. ``verdict``
    None: a person decided it."""
    rollout = active_rollout(route)
    ended = _decided(rollout, RolloutDecision.ROLLED_BACK, verdict, status=RolloutStatus.ROLLED_BACK)
    return changed(route, author, API, rollout=ended, stopped=(*route.stopped, rollout.candidate))


def paused(route: ModelRoute, author: Author) -> ModelRoute:
    """The route with the rollout kept at its step."""
    return _with_status(route, RolloutStatus.RUNNING, RolloutStatus.PAUSED, RolloutDecision.PAUSED, author)


def resumed(route: ModelRoute, author: Author) -> ModelRoute:
    """The route with a paused rollout going on."""
    return _with_status(route, RolloutStatus.PAUSED, RolloutStatus.RUNNING, RolloutDecision.RESUMED, author)


def approved(route: ModelRoute, approval: StepApproval, author: Author, step: int | None = None) -> ModelRoute:
    """The route with the end of the present step approved. ``step``: the index of the one that is meant; another one
    raises NoRolloutError."""
    rollout = active_rollout(route)
    if step is not None and step != rollout.step:
        raise NoRolloutError(f"the rollout is at step {rollout.step + 1}, not {step + 1}")
    if approval is StepApproval.WHEN_PASSED and not rollout.needs_approval:
        raise NoRolloutError("the rollout needs no approval")
    return changed(route, author, API, rollout=_decided(rollout, RolloutDecision.APPROVED, approval=approval))


def aborted(route: ModelRoute, author: Author) -> ModelRoute:
    """The route without the rollout: new requests go to the champion; those that wait for the candidate still get
    it."""
    rollout = active_rollout(route)
    return changed(route, author, API, rollout=_decided(rollout, RolloutDecision.ABORTED, status=RolloutStatus.ABORTED))


def active_rollout(route: ModelRoute) -> Rollout:
    """The rollout under way. Raises NoRolloutError."""
    if route.rollout is None or not is_active(route.rollout):
        raise NoRolloutError("no rollout is under way")
    return route.rollout


def _with_status(
    route: ModelRoute, before: RolloutStatus, after: RolloutStatus, decision: RolloutDecision, author: Author
) -> ModelRoute:
    rollout = active_rollout(route)
    if rollout.status != before:
        raise NoRolloutError(f"the rollout is {rollout.status}, not {before}")
    return changed(route, author, API, rollout=_decided(rollout, decision, status=after))


def _decided(
    rollout: Rollout, decision: RolloutDecision, verdict: StepVerdict | None = None, **fields_changed: object
) -> Rollout:
    found: dict[str, object] = {"candidate_requests": 0, "control_requests": 0, "findings": ()}
    if verdict is not None:
        found = {name: getattr(verdict, name) for name in found}
    return replace(rollout, decided=decision, **found, **fields_changed)  # type: ignore[arg-type]  # fields of it
