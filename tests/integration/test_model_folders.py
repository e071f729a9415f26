"""Folders that no language model can be loaded from: the error names the model, the folder and the file."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, BertModel, PreTrainedTokenizerBase

from inference_consumers.engine_process.process_facts import main_memory_bytes
from inference_consumers.engines import model_folder
from inference_consumers.engines.causal_lm import CausalLmEngine
from inference_consumers.engines.model_folder import weight_bytes
from inference_consumers.engines.protocol import EngineLoadError, Success, run_batch
from tests.kit.damaged_models import WEIGHTS, ask_for_a_terabyte, edit, truncate
from tests.kit.encoder_kit import prepared_tokenizer, save
from tests.kit.engine_kit import LANGUAGE_MODEL, TINY, complete, save_parrot, save_tiny_model
from tests.kit.engine_specs import spec_of

pytestmark = [pytest.mark.full, pytest.mark.model]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return prepared_tokenizer(LANGUAGE_MODEL)


@pytest.fixture(scope="module")
def tiny_folder(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder, tokenizer)
    return folder


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def load(folder: Path, dtype: str | None = None) -> CausalLmEngine:
    engine = CausalLmEngine(spec_of(folder, TINY, dtype=dtype))
    engine.load()
    return engine


def shard(folder: Path) -> None:
    """As large models come: in several files, and a list of what is in which."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
    where = {name: file for file, part in parts.items() for name in part}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}), encoding="utf-8")


def shard_and_lose_one(folder: Path) -> None:
    shard(folder)
    (folder / "model-2.safetensors").unlink()


def drop_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (shutil.rmtree, r"holds no model \(there is no such folder\)"),
    (lambda folder: (folder / "config.json").unlink(), r"holds no model \(config.json is missing\)"),
    (lambda folder: truncate(folder / "config.json"), "config.json cannot be loaded: .*line 1[0-9]"),
    (lambda folder: (folder / "config.json").write_text("[]"), "config.json cannot be loaded: it is no JSON object"),
    (lambda folder: (folder / WEIGHTS).unlink(), r"holds no weights \(model.safetensors is missing\)"),
    (lambda folder: truncate(folder / WEIGHTS), "model.safetensors cannot be loaded: .*"),
    (lambda folder: (folder / WEIGHTS).write_bytes(b"\x05"), "model.safetensors cannot be loaded: .*"),
    (lambda folder: (folder / WEIGHTS).write_bytes(b"<html>" * 1000), "model.safetensors cannot be loaded: .*"),
    (shard_and_lose_one, "model-2.safetensors is missing; model.safetensors.index.json lists it"),
    (drop_a_tensor, "1 of its tensors are missing, model.layers.1.mlp.up_proj.weight among them"),
    (lambda folder: (folder / "tokenizer.json").unlink(), r"holds no tokenizer \(tokenizer.json is missing\)"),
    (lambda folder: truncate(folder / "tokenizer.json"), "tokenizer.json cannot be loaded: .*"),
    (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json cannot be loaded: KeyError"),
    (lambda folder: (folder / "generation_config.json").write_text("{"), "generation_config.json cannot be loaded: "),
    (lambda folder: edit(folder, hidden_size="many"), "config.json cannot be loaded: .*'hidden_size'"),
    (lambda folder: edit(folder, model_type="homemade"), "config.json cannot be loaded: ValueError: .*homemade"),
    (
        lambda folder: edit(folder, hidden_size=32),
        r"lm_head.weight is of shape .*16\) in the weights, .*32\) by config",
    ),
    (ask_for_a_terabyte, r"the weights need 1024.00 GiB of memory; this machine has \d+\.\d\d GiB left"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGES, ids=[said for _, said in DAMAGES])
def test_what_is_wrong_with_a_folder_is_said_with_the_file(
    folder: Path, damage: Callable[[Path], object], said: str
) -> None:
    damage(folder)
    engine = CausalLmEngine(spec_of(folder, TINY))
    with pytest.raises(EngineLoadError, match=f"(?s)^tiny: {folder}.*{said}"):
        engine.load()
    with pytest.raises(EngineLoadError, match="tiny: not loaded"):
        run_batch(engine, [complete("x")])


def test_weights_in_several_files_are_loaded(folder: Path) -> None:
    [expected] = run_batch(load(folder), [complete("The sun")])
    shard(folder)
    assert run_batch(load(folder), [complete("The sun")]) == [expected]
    assert isinstance(expected, Success)


@pytest.mark.parametrize("kind", [BertModel, BertForMaskedLM])
def test_a_model_of_another_kind_is_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, kind: type[BertModel]
) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    save(tmp_path, kind(BertConfig(vocab_size=len(tokenizer), **sizes)), tokenizer)
    said = f"config.json describes {kind.__name__}; needed is BertLMHeadModel"
    with pytest.raises(EngineLoadError, match=f"^tiny: {tmp_path}/{said}"):
        load(tmp_path)


def test_a_model_that_is_its_own_code_is_not_run(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {
        "model_type": "homemade",
        "auto_map": {"AutoConfig": "homemade.Config", "AutoModelForCausalLM": "homemade.Lm"},
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "homemade.py").write_text("raise SystemExit('was run')", encoding="utf-8")
    with pytest.raises(EngineLoadError, match=f"^tiny: {folder}/config.json cannot be loaded"):
        load(folder)


def test_a_context_beyond_the_weights_is_a_load_error(tiny_folder: Path) -> None:
    engine = CausalLmEngine(spec_of(tiny_folder, TINY.__class__(8, 1024, 65, 8)))
    with pytest.raises(EngineLoadError, match="max_context_tokens is 65, the weights hold 64"):
        engine.load()


def test_a_model_that_says_nothing_is_not_served(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    save_parrot(tmp_path / "ends", tokenizer, {"": [tokenizer.eos_token_id]})
    with pytest.raises(EngineLoadError, match=r"tiny: .*the first run failed: the model ended its answer before"):
        load(tmp_path / "ends")
    save_parrot(tmp_path / "half", tokenizer, {"": tokenizer("\N{GRINNING FACE}").input_ids[:1]})
    with pytest.raises(EngineLoadError, match=r"tiny: .*the first run failed: the model wrote 2 tokens that are no"):
        load(tmp_path / "half")


def test_numbers_that_the_device_cannot_do_well_are_refused(tiny_folder: Path) -> None:
    with pytest.raises(EngineLoadError, match="float16 is for a GPU; on the CPU use bfloat16 or float32"):
        load(tiny_folder, dtype="float16")


def test_memory_is_counted_as_the_weights_will_be_held_and_checked_before_they_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = load_file(folder / WEIGHTS)
    numbers = sum(tensor.numel() for tensor in tensors.values())
    save_file(tensors | {"steps": torch.zeros(10, dtype=torch.int64)}, folder / WEIGHTS, metadata={"format": "pt"})
    needed = {torch.float32: 4 * numbers + 80, torch.bfloat16: 2 * numbers + 80}
    for dtype, expected in needed.items():
        assert weight_bytes(spec_of(folder, TINY), dtype.itemsize) == expected
    monkeypatch.setattr(model_folder, "main_memory_bytes", lambda: needed[torch.bfloat16])
    load(folder, dtype="bfloat16")
    with pytest.raises(EngineLoadError, match=r"the weights need 0\.01 GiB of memory; this machine has 0\.00 GiB left"):
        load(folder, dtype="float32")


def test_the_memory_of_a_container_is_what_its_limit_leaves(tmp_path: Path) -> None:
    def write(limit: str) -> None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text("3000000\n")
        (tmp_path / "memory.stat").write_text("anon 900000\ninactive_file 2000000\n")

    assert main_memory_bytes(tmp_path) > 1 << 20
    write("max")
    assert main_memory_bytes(tmp_path) > 1 << 20
    write("4000000")
    assert main_memory_bytes(tmp_path) == 4_000_000 - 3_000_000 + 2_000_000
    write("500000")
    assert main_memory_bytes(tmp_path) == 0
