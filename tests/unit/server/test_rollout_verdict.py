"""Verdicts on a step of a rollout: what passes, what is worse, and what stays undecided."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from random import Random
from time import process_time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from fairlane.rollout_records import GuardFinding, RolloutGuards
from fairlane_server.rollouts.evidence import OVERDUE_BUCKET, ArmEvidence, Moments, latency_bucket
from fairlane_server.rollouts.guards import RolloutGuard
from fairlane_server.rollouts.verdict import RolloutVerdict, StepVerdict, judge_step

GUARDS = RolloutGuards()
STEPS = 4
MANY = 20_000
USUAL = latency_bucket(200.0)


def arm(requests: int = MANY, failed: int = 0, latency_ms: float = 200.0, nanos: float = 1e6) -> ArmEvidence:
    """Requests of one latency and one cost."""
    answered = requests - failed
    return ArmEvidence(
        requests,
        failed,
        latencies={latency_bucket(latency_ms): answered} if answered else {},
        cost=Moments(requests, requests * nanos, requests * nanos**2),
    )


def scored(good: int, count: int = MANY) -> ArmEvidence:
    return replace(arm(), quality=Moments(count, good, good))


def judged(candidate: ArmEvidence, control: ArmEvidence, guards: RolloutGuards = GUARDS) -> StepVerdict:
    return judge_step(candidate, control, guards, STEPS)


def finding(verdict: StepVerdict, guard: RolloutGuard) -> GuardFinding:
    return next(found for found in verdict.findings if found.guard is guard)


@st.composite
def evidence(draw: st.DrawFn) -> ArmEvidence:
    latencies = draw(st.dictionaries(st.integers(0, OVERDUE_BUCKET), st.integers(1, 500), max_size=6))
    answered = sum(latencies.values()) + draw(st.integers(0, 50))
    failed, in_flight = draw(st.integers(0, answered)), draw(st.integers(0, 50))
    scores = draw(st.lists(st.sampled_from((0.0, 0.5, 1.0)), max_size=80))
    costs = draw(st.lists(st.floats(0, 1e9), max_size=80))
    requests = answered + in_flight
    keys = draw(st.integers(requests, max(requests, requests * requests)))
    return ArmEvidence(requests, failed, in_flight, latencies, Moments.of(costs), Moments.of(scores), keys)


def test_an_equal_candidate_passes() -> None:
    verdict = judged(arm(failed=100), arm(failed=100))

    assert verdict.verdict is RolloutVerdict.PASSED
    assert [found.verdict for found in verdict.findings] == [*[RolloutVerdict.PASSED] * 3, None]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_hardly_any_traffic_is_undecided(count: int) -> None:
    """Whatever happens to it."""
    for candidate in (arm(count), arm(count, failed=count)):
        assert judged(candidate, arm(count)).verdict is RolloutVerdict.UNDECIDED


@given(evidence())
def test_without_traffic_of_the_control_there_is_no_verdict(candidate: ArmEvidence) -> None:
    assert judged(candidate, ArmEvidence()).verdict is RolloutVerdict.UNDECIDED
    assert judged(ArmEvidence(), candidate).verdict is RolloutVerdict.UNDECIDED


def test_a_candidate_that_only_fails_is_worse_within_ten_requests() -> None:
    verdict = judged(arm(8, failed=8), arm(8))

    assert verdict.verdict is RolloutVerdict.WORSE
    assert verdict.reason.startswith("errors: ")
    assert judged(arm(8), arm(8, failed=8)).verdict is RolloutVerdict.UNDECIDED


@pytest.mark.parametrize(
    ("guard", "candidate", "control"),
    [
        (RolloutGuard.ERRORS, arm(failed=800), arm(failed=200)),
        (RolloutGuard.LATENCY, arm(latency_ms=300.0), arm()),
        (RolloutGuard.COST, arm(nanos=1.3e6), arm()),
        (RolloutGuard.QUALITY, scored(15_000), scored(16_000)),
    ],
)
def test_each_guard_finds_its_harm_and_no_other(
    guard: RolloutGuard, candidate: ArmEvidence, control: ArmEvidence
) -> None:
    worse, better = judged(candidate, control), judged(control, candidate)

    assert worse.verdict is RolloutVerdict.WORSE
    assert [found.guard for found in worse.findings if found.verdict is RolloutVerdict.WORSE] == [guard]
    assert better.verdict is RolloutVerdict.PASSED
    lower, harm, tolerance = (getattr(finding(worse, guard), name) for name in ("lower", "harm", "tolerance"))
    assert 0 <= lower < harm
    assert tolerance <= harm


def test_a_harm_within_the_tolerance_passes() -> None:
    """Although it is certain."""
    verdict = judged(arm(200_000, failed=1_600), arm(200_000, failed=1_000))

    errors = finding(verdict, RolloutGuard.ERRORS)
    assert errors.lower is not None
    assert errors.lower > 0
    assert verdict.verdict is RolloutVerdict.PASSED


def test_what_hangs_does_not_pass_and_is_worse_once_it_is_overdue() -> None:
    control = arm(2_000)
    hanging = ArmEvidence(2_000, in_flight=400, latencies={USUAL: 1_600}, cost=control.cost)
    overdue = ArmEvidence(2_000, failed=400, latencies={USUAL: 1_600, OVERDUE_BUCKET: 400}, cost=control.cost)

    assert judged(hanging, control).verdict is RolloutVerdict.UNDECIDED
    verdict = judged(overdue, control)
    assert verdict.verdict is RolloutVerdict.WORSE
    assert finding(verdict, RolloutGuard.LATENCY).candidate is None


def test_as_many_requests_in_flight_on_both_arms_delay_nothing() -> None:
    waiting = replace(arm(), requests=MANY + 2_000, in_flight=2_000)

    assert judged(waiting, waiting).verdict is RolloutVerdict.PASSED


def test_fast_failures_wait_for_the_first_answers_of_the_control() -> None:
    """The control may fail too, only later."""
    failing, waiting = arm(50, failed=50), ArmEvidence(50, in_flight=50)
    assert judged(failing, waiting).verdict is RolloutVerdict.UNDECIDED

    answering = ArmEvidence(50, in_flight=30, latencies={USUAL: 20})
    assert judged(failing, answering).verdict is RolloutVerdict.WORSE


def test_a_control_with_an_outage_is_no_standard() -> None:
    outage = arm(failed=MANY // 2)

    verdict = judged(arm(failed=MANY // 10), outage)
    assert verdict.verdict is RolloutVerdict.UNDECIDED
    assert "control" in verdict.reason
    assert judged(arm(failed=MANY), outage).verdict is RolloutVerdict.WORSE


def test_arms_of_very_unequal_sizes_are_compared() -> None:
    assert judged(arm(200, failed=60), arm(100_000, failed=500)).verdict is RolloutVerdict.WORSE
    assert judged(arm(100_000, failed=500), arm(5_000, failed=25)).verdict is RolloutVerdict.PASSED
    assert judged(arm(200, failed=1), arm(100_000, failed=500)).verdict is RolloutVerdict.UNDECIDED


def test_quality_is_waited_for_where_it_is_required_or_there_is_some() -> None:
    required = replace(GUARDS, require_quality=True)
    few, some = replace(scored(30, 40)), scored(200, 300)

    assert judged(arm(), arm()).verdict is RolloutVerdict.PASSED
    assert judged(arm(), arm(), required).verdict is RolloutVerdict.UNDECIDED
    assert judged(few, few).verdict is RolloutVerdict.PASSED
    assert judged(some, some).verdict is RolloutVerdict.UNDECIDED
    assert judged(scored(16_000), scored(16_000), required).verdict is RolloutVerdict.PASSED


def test_models_without_a_price_are_not_held_up_by_the_guard_of_cost() -> None:
    assert judged(arm(nanos=0), arm(nanos=0)).verdict is RolloutVerdict.PASSED
    assert judged(arm(nanos=5), arm(nanos=0)).verdict is RolloutVerdict.WORSE


def test_guards_that_are_off_find_nothing() -> None:
    errors_alone = RolloutGuards(most_latency_ratio=None, most_cost_ratio=None, most_lost_quality=None)
    verdict = judged(arm(latency_ms=900.0, nanos=1e7), arm(), errors_alone)

    assert [found.guard for found in verdict.findings] == [RolloutGuard.ERRORS]
    assert verdict.verdict is RolloutVerdict.PASSED


def test_requests_of_few_keys_prove_less() -> None:
    alone, together = arm(60, failed=20), replace(arm(60, failed=20), squared_requests_of_keys=60 * 30)

    assert judged(alone, arm(60)).verdict is RolloutVerdict.WORSE
    assert judged(together, arm(60)).verdict is RolloutVerdict.UNDECIDED


def test_a_step_must_be_one_of_some() -> None:
    with pytest.raises(ValueError, match=r"^judged_steps: "):
        judge_step(arm(), arm(), GUARDS, 0)


@given(evidence(), evidence())
def test_a_verdict_can_be_stored_as_json(candidate: ArmEvidence, control: ArmEvidence) -> None:
    verdict = judged(candidate, control)
    stored = json.dumps(asdict(verdict), allow_nan=False)

    assert len(stored) < 2_000
    found = json.loads(stored)
    assert found["verdict"] == verdict.verdict
    findings = tuple(
        GuardFinding(
            **{
                **one,
                "guard": RolloutGuard(one["guard"]),
                "verdict": None if one["verdict"] is None else RolloutVerdict(one["verdict"]),
            }
        )
        for one in found["findings"]
    )
    assert findings == verdict.findings


@given(evidence(), evidence())
def test_both_arms_cannot_be_worse_than_one_another(one: ArmEvidence, other: ArmEvidence) -> None:
    forth, back = judged(one, other), judged(other, one)

    for found, mirrored in zip(forth.findings, back.findings, strict=True):
        assert {found.verdict, mirrored.verdict} != {RolloutVerdict.WORSE}
        if found.verdict is RolloutVerdict.WORSE and mirrored.verdict is not None:
            assert mirrored.candidate == found.control


WORSE_BY_ONE: list[Callable[[ArmEvidence], ArmEvidence]] = [
    lambda found: replace(found, failed=min(found.failed + 1, found.answered)),
    lambda found: replace(found, latencies={OVERDUE_BUCKET: sum(found.latencies.values())}),
]


@pytest.mark.parametrize("change", WORSE_BY_ONE, ids=["one more failure", "all overdue"])
@given(candidate=evidence(), control=evidence())
def test_more_harm_never_makes_a_better_verdict(
    change: Callable[[ArmEvidence], ArmEvidence], candidate: ArmEvidence, control: ArmEvidence
) -> None:
    order = (RolloutVerdict.PASSED, RolloutVerdict.UNDECIDED, RolloutVerdict.WORSE)
    before, after = (judged(one, control).verdict for one in (candidate, change(candidate)))

    assert order.index(after) >= order.index(before)


@given(st.lists(evidence(), min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_the_order_in_which_evidence_came_does_not_matter(parts: list[ArmEvidence], random: Random) -> None:
    shuffled = sorted(parts, key=lambda _: random.random())
    forth, back = (sum(found, ArmEvidence()) for found in (parts, shuffled))

    assert judged(forth, arm(500)).verdict is judged(back, arm(500)).verdict


def test_an_equal_candidate_is_rolled_back_in_no_more_rollouts_than_stated() -> None:
    """In 4 steps of 1,500 requests an arm, with 15 looks at each. The stated rate is 0.2: a smaller one needs more runs
    to be seen exceeded."""
    guards, runs = RolloutGuards(false_rollback_rate=0.2), 60
    random = np.random.default_rng(5)
    rolled_back = 0
    for _ in range(runs):
        rolled_back += any(_is_worse_in_a_step(random, guards) for _step in range(STEPS))

    assert rolled_back <= binom.isf(1e-6, runs, 0.2)


def _is_worse_in_a_step(random: np.random.Generator, guards: RolloutGuards) -> bool:
    arms = [ArmEvidence(), ArmEvidence()]
    for _look in range(15):
        arms = [found + _drawn(random, 100) for found in arms]
        if judged(arms[0], arms[1], guards).verdict is RolloutVerdict.WORSE:
            return True
    return False


def _drawn(random: np.random.Generator, count: int) -> ArmEvidence:
    buckets, counts = np.unique([latency_bucket(one) for one in np.exp(random.normal(5, 1, count))], return_counts=True)
    costs, good = np.exp(random.normal(10, 1, count)), int(random.binomial(count, 0.85))
    return ArmEvidence(
        count,
        int(random.binomial(count, 0.01)),
        latencies=dict(zip(buckets.tolist(), counts.tolist(), strict=True)),
        cost=Moments(count, float(costs.sum()), float((costs**2).sum())),
        quality=Moments(count, good, good),
    )


@pytest.mark.alone
def test_a_verdict_takes_less_than_a_millisecond() -> None:
    random = np.random.default_rng(1)
    arms = [sum((_drawn(random, 1_000) for _ in range(30)), ArmEvidence()) for _ in range(2)]
    rounds = 200

    began = process_time()
    for _ in range(rounds):
        judged(arms[0], arms[1])
    assert (process_time() - began) / rounds < 1e-3
