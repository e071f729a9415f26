"""Sentence vectors and ranking with any encoder that transformers loads.

The vector of a text is the mean of the last hidden states of its tokens, scaled to length 1 (Reimers and
Gurevych 2019, "Sentence-BERT", section 3); the score of a document is the cosine between its vector and the
query's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase

from fairlane.outcomes import Code, Task
from fairlane.records import Output, Parameters, RequestInput, TokenUsage
from inference_consumers.engines.pretrained import load_pretrained
from inference_consumers.engines.protocol import (
    EngineItem,
    EngineLimits,
    EngineLoadError,
    Failure,
    ItemOutcome,
    Success,
)
from inference_consumers.engines.text import clean_text
from inference_consumers.engines.threads import use_threads


@dataclass(frozen=True, slots=True)
class _Encoded:
    """The texts of one item as token ids; for a ranking the query comes first."""

    task: str
    token_ids: list[list[int]]


class EmbeddingEngine:
    """``torch-embedding``: a transformers folder with mean pooling, on the CPU in float32."""

    name = "torch-embedding"

    def __init__(self, model: str, path: Path, limits: EngineLimits, threads: int) -> None:
        self.limits = limits
        self._model = model
        self._path = path
        self._threads = threads
        self._loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase] | None = None

    def load(self) -> None:
        """Load and embed one text. Raises EngineLoadError."""
        use_threads(self._threads)
        network, tokenizer = load_pretrained(AutoModel, self._model, self._path, torch.float32)
        if self.limits.max_context_tokens > network.config.max_position_embeddings:
            raise EngineLoadError(
                f"{self._model}: {self._path}: max_context_tokens is {self.limits.max_context_tokens}, "
                f"the weights hold {network.config.max_position_embeddings}"
            )
        self._loaded = network, tokenizer
        [outcome] = self.run([EngineItem("warm-up", Task.EMBED, RequestInput(texts=("hello",)), Parameters())])
        if isinstance(outcome, Failure):
            raise EngineLoadError(f"{self._model}: {self._path}: the first vector failed: {outcome.message}")

    def run(self, batch: Sequence[EngineItem]) -> list[ItemOutcome]:
        """Answer every item, in order."""
        if self._loaded is None:
            raise EngineLoadError(f"{self._model}: not loaded")
        network, tokenizer = self._loaded
        prepared = [self._prepare(item, tokenizer) for item in batch]
        texts = [ids for entry in prepared if isinstance(entry, _Encoded) for ids in entry.token_ids]
        vectors = iter(self._vectors(texts, network, tokenizer.pad_token_id or 0))
        return [_outcome(entry, vectors) if isinstance(entry, _Encoded) else entry for entry in prepared]

    def close(self) -> None:
        """Let go of the weights."""
        self._loaded = None

    def _prepare(self, item: EngineItem, tokenizer: PreTrainedTokenizerBase) -> _Encoded | Failure:
        if item.task == Task.EMBED:
            named = [(f"input.texts[{index}]", text) for index, text in enumerate(item.input.texts or ())]
            if not named:
                return Failure(Code.INVALID, "at least one text is needed", "input.texts")
        elif item.task == Task.RANK:
            documents = item.input.documents or ()
            if item.input.query is None:
                return Failure(Code.INVALID, "a query is needed", "input.query")
            if not documents:
                return Failure(Code.INVALID, "at least one document is needed", "input.documents")
            named = [("input.query", item.input.query)]
            named += [(f"input.documents[{index}]", text) for index, text in enumerate(documents)]
        else:
            return Failure(Code.INVALID, f"this engine does not do {item.task!r}", "task")
        encoded = tokenizer([clean_text(text) for _, text in named], split_special_tokens=True, verbose=False)
        token_ids: list[list[int]] = encoded["input_ids"]
        limit = self.limits.max_context_tokens
        for (field, _), ids in zip(named, token_ids, strict=True):
            if len(ids) > limit:
                return Failure(
                    Code.CONTEXT_TOO_LONG, f"the text has {len(ids)} tokens; the context holds {limit}", field
                )
        return _Encoded(item.task, token_ids)

    def _vectors(self, texts: list[list[int]], network: PreTrainedModel, pad_id: int) -> list[torch.Tensor]:
        """One float32 vector of length 1 per text, in order. Like lengths run together, to pad little."""
        vectors: dict[int, torch.Tensor] = {}
        for group in self._groups(texts):
            width = max(len(texts[index]) for index in group)
            ids = torch.full((len(group), width), pad_id)
            mask = torch.zeros((len(group), width), dtype=torch.int64)
            for row, index in enumerate(group):
                ids[row, : len(texts[index])] = torch.tensor(texts[index])
                mask[row, : len(texts[index])] = 1
            with torch.inference_mode():
                hidden = network(input_ids=ids, attention_mask=mask).last_hidden_state
                weights = mask.unsqueeze(-1).to(hidden.dtype)
                mean = (hidden * weights).sum(1) / weights.sum(1)
                pooled = torch.nn.functional.normalize(mean, dim=-1)
            vectors.update(zip(group, pooled, strict=True))
        return [vectors[index] for index in range(len(texts))]

    def _groups(self, texts: list[list[int]]) -> Iterator[list[int]]:
        """Indices by falling length, cut where a group would exceed ``max_batch_tokens`` with its padding."""
        group: list[int] = []
        width = 0
        for index in sorted(range(len(texts)), key=lambda index: -len(texts[index])):
            if group and (len(group) + 1) * width > self.limits.max_batch_tokens:
                yield group
                group = []
            if not group:
                width = len(texts[index])
            group.append(index)
        if group:
            yield group


def _outcome(encoded: _Encoded, vectors: Iterator[torch.Tensor]) -> ItemOutcome:
    """Takes as many vectors as the item has texts."""
    stacked = torch.stack([next(vectors) for _ in encoded.token_ids])
    if not bool(torch.isfinite(stacked).all()):
        return Failure(Code.ENGINE_ERROR, "the model computed a value that is not a finite number")
    usage = TokenUsage(prompt_tokens=sum(len(ids) for ids in encoded.token_ids))
    if encoded.task == Task.RANK:
        scores = stacked[1:] @ stacked[0]
        return Success(Output(scores=tuple(scores.tolist())), usage)
    return Success(Output(embeddings=tuple(tuple(vector) for vector in stacked.tolist())), usage)
