"""Guards of a rollout: their check, and how often a verdict may be wrong. Pure."""

import math
from enum import StrEnum

from fairlane.rollout_records import RolloutGuards


class RolloutGuard(StrEnum):
    """What is compared between the candidate and the control."""

    ERRORS = "errors"
    LATENCY = "latency"
    COST = "cost"
    QUALITY = "quality"


LEAST_VALUES = 20
"""The bounds of means rest on the central limit theorem."""


def active_guards(guards: RolloutGuards) -> tuple[RolloutGuard, ...]:
    """The guards that are on."""
    tolerances = {
        RolloutGuard.ERRORS: guards.most_added_failures,
        RolloutGuard.LATENCY: guards.most_latency_ratio,
        RolloutGuard.COST: guards.most_cost_ratio,
        RolloutGuard.QUALITY: guards.most_lost_quality,
    }
    return tuple(guard for guard, tolerance in tolerances.items() if tolerance is not None)


def rollback_level(guards: RolloutGuards, judged_steps: int) -> float:
    """The error rate of one guard in one step, so that all together keep ``false_rollback_rate``."""
    return guards.false_rollback_rate / (judged_steps * len(active_guards(guards)))


def check_guards(guards: RolloutGuards) -> None:
    """Raises ValueError with the field and the reason."""
    for name in ("most_added_failures", "most_control_failures", "false_rollback_rate", "false_pass_rate"):
        _check_between(name, getattr(guards, name))
    _check_between("latency_quantile", guards.latency_quantile)
    if guards.most_lost_quality is not None:
        _check_between("most_lost_quality", guards.most_lost_quality)
    for name in ("most_latency_ratio", "most_cost_ratio"):
        ratio = getattr(guards, name)
        if ratio is not None and not 1.0 < ratio < math.inf:
            raise ValueError(f"{name}: {ratio} is not more than 1")
    if guards.least_requests < 1:
        raise ValueError(f"least_requests: {guards.least_requests} is less than 1")
    if guards.least_values < LEAST_VALUES:
        raise ValueError(f"least_values: {guards.least_values} is less than {LEAST_VALUES}")
    if not 0.0 <= guards.key_correlation <= 1.0:
        raise ValueError(f"key_correlation: {guards.key_correlation} is not from 0 to 1")
    if guards.require_quality and guards.most_lost_quality is None:
        raise ValueError("require_quality: the guard of quality is off")


def _check_between(name: str, value: float) -> None:
    if not 0.0 < value < 1.0:
        raise ValueError(f"{name}: {value} is not between 0 and 1")
