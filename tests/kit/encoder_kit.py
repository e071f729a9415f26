"""Tiny random encoders with a real tokenizer, and what is asked of them."""

import json
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from deploy.models.prepare import prepare, recipes
from fairlane.records import Parameters, RequestInput
from inference_consumers.engines.encoders import EmbeddingEngine
from inference_consumers.engines.protocol import Engine, EngineItem, EngineLimits, ItemOutcome, Success
from tests.kit.engine_specs import spec_of

PROJECT = Path(__file__).parents[2]
MODELS_DIR = PROJECT / ".fairlane/models"
ENCODER = MODELS_DIR / "all-minilm-l6-v2"
THREADS = 2
TEXTS = ("A man is playing the guitar.", "Someone plays a musical instrument.", "Interest rates rose again.")
Network = TypeVar("Network", bound=PreTrainedModel)
TINY = EngineLimits(max_batch_size=8, max_batch_tokens=512, max_context_tokens=64, max_output_tokens=0)


def prepared_tokenizer(folder: Path = ENCODER) -> PreTrainedTokenizerBase:
    """That of a model that ships, which is prepared if it is not there yet."""
    prepare(MODELS_DIR, recipes(), print)
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def bert_config(tokenizer: PreTrainedTokenizerBase, **options: Any) -> BertConfig:
    """So small that a run takes a millisecond."""
    return BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        **options,
    )


def save_encoder(folder: Path, tokenizer: PreTrainedTokenizerBase, *, broken_token: int | None = None) -> BertModel:
    """``broken_token`` has not-a-number for an embedding."""
    torch.manual_seed(0)
    network = BertModel(bert_config(tokenizer)).eval()
    if broken_token is not None:
        with torch.no_grad():
            network.get_input_embeddings().weight[broken_token] = torch.nan
    return save(folder, network, tokenizer)


def save_cross_encoder(
    folder: Path, tokenizer: PreTrainedTokenizerBase, *, labels: int = 1, **options: Any
) -> BertForSequenceClassification:
    """``options`` go into its config.json."""
    torch.manual_seed(0)
    network = BertForSequenceClassification(bert_config(tokenizer, num_labels=labels, **options)).eval()
    # As they come, random weights hardly tell documents apart.
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.5)
    return save(folder, network, tokenizer)


def save(folder: Path, network: Network, tokenizer: PreTrainedTokenizerBase) -> Network:
    """A folder like those that models come in."""
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return network


def loaded(folder: Path, limits: EngineLimits = TINY, *, int8: bool = False, dtype: str | None = None) -> Engine:
    engine = EmbeddingEngine(spec_of(folder, limits, quantization="int8" if int8 else None, dtype=dtype))
    engine.load()
    return engine


def add_modules(folder: Path, pooling: object, modules: tuple[str, ...] = ("Transformer", "Pooling")) -> None:
    """What sentence-transformers writes beside a model."""
    described = [
        {
            "idx": index,
            "name": str(index),
            "path": "" if index == 0 else f"{index}_{name}",
            "type": f"some.where.{name}",
        }
        for index, name in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(described), encoding="utf-8")
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling), encoding="utf-8")


def embed(*texts: str) -> EngineItem:
    return EngineItem("embed", "embed", RequestInput(texts=texts), Parameters())


def rank(query: str | None, *documents: str) -> EngineItem:
    return EngineItem("rank", "rank", RequestInput(query=query, documents=documents), Parameters())


def vectors_of(outcome: ItemOutcome) -> tuple[tuple[float, ...], ...]:
    assert isinstance(outcome, Success), outcome
    assert outcome.output.embeddings is not None
    return outcome.output.embeddings


def scores_of(outcome: ItemOutcome) -> tuple[float, ...]:
    assert isinstance(outcome, Success), outcome
    assert outcome.output.scores is not None
    return outcome.output.scores


def tokens_of(outcome: ItemOutcome) -> int:
    assert isinstance(outcome, Success), outcome
    return outcome.usage.prompt_tokens
