"""Rankings by reading query and document together, held against transformers itself, pair by pair."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import BertForSequenceClassification, PreTrainedTokenizerBase

from fairlane.outcomes import Code
from fairlane.records import MOST_INPUT_ITEMS
from fairlane_server.models.models_file import load_models
from inference_consumers.engines.encoders import CrossEncoderEngine
from inference_consumers.engines.protocol import EngineLoadError, EngineSpec, Failure, Outcomes, run_batch
from inference_consumers.engines.registry import create_engine
from tests.kit.encoder_kit import (
    ENCODER,
    PROJECT,
    THREADS,
    TINY,
    embed,
    prepared_tokenizer,
    rank,
    save_cross_encoder,
    scores_of,
    tokens_of,
)
from tests.kit.engine_specs import spec_of

pytestmark = [pytest.mark.full, pytest.mark.model]

QUERY = "which animal barks at night"
DOCUMENTS = ("a dog barks at night", "the stock market fell", "cats sleep " * 15, "")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return prepared_tokenizer()


def loaded(folder: Path) -> CrossEncoderEngine:
    engine = CrossEncoderEngine(spec_of(folder, TINY))
    engine.load()
    return engine


@pytest.fixture(scope="module")
def network(tokenizer: PreTrainedTokenizerBase, folder: Path) -> BertForSequenceClassification:
    return save_cross_encoder(folder, tokenizer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cross")


@pytest.fixture(scope="module")
def engine(folder: Path, network: BertForSequenceClassification) -> CrossEncoderEngine:
    return loaded(folder)


def logits_of(
    network: BertForSequenceClassification, tokenizer: PreTrainedTokenizerBase, query: str, documents: Sequence[str]
) -> list[float]:
    with torch.inference_mode():
        return [
            float(network(**tokenizer([query], [document], return_tensors="pt")).logits.squeeze())
            for document in documents
        ]


def test_scores_are_those_that_transformers_computes_alone(
    engine: CrossEncoderEngine, network: BertForSequenceClassification, tokenizer: PreTrainedTokenizerBase
) -> None:
    logits = logits_of(network, tokenizer, QUERY, DOCUMENTS)
    apart = [abs(one - other) for one, other in itertools.combinations(logits, 2)]
    assert min(apart) > 0.01, "documents that are scored alike prove nothing"
    swapped = logits_of(network, tokenizer, DOCUMENTS[0], (QUERY,))
    assert abs(swapped[0] - logits[0]) > 0.01, "nor does a network that does not care which text is which"
    one, other = run_batch(engine, [rank(QUERY, *DOCUMENTS), rank(DOCUMENTS[0], QUERY)])
    assert scores_of(one) == pytest.approx(torch.tensor(logits).sigmoid().tolist(), abs=1e-5)
    assert scores_of(other) == pytest.approx(torch.tensor(swapped).sigmoid().tolist(), abs=1e-5)


def test_the_tokens_are_those_of_all_pairs(engine: CrossEncoderEngine, tokenizer: PreTrainedTokenizerBase) -> None:
    [outcome] = run_batch(engine, [rank(QUERY, *DOCUMENTS)])
    assert tokens_of(outcome) == sum(len(tokenizer([QUERY], [document])["input_ids"][0]) for document in DOCUMENTS)


@pytest.mark.parametrize(
    "activation",
    [
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
    ],
)
def test_config_json_may_ask_for_the_logits(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, activation: dict[str, Any]
) -> None:
    network = save_cross_encoder(tmp_path, tokenizer, **activation)
    [outcome] = run_batch(loaded(tmp_path), [rank(QUERY, *DOCUMENTS)])
    assert scores_of(outcome) == pytest.approx(logits_of(network, tokenizer, QUERY, DOCUMENTS), abs=1e-4)


def test_a_file_beside_config_json_may_ask_for_the_logits(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    network = save_cross_encoder(tmp_path, tokenizer)
    file = tmp_path / "config_sentence_transformers.json"
    file.write_text('{"activation_fn": "torch.nn.modules.linear.Identity"}', encoding="utf-8")
    [outcome] = run_batch(loaded(tmp_path), [rank(QUERY, *DOCUMENTS)])
    assert scores_of(outcome) == pytest.approx(logits_of(network, tokenizer, QUERY, DOCUMENTS), abs=1e-4)
    file.write_text("{", encoding="utf-8")
    with pytest.raises(EngineLoadError, match=r"config_sentence_transformers\.json cannot be loaded"):
        loaded(tmp_path)


def test_large_logits_still_tell_documents_apart(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    network = save_cross_encoder(tmp_path, tokenizer)
    with torch.no_grad():
        network.classifier.bias.fill_(20.0)
    network.save_pretrained(tmp_path)
    [outcome] = run_batch(loaded(tmp_path), [rank(QUERY, *DOCUMENTS)])
    assert len(set(scores_of(outcome))) == len(DOCUMENTS)


def test_a_bad_item_is_named_and_its_neighbours_are_answered(engine: CrossEncoderEngine) -> None:
    good, long = rank(QUERY, *DOCUMENTS), "word " * 60
    in_the_pair = f"the text has {60 + 6 + 3} tokens; the context holds 64"
    items = {
        rank(QUERY, "fine", long): Failure(Code.CONTEXT_TOO_LONG, in_the_pair, "input.documents[1]"),
        rank("word " * 63, "fine"): Failure(
            Code.CONTEXT_TOO_LONG, "the text has 65 tokens; the context holds 64", "input.query"
        ),
        rank(QUERY): Failure(Code.INVALID, "at least one is needed", "input.documents"),
        rank(QUERY, *["word"] * 10_000): Failure(
            Code.INVALID, f"10000 items are more than {MOST_INPUT_ITEMS}", "input.documents"
        ),
        rank(None, "fine"): Failure(Code.INVALID, "a query is needed", "input.query"),
        embed("fine"): Failure(Code.INVALID, "this engine does not do 'embed'", "task"),
    }
    [alone] = run_batch(engine, [good])
    outcomes = run_batch(engine, [item for bad in items for item in (bad, good)])
    assert outcomes[::2] == list(items.values())
    for outcome in outcomes[1::2]:
        assert scores_of(outcome) == pytest.approx(scores_of(alone), abs=1e-5)
    [limited] = run_batch(engine, [replace(good, max_prompt_tokens=30)])
    assert isinstance(limited, Failure)
    assert limited.message.endswith("the tenant's limit is 30")


def test_many_documents_are_run_in_groups(engine: CrossEncoderEngine) -> None:
    outcomes = Outcomes()
    engine.run([rank(QUERY, *[f"document {number}" for number in range(500)])], outcomes)
    assert len(set(scores_of(outcomes.by_index[0]))) > 1
    assert outcomes.steps >= tokens_of(outcomes.by_index[0]) / TINY.max_batch_tokens


def test_names_of_control_tokens_move_no_border_between_the_two(
    engine: CrossEncoderEngine, tokenizer: PreTrainedTokenizerBase
) -> None:
    [outcome] = run_batch(engine, [rank("a [SEP] b", "c")])
    assert tokens_of(outcome) == len(tokenizer("a [ sep ] b", "c")["input_ids"])
    assert tokens_of(outcome) > len(tokenizer("a [SEP] b", "c")["input_ids"])


def test_a_folder_that_is_no_cross_encoder_is_a_load_error(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    with pytest.raises(EngineLoadError, match=r"config\.json describes BertModel; needed is .*SequenceClassification"):
        CrossEncoderEngine(spec_of(ENCODER, TINY)).load()
    headless = save_cross_encoder(tmp_path / "headless", tokenizer)
    save_file(headless.bert.state_dict(), tmp_path / "headless/model.safetensors", {"format": "pt"})
    with pytest.raises(EngineLoadError, match=r"no weights of BertForSequenceClassification.* classifier\.bias"):
        loaded(tmp_path / "headless")
    save_cross_encoder(tmp_path / "two", tokenizer, labels=2)
    with pytest.raises(EngineLoadError, match=r"two: config\.json has 2 labels; a ranking needs one"):
        loaded(tmp_path / "two")
    softmax: dict[str, Any] = {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Softmax"}}
    save_cross_encoder(tmp_path / "softmax", tokenizer, **softmax)
    with pytest.raises(EngineLoadError, match="its activation function Softmax is unknown"):
        loaded(tmp_path / "softmax")


def test_models_yaml_can_name_it(folder: Path, network: BertForSequenceClassification) -> None:
    [model] = [model for model in load_models(PROJECT / "deploy/models.yaml") if model.engine == "torch-embedding"]
    model = replace(model, engine="torch-cross-encoder", path=folder.name, max_context_tokens=64, quantization="int8")
    engine = create_engine(EngineSpec(model, str(folder.parent), THREADS, device="cpu"))
    engine.load()
    assert engine.name == "torch-cross-encoder"
    exact, rounded = (run_batch(one, [rank(QUERY, *DOCUMENTS)])[0] for one in (loaded(folder), engine))
    assert scores_of(rounded) != scores_of(exact)
    assert scores_of(rounded) == pytest.approx(scores_of(exact), abs=0.1)
