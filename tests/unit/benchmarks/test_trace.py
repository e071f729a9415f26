"""The trace, and what is drawn from it."""

import itertools
from statistics import fmean, pstdev

import pytest

from benchmarks.trace import MAX_CONTEXT_TOKENS, RequestSize, TraceSampler, load_trace
from producers.replay.trace import TraceRow


@pytest.fixture(scope="module")
def rows() -> tuple[TraceRow, ...]:
    return load_trace()


def test_the_trace_is_the_published_hour(rows: tuple[TraceRow, ...]) -> None:
    assert len(rows) == 8_819
    assert rows[0] == TraceRow(0.0, 4_808, 10)
    assert rows[-1].arrived_at_s == pytest.approx(3_435.948, abs=0.001)
    assert fmean(row.context_tokens for row in rows) == pytest.approx(2_047.8, abs=0.1)
    assert all(earlier.arrived_at_s <= later.arrived_at_s for earlier, later in itertools.pairwise(rows))


def test_every_size_fits_the_model_and_keeps_its_skew(rows: tuple[TraceRow, ...]) -> None:
    sampler = TraceSampler(rows, 1, scale=0.25)
    sizes = [sampler.size() for _ in range(20_000)]

    assert all(size.prompt_tokens >= 1 and size.output_tokens >= 1 for size in sizes)
    assert max(size.prompt_tokens + size.output_tokens for size in sizes) <= MAX_CONTEXT_TOKENS
    assert fmean(size.cost_tokens for size in sizes) == pytest.approx(sampler.mean_cost_tokens, rel=0.03)
    assert sampler.mean_cost_tokens == pytest.approx(0.25 * (2_047.8 + 2 * 27.9), rel=0.01)
    costs = sorted(size.cost_tokens for size in sizes)
    assert costs[9_900 * 2] > 3 * sampler.mean_cost_tokens


def test_an_answer_gives_way_to_its_prompt() -> None:
    sampler = TraceSampler([TraceRow(0.0, 90, 90), TraceRow(1.0, 200, 5)], 1, scale=1.0, max_tokens=100)

    assert {sampler.size() for _ in range(50)} == {RequestSize(90, 10), RequestSize(99, 1)}


@pytest.mark.parametrize("rate_per_s", [0.5, 20.0, 400.0])
def test_arrivals_come_at_the_rate_and_in_bursts(rows: tuple[TraceRow, ...], rate_per_s: float) -> None:
    seconds = 20_000 / rate_per_s
    times = TraceSampler(rows, 3).arrivals(rate_per_s, seconds)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]

    assert len(times) == pytest.approx(20_000, rel=0.05)
    assert times == sorted(times)
    assert times[-1] < seconds
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(1.69, abs=0.1)
    # What is left of the silences: about twenty mean gaps.
    assert max(gaps) * rate_per_s < 25


def test_a_steady_pace_has_no_bursts(rows: tuple[TraceRow, ...]) -> None:
    times = TraceSampler(rows, 3).arrivals(10.0, 100.0, steady=True)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]

    assert len(times) == pytest.approx(1_000, rel=0.05)
    assert min(gaps) >= 0.049
    assert max(gaps) <= 0.151


def test_the_same_seed_draws_the_same(rows: tuple[TraceRow, ...]) -> None:
    one, same, other = (TraceSampler(rows, seed) for seed in (5, 5, 6))

    assert one.arrivals(10, 5) == same.arrivals(10, 5) != other.arrivals(10, 5)
    assert [one.size() for _ in range(20)] == [same.size() for _ in range(20)]


def test_nothing_arrives_at_no_rate(rows: tuple[TraceRow, ...]) -> None:
    assert TraceSampler(rows, 1).arrivals(0, 100) == []
