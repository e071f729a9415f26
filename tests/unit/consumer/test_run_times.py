"""Predicted run times."""

from math import inf
from random import Random

import pytest

from inference_consumers.batching.model_queue import RunTimes


def learned(base_s: float, per_token_s: float, *, runs: int = 100, noise: float = 0.0) -> RunTimes:
    random, times = Random(1), RunTimes()
    for _ in range(runs):
        tokens = random.randint(10, 4_000)
        times.ran(tokens, (base_s + per_token_s * tokens) * random.uniform(1 - noise, 1 + noise))
    return times


def test_nothing_is_known_before_the_first_run() -> None:
    assert (RunTimes().predicted_s(1_000), RunTimes().base_tokens) == (0, 0)


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_the_base_and_the_slope_are_found(noise: float) -> None:
    times = learned(0.5, 0.001, noise=noise)
    assert times.predicted_s(2_000) == pytest.approx(2.5, rel=0.02 + noise / 2)
    assert times.predicted_s(8_000) == pytest.approx(8.5, rel=0.02 + noise / 2)
    assert times.base_tokens == pytest.approx(500, rel=0.05 + 3 * noise)


def test_runs_that_are_all_alike_say_what_a_token_takes() -> None:
    times = RunTimes()
    for _ in range(10):
        times.ran(1_000, 2.0)
    assert times.predicted_s(1_000) == pytest.approx(2.0)
    assert times.predicted_s(100) == pytest.approx(0.2)
    assert times.base_tokens == 0


def test_runs_that_are_nearly_alike_say_nothing_about_the_base() -> None:
    """The times of two of them may differ by any chance."""
    times = RunTimes()
    for _ in range(10):
        times.ran(1_000, 2.0)
        times.ran(1_010, 1.6)
    assert times.predicted_s(100) == pytest.approx(0.18, rel=0.05)
    assert times.base_tokens == 0


def test_an_engine_that_takes_no_longer_for_more_may_waste_any_number_of_tokens() -> None:
    times = learned(0.5, 0.0)
    assert times.base_tokens > 10**6 or times.base_tokens == inf
    assert times.predicted_s(10**4) == pytest.approx(0.5)


def test_neither_base_nor_slope_is_negative() -> None:
    times = RunTimes()
    for tokens, seconds in ((100, 5.0), (1_000, 1.0), (100, 5.0), (1_000, 1.0)):
        times.ran(tokens, seconds)
    assert times.predicted_s(0) > 0
    assert times.predicted_s(10**6) >= times.predicted_s(0)


def test_a_stall_is_clipped_and_a_slowdown_is_followed() -> None:
    times = learned(0.1, 0.001)
    before = times.predicted_s(1_000)
    times.ran(1_000, 600.0)
    assert times.predicted_s(1_000) < 2 * before
    random = Random(2)
    for _ in range(60):
        tokens = random.randint(10, 4_000)
        times.ran(tokens, 5 * (0.1 + 0.001 * tokens))
    assert times.predicted_s(1_000) == pytest.approx(5 * 1.1, rel=0.1)
