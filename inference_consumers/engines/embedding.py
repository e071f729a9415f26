"""Sentence vectors and ranking with any encoder that transformers loads.

The vector of a text is the mean of the last hidden states of its tokens, scaled to length 1, unless the folder's
``modules.json`` says otherwise; the score of a document is the cosine between its vector and the query's.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch.nn.functional import normalize
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase

from fairlane.outcomes import Code, Task
from fairlane.records import Output, Parameters, RequestInput
from fairlane_server.text import clean_text
from inference_consumers.engines.encoder import EncoderEngine, wrong_length, wrong_task, wrong_texts
from inference_consumers.engines.pooling import Pooling, read_pooling
from inference_consumers.engines.protocol import EngineItem, Failure
from inference_consumers.engines.token_groups import TokenRow


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
