"""Sentence vectors and ranking with any encoder that transformers loads.

The vector of a text is pooled from the last hidden states of its tokens: their mean, scaled to length 1, unless the
folder's ``modules.json`` says otherwise. The score of a document is the cosine between its vector and the query's.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.nn.functional import normalize
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase

from fairlane.outcomes import Code, Task
from fairlane.records import Output, Parameters, RequestInput
from fairlane_server.text import clean_text
from inference_consumers.engines.encoder import EncoderEngine, TokenRow, wrong_length, wrong_task, wrong_texts
from inference_consumers.engines.protocol import EngineItem, EngineLoadError, Failure

_MODES = ("mean", "cls")
_MODULES = frozenset({"Transformer", "Pooling", "Normalize"})
# How sentence-transformers wrote the mode before it had one key for it: one flag for each.
_FLAG = "pooling_mode_"
_MODE_OF_FLAG = {"mean_tokens": "mean", "cls_token": "cls"}


@dataclass(frozen=True, slots=True)
class Pooling:
    """``mode`` is mean (Reimers and Gurevych 2019, "Sentence-BERT", section 3) or cls, the first token's vector."""

    mode: str = "mean"
    normalize: bool = True

    def pool(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """From last hidden states (rows, width, n) and the attention mask (rows, width) to float32 (rows, n), not yet
        normalized. Rows are padded on the right."""
        hidden = hidden.float()
        if self.mode == "cls":
            return hidden[:, 0]
        weights = mask.unsqueeze(-1).float()
        return (hidden * weights).sum(1) / weights.sum(1)


def read_pooling(model: str, path: Path) -> Pooling | None:
    """Pooling from ``modules.json`` of a sentence-transformers folder; None without one.

    Raises EngineLoadError for a file that is damaged, and for a model that does more than pool and normalize.
    """
    file = path / "modules.json"
    if not file.is_file():
        return None
    try:
        modules = {module["type"].rpartition(".")[2]: module["path"] for module in _read(file)}
        _check(not (unknown := sorted(set(modules) - _MODULES)), f"this engine has no module {', '.join(unknown)}")
        _check("Pooling" in modules, "no module pools the vectors of the tokens")
        file = path / modules["Pooling"] / "config.json"
        return Pooling(_mode(_read(file)), normalize="Normalize" in modules)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise EngineLoadError(f"{model}: {file} cannot be loaded: {error!r}") from error


def _read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def _mode(config: Mapping[str, Any]) -> str:
    if "pooling_mode" in config:
        stated = config["pooling_mode"]
        modes = [stated] if isinstance(stated, str) else stated
    else:
        modes = [key.removeprefix(_FLAG) for key, value in config.items() if key.startswith(_FLAG) and value]
        modes = [_MODE_OF_FLAG.get(mode, mode) for mode in modes]
    _check(len(modes) == 1 and modes[0] in _MODES, f"this engine pools by {' or '.join(_MODES)}, not {modes}")
    return str(modes[0])


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


class EmbeddingEngine(EncoderEngine):
    """``torch-embedding``: does embed and rank."""

    name = "torch-embedding"
    auto_class: ClassVar[type[PreTrainedModel]] = AutoModel
    _pooling = Pooling()

    def check(self, network: PreTrainedModel) -> None:
        """A text generator has hidden states too, but none that mean anything for being averaged."""
        stated = read_pooling(self._model, self._path)
        [architecture, *_] = network.config.architectures or [""]
        if stated is None and architecture.endswith("ForCausalLM"):
            raise self._load_error(f"config.json says {architecture}, which generates text")
        self._pooling = stated or Pooling()

    def warm_up_items(self) -> Sequence[EngineItem]:
        return (
            EngineItem("warm-up", Task.EMBED, RequestInput(texts=("hello", "hello again")), Parameters()),
            EngineItem("warm-up", Task.RANK, RequestInput(query="hello", documents=("hello again",)), Parameters()),
        )

    def prepare(self, item: EngineItem, tokenizer: PreTrainedTokenizerBase) -> Sequence[TokenRow] | Failure:
        """One row per text; for a ranking the query comes first."""
        given = item.input
        if item.task == Task.EMBED:
            name, texts = "texts", given.texts or ()
        elif item.task == Task.RANK:
            name, texts = "documents", given.documents or ()
        else:
            return wrong_task(item)
        if wrong := wrong_texts(texts, name):
            return wrong
        fields = [f"input.{name}[{index}]" for index in range(len(texts))]
        if item.task == Task.RANK:
            if given.query is None:
                return Failure(Code.INVALID, "a query is needed", "input.query")
            fields, texts = ["input.query", *fields], (given.query, *texts)
        encoded = tokenizer([clean_text(text) for text in texts], split_special_tokens=True, verbose=False)
        token_ids: list[list[int]] = encoded["input_ids"]
        for field, ids in zip(fields, token_ids, strict=True):
            if wrong := wrong_length(len(ids), self.limits.max_context_tokens, field):
                return wrong
        return [TokenRow(ids) for ids in token_ids]

    def compute(self, network: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._pooling.pool(network(**inputs).last_hidden_state, inputs["attention_mask"])

    def output(self, task: str, results: torch.Tensor, /) -> Output:
        if task == Task.RANK:
            vectors = normalize(results, dim=-1)
            return Output(scores=tuple((vectors[1:] @ vectors[0]).tolist()))
        vectors = normalize(results, dim=-1) if self._pooling.normalize else results
        return Output(embeddings=tuple(tuple(vector) for vector in vectors.tolist()))
