"""The plan of a replay and its states: what a person asks for, and what may be done with it when. Pure."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from fairlane.names import is_name
from fairlane.records import ModelVersion
from fairlane_server.models.catalog import ModelCatalog
from fairlane_server.models.routes import CHAMPION

MOST_OUTSTANDING = 1_000
MOST_TENANTS = 1_000
ARMS = 2
"""Each request has a copy for the candidate, and one for the version that answered it: the noise floor."""


class LogReplayState(StrEnum):
    """State of a replay. It begins as planned, and its first step makes it running."""

    PLANNED = "planned"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


class LogReplayAction(StrEnum):
    """What a person may do with a replay."""

    PAUSE = "pause"
    RESUME = "resume"
    CANCEL = "cancel"


_OPEN = frozenset({LogReplayState.PLANNED, LogReplayState.RUNNING})
ENDED = frozenset({LogReplayState.FINISHED, LogReplayState.CANCELLED, LogReplayState.FAILED})
_STEPS: Mapping[LogReplayAction, tuple[frozenset[LogReplayState], LogReplayState]] = {
    LogReplayAction.PAUSE: (_OPEN, LogReplayState.PAUSED),
    # The ranges that it has, if it was begun, stay.
    LogReplayAction.RESUME: (frozenset({LogReplayState.PAUSED}), LogReplayState.PLANNED),
    LogReplayAction.CANCEL: (_OPEN | {LogReplayState.PAUSED}, LogReplayState.CANCELLED),
}


class LogReplayConflictError(Exception):
    """The state of the replay does not permit this. The message says which it is."""


def state_after(state: LogReplayState, action: LogReplayAction) -> LogReplayState:
    """The state that an action leads to. Raises LogReplayConflictError."""
    allowed, after = _STEPS[action]
    if state not in allowed:
        raise LogReplayConflictError(f"the replay is {state}")
    return after


@dataclass(frozen=True, slots=True)
class LogReplayPlan:
    """What is to be replayed.

    Attributes:
        model: name of the model.
        candidate: the version that is tried.
        against: the version whose work is replayed, and which runs it again; None: the champion.
        from_ms: work dispatched then or later, by the broker's clock.
        until_ms: work dispatched before then.
        tenants: of these alone; none: of all that allow evaluation.
        sample: part of the requests.
        most_requests: copied at most; None: all.
        most_outstanding: copies without a result at any time.
        name: for people; unique.
        reason: why.
    """

    model: str
    candidate: str
    against: str | None
    from_ms: int
    until_ms: int
    tenants: tuple[str, ...] = ()
    sample: float = 0.1
    most_requests: int | None = None
    most_outstanding: int = 200
    name: str | None = None
    reason: str = ""


def check_plan(plan: LogReplayPlan, catalog: ModelCatalog) -> str:
    """Returns the version that the candidate is compared with. Raises ValueError with the field and the reason."""
    if not catalog.versions_of(plan.model):
        raise ValueError(f"model: {plan.model!r} is the name of no model")
    champion = catalog.champion(plan.model)
    if plan.against is None and champion is None:
        raise ValueError(f"against: {plan.model} has no {CHAMPION}; name a version")
    against = plan.against if plan.against is not None else champion.version if champion else ""
    new, old = (
        _usable(catalog, plan.model, field, version)
        for field, version in (("candidate", plan.candidate), ("against", against))
    )
    if new == old:
        raise ValueError(f"candidate: version {old.version} is the one that it would be compared with")
    if missing := sorted({*old.tasks} - {*new.tasks}):
        raise ValueError(f"candidate: it does not do {', '.join(missing)}, which version {old.version} does")
    if plan.from_ms >= plan.until_ms:
        raise ValueError("from: it must be before the end of the replay")
    if len(plan.tenants) > MOST_TENANTS:
        raise ValueError(f"tenants: {len(plan.tenants)} are more than {MOST_TENANTS}")
    for tenant in plan.tenants:
        if not is_name(tenant):
            raise ValueError(f"tenants: no tenant can have the name {tenant!r}")
    if not 0 < plan.sample <= 1:
        raise ValueError(f"sample: {plan.sample} is not above 0 and at most 1")
    if plan.most_requests is not None and plan.most_requests < 1:
        raise ValueError(f"max_requests: {plan.most_requests} is less than 1")
    if not ARMS <= plan.most_outstanding <= MOST_OUTSTANDING:
        raise ValueError(f"max_outstanding: {plan.most_outstanding} is not from {ARMS} to {MOST_OUTSTANDING}")
    if plan.name is not None and (not is_name(plan.name) or plan.name.startswith(_ID_PREFIX)):
        raise ValueError(f"name: {plan.name!r} must be lower-case letters, digits and hyphens, and no id of a replay")
    return against


def _usable(catalog: ModelCatalog, model: str, field: str, version: str) -> ModelVersion:
    found = catalog.versions.get((model, version))
    if found is None:
        raise ValueError(f"{field}: {model} has no version {version!r}")
    if catalog.is_stopped(found):
        raise ValueError(f"{field}: version {version} of {model} is stopped")
    return found


_ID_PREFIX = "replay-"


def new_replay_id() -> str:
    """The id of a replay, which nothing else has: the ids of its copies follow from it."""
    return f"{_ID_PREFIX}{secrets.token_hex(8)}"
