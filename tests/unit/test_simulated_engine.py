"""The engine without a model: what it takes, what it says, and that building it imports no torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from fairlane.models import load_models
from fairlane.outcomes import Code, FinishReason
from fairlane.records import Parameters, RequestInput
from inference_consumers.engines.protocol import EngineItem, EngineLimits, EngineLoadError, Failure, Success
from inference_consumers.engines.registry import create_engine, limits_of
from inference_consumers.engines.simulated import SimulatedCost, SimulatedEngine

PROJECT = Path(__file__).parents[2]
LIMITS = EngineLimits(max_batch_size=32, max_batch_tokens=4096, max_context_tokens=100, max_output_tokens=50)


class RecordedSleep:
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


def generate(prompt: str = "x" * 40, parameters: Parameters | None = None) -> EngineItem:
    return EngineItem("id", "generate", RequestInput(prompt=prompt), parameters or Parameters(max_tokens=10))


def test_no_cost_means_no_sleep() -> None:
    sleep = RecordedSleep()
    SimulatedEngine(LIMITS, sleep=sleep).run([generate()] * 32)
    assert sleep.seconds == []


def test_a_batch_takes_its_fixed_time_and_its_tokens_at_the_rates() -> None:
    sleep = RecordedSleep()
    cost = SimulatedCost(prefill_tokens_per_s=1000, decode_tokens_per_s=100, batch_ms=50)
    outcomes = SimulatedEngine(LIMITS, cost, sleep).run([generate(), generate()])
    assert [outcome.usage.prompt_tokens for outcome in outcomes if isinstance(outcome, Success)] == [10, 10]
    assert sleep.seconds == [pytest.approx(0.05 + 20 / 1000 + 20 / 100)]


def test_the_fixed_time_does_not_grow_with_the_batch() -> None:
    sleep = RecordedSleep()
    engine = SimulatedEngine(LIMITS, SimulatedCost(batch_ms=100), sleep)
    engine.run([generate()])
    engine.run([generate()] * 32)
    assert sleep.seconds == [pytest.approx(0.1)] * 2


def test_the_text_says_that_it_is_simulated_and_has_as_many_words_as_tokens() -> None:
    [outcome] = SimulatedEngine(LIMITS).run([generate()])
    assert isinstance(outcome, Success)
    assert outcome.output.text is not None
    assert outcome.output.text.startswith("simulated answer")
    assert len(outcome.output.text.split()) == outcome.usage.completion_tokens == 10
    assert outcome.finish_reason == FinishReason.LENGTH


def test_a_stop_string_cuts_the_text() -> None:
    [outcome] = SimulatedEngine(LIMITS).run([generate(parameters=Parameters(max_tokens=10, stop=(" without",)))])
    assert isinstance(outcome, Success)
    assert (outcome.output.text, outcome.finish_reason) == ("simulated answer", FinishReason.STOP)


def test_the_output_limit_caps_the_answer() -> None:
    [outcome] = SimulatedEngine(LIMITS).run([generate("x", Parameters(max_tokens=1000))])
    assert isinstance(outcome, Success)
    assert outcome.usage.completion_tokens == LIMITS.max_output_tokens


def test_every_task_is_answered() -> None:
    inputs = {
        "embed": RequestInput(texts=("a", "b")),
        "rank": RequestInput(query="q", documents=("a", "b", "c")),
        "classify": RequestInput(image=bytes(64)),
    }
    items = [EngineItem(task, task, given, Parameters()) for task, given in inputs.items()]
    embedded, ranked, classified = SimulatedEngine(LIMITS).run(items)
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
    outcomes = SimulatedEngine(LIMITS).run([generate(), generate("x" * 400), generate()])
    assert isinstance(outcomes[0], Success)
    assert isinstance(outcomes[2], Success)
    assert outcomes[1] == Failure(Code.CONTEXT_TOO_LONG, "110 tokens; the context holds 100", "input")


def test_any_model_can_be_simulated_and_an_unknown_engine_is_named() -> None:
    for model in load_models(PROJECT / "deploy/models.yaml"):
        engine = create_engine(model, Path("nowhere"), threads=1, engine="simulated")
        engine.load()
        assert engine.name == "simulated"
        assert engine.limits == limits_of(model)
        with pytest.raises(EngineLoadError, match="no engine is called 'magic'"):
            create_engine(model, Path("nowhere"), threads=1, engine="magic")


def test_a_simulated_engine_needs_no_torch() -> None:
    program = (
        "import sys; from inference_consumers.engines.registry import create_engine;"
        "from fairlane.records import ModelVersion; from pathlib import Path;"
        "create_engine(ModelVersion('m', '1', 'p', 'simulated', ('embed',), 'm', 1, 1), Path('.'), 1).load();"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, timeout=60, check=False)
    assert done.returncode == 0
