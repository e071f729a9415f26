"""What folders of encoders say, and what is wrong with them; and the layers whose numbers are made smaller."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5ForConditionalGeneration,
)

from inference_consumers.engines.encoders import EmbeddingEngine
from inference_consumers.engines.int8 import Int8Linear, quantize_linears
from inference_consumers.engines.protocol import EngineLoadError, run_batch
from tests.kit.encoder_kit import (
    TEXTS,
    TINY,
    add_modules,
    bert_config,
    embed,
    loaded,
    prepared_tokenizer,
    rank,
    save,
    save_encoder,
    scores_of,
    tokens_of,
    vectors_of,
)
from tests.kit.engine_specs import spec_of

pytestmark = [pytest.mark.full, pytest.mark.model]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return prepared_tokenizer()


@pytest.fixture(scope="module")
def tiny_folder(tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_encoder(folder, tokenizer)
    return folder


@pytest.fixture
def copied(tiny_folder: Path, tmp_path: Path) -> Path:
    """A folder of its own to damage."""
    folder = tmp_path / "copied"
    folder.mkdir()
    for file in tiny_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_a_folder_of_sentence_transformers_says_how_its_vectors_are_pooled(
    copied: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    network = AutoModel.from_pretrained(copied, local_files_only=True).eval()
    with torch.inference_mode():
        hidden = network(**tokenizer(TEXTS[0], return_tensors="pt")).last_hidden_state[0]
    mean, first = hidden.mean(0), hidden[0]
    unit = nn.functional.normalize
    flags = {"word_embedding_dimension": 16, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    with_length_one = ("Transformer", "Pooling", "Normalize")
    for pooling, modules, expected in (
        (flags, ("Transformer", "Pooling"), mean),
        (flags, with_length_one, unit(mean, dim=0)),
        ({"embedding_dimension": 16, "pooling_mode": "cls"}, ("Transformer", "Pooling"), first),
        ({"pooling_mode_cls_token": True}, with_length_one, unit(first, dim=0)),
        ({"pooling_mode": ["mean"]}, with_length_one, unit(mean, dim=0)),
    ):
        add_modules(copied, pooling, modules)
        engine = loaded(copied)
        embedded, ranked = run_batch(engine, [embed(TEXTS[0], TEXTS[2]), rank(TEXTS[0], TEXTS[0])])
        assert torch.allclose(torch.tensor(vectors_of(embedded)[0]), expected, atol=1e-5)
        assert scores_of(ranked) == pytest.approx([1.0], abs=1e-5)


@pytest.mark.parametrize(
    ("pooling", "modules", "said"),
    [
        ({"pooling_mode": "max"}, ("Transformer", "Pooling"), r"1_Pooling/config\.json .*pools by mean or cls, not"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, ("Transformer", "Pooling"), "not .*cls"),
        ({"pooling_mode": "mean"}, ("Transformer", "Pooling", "Dense"), r"modules\.json .*no module Dense"),
        ({}, ("Transformer",), r"modules\.json .*no module pools"),
        ([], ("Transformer", "Pooling"), r"1_Pooling/config\.json cannot be loaded"),
    ],
)
def test_a_model_that_does_more_than_pool_is_a_load_error(
    copied: Path, pooling: object, modules: tuple[str, ...], said: str
) -> None:
    add_modules(copied, pooling, modules)
    with pytest.raises(EngineLoadError, match=f"^tiny: {copied}.*{said}"):
        loaded(copied)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:1000])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"holds no model \(config.json is missing\)"),
        (lambda folder: truncate(folder / "model.safetensors"), "cannot be loaded"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"holds no weights \(model.safetensors is missing\)"),
        (lambda folder: truncate(folder / "tokenizer.json"), "cannot be loaded"),
        (lambda folder: (folder / "config.json").write_text("{"), r"config\.json cannot be loaded"),
        (lambda folder: (folder / "modules.json").write_text("{"), r"modules\.json cannot be loaded"),
    ],
)
def test_a_damaged_folder_is_a_load_error(copied: Path, damage: Callable[[Path], object], said: str) -> None:
    damage(copied)
    engine = EmbeddingEngine(spec_of(copied, TINY))
    with pytest.raises(EngineLoadError, match=f"(?s)^tiny: {copied}.*{said}"):
        engine.load()
    with pytest.raises(EngineLoadError, match="tiny: not loaded"):
        run_batch(engine, [embed("a")])


def test_weights_of_another_architecture_are_a_load_error(
    copied: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **sizes))
    save(tmp_path / "llama", llama, tokenizer)
    with pytest.raises(EngineLoadError, match=r"llama: config\.json says LlamaForCausalLM, which generates text"):
        loaded(tmp_path / "llama")

    (copied / "model.safetensors").write_bytes((tmp_path / "llama/model.safetensors").read_bytes())
    with pytest.raises(EngineLoadError, match=r"these are no weights of BertModel: \d+ of its tensors are missing"):
        loaded(copied)

    t5 = T5ForConditionalGeneration(T5Config(vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=16, num_layers=1))
    save(tmp_path / "t5", t5, tokenizer)
    with pytest.raises(EngineLoadError, match="t5: the first run failed: ValueError"):
        loaded(tmp_path / "t5")


def test_a_tokenizer_of_another_model_is_a_load_error(copied: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    larger = AutoTokenizer.from_pretrained(copied, local_files_only=True)
    larger.add_tokens(["onemoretoken"])
    larger.save_pretrained(copied)
    with pytest.raises(EngineLoadError, match=f"has {len(tokenizer) + 1} tokens, the weights know {len(tokenizer)}"):
        loaded(copied)


def test_a_context_beyond_the_weights_is_a_load_error(
    tiny_folder: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    with pytest.raises(EngineLoadError, match="max_context_tokens is 65, the weights hold 64"):
        loaded(tiny_folder, replace(TINY, max_context_tokens=65))
    config = RobertaConfig(**{**bert_config(tokenizer).to_dict(), "pad_token_id": 1})
    save(tmp_path, RobertaModel(config), tokenizer)
    with pytest.raises(EngineLoadError, match="max_context_tokens is 64, the weights hold 62"):
        loaded(tmp_path)
    longest = loaded(tmp_path, replace(TINY, max_context_tokens=62))
    assert tokens_of(run_batch(longest, [embed("word " * 60)])[0]) == 62


# --- 8-bit numbers ----------------------------------------------------------------------------------------------


def test_an_8_bit_layer_gives_what_its_layer_gave_in_any_batch() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 32)
    small = Int8Linear(linear)
    with torch.inference_mode():
        rows = torch.randn(3, 5, 64) * torch.tensor([0.001, 1.0, 1000.0]).reshape(3, 1, 1)
        rows[0, 0] = 0
        exact, rounded = linear(rows), small(rows)
        assert rounded.shape == exact.shape
        assert ((rounded - exact).norm(dim=-1) <= 0.02 * exact.norm(dim=-1)).all()
        assert torch.equal(small(rows[1:2]), rounded[1:2])
        rows[2, 1, 7] = torch.inf
        rows[2, 3, 7] = torch.nan
        finite = small(rows).isfinite().all(-1)
    assert [(~finite[row]).nonzero().flatten().tolist() for row in range(3)] == [[], [], [1, 3]]


def test_only_layers_that_the_kernel_takes_become_8_bit_ones() -> None:
    network = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.ReLU(), nn.Linear(16, 8, bias=False)), nn.Linear(8, 1))
    quantize_linears(network)
    assert [type(module).__name__ for module in network.modules() if "Linear" in type(module).__name__] == [
        "Int8Linear",
        "Int8Linear",
        "Linear",
    ]
    assert network(torch.zeros(2, 16)).shape == (2, 1)
