"""Rules that judge a simulated step: ours, and two that are in common use."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.rollout_traffic import DEADLINE_S, ArmRequests, Floats, SimulatedStep
from fairlane_server.rollouts.changes import RolloutPlan, first_step
from fairlane_server.rollouts.steps import StepAction, next_action
from fairlane_server.rollouts.verdict import RolloutVerdict, judge_step

ROLLOUT = first_step(RolloutPlan("candidate"), "champion", 0)
JUDGED_STEPS = len(ROLLOUT.steps) - 1
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
    """What a rule said of a step, and when."""

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
            np.quantile((arm.done_s - arm.arrived_s)[window], ROLLOUT.guards.latency_quantile)
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
    (failed, requests), (latency, costs, scores) = _rates(step, seconds), _means(step, seconds)
    rates = failed / np.maximum(requests, 1)
    spread = np.sqrt((rates * (1 - rates) / np.maximum(requests, 1)).sum(axis=0))
    tests = [(rates[0] - rates[1], spread, ROLLOUT.guards.most_added_failures)]
    ratios = (latency, ROLLOUT.guards.most_latency_ratio), (costs, ROLLOUT.guards.most_cost_ratio)
    for (harm, deviation), most in ratios:
        tests.append((harm, deviation, math.log(most or math.inf)))
    tests.append((*scores, ROLLOUT.guards.most_lost_quality or math.inf))
    enough = requests.min(axis=0) >= LEAST_IN_TEST
    with np.errstate(invalid="ignore"):
        worse = enough & np.any([harm > _Z_WORSE * spread for harm, spread, _ in tests], axis=0)
        passes = enough & np.all([harm + _Z_PASS * spread < most for harm, spread, most in tests], axis=0)
    first = int(np.argmax(worse | passes))
    if not (worse | passes)[first]:
        return RuleEnd(RolloutVerdict.UNDECIDED, float(step.seconds))
    return RuleEnd(RolloutVerdict.WORSE if worse[first] else RolloutVerdict.PASSED, float(seconds[first]))


def _at(arm: ArmRequests, values: Floats, seconds: Floats) -> Floats:
    """Sums of the values of what is answered at each second; NaN counts as nothing."""
    order = np.argsort(arm.done_s, kind="stable")
    ends = np.searchsorted(arm.done_s[order], seconds, side="right")
    return np.concatenate(([0.0], np.cumsum(np.nan_to_num(values)[order])))[ends]


def _rates(step: SimulatedStep, seconds: Floats) -> tuple[Floats, Floats]:
    arms = (step.candidate, step.control)
    failed = np.asarray([_at(arm, arm.failed.astype(float), seconds) for arm in arms])
    return failed, np.asarray([_at(arm, np.ones(len(arm.done_s)), seconds) for arm in arms])


def _means(step: SimulatedStep, seconds: Floats) -> list[tuple[Floats, Floats]]:
    """Harm and its standard deviation at each second: logarithms of ratios, and differences of scores."""
    found: list[tuple[Floats, Floats]] = []
    arms = (step.candidate, step.control)
    values = [
        [np.minimum(arm.done_s - arm.arrived_s, DEADLINE_S) for arm in arms],
        [arm.costs for arm in arms],
        [arm.scores for arm in arms],
    ]
    with np.errstate(invalid="ignore", divide="ignore"):
        for number, of_arms in enumerate(values):
            means, variances = [], []
            for arm, one in zip(arms, of_arms, strict=True):
                count = _at(arm, (~np.isnan(one)).astype(float), seconds)
                mean = _at(arm, one, seconds) / count
                variance = (_at(arm, one * one, seconds) / count - mean * mean) / count
                means.append(mean)
                variances.append(variance)
            if number < 2:
                harm = np.log(means[0] / means[1])
                deviation = np.sqrt(variances[0] / means[0] ** 2 + variances[1] / means[1] ** 2)
            else:
                harm, deviation = means[1] - means[0], np.sqrt(variances[0] + variances[1])
            found.append((harm, deviation))
    return found
