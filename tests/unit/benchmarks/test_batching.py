"""The batching benchmark: what it gives to the engine, and what it makes of what that says."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from benchmarks.batching import (
    AIM_ONE,
    ARRIVAL,
    BUCKETED,
    ONE,
    PADDED,
    Batches,
    EngineBatch,
    TraceRequest,
    WayTotals,
    bucketed,
    by_arrival,
    draw_requests,
    result,
    scale_of,
    take_turns,
)
from benchmarks.service_curve import percentile
from benchmarks.trace import MAX_CONTEXT_TOKENS, load_trace
from fairlane.records import ModelVersion, Output, TokenUsage
from fairlane_server.models.models_file import load_models
from inference_consumers.batching.batch_size import BatchLimits
from inference_consumers.engines.protocol import EngineItem, EngineLimits, RunCost, RunObserver, Success

COUNT = 48


def four_letters_a_token(tokens: int, _random: Random) -> str:
    return "word" * tokens


class CountingEngine:
    """Computes nothing, and says what it would have, padded or not."""

    name = "counting"
    limits = EngineLimits(32, 8_192, 2_048, 512)

    def __init__(self, *, pads: bool = True) -> None:
        self.batches: list[list[int]] = []
        self._pads = pads

    def load(self) -> None: ...

    def close(self) -> None: ...

    def run(self, batch: Sequence[EngineItem], observer: RunObserver) -> RunCost:
        lengths = [len(item.input.prompt or "") // 4 for item in batch]
        self.batches.append([int(item.item_id) for item in batch])
        for index, length in enumerate(lengths):
            answer = batch[index].parameters.max_tokens or 0
            observer.finished(index, Success(Output(text=""), TokenUsage(length, answer)))
        observer.step()
        return RunCost(sum(lengths), len(lengths) * max(lengths) if self._pads else sum(lengths))


@pytest.fixture(scope="module")
def model() -> ModelVersion:
    return next(one for one in load_models(Path("deploy/models.yaml")) if one.engine == "torch-causal-lm")


@pytest.fixture(scope="module")
def requests(model: ModelVersion) -> list[TraceRequest]:
    return draw_requests(model, four_letters_a_token, COUNT, seed=1)


@pytest.fixture
def limits(model: ModelVersion) -> BatchLimits:
    return BatchLimits(model.max_batch_size, model.max_batch_tokens, timeout_ms=0)


def test_lengths_are_the_trace_s_to_one_factor(model: ModelVersion) -> None:
    rows = load_trace()
    scale = scale_of(rows)
    scaled = [scale * (row.context_tokens + row.generated_tokens) for row in rows]
    assert percentile(scaled, 0.99) == pytest.approx(MAX_CONTEXT_TOKENS)
    drawn = draw_requests(model, four_letters_a_token, 3_000, seed=2)
    prompts = [len(one.item.input.prompt or "") // 4 for one in drawn]
    answers = [one.item.parameters.max_tokens or 0 for one in drawn]
    assert sum(prompts) / len(prompts) == pytest.approx(scale * 2_047.8, rel=0.05)
    assert sum(answers) / len(answers) == pytest.approx(scale * 27.9, rel=0.15)
    assert max(map(sum, zip(prompts, answers, strict=True))) <= model.max_context_tokens - 1


def test_costs_are_estimates_and_not_known_lengths(requests: list[TraceRequest]) -> None:
    """An answer's length is known only afterwards; of a prompt, its bytes."""
    outputs = [(one.cost_tokens - one.work.item.prompt_tokens) // 2 for one in requests]
    answers = [one.item.parameters.max_tokens or 0 for one in requests]
    assert all(expected <= answer for expected, answer in zip(outputs, answers, strict=True))
    assert max(outputs) < max(answers) / 2


def metered(ways: Batches) -> Batches:
    """Takes a millisecond for each token that was computed, however long it really took."""
    batch: EngineBatch | None = next(ways)
    while batch is not None:
        _, cost = yield batch
        try:
            batch = ways.send((0.1 + 0.001 * cost.computed_tokens, cost))
        except StopIteration:
            batch = None


@pytest.mark.parametrize("pads", [True, False])
def test_all_ways_answer_every_request_once(requests: list[TraceRequest], limits: BatchLimits, pads: bool) -> None:
    engine = CountingEngine(pads=pads)
    ways = {
        ONE: by_arrival(requests, replace(limits, max_items=1)),
        BUCKETED: metered(bucketed(requests, limits)),
        ARRIVAL: by_arrival(requests, limits),
        PADDED: by_arrival(requests, limits, four_letters_a_token),
    }
    tallies = take_turns(engine, ways, COUNT)
    assert sorted(number for batch in engine.batches for number in batch) == sorted([*range(COUNT)] * 4)
    assert {tally.items for tally in tallies.values()} == {COUNT}
    assert len({tally.completion_tokens for tally in tallies.values()}) == 1
    assert len({tally.useful_tokens for tally in tallies.values()}) == 1
    assert tallies[ONE].batches == COUNT
    assert tallies[ONE].padding == 0
    assert tallies[BUCKETED].padding < 0.15
    assert tallies[PADDED].padding > 0.4, "however the engine runs them"
    assert tallies[ARRIVAL].padding == (pytest.approx(tallies[PADDED].padding) if pads else 0)
    assert tallies[ARRIVAL].batches == tallies[PADDED].batches


def test_by_arrival_means_in_order_and_within_the_bounds(requests: list[TraceRequest], limits: BatchLimits) -> None:
    engine = CountingEngine()
    take_turns(engine, {"arrival": by_arrival(requests, limits)}, COUNT)
    assert [number for batch in engine.batches for number in batch] == list(range(COUNT))
    costs = [sum(requests[number].cost_tokens for number in batch) for batch in engine.batches]
    assert max(costs) <= limits.max_tokens
    assert all(len(batch) <= limits.max_items for batch in engine.batches)
    following = [costs[index] + requests[batch[-1] + 1].cost_tokens for index, batch in enumerate(engine.batches[:-1])]
    assert all(cost > limits.max_tokens for cost in following), "each is as large as it can be"


def test_a_way_that_gives_nothing_out_is_a_failure(requests: list[TraceRequest], limits: BatchLimits) -> None:
    with pytest.raises(RuntimeError, match="only 3 of 4"):
        take_turns(CountingEngine(), {"one": by_arrival(requests[:3], limits)}, 4)


def test_the_figures_are_ratios_of_the_same_run() -> None:
    one = WayTotals(10.0, 4.0, 20, 20, 100, 1_000, 1_000)
    arrival = replace(one, seconds=2.0, prefill_s=1.0)
    padded = replace(one, seconds=4.0, prefill_s=3.0, computed_tokens=3_000)
    ours = replace(one, seconds=1.0, prefill_s=0.5, batches=5, computed_tokens=1_100)
    tallies = {ONE: one, BUCKETED: ours, ARRIVAL: arrival, PADDED: padded}
    made = result(tallies)
    values = {figure.name: figure.value for figure in made.figures}
    assert values["bucketed: tokens/s divided by one at a time"] == pytest.approx(10.0)
    assert values["bucketed: tokens/s divided by padded by arrival"] == pytest.approx(4.0)
    assert values["bucketed: tokens/s divided by arrival, unpadded"] == pytest.approx(2.0)
    assert values["bucketed: padding of all computed tokens"] == pytest.approx(1 - 1_000 / 1_100)
    assert values["padded by arrival: padding of all computed tokens"] == pytest.approx(2 / 3)
    assert values["one at a time: prefill's part of the time"] == pytest.approx(0.4)
    assert values["one at a time: its time divided by its prefill's"] == pytest.approx(2.5)
    assert values["bucketed: decoding, divided by one at a time"] == pytest.approx(12)
    assert values["bucketed: items per batch"] == 4
    assert made.met
    assert not result({**tallies, ONE: replace(one, seconds=0.9 * AIM_ONE)}).met
