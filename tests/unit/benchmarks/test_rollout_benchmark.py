"""The benchmark of rollouts in short: its requests, its rules, and its figures."""

import numpy as np
import pytest

from benchmarks import rollout
from benchmarks.rollout_rules import fixed_threshold, repeated_test, sequential
from benchmarks.rollout_traffic import BY_NAME, CANDIDATES, FAILING, RolloutTraffic
from fairlane_server.rollouts.verdict import RolloutVerdict

FAILS = next(one for one in CANDIDATES if one.failing == 1.0)
EQUAL = CANDIDATES[0]


def test_the_same_seed_draws_the_same_requests() -> None:
    one, other = (RolloutTraffic(BY_NAME["bursts"], 3).step(FAILS, 50.0) for _ in range(2))

    assert np.array_equal(one.candidate.done_s, other.candidate.done_s)
    assert one.candidate.arrived_s.max() < one.seconds


@pytest.mark.parametrize("shape", BY_NAME)
def test_evidence_at_the_end_is_that_of_all_requests(shape: str) -> None:
    step = RolloutTraffic(BY_NAME[shape], 4).step(EQUAL, 25.0)
    arm = step.control
    *_, last = arm.evidence(np.asarray([1.0, 10.0, 10.0, 1e9]))

    assert last.requests == len(arm.arrived_s)
    assert last.in_flight == 0
    assert last.failed == arm.failed.sum()
    assert last.failed / last.requests == pytest.approx(FAILING, rel=0.3)
    assert sum(last.latencies.values()) == (~arm.failed | arm.overdue).sum()
    assert last.cost.total == pytest.approx(arm.costs.sum())
    assert last.quality.count == (~np.isnan(arm.scores)).sum()


def test_an_equal_candidate_does_no_harm_and_others_do() -> None:
    for candidate in CANDIDATES:
        step = RolloutTraffic(BY_NAME["constant"], 5).step(candidate, 50.0)
        bad, excess_s = step.candidate.harm(1e9)
        does_harm = candidate.slower > 1 or candidate.failing > 0 or candidate.lost_quality > 0 or candidate.hanging > 0
        assert (bad > 0 or excess_s > 0) is does_harm, candidate.name
        assert step.control.harm(1e9) == (0, 0.0)


def test_ours_ends_a_candidate_that_only_fails_before_the_thresholds_do() -> None:
    step = RolloutTraffic(BY_NAME["constant"], 6).step(FAILS, 1.0)
    ours, thresholds, tests = (rule(step, 0) for rule in (sequential, fixed_threshold, repeated_test))

    assert {end.verdict for end in (ours, thresholds, tests)} == {RolloutVerdict.WORSE}
    assert ours.at_s < thresholds.at_s


def test_all_rules_are_reported_for_every_candidate() -> None:
    ends = list(rollout.rollouts(BY_NAME["constant"], 2, (FAILS,)))

    figures = {figure.name: figure.value for figure in rollout.figures(ends)}
    for rule in rollout.RULES:
        assert figures[f"{rule}{FAILS.name}: right"] == 1.0
        assert figures[f"{rule}{FAILS.name}: bad answers"] > 0
    assert next(iter(rollout.cells(ends)))[f"constant: {FAILS.name}: right"] == 1.0
