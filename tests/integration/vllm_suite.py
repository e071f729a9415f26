"""What the vLLM engine promises. Run by ``test_vllm_engine.py`` with the Python of vLLM's own environment, which has
neither the servers nor most of the libraries of the others.

Two engines are loaded once: the shipped model, and one of random weights that is made to fail.
"""

import inspect
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from fairlane.outcomes import Code, FinishReason
from fairlane.records import Message, ModelVersion, Parameters, RequestInput, TokenUsage
from fairlane_server.models.models_file import load_models
from inference_consumers.engines import model_folder
from inference_consumers.engines.protocol import (
    CancelledItem,
    EngineGoneError,
    EngineItem,
    EngineLimits,
    EngineLoadError,
    EngineSpec,
    Failure,
    ItemOutcome,
    Outcomes,
    Success,
    run_batch,
)
from inference_consumers.engines.registry import create_engine
from inference_consumers.engines.vllm_engine import VllmEngine
from tests.integration import test_engines as behaviour
from tests.kit.engine_kit import FARES, LANGUAGE_MODEL, MODELS_DIR, PROJECT, THREADS, save_tiny_model, text_of
from tests.kit.engine_specs import spec_of
from tests.kit.waiting import eventually

PATIENCE_S = 60.0

FRANCE = "What is the capital of France?"
STORY = "Write a long story about the sea."


def chat(question: str, max_tokens: int | None = 12, item_id: str = "", **parameters: Any) -> EngineItem:
    given = RequestInput(messages=(Message("user", question),))
    return EngineItem(item_id or question, "generate", given, replace(Parameters(max_tokens), **parameters))


class Joined(Outcomes):
    """The observer of a batch that joined, asked by another thread."""

    def __init__(self, engine: VllmEngine, *items: EngineItem) -> None:
        super().__init__()
        self._items = len(items)
        engine.join(items, self)

    def is_done(self) -> bool:
        return len(self.by_index) == self._items

    def results(self) -> list[ItemOutcome]:
        eventually(self.is_done, PATIENCE_S, "the last outcome")
        return [self.by_index[index] for index in range(self._items)]


@pytest.fixture(scope="session")
def model() -> ModelVersion:
    [found] = [model for model in load_models(PROJECT / "deploy/models.yaml") if model.model == LANGUAGE_MODEL.name]
    return replace(found, engine="vllm", max_batch_size=4, smaller_model=None)


@pytest.fixture(scope="session")
def tokenizer(model: ModelVersion) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODELS_DIR / model.path, local_files_only=True)


@pytest.fixture(scope="session")
def engines(
    model: ModelVersion, tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, VllmEngine]]:
    folder = tmp_path_factory.mktemp("failing")
    [broken_token] = tokenizer(" sea").input_ids
    # vLLM's attention on a CPU knows no smaller heads.
    save_tiny_model(folder, tokenizer, broken_token=broken_token, head_dim=32)
    shipped = create_engine(EngineSpec(model, str(MODELS_DIR), THREADS))
    assert isinstance(shipped, VllmEngine)
    failing = VllmEngine(spec_of(folder, EngineLimits(4, 256, 64, 8), "failing", threads=1))
    # Most of the time of both is imports in processes of their own.
    with ThreadPoolExecutor() as pool:
        list(pool.map(VllmEngine.load, (shipped, failing)))
    yield {"shipped": shipped, "failing": failing}
    for engine in (shipped, failing):
        engine.close()


@pytest.fixture(scope="session")
def engine(engines: dict[str, VllmEngine]) -> VllmEngine:
    return engines["shipped"]


# --- every engine -----------------------------------------------------------------------------------------------

FARES["vllm"] = FARES["torch-causal-lm"]

PROMISES = [
    promise
    for name, promise in vars(behaviour).items()
    if name.startswith("test_") and "name" in inspect.signature(promise).parameters
]


@pytest.mark.parametrize("promise", PROMISES)
def test_it_does_what_every_engine_does(
    engine: VllmEngine, model: ModelVersion, tmp_path: Path, promise: Callable[..., None]
) -> None:
    given = {"engines": {"vllm": engine}, "models": {"vllm": (model, MODELS_DIR)}, "name": "vllm", "tmp_path": tmp_path}
    promise(**{name: given[name] for name in inspect.signature(promise).parameters})


def test_an_engine_carries_its_limits(engine: VllmEngine, model: ModelVersion) -> None:
    assert (engine.limits.max_batch_size, engine.limits.max_context_tokens) == (4, model.max_context_tokens)


# --- parameters -------------------------------------------------------------------------------------------------


def test_stop_strings_cut_the_text_before_the_first_of_them(engine: VllmEngine) -> None:
    stops = ((), (" Paris",), ("Paris", "capital", ""), ("Berlin",), ("ance is Par",))
    outcomes = run_batch(engine, [chat(FRANCE, stop=stop) for stop in stops])
    assert [text_of(outcome) for outcome in outcomes] == [
        "The capital of France is Paris.",
        "The capital of France is",
        "The ",
        "The capital of France is Paris.",
        "The capital of Fr",
    ]
    assert {outcome.finish_reason for outcome in outcomes if isinstance(outcome, Success)} == {FinishReason.STOP}


def test_every_item_has_its_own_max_tokens(engine: VllmEngine) -> None:
    lengths = [1, 40, 3, 7, 2, 25]
    outcomes = run_batch(engine, [chat(STORY, max_tokens=length) for length in lengths])
    for length, outcome in zip(lengths, outcomes, strict=True):
        assert isinstance(outcome, Success)
        assert (outcome.usage.completion_tokens, outcome.finish_reason) == (length, FinishReason.LENGTH)
        assert text_of(outcomes[1]).startswith(text_of(outcome))


def test_a_seed_gives_the_same_text_in_any_batch_and_another_another(engine: VllmEngine) -> None:
    seeded = chat(STORY, temperature=0.8, top_p=0.9, seed=7)
    neighbours = [chat(FRANCE), chat(STORY, temperature=1.0)]
    alone = text_of(run_batch(engine, [seeded])[0])
    assert text_of(run_batch(engine, [*neighbours, seeded])[-1]) == alone
    others = run_batch(engine, [chat(STORY, temperature=0.8, top_p=0.9, seed=seed) for seed in range(4)])
    assert len({text_of(outcome) for outcome in others}) > 1


def test_a_tiny_nucleus_or_temperature_is_greedy(engine: VllmEngine) -> None:
    greedy, nucleus, cold = run_batch(
        engine, [chat(FRANCE), chat(FRANCE, temperature=1.0, top_p=1e-9, seed=1), chat(FRANCE, temperature=1e-30)]
    )
    assert text_of(greedy) == text_of(nucleus) == text_of(cold)


def test_log_probabilities_stand_for_the_tokens_of_the_text(engine: VllmEngine) -> None:
    plain, chosen, three = run_batch(engine, [chat(FRANCE), chat(FRANCE, logprobs=0), chat(FRANCE, logprobs=3)])
    assert isinstance(plain, Success)
    assert plain.output.logprobs is None
    for outcome, alternatives in ((chosen, 0), (three, 3)):
        assert isinstance(outcome, Success)
        entries = outcome.output.logprobs
        assert entries is not None
        assert "".join(entry.token for entry in entries) == outcome.output.text
        assert all(entry.logprob <= 0 and len(entry.top) == alternatives for entry in entries)
        for entry in entries[:alternatives]:
            assert entry.top[0].logprob == entry.logprob
            assert [other.logprob for other in entry.top] == sorted((o.logprob for o in entry.top), reverse=True)


def test_usage_counts_the_prompt_as_its_template_renders_it(
    engine: VllmEngine, tokenizer: PreTrainedTokenizerBase
) -> None:
    messages = [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": "Name 3 colours,\n\nplease."},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)["input_ids"]
    given = RequestInput(messages=tuple(Message(**message) for message in messages))
    [outcome] = run_batch(engine, [EngineItem("usage", "generate", given, Parameters(max_tokens=2))])
    assert isinstance(outcome, Success)
    assert outcome.usage == TokenUsage(prompt_tokens=len(rendered), completion_tokens=2)


def test_a_prompt_that_begins_like_another_is_taken_from_the_cache(engine: VllmEngine) -> None:
    beginning = "The sea is wide and the sky is high. " * 20
    first, second = (run_batch(engine, [chat(beginning + end, max_tokens=1)])[0] for end in ("Why?", "Where?"))
    assert isinstance(first, Success)
    assert isinstance(second, Success)
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 128)


# --- joining and leaving ----------------------------------------------------------------------------------------


def test_an_item_that_joins_later_and_is_short_leaves_first(engine: VllmEngine) -> None:
    long = Joined(engine, chat(STORY, 200, "long", stream=True))
    eventually(lambda: long.texts, PATIENCE_S, "the first text")
    short = Joined(engine, chat(FRANCE, 3, "short"), chat("Hello", 2, "shorter"))
    assert all(isinstance(outcome, Success) for outcome in short.results())
    assert not long.is_done()
    engine.cancel(["long"])
    assert isinstance(long.results()[0], CancelledItem)


def test_the_texts_of_an_item_that_streams_are_its_text(engine: VllmEngine) -> None:
    whole, cut, silent = (
        chat(STORY, 24, "whole", stream=True),
        chat(FRANCE, 12, "cut", stream=True, stop=("ance is Par",)),
        chat(FRANCE, 12, "silent"),
    )
    joined = Joined(engine, whole, cut, silent)
    outcomes = joined.results()
    assert "".join(joined.texts[0]) == text_of(outcomes[0])
    assert "".join(joined.texts[1]) == text_of(outcomes[1]) == "The capital of Fr"
    assert len(joined.texts[0]) > 5
    assert 2 not in joined.texts
    assert joined.steps > 5


def test_what_is_cancelled_stops_and_costs_what_it_took(engine: VllmEngine) -> None:
    running = Joined(engine, *(chat(STORY, 400, f"running-{n}", stream=n == 0) for n in range(4)))
    eventually(lambda: running.texts, PATIENCE_S, "the first text")
    waiting = Joined(engine, chat(STORY, 400, "waiting"), chat(FRANCE, 3, "stays"))
    engine.cancel(["waiting", "running-0", "running-1", "nobody"])
    cancelled, stays = waiting.results()
    assert cancelled == CancelledItem(TokenUsage(prompt_tokens=38))
    assert isinstance(stays, Success)
    # The others are stopped by their observer.
    running.cancelled.update({2, 3})
    stopped = running.results()
    for outcome in stopped:
        assert isinstance(outcome, CancelledItem)
        assert outcome.usage.prompt_tokens == 38
        assert outcome.usage.completion_tokens < 400
    assert isinstance(stopped[0], CancelledItem)
    assert stopped[0].usage.completion_tokens > 0


def test_an_item_that_is_cancelled_before_it_joins_never_runs(engine: VllmEngine) -> None:
    outcomes = Outcomes(cancelled=[0])
    engine.run([chat(STORY, 400), chat("Hello", 1)], outcomes)
    assert outcomes.by_index[0] == CancelledItem(TokenUsage())
    assert isinstance(outcomes.by_index[1], Success)


def test_the_metrics_of_vllm_keep_their_names(engine: VllmEngine) -> None:
    run_batch(engine, [chat(FRANCE)])
    names = {line.split("{")[0] for line in engine.metrics().splitlines() if not line.startswith("#")}
    assert {"vllm:num_requests_running", "vllm:generation_tokens_total"} <= names
    assert all(name.startswith("vllm:") for name in names)


# --- failures ---------------------------------------------------------------------------------------------------


def test_an_architecture_that_vllm_does_not_know_is_a_load_error(model: ModelVersion, tmp_path: Path) -> None:
    folder = tmp_path / model.path
    folder.mkdir()
    for file in (MODELS_DIR / model.path).iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "config.json").unlink()
    (folder / "config.json").write_text('{"architectures": ["NobodyForCausalLM"], "model_type": "llama"}')
    with pytest.raises(EngineLoadError, match=f"(?s){model.model}: {folder} cannot be loaded: .*NobodyForCausalLM"):
        create_engine(EngineSpec(model, str(tmp_path), THREADS)).load()


def test_what_this_build_or_this_machine_cannot_serve_is_a_load_error(
    model: ModelVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineLoadError, match=f"{model.model}: this build of vLLM runs on cpu, not on cuda"):
        create_engine(EngineSpec(model, str(MODELS_DIR), THREADS, device="cuda")).load()
    monkeypatch.setattr(model_folder, "main_memory_bytes", lambda: 1 << 20)
    with pytest.raises(EngineLoadError, match=f"{model.model}: .*the weights need 0.50 GiB of memory"):
        create_engine(EngineSpec(model, str(MODELS_DIR), THREADS)).load()


def test_a_value_that_is_not_a_number_fails_its_item_only(engines: dict[str, VllmEngine]) -> None:
    broken = "A long way to the sea shore"
    before, failed, streamed, after = run_batch(
        engines["failing"], [chat("Hello", 3), chat(broken, 3), chat(broken, 3, "s", stream=True), chat("Hi", 3)]
    )
    assert isinstance(before, Success)
    assert isinstance(after, Success)
    assert failed == streamed == Failure(Code.ENGINE_ERROR, "the model computed a value that is not a finite number")


def test_when_vllm_dies_its_watcher_is_told_and_nobody_waits_for_ever(engines: dict[str, VllmEngine]) -> None:
    """The last one: afterwards the engine is gone."""
    failing = engines["failing"]
    told: queue.Queue[BaseException] = queue.Queue()
    failing.watch(told.put)
    never = Outcomes()
    failing.join([chat("Hello", 8)] * 4, never)
    # Both engines' processes are children of this one: the younger has the smaller model.
    cores = [child for child in psutil.Process().children() if "EngineCore" in "".join(child.cmdline())]
    smaller = min(cores, key=lambda process: process.memory_info().rss)
    smaller.kill()
    death = told.get(timeout=PATIENCE_S)
    assert type(death).__name__ == "EngineDeadError"
    with pytest.raises(EngineGoneError) as caught:
        run_batch(failing, [chat("Hello")])
    assert caught.value.__cause__ is death
    assert told.empty()
    assert isinstance(run_batch(engines["shipped"], [chat("Hello", 1)])[0], Success)
