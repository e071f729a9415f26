"""The size of batches is found by measuring: on simulated engines, whose best size is known."""

from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest

from inference_consumers.batching.batch_size import NEAR_BEST, BatchSizeTuner, rung_of

MOST = 32
TOKENS = 100
SIZES = (1, 2, 4, 8, 16, 32)
Engine = Callable[[int], float]


def linear(base_s: float, per_item_s: float) -> Engine:
    return lambda items: base_s + per_item_s * items


def with_knee(base_s: float, per_item_s: float, knee: int, beyond_s: float) -> Engine:
    """Every item beyond the knee takes so much longer."""
    return lambda items: base_s + per_item_s * items + beyond_s * max(0, items - knee)


def rate(engine: Engine, items: int) -> float:
    return items / engine(items)


def smallest_near_best(engine: Engine) -> int:
    best = max(rate(engine, size) for size in SIZES)
    return next(size for size in SIZES if rate(engine, size) >= NEAR_BEST * best)


class Load:
    """Batches of an engine, one after another, with so much waiting each time."""

    def __init__(self, noise: float = 0.0, seed: int = 0, waiting: int = 1_000, room: int = MOST) -> None:
        self.size, self.waiting, self.room = BatchSizeTuner(), waiting, room
        self._noise, self._random = noise, Random(seed)

    def run(self, engine: Engine, batches: int) -> list[int]:
        """The sizes of the batches. No more than ``room`` items have room in one."""
        made = []
        for _ in range(batches):
            wanted = self.size.wanted(self.waiting, MOST)
            assert 1 <= wanted <= MOST
            self.size.asked(wanted, self.waiting)
            items = min(wanted, self.waiting, self.room)
            seconds = engine(items) * self._random.uniform(1 - self._noise, 1 + self._noise)
            self.size.ran(items, TOKENS * items, seconds, MOST)
            made.append(items)
        return made


ENGINES = {
    "base is most of it": linear(0.1, 0.01),
    "base is little": linear(0.01, 0.01),
    "no base": linear(0.0, 0.01),
    "knee at 8": with_knee(0.1, 0.01, 8, 0.05),
    "knee at 16": with_knee(0.2, 0.01, 16, 0.05),
    "knee at 1": with_knee(0.1, 0.01, 1, 0.2),
}


def test_rungs_are_the_nearest_powers_of_two() -> None:
    assert [rung_of(items) for items in (1, 2, 3, 5, 6, 11, 12, 22, 23, 32)] == [0, 1, 2, 2, 3, 3, 4, 4, 5, 5]


@pytest.mark.parametrize("name", ENGINES)
def test_the_right_size_is_found(name: str) -> None:
    """And within 60 batches, of which none is needed to know the engine."""
    engine, load = ENGINES[name], Load()
    load.run(engine, 60)
    sizes = load.run(engine, 200)
    assert max(set(sizes), key=sizes.count) == smallest_near_best(engine)


def test_a_knee_is_found_at_once() -> None:
    """From the largest size down, without running at a bad one for longer than it takes to know it."""
    assert Load().run(ENGINES["knee at 8"], 16)[-3:] == [8, 8, 8]


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("noise", [0.1, 0.2])
def test_noise_costs_little_throughput(name: str, noise: float) -> None:
    """Run times that vary by so much: what is lost to wrong sizes and to trying others is a few percent."""
    engine = ENGINES[name]
    for seed in range(5):
        load = Load(noise, seed)
        load.run(engine, 200)
        sizes = load.run(engine, 500)
        assert sum(sizes) / sum(engine(size) for size in sizes) >= 0.92 * max(rate(engine, size) for size in SIZES)


@pytest.mark.parametrize("name", ["base is most of it", "knee at 8", "knee at 16"])
def test_a_size_that_is_clearly_best_is_kept(name: str) -> None:
    """No flapping: batches of another size are trials only."""
    load = Load(0.1)
    load.run(ENGINES[name], 60)
    sizes = load.run(ENGINES[name], 1_000)
    others = [size for size in sizes if size != smallest_near_best(ENGINES[name])]
    assert len(others) <= 40


def test_sizes_that_are_as_good_are_not_taken_in_turn() -> None:
    load = Load(0.1)
    load.run(ENGINES["no base"], 60)
    sizes = load.run(ENGINES["no base"], 1_000)
    assert sum(one != other for one, other in pairwise(sizes)) <= 100


@pytest.mark.parametrize("before", ENGINES)
@pytest.mark.parametrize("after", ENGINES)
def test_an_engine_that_changes_is_followed(before: str, after: str) -> None:
    """Slower or faster, to larger batches or smaller: the loss after 150 batches is what it would be anyway."""
    engine = ENGINES[after]
    for seed in range(3):
        load = Load(0.05, seed)
        load.run(ENGINES[before], 300)
        load.run(engine, 150)
        sizes = load.run(engine, 100)
        assert sum(sizes) / sum(engine(size) for size in sizes) >= 0.9 * max(rate(engine, size) for size in SIZES)


def test_what_was_never_measured_is_taken_for_worth_it() -> None:
    """From the first batch on, and when more waits than ever."""
    load = Load()
    assert load.size.wanted(1_000, MOST) == MOST
    load.waiting = 1
    load.run(ENGINES["no base"], 50)
    assert load.size.wanted(1_000, MOST) == MOST


@pytest.mark.parametrize("seed", range(20))
def test_a_quiet_time_does_not_hide_the_sizes_that_were_wanted_in_it(seed: int) -> None:
    """Batches come out smaller than wanted while little waits. Once much waits, the best size is there at once."""
    engine, dice, load = ENGINES["base is most of it"], Random(seed), Load()
    for _ in range(dice.randint(1, 60)):
        load.waiting = dice.randint(1, 6)
        load.run(engine, 1)
    load.waiting = 1_000
    assert load.run(engine, 25).count(MOST) >= 15


@pytest.mark.parametrize("waiting", [20, 1_000])
def test_a_size_that_has_no_room_is_not_wanted_for_ever(waiting: int) -> None:
    """Of long items no more than 6 fit: which size is best is found among what fits."""
    engine = ENGINES["no base"]
    load = Load(room=6, waiting=waiting)
    load.run(engine, 100)
    sizes = load.run(engine, 200)
    assert sizes.count(1) > 150


def test_batches_stay_small_when_little_waits() -> None:
    load = Load(waiting=3)
    assert set(load.run(ENGINES["base is most of it"], 100)) <= {2, 3}


def test_a_lower_bound_is_kept() -> None:
    load = Load()
    load.run(ENGINES["base is most of it"], 60)
    assert load.size.wanted(1_000, 5) <= 5
    assert BatchSizeTuner().wanted(1_000, 24) == 24


def test_a_run_without_items_says_nothing() -> None:
    size = BatchSizeTuner()
    size.ran(0, 0, 1.0, MOST)
    size.ran(3, 0, 1.0, MOST)
    assert size.wanted(1_000, MOST) == MOST


def test_a_stall_does_not_change_the_size() -> None:
    load = Load(0.05)
    load.run(ENGINES["base is most of it"], 200)
    load.size.ran(MOST, TOKENS * MOST, 600.0, MOST)
    assert load.run(ENGINES["base is most of it"], 20).count(MOST) >= 17
