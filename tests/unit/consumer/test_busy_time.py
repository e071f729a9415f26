"""The time in which an engine ran anything, as its counter has it: a rate of it is a share of the time."""

from collections.abc import Callable

import pytest
from prometheus_client import REGISTRY

from inference_consumers.capacity.measurement import BusyTime
from tests.kit.driver_bench import OK, DriverBench, named
from tests.kit.micro_batch_kit import MODEL, SMALL_MODEL
from tests.kit.stuck_engine import Stuck


@pytest.fixture
def busy_s() -> Callable[[], float]:
    """Seconds that were counted since the test began."""

    def counted() -> float:
        return REGISTRY.get_sample_value("fairlane_engine_busy_seconds_total", {"model": MODEL[0]}) or 0.0

    before = counted()
    return lambda: counted() - before


def test_a_batch_counts_as_it_goes_and_the_rest_after_it_does_not(busy_s: Callable[[], float]) -> None:
    bench = DriverBench()
    bench.now_ms += 10_000
    bench.add(named("a"), named("b"))
    bench.start()
    bench.now_ms += 300
    bench.tell({0: OK})
    assert busy_s() == pytest.approx(0.3)
    bench.now_ms += 200
    bench.tell({1: OK})
    bench.now_ms += 50  # everything is told, and the engine still runs
    bench.end()
    bench.now_ms += 10_000
    bench.add(named("c"))
    bench.start()
    bench.now_ms += 100
    bench.tell({0: OK})
    bench.end()
    assert busy_s() == pytest.approx(0.65)


def test_runs_that_overlap_count_once(busy_s: Callable[[], float]) -> None:
    bench = DriverBench(continuous=True)
    bench.add(named("a"))
    bench.start()
    first = bench.run_id
    bench.now_ms += 100
    bench.add(named("b"))
    bench.start()
    assert bench.run_id != first
    bench.now_ms += 100
    bench.tell({0: OK}, run_id=first)
    bench.end(run_id=first)
    bench.now_ms += 100
    bench.tell({0: OK})
    bench.end()
    bench.now_ms += 5_000
    bench.add(named("c"))
    bench.start()
    assert busy_s() == pytest.approx(0.3)


@pytest.mark.parametrize("continuous", [False, True])
def test_it_is_at_rest_from_the_death_of_its_process_on(busy_s: Callable[[], float], continuous: bool) -> None:
    bench = DriverBench(continuous=continuous)
    bench.add(named("a"))
    bench.start()
    bench.now_ms += 400
    bench.die()
    bench.now_ms += 30_000
    bench.load(continuous=continuous)
    bench.start()
    bench.now_ms += 100
    bench.tell({0: OK})
    bench.end()
    assert busy_s() == pytest.approx(0.5)


def test_an_engine_that_died_is_not_measured_by_the_time_it_was_gone() -> None:
    bench = DriverBench(continuous=True)
    bench.add(named("a"))
    bench.start()
    bench.now_ms += 400
    bench.die()
    bench.now_ms += 30_000
    bench.load(continuous=True)
    bench.start()
    bench.now_ms += 100
    bench.tell({0: OK})
    bench.end()
    assert bench.driver.meter.rates.completion_tokens_per_s == pytest.approx(3 / 0.5)


def test_a_long_batch_counts_while_it_tells_nothing(busy_s: Callable[[], float]) -> None:
    made = Stuck()
    made.poll_for(5_000)
    assert busy_s() == pytest.approx(5, abs=0.2)
    made.bench.tell({0: OK})
    made.bench.end()
    made.poll_for(5_000)
    assert busy_s() == pytest.approx(5, abs=0.2)


def test_a_clock_that_was_set_back_takes_nothing_away_and_stops_nothing() -> None:
    busy = BusyTime()
    assert busy.passed_s(MODEL, 50_000, running=True) == 0
    assert busy.passed_s(MODEL, 10_000, running=True) == 0
    assert busy.passed_s(MODEL, 10_500, running=False) == 0.5
    assert busy.passed_s(MODEL, 90_000, running=False) == 0


def test_engines_are_counted_each_for_itself() -> None:
    busy = BusyTime()
    busy.passed_s(MODEL, 0, running=True)
    busy.passed_s(SMALL_MODEL, 500, running=True)
    assert busy.passed_s(MODEL, 1_000, running=False) == 1
    assert busy.passed_s(SMALL_MODEL, 1_500, running=False) == 1
