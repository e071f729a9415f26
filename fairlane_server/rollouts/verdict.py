"""Verdict on one step of a rollout: the candidate's requests beside a concurrent part of the champion's. Pure.

A guard is *worse* when its lower bound shows a harm, and the measured harm is beyond the tolerance: so a harm within
the tolerance passes as soon as it is measured well. It *passes* when its upper bound is within the tolerance. A step is
worse with one guard that is, and passed when all pass. Everything else is undecided, however long it lasts.

The bounds hold at every look (``bounds.py``), so evidence may be read and judged as often as one likes. Requests in
flight are unknown. As long as one arm has more of them than the other, in proportion, the difference counts as failed
and slow where that delays a verdict: what hangs does not pass, and what fails fast is worse when the control has had
the time to answer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from fairlane.rollout_records import GuardFinding, RolloutGuards
from fairlane_server.rollouts.bounds import UNKNOWN, HarmBounds
from fairlane_server.rollouts.evidence import OVERDUE_BUCKET, ArmEvidence
from fairlane_server.rollouts.guards import RolloutGuard, active_guards, rollback_level
from fairlane_server.rollouts.means import cost_ratio_bounds, lost_quality_bounds
from fairlane_server.rollouts.proportions import FailureCount, difference_bounds
from fairlane_server.rollouts.quantiles import quantile_ms, ratio_bounds


class RolloutVerdict(StrEnum):
    """What evidence says about a candidate."""

    PASSED = "pass"
    """Better or equal, or worse by no more than is tolerated."""
    WORSE = "worse"
    UNDECIDED = "undecided"
    """Not enough evidence yet."""


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """The verdict on a step, in plain values, so that it can be stored. ``reason`` is for people."""

    verdict: RolloutVerdict
    reason: str
    candidate_requests: int
    control_requests: int
    findings: tuple[GuardFinding, ...]


def judge_step(candidate: ArmEvidence, control: ArmEvidence, guards: RolloutGuards, judged_steps: int) -> StepVerdict:
    """Judge all evidence of the present step so far. ``judged_steps``: of the whole rollout, those with a control."""
    if judged_steps < 1:
        raise ValueError(f"judged_steps: {judged_steps} is less than 1")
    comparison = _Comparison(candidate, control, guards, rollback_level(guards, judged_steps))
    findings = tuple(comparison.finding(guard) for guard in active_guards(guards))
    verdict, reason = _judged(candidate, control, guards, findings)
    return StepVerdict(verdict, reason, candidate.requests, control.requests, findings)


def _judged(
    candidate: ArmEvidence, control: ArmEvidence, guards: RolloutGuards, findings: tuple[GuardFinding, ...]
) -> tuple[RolloutVerdict, str]:
    undecided = RolloutVerdict.UNDECIDED
    for finding in findings:
        if finding.verdict is RolloutVerdict.WORSE:
            return RolloutVerdict.WORSE, f"{finding.guard}: {_described(finding)}"
    for name, arm in (("candidate", candidate), ("control", control)):
        if arm.answered < guards.least_requests:
            return undecided, f"{arm.answered} answered requests of the {name} are fewer than {guards.least_requests}"
    if control.failed > guards.most_control_failures * control.requests:
        return undecided, f"{control.failed} of {control.requests} requests of the control failed: it is no standard"
    waiting = [finding for finding in findings if finding.verdict is undecided]
    if waiting:
        return undecided, "; ".join(f"{finding.guard}: {_described(finding)}" for finding in waiting)
    return RolloutVerdict.PASSED, "every guard is within its tolerance"


def _described(finding: GuardFinding) -> str:
    if finding.lower is None and finding.upper is None:
        return "not enough data" if finding.verdict is not RolloutVerdict.WORSE else "beyond any bound"
    low = "-inf" if finding.lower is None else f"{finding.lower:.4g}"
    high = "inf" if finding.upper is None else f"{finding.upper:.4g}"
    return f"a harm between {low} and {high}, of which {finding.tolerance:.4g} is tolerated"


@dataclass(frozen=True, slots=True)
class _Comparison:
    candidate: ArmEvidence
    control: ArmEvidence
    guards: RolloutGuards
    rollback_level: float

    def finding(self, guard: RolloutGuard) -> GuardFinding:
        match guard:
            case RolloutGuard.ERRORS:
                return self._errors()
            case RolloutGuard.LATENCY:
                return self._latency()
            case RolloutGuard.COST:
                return self._cost()
            case RolloutGuard.QUALITY:
                return self._quality()

    def _errors(self) -> GuardFinding:
        candidate, control = (
            FailureCount(arm.failed / weight, arm.requests / weight)
            for arm, weight in zip((self.candidate, self.control), self._weights(), strict=True)
        )
        bounds = difference_bounds(candidate, control, *self._levels(), self._missing())
        measured = [count.rate if count.requests else None for count in (candidate, control)]
        return self._found(RolloutGuard.ERRORS, bounds, measured, self.guards.most_added_failures)

    def _latency(self) -> GuardFinding:
        quantile = self.guards.latency_quantile
        candidate, control = (
            [arm.latencies.get(bucket, 0) / weight for bucket in range(OVERDUE_BUCKET + 1)]
            for arm, weight in zip((self.candidate, self.control), self._weights(), strict=True)
        )
        bounds = ratio_bounds(candidate, control, quantile, *self._levels(), self._missing())
        measured = [quantile_ms(arm, quantile) if any(arm) else None for arm in (candidate, control)]
        return self._found(RolloutGuard.LATENCY, bounds, measured, (self.guards.most_latency_ratio or math.inf) - 1.0)

    def _cost(self) -> GuardFinding:
        candidate, control, most = self.candidate.cost, self.control.cost, self.guards.most_cost_ratio or math.inf
        # Of a version without a price nothing is known, however long the step lasts.
        bounds, required = UNKNOWN, min(candidate.count, control.count) > 0 and control.total > 0
        if min(candidate.count, control.count) >= self.guards.least_values:
            bounds = cost_ratio_bounds(candidate, control, most, self._levels(), self._weights())
        measured = [arm.mean if arm.count else None for arm in (candidate, control)]
        return self._found(RolloutGuard.COST, bounds, measured, most - 1.0, required=required)

    def _quality(self) -> GuardFinding:
        candidate, control, most = self.candidate.quality, self.control.quality, self.guards.most_lost_quality or 0.0
        bounds, required = UNKNOWN, self.guards.require_quality
        if min(candidate.count, control.count) >= self.guards.least_values:
            bounds, required = lost_quality_bounds(candidate, control, most, self._levels(), self._weights()), True
        measured = [arm.mean if arm.count else None for arm in (candidate, control)]
        return self._found(RolloutGuard.QUALITY, bounds, measured, most, required=required)

    def _found(
        self,
        guard: RolloutGuard,
        bounds: HarmBounds,
        measured: Sequence[float | None],
        tolerance: float,
        *,
        required: bool = True,
    ) -> GuardFinding:
        verdict: RolloutVerdict | None = RolloutVerdict.UNDECIDED if required else None
        if bounds.lower >= 0 and bounds.harm >= tolerance:
            verdict = RolloutVerdict.WORSE
        elif bounds.upper <= tolerance:
            verdict = RolloutVerdict.PASSED
        candidate, control, harm, lower, upper = map(_finite, (*measured, bounds.harm, bounds.lower, bounds.upper))
        return GuardFinding(guard, verdict, candidate, control, harm, lower, upper, tolerance)

    def _levels(self) -> tuple[float, float]:
        return self.rollback_level, self.guards.false_pass_rate

    def _weights(self) -> tuple[float, float]:
        correlation = self.guards.key_correlation
        return self.candidate.design_effect(correlation), self.control.design_effect(correlation)

    def _missing(self) -> tuple[float, float]:
        """Requests in flight, of each arm, beyond what the other's part in flight predicts."""
        of_candidate, of_control = self._weights()
        return (
            _excess_in_flight(self.candidate, self.control) / of_candidate,
            _excess_in_flight(self.control, self.candidate) / of_control,
        )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _excess_in_flight(arm: ArmEvidence, other: ArmEvidence) -> float:
    usual = other.in_flight / other.requests if other.requests else 0.0
    return max(0.0, arm.in_flight - usual * arm.requests)
