"""Rules that judge a simulated step: ours, and two that are in common use."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.rollout_traffic import ArmRequests, Floats, SimulatedStep
from fairlane_server.rollouts.changes import RolloutPlan, first_step
from fairlane_server.rollouts.steps import StepAction, next_action
from fairlane_server.rollouts.verdict import RolloutVerdict, judge_step

ROLLOUT = first_step(RolloutPlan("candidate"), "champion", 0)
JUDGED_STEPS = len(ROLLOUT.steps) - 1
GUARDS = ROLLOUT.guards
WINDOW = 500
MOST_FAILING, MOST_RATIO = 0.01, 1.2
FAILED_WINDOWS = 3
PASSED_WINDOWS = 5
"""Windows that are within the thresholds before a step ends."""
LEAST_IN_TEST = 30
_Z_WORSE, _Z_PASS = 2.326, 1.645
"""One-sided quantiles of the normal distribution for 1 % and 5 %, the rates that ours states."""


@dataclass(frozen=True, slots=True)
class RuleEnd:
    """Verdict of a rule on a step, and its time."""

    verdict: RolloutVerdict
    at_s: float


Rule = Callable[[SimulatedStep, int], RuleEnd]
"""Judges a step, given its place in the plan."""


def sequential(step: SimulatedStep, place: int) -> RuleEnd:
    """Ours."""
    looks = step.looks_s
    rollout = replace(ROLLOUT, step=place)
    arms = zip(step.candidate.evidence(looks), step.control.evidence(looks), looks.tolist(), strict=True)
    for candidate, control, at_s in arms:
        found = judge_step(candidate, control, rollout.guards, JUDGED_STEPS)
        action, _ = next_action(rollout, found.verdict, round(1_000 * at_s))
        if action is not StepAction.STAY:
            return RuleEnd(found.verdict, at_s)
    return RuleEnd(RolloutVerdict.UNDECIDED, float(step.seconds))


def fixed_threshold(step: SimulatedStep, _place: int) -> RuleEnd:
    """As rollout tools are configured (Flagger, Argo Rollouts): a measurement for every WINDOW answered requests of an
    arm. It fails if more than 1 % of the candidate's failed, or its p95 is more than 1.2 times the control's. Three
    failed measurements are a rollback, and five others the end of the step."""
    arms = (step.candidate, step.control)
    orders = [np.argsort(arm.done_s, kind="stable") for arm in arms]
    failed = passed = 0
    for end in range(WINDOW, min(map(len, orders)) + 1, WINDOW):
        windows = [order[end - WINDOW : end] for order in orders]
        slow, usual = (
            np.quantile((arm.done_s - arm.arrived_s)[window], GUARDS.latency_quantile)
            for arm, window in zip(arms, windows, strict=True)
        )
        if arms[0].failed[windows[0]].mean() > MOST_FAILING or slow > MOST_RATIO * usual:
            failed += 1
        else:
            passed += 1
        at_s = max(float(arm.done_s[window[-1]]) for arm, window in zip(arms, windows, strict=True))
        if at_s > step.seconds:
            break
        if failed == FAILED_WINDOWS:
            return RuleEnd(RolloutVerdict.WORSE, at_s)
        if passed == PASSED_WINDOWS:
            return RuleEnd(RolloutVerdict.PASSED, at_s)
    return RuleEnd(RolloutVerdict.UNDECIDED, float(step.seconds))


def repeated_test(step: SimulatedStep, _place: int) -> RuleEnd:
    """A z-test for each guard with the rates that ours states, made for one look, and looked at every second; of
    latencies the means are compared."""
    seconds = np.arange(1, step.seconds + 1, dtype=np.float64)
    candidate, control = (_SumsInTime(arm, seconds) for arm in (step.candidate, step.control))
    answered = np.minimum(candidate.answered, control.answered)
    with np.errstate(invalid="ignore", divide="ignore"):
        tests = [
            (*_difference(candidate.failed, control.failed), GUARDS.most_added_failures),
            (*_log_ratio(candidate.latencies, control.latencies), math.log(GUARDS.most_latency_ratio or math.inf)),
            (*_log_ratio(candidate.costs, control.costs), math.log(GUARDS.most_cost_ratio or math.inf)),
            (*_difference(control.scores, candidate.scores), GUARDS.most_lost_quality or math.inf),
        ]
        enough = answered >= LEAST_IN_TEST
        worse = enough & np.any([harm > _Z_WORSE * deviation for harm, deviation, _ in tests], axis=0)
        passes = enough & np.all([harm + _Z_PASS * deviation < most for harm, deviation, most in tests], axis=0)
    first = int(np.argmax(worse | passes))
    if not (worse | passes)[first]:
        return RuleEnd(RolloutVerdict.UNDECIDED, float(step.seconds))
    return RuleEnd(RolloutVerdict.WORSE if worse[first] else RolloutVerdict.PASSED, float(seconds[first]))


@dataclass(frozen=True, slots=True)
class _MeanInTime:
    """A mean at each second, and its variance."""

    mean: Floats
    variance: Floats


class _SumsInTime:
    """Sums of an arm at each of these seconds."""

    def __init__(self, arm: ArmRequests, seconds: Floats) -> None:
        self._order = np.argsort(arm.done_s, kind="stable")
        self._ends = np.searchsorted(arm.done_s[self._order], seconds, side="right")
        self.answered = self._ends
        self.failed = self._mean(arm.failed.astype(np.float64))
        self.latencies = self._mean(arm.done_s - arm.arrived_s)
        self.costs = self._mean(arm.costs)
        self.scores = self._mean(arm.scores)

    def _mean(self, values: Floats) -> _MeanInTime:
        """NaN counts as no value."""
        ordered = values[self._order]
        counts, totals, squares = (
            np.concatenate(([0.0], np.cumsum(one)))[self._ends]
            for one in (~np.isnan(ordered), np.nan_to_num(ordered), np.nan_to_num(ordered) ** 2)
        )
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = totals / counts
            return _MeanInTime(mean, (squares / counts - mean * mean) / counts)


def _difference(one: _MeanInTime, other: _MeanInTime) -> tuple[Floats, Floats]:
    return one.mean - other.mean, np.sqrt(one.variance + other.variance)


def _log_ratio(one: _MeanInTime, other: _MeanInTime) -> tuple[Floats, Floats]:
    variance = one.variance / one.mean**2 + other.variance / other.mean**2
    return np.log(one.mean / other.mean), np.sqrt(variance)
