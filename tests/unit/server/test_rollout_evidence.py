"""Evidence and guards of rollouts: what adds up, what contradicts itself, and which errors name which field."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane_server.rollouts.evidence import (
    LATENCY_BOUNDS_MS,
    LATENCY_GROWTH,
    OVERDUE_BUCKET,
    ArmEvidence,
    Moments,
    latency_bucket,
)
from fairlane_server.rollouts.guards import RolloutGuard, RolloutGuards


@given(st.floats(0, 1e9))
def test_a_latency_is_between_the_bounds_of_its_bucket(latency_ms: float) -> None:
    bucket = latency_bucket(latency_ms)

    assert bucket == 0 or LATENCY_BOUNDS_MS[bucket - 1] <= latency_ms
    assert bucket == OVERDUE_BUCKET or latency_ms < LATENCY_BOUNDS_MS[bucket]


def test_the_bounds_grow_by_one_ratio() -> None:
    assert LATENCY_BOUNDS_MS[0] == 1.0
    assert LATENCY_BOUNDS_MS[-1] == 2**20
    assert all(high / low == pytest.approx(LATENCY_GROWTH) for low, high in pairwise(LATENCY_BOUNDS_MS))


def test_evidence_of_disjoint_requests_adds_up() -> None:
    one = ArmEvidence(5, 1, 1, {7: 3, 9: 1}, Moments.of([1, 2]), Moments.of([0.5]), 9)
    two = ArmEvidence(3, 0, 0, {7: 1}, Moments.of([3]), Moments.of([1.0, 0.0]))

    # Without keys, every request has its own.
    together = ArmEvidence(8, 1, 1, {7: 4, 9: 1}, Moments.of([1, 2, 3]), Moments.of([0.5, 1.0, 0.0]), 9 + 3)
    assert one + two == together


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"requests": -1}, "requests"),
        ({"failed": -1, "requests": 1}, "failed"),
        ({"requests": 2, "failed": 1, "in_flight": 2}, "requests"),
        ({"requests": 2, "latencies": {OVERDUE_BUCKET + 1: 1}}, "latencies"),
        ({"requests": 2, "latencies": {3: -1}}, "latencies"),
        ({"requests": 2, "in_flight": 1, "latencies": {3: 2}}, "latencies"),
        ({"cost": Moments.of([-1.0])}, "cost"),
        ({"quality": Moments.of([1.5])}, "quality"),
        ({"requests": 3, "squared_requests_of_keys": 2}, "squared_requests_of_keys"),
        ({"requests": 3, "squared_requests_of_keys": 10}, "squared_requests_of_keys"),
    ],
)
def test_contradicting_counts_are_refused_by_field(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}: "):
        ArmEvidence(**fields)


def test_sums_that_no_values_have_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^count: "):
        Moments(-1)
    with pytest.raises(ValueError, match=r"^total_of_squares: "):
        Moments(2, 2.0, 1.0)


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=20))
def test_the_moments_of_any_values_are_possible(values: list[float]) -> None:
    assert Moments.of(values).count == len(values)


def test_requests_of_one_key_weigh_less() -> None:
    alone = ArmEvidence(100)
    in_fives = ArmEvidence(100, squared_requests_of_keys=20 * 25)

    assert alone.design_effect(0.1) == 1.0
    assert in_fives.design_effect(0.0) == 1.0
    assert in_fives.design_effect(0.1) == pytest.approx(1.4)
    assert in_fives.design_effect(1.0) == pytest.approx(5.0)
    assert ArmEvidence().design_effect(1.0) == 1.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("most_added_failures", 0.0),
        ("most_latency_ratio", 1.0),
        ("latency_quantile", 1.0),
        ("most_cost_ratio", 0.9),
        ("most_lost_quality", 0.0),
        ("false_rollback_rate", 0.0),
        ("false_pass_rate", 1.0),
        ("least_requests", 0),
        ("least_values", 5),
        ("most_control_failures", 0.0),
        ("key_correlation", 1.1),
        ("most_cost_ratio", float("nan")),
    ],
)
def test_impossible_guards_are_refused_by_field(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        RolloutGuards(**{field: value})


def test_scores_cannot_be_required_of_a_guard_that_is_off() -> None:
    with pytest.raises(ValueError, match=r"^require_quality: "):
        RolloutGuards(most_lost_quality=None, require_quality=True)


def test_the_rate_of_false_rollbacks_is_divided_between_steps_and_guards() -> None:
    assert RolloutGuards(false_rollback_rate=0.04).rollback_level(4) == pytest.approx(0.04 / 16)

    two = RolloutGuards(false_rollback_rate=0.04, most_cost_ratio=None, most_lost_quality=None)
    assert two.active == (RolloutGuard.ERRORS, RolloutGuard.LATENCY)
    assert two.rollback_level(4) == pytest.approx(0.04 / 8)
