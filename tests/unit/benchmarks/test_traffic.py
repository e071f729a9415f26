"""Shapes of load: as much as was asked for, when and from whom the shape says."""

from collections import Counter

import pytest

from benchmarks.traffic import FLASH_LOAD, SHAPES, Arrival, Traffic

TENANTS = ("a", "b", "c", "d")
CAPACITY = 40_000.0
SECONDS = 60.0


def arrivals(shape: str, load: float = 3.0) -> list[Arrival]:
    return Traffic(SHAPES[shape]).arrivals(TENANTS, load, CAPACITY, SECONDS, seed=5)


def tokens_per_s(found: list[Arrival], start_s: float, end_s: float) -> float:
    return sum(one.size.cost_tokens for one in found if start_s <= one.at_s < end_s) / (end_s - start_s)


@pytest.mark.parametrize("shape", ["constant", "burst", "sawtooth", "one-giant"])
def test_a_shape_asks_for_as_much_as_was_wanted(shape: str) -> None:
    found = arrivals(shape)
    assert tokens_per_s(found, 0, SECONDS) == pytest.approx(3 * CAPACITY, rel=0.15)
    assert [one.at_s for one in found] == sorted(one.at_s for one in found)
    assert 0 <= found[0].at_s <= found[-1].at_s < SECONDS


def test_a_burst_is_six_times_the_calm() -> None:
    found = arrivals("burst")
    burst = sum(tokens_per_s(found, start, start + 2) for start in range(0, 60, 10))
    calm = sum(tokens_per_s(found, start + 2, start + 10) for start in range(0, 60, 10))
    assert burst / calm == pytest.approx(6, rel=0.3)


def test_a_sawtooth_rises() -> None:
    found = arrivals("sawtooth")
    assert tokens_per_s(found, 0, 5) < tokens_per_s(found, 5, 10) < tokens_per_s(found, 15, 20)
    assert tokens_per_s(found, 20, 25) < tokens_per_s(found, 15, 20) / 3


def test_a_flash_crowd_is_a_multiple_of_the_capacity_whatever_the_load() -> None:
    found = arrivals("flash-crowd", load=10)
    assert tokens_per_s(found, 10, 15) == pytest.approx(FLASH_LOAD * CAPACITY, rel=0.15)
    assert tokens_per_s(found, 15, SECONDS) == pytest.approx(0.7 * CAPACITY, rel=0.3)


def test_one_giant_sends_nine_tenths() -> None:
    sent = Counter(one.tenant for one in arrivals("one-giant"))
    assert sent["a"] / sent.total() == pytest.approx(0.9, abs=0.03)
    assert min(sent.values()) > 0


def test_lengths_drift() -> None:
    found = arrivals("drifting-lengths")
    early = [one.size.output_tokens for one in found if one.at_s < 10]
    late = [one.size.output_tokens for one in found if one.at_s > 50]
    assert sum(late) / len(late) > 2.5 * sum(early) / len(early)


def test_the_same_seed_gives_the_same() -> None:
    assert arrivals("burst") == arrivals("burst")
