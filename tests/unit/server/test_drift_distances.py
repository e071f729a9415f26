"""Distances of blocks from a reference, and what makes them."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane_server.drift.distances import (
    MOST_CATEGORIES,
    MOST_KEPT,
    CategoryReference,
    NumberReference,
    VectorReference,
)

numbers = st.floats(-1e6, 1e6)
blocks_of_numbers = st.lists(numbers, min_size=1, max_size=60)
names = st.sampled_from(["en", "de", "ru", "none"])
vectors = st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=20)


@given(blocks_of_numbers, blocks_of_numbers, st.randoms())
def test_the_order_of_a_block_does_not_matter(known: list[float], block: list[float], drawn: random.Random) -> None:
    reference = NumberReference.of(known)
    shuffled = [*block]
    drawn.shuffle(shuffled)

    assert reference.distance(shuffled) == pytest.approx(reference.distance(block))
    assert reference.distance(block) >= 0
    assert reference.effect(shuffled) == pytest.approx(reference.effect(block))


@given(blocks_of_numbers, blocks_of_numbers)
def test_the_effect_of_numbers_is_that_of_kolmogorov_and_smirnov(known: list[float], block: list[float]) -> None:
    def part(values: list[float], limit: float) -> float:
        return sum(value <= limit for value in values) / len(values)

    largest = max(abs(part(known, one) - part(block, one)) for one in (*known, *block))
    assert NumberReference.of(known).effect(block) == pytest.approx(largest)


@given(st.lists(numbers, min_size=1, max_size=2_000))
def test_a_reference_keeps_so_many_values_in_their_order(known: list[float]) -> None:
    kept = NumberReference.of(known).kept

    assert len(kept) == min(MOST_KEPT, len(known))
    assert list(kept) == sorted(kept)
    assert set(kept) <= set(known)


@given(st.lists(names, min_size=1, max_size=60), st.lists(st.text(max_size=3), min_size=1, max_size=60))
def test_unknown_categories_are_one(known: list[str], block: list[str]) -> None:
    reference = CategoryReference.of(known)

    assert 0 <= reference.effect(block) <= 1
    assert reference.distance(block) >= 0
    assert sum(reference.parts().values()) == pytest.approx(1)
    unknown = [one for one in block if one not in reference.counts]
    assert reference.distance(block) == pytest.approx(
        reference.distance([one if one in reference.counts else "?" for one in block])
    )
    assert len(unknown) <= len(block)


def test_a_reference_of_categories_is_bounded() -> None:
    reference = CategoryReference.of([f"label-{number % 100}" for number in range(10_000)])

    assert len(reference.counts) == MOST_CATEGORIES + 1
    assert sum(reference.counts.values()) == 10_000


@given(vectors, vectors)
def test_equal_vectors_are_at_no_distance_and_others_at_a_finite_one(
    known: list[tuple[float, ...]], block: list[tuple[float, ...]]
) -> None:
    reference = VectorReference.of(known)

    assert reference.effect(known) == pytest.approx(0, abs=1e-3)
    assert 0 <= reference.distance(block) < float("inf")


def gauss(mean: float, deviation: float = 1.0) -> Callable[[random.Random], float]:
    return lambda drawn: drawn.gauss(mean, deviation)


@pytest.mark.parametrize(
    "changed",
    [gauss(1.0), gauss(-1.0), gauss(0.0, 3.0), gauss(0.0, 0.2), lambda drawn: drawn.choice((-1.0, 1.0))],
    ids=["larger", "smaller", "wider", "narrower", "two values"],
)
def test_any_change_of_numbers_is_farther_than_blocks_usually_are(changed: Callable[[random.Random], float]) -> None:
    drawn = random.Random(3)
    reference = NumberReference.of([drawn.gauss(0, 1) for _ in range(2_000)])
    usual = sorted(reference.distance([drawn.gauss(0, 1) for _ in range(64)]) for _ in range(100))

    assert reference.distance([changed(drawn) for _ in range(64)]) > usual[-1]


@pytest.mark.parametrize(
    ("reference", "usual", "strange"),
    [
        (NumberReference.of(range(100)), 50.0, 99.0),
        (CategoryReference.of(["en"] * 90 + ["zh"] * 10), "en", "zh"),
        (VectorReference.of([(0.0, 0.0), (1.0, 1.0), (1.0, 0.0), (0.0, 1.0)]), (0.5, 0.5), (9.0, 0.5)),
    ],
    ids=["numbers", "categories", "vectors"],
)
def test_what_makes_the_difference_is_the_strangest(reference: Any, usual: Any, strange: Any) -> None:
    strangeness = reference.strangeness([usual, *[strange] * 5])

    assert all(one > strangeness[0] for one in strangeness[1:])
