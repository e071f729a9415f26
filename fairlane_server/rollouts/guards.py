"""Guards of a rollout: how much worse a candidate may be, and how often a verdict may be wrong. Pure."""

import math
from dataclasses import dataclass
from enum import StrEnum


class RolloutGuard(StrEnum):
    """What is compared between the candidate and the control."""

    ERRORS = "errors"
    LATENCY = "latency"
    COST = "cost"
    QUALITY = "quality"


@dataclass(frozen=True, slots=True)
class RolloutGuards:
    """Tolerances and rates of wrong verdicts. A tolerance of None turns its guard off.

    Raises ValueError with the field and the reason.

    Attributes:
        most_added_failures: part of the requests that may fail on the candidate beyond those of the control.
        most_latency_ratio: bound of the candidate's latency quantile, divided by the control's.
        latency_quantile: which one.
        most_cost_ratio: bound of the candidate's mean cost, divided by the control's.
        most_lost_quality: by how much the mean score may be lower.
        false_rollback_rate: at most this part of the rollouts of candidates that are no worse in anything ends in a
            rollback. It is divided evenly between the judged steps and the guards.
        false_pass_rate: at most this part of the candidates that are worse than a tolerance in a step passes it. It is
            not divided: to pass a step, a candidate must pass every guard, and to be promoted, every step.
        least_requests: answered by each arm before a step is passed.
        least_values: costs, or scores, of each arm before they count as data.
        require_quality: whether a step waits for scores. Without it, a step with too few scores passes without.
        most_control_failures: no step is passed while more than this part of the control's requests fail.
        key_correlation: assumed between requests of one sticky key (``ArmEvidence.design_effect``).
    """

    most_added_failures: float = 0.01
    most_latency_ratio: float | None = 1.2
    latency_quantile: float = 0.95
    most_cost_ratio: float | None = 1.1
    most_lost_quality: float | None = 0.02
    false_rollback_rate: float = 0.01
    false_pass_rate: float = 0.05
    least_requests: int = 100
    least_values: int = 50
    require_quality: bool = False
    most_control_failures: float = 0.2
    key_correlation: float = 0.1

    def __post_init__(self) -> None:
        for name in ("most_added_failures", "most_control_failures", "false_rollback_rate", "false_pass_rate"):
            _check_between(name, getattr(self, name), 0.0, 1.0)
        _check_between("latency_quantile", self.latency_quantile, 0.0, 1.0)
        if self.most_lost_quality is not None:
            _check_between("most_lost_quality", self.most_lost_quality, 0.0, 1.0)
        for name in ("most_latency_ratio", "most_cost_ratio"):
            ratio = getattr(self, name)
            if ratio is not None and not 1.0 < ratio < math.inf:
                raise ValueError(f"{name}: {ratio} is not more than 1")
        if self.least_requests < 1:
            raise ValueError(f"least_requests: {self.least_requests} is less than 1")
        if self.least_values < LEAST_VALUES:
            raise ValueError(f"least_values: {self.least_values} is less than {LEAST_VALUES}")
        if not 0.0 <= self.key_correlation <= 1.0:
            raise ValueError(f"key_correlation: {self.key_correlation} is not from 0 to 1")
        if self.require_quality and self.most_lost_quality is None:
            raise ValueError("require_quality: the guard of quality is off")

    @property
    def active(self) -> tuple[RolloutGuard, ...]:
        """The guards that are on."""
        tolerances = {
            RolloutGuard.ERRORS: self.most_added_failures,
            RolloutGuard.LATENCY: self.most_latency_ratio,
            RolloutGuard.COST: self.most_cost_ratio,
            RolloutGuard.QUALITY: self.most_lost_quality,
        }
        return tuple(guard for guard, tolerance in tolerances.items() if tolerance is not None)

    def rollback_level(self, judged_steps: int) -> float:
        """The error rate of one guard in one step, so that all together keep ``false_rollback_rate``."""
        return self.false_rollback_rate / (judged_steps * len(self.active))


LEAST_VALUES = 20
"""The bounds of means rest on the central limit theorem."""


def _check_between(name: str, value: float, low: float, high: float) -> None:
    if not low < value < high:
        raise ValueError(f"{name}: {value} is not between {low:g} and {high:g}")
