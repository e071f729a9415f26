"""One behaviour suite over every engine.

The models are prepared into the project's own models folder when they are not there yet, and each is loaded once.
What each kind of engine promises beyond this is in a file of its own.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deploy.models.prepare import prepare, recipes
from deploy.models.train_digits import build_network
from fairlane.records import ModelVersion, TokenUsage
from fairlane_server.models.models_file import load_models
from inference_consumers.engine_process.failures import is_out_of_memory
from inference_consumers.engines.protocol import (
    CancelledItem,
    Engine,
    EngineLoadError,
    EngineSpec,
    Failure,
    RunCost,
    Success,
    run_batch,
)
from inference_consumers.engines.registry import create_engine
from tests.kit.encoder_kit import TINY, prepared_tokenizer, save_cross_encoder
from tests.kit.engine_kit import (
    FARES,
    HOSTILE_TEXTS,
    MODELS_DIR,
    PROJECT,
    THREADS,
    Watcher,
    assert_same,
    code_of,
    text_of,
)
from tests.kit.vision_kit import save_script

pytestmark = [pytest.mark.full, pytest.mark.model]

every_engine = pytest.mark.parametrize("name", FARES)
with_weights = pytest.mark.parametrize("name", [name for name in FARES if name != "simulated"])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[ModelVersion, Path]]:
    """By the engine's name a model for it, and the folder of its folder."""
    prepare(MODELS_DIR, recipes(), print)
    # Of several for an engine the first, which the others are smaller models of.
    found = {model.engine: (model, MODELS_DIR) for model in reversed(load_models(PROJECT / "deploy/models.yaml"))}
    folder = tmp_path_factory.mktemp("models")
    encoder, digits = found["torch-embedding"][0], found["torch-classifier"][0]
    save_cross_encoder(folder / encoder.path, prepared_tokenizer())
    network = build_network()
    network.load_state_dict(torch.export.load(MODELS_DIR / digits.path / "model.pt2").state_dict)
    save_script(folder / digits.path, network, 10)
    ranker = replace(encoder, engine="torch-cross-encoder", max_context_tokens=TINY.max_context_tokens)
    found["torch-cross-encoder"] = (replace(ranker, tasks=("rank",)), folder)
    found["torchscript-classifier"] = (replace(digits, engine="torchscript-classifier"), folder)
    found["simulated"] = (replace(found["torch-causal-lm"][0], engine="simulated"), folder)
    return found


@pytest.fixture(scope="module")
def engines(models: dict[str, tuple[ModelVersion, Path]]) -> Iterator[dict[str, Engine]]:
    built = {
        name: create_engine(
            EngineSpec(model, str(folder), THREADS, device="cpu", allow_unsafe_weights=name.startswith("torchscript"))
        )
        for name, (model, folder) in models.items()
    }
    for engine in built.values():
        engine.load()
    yield built
    for engine in built.values():
        engine.close()


@every_engine
def test_a_batch_gives_each_item_the_outcome_it_gets_alone_in_any_order(engines: dict[str, Engine], name: str) -> None:
    items = FARES[name].good()
    alone = [run_batch(engines[name], [item])[0] for item in items]
    assert all(isinstance(outcome, Success) for outcome in alone), alone
    together = run_batch(engines[name], items[::-1])
    for outcome, expected in zip(together, alone[::-1], strict=True):
        assert_same(outcome, expected)


@every_engine
def test_an_item_that_fails_leaves_its_neighbours_alone(engines: dict[str, Engine], name: str) -> None:
    good, bad = FARES[name].good(), FARES[name].bad
    expected = run_batch(engines[name], good)
    mixed = [item for pair in zip(good, [entry[0] for entry in bad], strict=False) for item in pair]
    mixed += good[len(bad) :] + [entry[0] for entry in bad[len(good) :]]
    outcomes = dict(zip(map(id, mixed), run_batch(engines[name], mixed), strict=True))
    for item, outcome in zip(good, expected, strict=True):
        assert_same(outcomes[id(item)], outcome)
    for item, code, field in bad:
        assert code_of(outcomes[id(item)]) == (code, field)


@every_engine
def test_a_batch_of_only_failures_and_an_empty_batch_are_answered(engines: dict[str, Engine], name: str) -> None:
    watcher = Watcher()
    cost = engines[name].run([entry[0] for entry in FARES[name].bad], watcher)
    assert len(watcher.by_index) == len(FARES[name].bad)
    assert all(isinstance(outcome, Failure) for outcome in watcher.by_index.values())
    assert cost == engines[name].run([], Watcher()) == RunCost()


@every_engine
def test_hostile_text_is_only_text(engines: dict[str, Engine], name: str) -> None:
    outcomes = run_batch(engines[name], [FARES[name].hostile(text) for text in HOSTILE_TEXTS])
    assert all(isinstance(outcome, Success) for outcome in outcomes), outcomes


@every_engine
def test_an_engine_carries_its_name(engines: dict[str, Engine], name: str) -> None:
    assert engines[name].name == name


@every_engine
def test_all_is_told_before_a_last_step_and_paid_for_and_texts_stream(engines: dict[str, Engine], name: str) -> None:
    watcher = Watcher()
    items = FARES[name].good() + [entry[0] for entry in FARES[name].bad]
    cost = engines[name].run(items, watcher)
    assert set(watcher.by_index) == set(range(len(items)))
    assert max(watcher.finished_at.values()) < watcher.steps
    usages = [outcome.usage for outcome in watcher.by_index.values() if isinstance(outcome, Success)]
    spent = sum(usage.prompt_tokens - usage.cached_tokens + usage.completion_tokens for usage in usages)
    assert spent <= cost.useful_tokens <= cost.computed_tokens
    streaming = {index for index, item in enumerate(items) if item.parameters.stream}
    assert set(watcher.texts) == streaming
    for index in streaming:
        assert watcher.text_of(index) == text_of(watcher.by_index[index])
        assert len(watcher.texts[index]) > 2
        assert "" not in watcher.texts[index]


@every_engine
def test_what_is_cancelled_before_it_began_costs_nothing_and_its_neighbours_are_answered(
    engines: dict[str, Engine], name: str
) -> None:
    items = FARES[name].good()[:3]
    watcher = Watcher(cancel_after={1: 0})
    engines[name].run(items, watcher)
    assert watcher.by_index[1] == CancelledItem(TokenUsage())
    for index in (0, 2):
        assert isinstance(watcher.by_index[index], Success)
    nobody = Watcher(cancel_after=dict.fromkeys(range(3), 0))
    assert engines[name].run(items, nobody).computed_tokens == 0
    assert set(nobody.by_index.values()) == {CancelledItem(TokenUsage())}


@with_weights
def test_a_model_that_is_not_there_or_not_loaded_is_named(
    models: dict[str, tuple[ModelVersion, Path]], name: str, tmp_path: Path
) -> None:
    model = models[name][0]
    engine = create_engine(EngineSpec(model, str(tmp_path), THREADS))
    with pytest.raises(EngineLoadError, match=f"{model.model}: .*{model.path} holds no model"):
        engine.load()
    with pytest.raises(EngineLoadError, match=f"{model.model}: not loaded"):
        run_batch(engine, FARES[name].good())


@with_weights
def test_a_model_that_is_damaged_is_a_load_error_that_names_the_file(
    models: dict[str, tuple[ModelVersion, Path]], name: str, tmp_path: Path
) -> None:
    model, where = models[name]
    folder = tmp_path / model.path
    folder.mkdir()
    damaged = ""
    for file in (where / model.path).iterdir():
        if file.suffix in {".safetensors", ".pt2", ".pt"}:
            (folder / file.name).write_bytes(file.read_bytes()[:1000])
            damaged = file.name
        else:
            (folder / file.name).symlink_to(file)
    with pytest.raises(EngineLoadError, match=f"{model.model}: .*{damaged}.* cannot be loaded"):
        create_engine(EngineSpec(model, str(tmp_path), THREADS, allow_unsafe_weights=True)).load()


def test_torch_says_that_memory_ran_out_in_the_words_we_know() -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 50, dtype=torch.uint8)
    assert is_out_of_memory(refused.value)
    assert is_out_of_memory(torch.OutOfMemoryError())
    with pytest.raises(RuntimeError) as mistake:
        torch.ones(2) @ torch.ones(3)
    assert not is_out_of_memory(mistake.value)
