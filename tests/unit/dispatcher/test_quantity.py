"""Mean and quantile of a quantity, learned online."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_processors.dispatcher.scheduling.quantity import CAUTION, Quantity

DISTRIBUTIONS: dict[str, Callable[[random.Random], float]] = {
    "exponential": lambda one: one.expovariate(1.0),
    "log-normal": lambda one: one.lognormvariate(0.0, 1.0),
    "two lengths": lambda one: 1.0 if one.random() < 0.5 else 10.0,
    "constant": lambda _: 3.0,
}


@pytest.mark.parametrize("shape", DISTRIBUTIONS)
def test_about_nine_of_ten_samples_do_not_exceed_the_cautious_value(shape: str) -> None:
    one, learned = random.Random(7), Quantity()
    draw = DISTRIBUTIONS[shape]
    for _ in range(200):
        learned.learn(draw(one))
    below = 0
    for _ in range(4_000):
        sample = draw(one)
        below += sample <= learned.cautious * 1.001
        learned.learn(sample)
    assert below / 4_000 == pytest.approx(CAUTION, abs=0.04) or shape == "constant"
    assert below / 4_000 >= CAUTION - 0.04


@pytest.mark.parametrize("factor", [4.0, 0.25])
def test_it_follows_a_change(factor: float) -> None:
    one, learned = random.Random(3), Quantity()
    for _ in range(500):
        learned.learn(one.uniform(0.5, 1.0))
    before = learned.cautious
    for _ in range(500):
        learned.learn(factor * one.uniform(0.5, 1.0))
    assert learned.cautious == pytest.approx(factor * before, rel=0.2)
    assert learned.mean == pytest.approx(factor * 0.75, rel=0.25)


def test_a_prior_is_soon_outweighed() -> None:
    of_others = Quantity()
    for _ in range(1_000):
        of_others.learn(1.0)
    own = of_others.as_prior()
    assert (own.mean, own.cautious) == (of_others.mean, of_others.cautious)
    for _ in range(40):
        own.learn(5.0)
    assert own.mean == pytest.approx(5.0, rel=0.1)
    assert own.cautious == pytest.approx(5.0, rel=0.2)
    assert of_others.mean == pytest.approx(1.0), "the prior itself does not change"


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=50))
def test_it_stays_positive_and_finite(samples: list[float]) -> None:
    learned = Quantity()
    for sample in samples:
        learned.learn(sample)
    assert 0 < learned.cautious <= max(*samples, 1e-6) * 10
    assert 0 <= learned.mean <= max(samples) * (1 + 1e-9)
