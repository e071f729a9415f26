"""The engine without a model: what it takes, what it says, and that building it imports no torch."""

import itertools
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fairlane.outcomes import Code, FinishReason
from fairlane.records import Message, Parameters, RequestInput, TokenLogprob, TokenUsage, TopLogprob
from fairlane_server.models.models_file import load_models
from inference_consumers.engines.protocol import (
    CancelledItem,
    EngineItem,
    EngineLimits,
    EngineLoadError,
    EngineSpec,
    Failure,
    ItemOutcome,
    Outcomes,
    RunCost,
    SimulatedCost,
    Success,
    run_batch,
)
from inference_consumers.engines.registry import create_engine
from inference_consumers.engines.simulated import SimulatedEngine

PROJECT = Path(__file__).parents[3]
LIMITS = EngineLimits(max_batch_size=32, max_batch_tokens=4096, max_context_tokens=100, max_output_tokens=50)


class Time:
    """Passes only while somebody sleeps, and a little longer than asked, as it does."""

    def __init__(self, overshoot: float = 0.0) -> None:
        self.seconds = 0.0
        self.sleeps: list[float] = []
        self._overshoot = overshoot

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.seconds += seconds + self._overshoot

    def now(self) -> float:
        return self.seconds


class Watcher(Outcomes):
    """Notes the time at which it is told something, and cancels items at their time."""

    def __init__(self, time: Time, cancel_at: dict[int, float] | None = None) -> None:
        super().__init__()
        self.finished_at: dict[int, float] = {}
        self.texts_at: dict[int, list[float]] = {}
        self.steps_at: list[float] = []
        self._time = time
        self._cancel_at = cancel_at or {}

    def text(self, index: int, delta: str) -> None:
        super().text(index, delta)
        self.texts_at.setdefault(index, []).append(self._time.seconds)

    def finished(self, index: int, outcome: ItemOutcome) -> None:
        super().finished(index, outcome)
        self.finished_at[index] = self._time.seconds

    def step(self) -> None:
        super().step()
        self.steps_at.append(self._time.seconds)

    def is_cancelled(self, index: int) -> bool:
        return self._time.seconds >= self._cancel_at.get(index, math.inf)


def engine(time: Time, cost: SimulatedCost | None = None) -> SimulatedEngine:
    return SimulatedEngine(LIMITS, cost or SimulatedCost(), time.sleep, now=time.now)


def generate(prompt: str = "x" * 40, parameters: Parameters | None = None) -> EngineItem:
    return EngineItem("id", "generate", RequestInput(prompt=prompt), parameters or Parameters(max_tokens=10))


def test_what_was_said_before_is_part_of_the_prompt() -> None:
    history = (Message("user", "x" * 40), Message("assistant", "x" * 80))
    (outcome,) = run_batch(engine(Time()), [replace(generate(), history=history)])
    assert isinstance(outcome, Success)
    assert outcome.usage.prompt_tokens == 40
    (outcome,) = run_batch(engine(Time()), [replace(generate(), history=history * 4)])
    assert isinstance(outcome, Failure)
    assert outcome.code == Code.CONTEXT_TOO_LONG
    (outcome,) = run_batch(engine(Time()), [replace(generate(""), history=history)])
    assert outcome == Failure(Code.INVALID, "neither messages nor a prompt", "input")


def test_no_cost_means_no_sleep() -> None:
    time = Time()
    run_batch(engine(time), [generate(), generate(parameters=Parameters(max_tokens=10, stream=True))] * 16)
    assert time.sleeps == []


@pytest.mark.parametrize("overshoot", [0.0, 0.0007])
def test_a_batch_takes_its_fixed_time_and_its_tokens_at_the_rates(overshoot: float) -> None:
    time = Time(overshoot)
    cost = SimulatedCost(prefill_tokens_per_s=1000, decode_tokens_per_s=100, batch_ms=50)
    outcomes = run_batch(engine(time, cost), [generate(), generate(parameters=Parameters(max_tokens=3))])
    assert [outcome.usage.prompt_tokens for outcome in outcomes if isinstance(outcome, Success)] == [10, 10]
    assert time.seconds == pytest.approx(0.05 + 20 / 1000 + 13 / 100, abs=overshoot + 1e-9)


def test_a_high_rate_is_kept_by_sleeping_seldom() -> None:
    time = Time()
    run_batch(engine(time, SimulatedCost(decode_tokens_per_s=100_000)), [generate()] * 32)
    assert time.seconds == pytest.approx(320 / 100_000)
    assert len(time.sleeps) <= 4


def test_the_fixed_time_does_not_grow_with_the_batch() -> None:
    for items in (1, 32):
        time = Time()
        run_batch(engine(time, SimulatedCost(batch_ms=100)), [generate()] * items)
        assert time.seconds == pytest.approx(0.1)


def test_it_says_that_it_is_alive_all_the_time() -> None:
    time = Time()
    watcher = Watcher(time)
    cost = SimulatedCost(prefill_tokens_per_s=10, decode_tokens_per_s=3, batch_ms=700)
    engine(time, cost).run([generate()] * 3, watcher)
    gaps = [later - earlier for earlier, later in itertools.pairwise([0.0, *watcher.steps_at, time.seconds])]
    assert max(gaps) <= 0.1


def test_words_are_told_as_their_time_comes_and_items_when_they_are_done() -> None:
    time = Time()
    watcher = Watcher(time)
    streamed = generate(parameters=Parameters(max_tokens=4, stream=True))
    whole = generate(parameters=Parameters(max_tokens=2))
    texts = EngineItem("id", "embed", RequestInput(texts=("x" * 80,)), Parameters())
    cost = SimulatedCost(prefill_tokens_per_s=100, decode_tokens_per_s=10)
    run_cost = engine(time, cost).run([streamed, whole, texts], watcher)
    assert watcher.texts == {0: ["simulated", " answer", " without", " a"]}
    assert watcher.texts_at[0] == pytest.approx([0.6, 0.8, 0.9, 1.0])
    assert watcher.finished_at == pytest.approx({0: 1.0, 1: 0.8, 2: 0.4})
    assert run_cost == RunCost(useful_tokens=40 + 6, computed_tokens=40 + 6)


def test_texts_told_are_the_text_of_the_answer_whatever_stops_it() -> None:
    for stop in ("", "simulated", "answer", " answer", "t a", " ", "nowhere"):
        watcher = Watcher(Time())
        SimulatedEngine(LIMITS).run([generate(parameters=Parameters(10, stop=(stop,), stream=True))], watcher)
        [outcome] = watcher.by_index.values()
        assert isinstance(outcome, Success)
        assert "".join(watcher.texts.get(0, [])) == outcome.output.text
        assert "" not in watcher.texts.get(0, [])


def test_a_cancelled_item_ends_at_once_and_its_time_is_not_spent() -> None:
    time = Time()
    watcher = Watcher(time, {0: 0.0, 1: 0.15, 2: 0.55})
    items = [generate(parameters=Parameters(max_tokens=10, stream=True)) for _ in range(4)]
    cost = SimulatedCost(prefill_tokens_per_s=100, decode_tokens_per_s=10)
    engine(time, cost).run(items, watcher)
    assert watcher.by_index[0] == CancelledItem(TokenUsage())
    assert watcher.by_index[1] == CancelledItem(TokenUsage(prompt_tokens=10, completion_tokens=0))
    assert watcher.by_index[2] == CancelledItem(TokenUsage(prompt_tokens=10, completion_tokens=1))
    assert len(watcher.texts[2]) == 1
    assert watcher.finished_at[1] <= 0.2
    assert watcher.finished_at[2] <= 0.6
    assert isinstance(watcher.by_index[3], Success)
    assert time.seconds == pytest.approx(0.3 + 0.2 + 0.2 + 0.8)


def test_log_probabilities_are_given_when_asked_for() -> None:
    plain, chosen, top = run_batch(
        SimulatedEngine(LIMITS), [generate(parameters=Parameters(2, logprobs=count)) for count in (None, 0, 5)]
    )
    assert isinstance(plain, Success)
    assert isinstance(chosen, Success)
    assert isinstance(top, Success)
    assert plain.output.logprobs is None
    assert chosen.output.logprobs == (TokenLogprob("simulated", 0.0), TokenLogprob(" answer", 0.0))
    assert top.output.logprobs is not None
    assert top.output.logprobs[0].top == (TopLogprob("simulated", 0.0),)


def test_a_prompt_beyond_the_tenants_limit_fails_alone() -> None:
    items = [replace(generate(), max_prompt_tokens=limit) for limit in (9, 10)]
    refused, answered = run_batch(SimulatedEngine(LIMITS), items)
    message = "the prompt has 10 tokens; the tenant's limit is 9"
    assert refused == Failure(Code.CONTEXT_TOO_LONG, message, "input")
    assert isinstance(answered, Success)


def test_the_text_says_that_it_is_simulated_and_has_as_many_words_as_tokens() -> None:
    [outcome] = run_batch(SimulatedEngine(LIMITS), [generate()])
    assert isinstance(outcome, Success)
    assert outcome.output.text is not None
    assert outcome.output.text.startswith("simulated answer")
    assert len(outcome.output.text.split()) == outcome.usage.completion_tokens == 10
    assert outcome.finish_reason == FinishReason.LENGTH


def test_a_stop_string_cuts_the_text() -> None:
    [outcome] = run_batch(SimulatedEngine(LIMITS), [generate(parameters=Parameters(max_tokens=10, stop=(" without",)))])
    assert isinstance(outcome, Success)
    assert (outcome.output.text, outcome.finish_reason) == ("simulated answer", FinishReason.STOP)


def test_the_output_limit_caps_the_answer() -> None:
    [outcome] = run_batch(SimulatedEngine(LIMITS), [generate("x", Parameters(max_tokens=1000))])
    assert isinstance(outcome, Success)
    assert outcome.usage.completion_tokens == LIMITS.max_output_tokens


def test_every_task_is_answered() -> None:
    inputs = {
        "embed": RequestInput(texts=("a", "b")),
        "rank": RequestInput(query="q", documents=("a", "b", "c")),
        "classify": RequestInput(image=bytes(64)),
    }
    items = [EngineItem(task, task, given, Parameters()) for task, given in inputs.items()]
    embedded, ranked, classified = run_batch(SimulatedEngine(LIMITS), items)
    assert isinstance(embedded, Success)
    assert isinstance(ranked, Success)
    assert isinstance(classified, Success)
    assert embedded.output.embeddings is not None
    assert len(embedded.output.embeddings) == 2
    assert ranked.output.scores is not None
    assert len(ranked.output.scores) == 3
    assert classified.output.labels is not None
    assert classified.output.labels[0].label == "simulated"


def test_too_long_fails_only_its_item() -> None:
    outcomes = run_batch(SimulatedEngine(LIMITS), [generate(), generate("x" * 400), generate()])
    assert isinstance(outcomes[0], Success)
    assert isinstance(outcomes[2], Success)
    assert outcomes[1] == Failure(Code.CONTEXT_TOO_LONG, "110 tokens; the context holds 100", "input")


def test_an_item_beyond_its_memory_fails_alone() -> None:
    texts = EngineItem("id", "embed", RequestInput(texts=("x" * 24, "x" * 20)), Parameters())
    outcomes = run_batch(
        SimulatedEngine(LIMITS, SimulatedCost(memory_tokens=10)), [generate("x" * 40), generate("x" * 44), texts]
    )
    assert isinstance(outcomes[0], Success)
    assert outcomes[1:] == [Failure(Code.OVERLOADED, "11 prompt tokens; there is memory for 10")] * 2


def test_without_a_declared_memory_everything_fits() -> None:
    assert isinstance(run_batch(SimulatedEngine(LIMITS), [generate("x" * 200)])[0], Success)


def test_any_model_can_be_simulated_and_an_unknown_engine_is_named() -> None:
    for model in load_models(PROJECT / "deploy/models.yaml"):
        spec = EngineSpec(model, "nowhere", engine="simulated")
        created = create_engine(spec)
        created.load()
        assert created.name == "simulated"
        assert created.limits == spec.limits
        with pytest.raises(EngineLoadError, match="no engine is called 'magic'"):
            create_engine(EngineSpec(model, "nowhere", engine="magic"))


def test_a_simulated_engine_needs_no_torch() -> None:
    program = (
        "import sys; from inference_consumers.engines.registry import create_engine;"
        "from fairlane.records import ModelVersion; from inference_consumers.engines.protocol import EngineSpec;"
        "model = ModelVersion('m', '1', 'p', 'simulated', ('embed',), 'm', 1, 1);"
        "create_engine(EngineSpec(model, '.')).load();"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, timeout=60, check=False)
    assert done.returncode == 0
