"""When a model is measured again, and which of its versions. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fairlane_server.models.routes import CHAMPION

CANDIDATE = "candidate"
"""The alias of a version that is measured beside the champion, unless a rollout has another candidate."""
LEAST_HOURS = 0.1
"""More often, an evaluation is a load and no measurement."""

_HOUR_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class EvaluationSchedule:
    """How often a model is measured on which set, whichever limit is reached first.

    Attributes:
        set_name: its latest version is used.
        every_hours, every_requests: hours, and requests of the model by all tenants; None: no such limit.
        baseline_run: what runs are compared with; None: the first run that ends becomes it.
    """

    model: str
    set_name: str
    scorer: str
    parameters: Mapping[str, Any]
    judge: Mapping[str, Any] | None
    every_hours: float | None = None
    every_requests: int | None = None
    baseline_run: str | None = None
    created_at_ms: int = 0
    created_by: str = ""


def check_schedule(schedule: EvaluationSchedule) -> None:
    """Raises ValueError; the message begins with the field."""
    if schedule.every_hours is None and schedule.every_requests is None:
        raise ValueError("every_hours: give it, or every_requests")
    if schedule.every_hours is not None and not LEAST_HOURS <= schedule.every_hours <= 10_000:
        raise ValueError(f"every_hours: must be from {LEAST_HOURS:g} to 10,000")
    if schedule.every_requests is not None and not 1 <= schedule.every_requests < 2**53:
        raise ValueError("every_requests: must be a number from 1 on")


def measured_versions(aliases: Mapping[str, str], rollout: Mapping[str, Any] | None) -> tuple[str, ...]:
    """The versions of a model to measure: the champion, then the candidate of the rollout under way, or else of the
    alias. ``rollout`` is that of the route, as it is recorded."""
    champion, candidate = aliases.get(CHAMPION), aliases.get(CANDIDATE)
    if rollout is not None and rollout.get("status") in {"running", "paused"}:
        candidate = rollout.get("candidate")
    found = [version for version in (champion, candidate) if version]
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class LastRun:
    """The last scheduled run of a version that ended, on the present version of the set. ``requests``: of the model, as
    counted at its end."""

    version: str
    started_at_ms: int
    requests: int


def due_versions(
    schedule: EvaluationSchedule,
    versions: tuple[str, ...],
    last_runs: Mapping[str, LastRun],
    requests: int,
    now_ms: int,
) -> tuple[str, ...]:
    """The versions to measure now, in their order. One that was never measured on the present set is due at once.

    Args:
        schedule: of the model.
        versions: as ``measured_versions`` returns them.
        last_runs: by version.
        requests: of the model, counted since ever; fewer than before if old days are not counted any more.
        now_ms: since the epoch.
    """

    def is_due(version: str) -> bool:
        last = last_runs.get(version)
        if last is None:
            return True
        if schedule.every_requests is not None and not 0 <= requests - last.requests < schedule.every_requests:
            return True
        return schedule.every_hours is not None and now_ms - last.started_at_ms >= schedule.every_hours * _HOUR_MS

    return tuple(version for version in versions if is_due(version))
