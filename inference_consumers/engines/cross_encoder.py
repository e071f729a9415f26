"""Ranking with any cross-encoder that transformers loads: query and document are read together, in one row.

Slower than comparing vectors, since nothing of a document can be computed before the query is known, and better
(Nogueira and Cho 2019, "Passage Re-ranking with BERT"). The tokens of a ranking are those of all its pairs.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from fairlane.outcomes import Code, Task
from fairlane.records import Output, Parameters, RequestInput
from fairlane_server.text import clean_text
from inference_consumers.engines.encoder import EncoderEngine, TokenRow, wrong_length, wrong_task, wrong_texts
from inference_consumers.engines.protocol import EngineItem, Failure

_SIGMOID, _IDENTITY = "Sigmoid", "Identity"


class CrossEncoderEngine(EncoderEngine):
    """``torch-cross-encoder``: a classifier of sequences with one label; does rank.

    As in sentence-transformers, a score is the sigmoid of the label's logit, or the logit where the folder names
    Identity as the activation function.
    """

    name = "torch-cross-encoder"
    auto_class: ClassVar[type[PreTrainedModel]] = AutoModelForSequenceClassification
    _activation = _SIGMOID

    def check(self, network: PreTrainedModel) -> None:
        if network.config.num_labels != 1:
            raise self._load_error(f"config.json has {network.config.num_labels} labels; a ranking needs one")
        self._activation = self._named_activation(network.config.to_dict())
        if self._activation not in {_SIGMOID, _IDENTITY}:
            raise self._load_error(f"its activation function {self._activation} is unknown")

    def warm_up_items(self) -> Sequence[EngineItem]:
        given = RequestInput(query="hello", documents=("hello", "hello again"))
        return (EngineItem("warm-up", Task.RANK, given, Parameters()),)

    def prepare(self, item: EngineItem, tokenizer: PreTrainedTokenizerBase) -> Sequence[TokenRow] | Failure:
        if item.task != Task.RANK:
            return wrong_task(item)
        documents, limit = item.input.documents or (), self.limits.max_context_tokens
        if wrong := wrong_texts(documents, "documents"):
            return wrong
        if item.input.query is None:
            return Failure(Code.INVALID, "a query is needed", "input.query")
        query = clean_text(item.input.query)
        # First alone: each document would repeat a query that is far too long.
        alone = tokenizer(query, split_special_tokens=True, verbose=False)["input_ids"]
        if wrong := wrong_length(len(alone), limit, "input.query"):
            return wrong
        pairs = tokenizer(
            [query] * len(documents),
            [clean_text(document) for document in documents],
            split_special_tokens=True,
            verbose=False,
        )
        all_ids: list[list[int]] = pairs["input_ids"]
        for index, ids in enumerate(all_ids):
            if wrong := wrong_length(len(ids), limit, f"input.documents[{index}]"):
                return wrong
        all_type_ids = pairs.get("token_type_ids") or [None] * len(all_ids)
        return [TokenRow(ids, type_ids) for ids, type_ids in zip(all_ids, all_type_ids, strict=True)]

    def compute(self, network: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        logits: torch.Tensor = network(**inputs).logits
        return logits

    def output(self, _task: str, results: torch.Tensor, /) -> Output:
        # In float32 the sigmoids of the best documents would all be 1.
        logits = results[:, 0].double()
        scores = logits if self._activation == _IDENTITY else logits.sigmoid()
        return Output(scores=tuple(scores.tolist()))

    def _named_activation(self, config: Mapping[str, Any]) -> str:
        """The last part of the name that sentence-transformers wrote: in a file of its own, earlier in
        ``config.json``, and there in a different place before version 4."""
        file = self._path / "config_sentence_transformers.json"
        try:
            own = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
            older = config.get("sentence_transformers") or {}
            oldest = config.get("sbert_ce_default_activation_function")
            named = own.get("activation_fn") or older.get("activation_fn") or oldest or _SIGMOID
        except (OSError, ValueError, AttributeError) as error:
            raise self._load_error(f"{file.name} cannot be loaded: {error}") from error
        return str(named).rpartition(".")[2]
