"""Engines that read texts and write none: sentence vectors, and ranking, with any encoder that transformers loads.

Texts of like length run together, so that little is padded, and few at once, so that a group is done soon, whatever the
number of texts in a request.
"""

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.nn.functional import normalize
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from fairlane.outcomes import Code, Task
from fairlane.records import Output, Parameters, RequestInput, TokenUsage
from fairlane_server.text import clean_text
from inference_consumers.engines.pretrained import PretrainedEngine
from inference_consumers.engines.protocol import (
    NOT_FINITE,
    CancelledItem,
    EngineItem,
    Failure,
    RunCost,
    RunObserver,
    Success,
    over_allowance,
    try_once,
    wrong_task,
    wrong_texts,
)

_CPU_GROUP_TOKENS = 1_024
"""On a CPU larger groups were no faster per token, and slower beyond 4,096 tokens: they leave its caches."""

_POOLINGS = ("mean", "cls")
_MODULES = frozenset({"Transformer", "Pooling", "Normalize"})
# How sentence-transformers wrote the pooling before it had one key for it: one flag for each.
_FLAG = "pooling_mode_"
_MODE_OF_FLAG = {"mean_tokens": "mean", "cls_token": "cls"}
_SIGMOID, _IDENTITY = "Sigmoid", "Identity"


@dataclass(frozen=True, slots=True)
class _TokenRow:
    """One text, or one pair of them, as the network takes it. ``type_ids`` distinguish the texts of a pair."""

    ids: list[int]
    type_ids: list[int] | None = None


@dataclass(slots=True)
class _Progress:
    item: EngineItem
    rows: Sequence[_TokenRow]
    results: dict[int, torch.Tensor] = field(default_factory=dict)
    spent_tokens: int = 0


@dataclass(slots=True)
class _EncoderRun:
    """One run of a batch."""

    engine: "_EncoderEngine"
    network: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    batch: Sequence[EngineItem]
    observer: RunObserver
    _running: dict[int, _Progress] = field(default_factory=dict)

    def run(self, device: torch.device) -> RunCost:
        """Report every item's outcome, each when the last of its rows is computed. The shortest rows come first."""
        for index, item in enumerate(self.batch):
            self._prepare(index, item)
            self.observer.step()
        useful = computed = 0
        places = [(index, row) for index, progress in self._running.items() for row in range(len(progress.rows))]
        most_tokens = self.engine.limits.max_batch_tokens
        if device.type == "cpu":
            most_tokens = min(_CPU_GROUP_TOKENS, most_tokens)
        for whole_group in _groups(places, lambda place: len(self._row(place).ids), most_tokens):
            for index in [index for index in self._running if self.observer.is_cancelled(index)]:
                progress = self._running.pop(index)
                self.observer.finished(index, CancelledItem(TokenUsage(prompt_tokens=progress.spent_tokens)))
            group = [place for place in whole_group if place[0] in self._running]
            if group:
                inputs = self._inputs([self._row(place) for place in group], device)
                with torch.inference_mode():
                    results = self.engine.compute(self.network, inputs).float().cpu()
                useful += sum(len(self._row(place).ids) for place in group)
                computed += inputs["input_ids"].numel()
                for place, result in zip(group, results, strict=True):
                    self._take(place, result)
            self.observer.step()
        return RunCost(useful_tokens=useful, computed_tokens=computed)

    def _row(self, place: tuple[int, int]) -> _TokenRow:
        index, row = place
        return self._running[index].rows[row]

    def _prepare(self, index: int, item: EngineItem) -> None:
        if self.observer.is_cancelled(index):
            self.observer.finished(index, CancelledItem(TokenUsage()))
            return
        rows = self.engine.prepare(item, self.tokenizer)
        if isinstance(rows, Failure):
            self.observer.finished(index, rows)
        elif failure := over_allowance(item, sum(len(row.ids) for row in rows), "input"):
            self.observer.finished(index, failure)
        else:
            self._running[index] = _Progress(item, rows)

    def _inputs(self, rows: Sequence[_TokenRow], device: torch.device) -> dict[str, torch.Tensor]:
        """Padded on the right."""
        shape = len(rows), max(len(row.ids) for row in rows)
        inputs = {
            "input_ids": torch.full(shape, self.tokenizer.pad_token_id or 0),
            "attention_mask": torch.zeros(shape, dtype=torch.int64),
        }
        if any(row.type_ids is not None for row in rows):
            inputs["token_type_ids"] = torch.zeros(shape, dtype=torch.int64)
        for number, row in enumerate(rows):
            length = len(row.ids)
            inputs["input_ids"][number, :length] = torch.tensor(row.ids)
            inputs["attention_mask"][number, :length] = 1
            if row.type_ids is not None:
                inputs["token_type_ids"][number, :length] = torch.tensor(row.type_ids)
        return {name: tensor.to(device) for name, tensor in inputs.items()}

    def _take(self, place: tuple[int, int], result: torch.Tensor) -> None:
        index, row = place
        progress = self._running[index]
        progress.results[row] = result
        progress.spent_tokens += len(progress.rows[row].ids)
        if len(progress.results) < len(progress.rows):
            return
        del self._running[index]
        results = torch.stack([progress.results[row] for row in range(len(progress.rows))])
        if bool(torch.isfinite(results).all()):
            usage = TokenUsage(prompt_tokens=progress.spent_tokens)
            self.observer.finished(index, Success(self.engine.output(progress.item.task, results), usage))
        else:
            self.observer.finished(index, NOT_FINITE)


def _groups(
    places: Sequence[tuple[int, int]], length_of: Callable[[tuple[int, int]], int], most_tokens: int
) -> Iterator[list[tuple[int, int]]]:
    """Places by rising length, cut where a group would exceed ``most_tokens`` with its padding."""
    by_length = sorted((length_of(place), place) for place in places)
    group: list[tuple[int, int]] = []
    for length, place in by_length:
        if group and (len(group) + 1) * length > most_tokens:
            yield group
            group = []
        group.append(place)
    if group:
        yield group


class _EncoderEngine(PretrainedEngine):
    """Runs whole batches. No text is ever cut: one that is too long is a Failure."""

    auto_class: ClassVar[type[PreTrainedModel]]

    _loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase] | None = None

    def load(self) -> None:
        network, tokenizer = self._load_folder(self.auto_class)
        self.check(network)
        self._loaded = network, tokenizer
        try_once(self, self.warm_up_items(), self._spec)

    def run(self, batch: Sequence[EngineItem], observer: RunObserver) -> RunCost:
        """Answer every item. A step is an item made into tokens, or a group of texts computed."""
        if self._loaded is None:
            raise self._spec.error("not loaded")
        return _EncoderRun(self, *self._loaded, batch, observer).run(self._device)

    def close(self) -> None:
        self._loaded = None

    @abstractmethod
    def check(self, network: PreTrainedModel) -> None:
        """Raises EngineLoadError when the folder is not of this engine's kind."""

    @abstractmethod
    def warm_up_items(self) -> Sequence[EngineItem]:
        """Items of different lengths, so that padding is tried as well."""

    @abstractmethod
    def prepare(self, item: EngineItem, tokenizer: PreTrainedTokenizerBase) -> Sequence[_TokenRow] | Failure:
        """The rows of an item, at least one, none of them empty or longer than the context."""

    @abstractmethod
    def compute(self, network: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """From ``input_ids``, ``attention_mask`` and, for pairs, ``token_type_ids``, each int64 of shape (rows, width),
        to numbers of shape (rows, n), on any device."""

    @abstractmethod
    def output(self, task: str, results: torch.Tensor) -> Output:
        """From an item's task and what was computed of its rows, float32 of shape (rows, n) on the CPU, in their
        order."""


def _wrong_length(tokens: int, limit: int, field: str) -> Failure | None:
    if tokens == 0:
        return Failure(Code.INVALID, "the text has no tokens", field)
    if tokens > limit:
        return Failure(Code.CONTEXT_TOO_LONG, f"the text has {tokens} tokens; the context holds {limit}", field)
    return None


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


class EmbeddingEngine(_EncoderEngine):
    """``torch-embedding``: does embed and rank.

    The vector of a text is pooled from the last hidden states of its tokens: their mean, scaled to length 1, unless the
    folder's ``modules.json`` says otherwise. The score of a document is the cosine of its vector and the query's.
    """

    name = "torch-embedding"
    auto_class: ClassVar[type[PreTrainedModel]] = AutoModel
    _pooling = Pooling()

    def check(self, network: PreTrainedModel) -> None:
        """A text generator has hidden states too, but none that mean anything for being averaged."""
        stated = self._stated_pooling()
        [architecture, *_] = network.config.architectures or [""]
        if stated is None and architecture.endswith("ForCausalLM"):
            raise self._error(f"config.json says {architecture}, which generates text")
        self._pooling = stated or Pooling()

    def warm_up_items(self) -> Sequence[EngineItem]:
        return (
            EngineItem("warm-up", Task.EMBED, RequestInput(texts=("hello", "hello again")), Parameters()),
            EngineItem("warm-up", Task.RANK, RequestInput(query="hello", documents=("hello again",)), Parameters()),
        )

    def prepare(self, item: EngineItem, tokenizer: PreTrainedTokenizerBase) -> Sequence[_TokenRow] | Failure:
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
        for name, ids in zip(fields, token_ids, strict=True):
            if wrong := _wrong_length(len(ids), self.limits.max_context_tokens, name):
                return wrong
        return [_TokenRow(ids) for ids in token_ids]

    def compute(self, network: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._pooling.pool(network(**inputs).last_hidden_state, inputs["attention_mask"])

    def output(self, task: str, results: torch.Tensor) -> Output:
        if task == Task.RANK:
            vectors = normalize(results, dim=-1)
            return Output(scores=tuple((vectors[1:] @ vectors[0]).tolist()))
        vectors = normalize(results, dim=-1) if self._pooling.normalize else results
        return Output(embeddings=tuple(tuple(vector) for vector in vectors.tolist()))

    def _stated_pooling(self) -> Pooling | None:
        """Pooling from ``modules.json`` of a sentence-transformers folder; None without one.

        Raises EngineLoadError for a file that is damaged, and for a model that does more than pool and normalize.
        """
        path = self._spec.path
        file = path / "modules.json"
        if not file.is_file():
            return None
        try:
            modules = {module["type"].rpartition(".")[2]: module["path"] for module in _read_json(file)}
            file = path / _pooling_folder(modules) / "config.json"
            return Pooling(_pooling_mode(_read_json(file)), normalize="Normalize" in modules)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise self._spec.error(f"{file} cannot be loaded: {error!r}") from error


def _pooling_folder(modules: Mapping[str, str]) -> str:
    if unknown := sorted(set(modules) - _MODULES):
        raise ValueError(f"this engine has no module {', '.join(unknown)}")
    if "Pooling" not in modules:
        raise ValueError("no module pools the vectors of the tokens")
    return modules["Pooling"]


def _pooling_mode(config: Mapping[str, Any]) -> str:
    if "pooling_mode" in config:
        stated = config["pooling_mode"]
        modes = [stated] if isinstance(stated, str) else stated
    else:
        modes = [key.removeprefix(_FLAG) for key, value in config.items() if key.startswith(_FLAG) and value]
        modes = [_MODE_OF_FLAG.get(mode, mode) for mode in modes]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ValueError(f"this engine pools by {' or '.join(_POOLINGS)}, not {modes}")
    return str(modes[0])


def _read_json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


class CrossEncoderEngine(_EncoderEngine):
    """``torch-cross-encoder``: ranks with a classifier of sequences with one label, which reads query and document
    together, in one row.

    Slower than comparing vectors, since nothing of a document can be computed before the query is known, and better
    (Nogueira and Cho 2019, "Passage Re-ranking with BERT"). The tokens of a ranking are those of all its pairs.
    As in sentence-transformers, a score is the sigmoid of the label's logit, or the logit where the folder names
    Identity as the activation function.
    """

    name = "torch-cross-encoder"
    auto_class: ClassVar[type[PreTrainedModel]] = AutoModelForSequenceClassification
    _activation = _SIGMOID

    def check(self, network: PreTrainedModel) -> None:
        if network.config.num_labels != 1:
            raise self._error(f"config.json has {network.config.num_labels} labels; a ranking needs one")
        self._activation = self._named_activation(network.config.to_dict())
        if self._activation not in {_SIGMOID, _IDENTITY}:
            raise self._error(f"its activation function {self._activation} is unknown")

    def warm_up_items(self) -> Sequence[EngineItem]:
        given = RequestInput(query="hello", documents=("hello", "hello again"))
        return (EngineItem("warm-up", Task.RANK, given, Parameters()),)

    def prepare(self, item: EngineItem, tokenizer: PreTrainedTokenizerBase) -> Sequence[_TokenRow] | Failure:
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
        if wrong := _wrong_length(len(alone), limit, "input.query"):
            return wrong
        pairs = tokenizer(
            [query] * len(documents),
            [clean_text(document) for document in documents],
            split_special_tokens=True,
            verbose=False,
        )
        all_ids: list[list[int]] = pairs["input_ids"]
        for index, ids in enumerate(all_ids):
            if wrong := _wrong_length(len(ids), limit, f"input.documents[{index}]"):
                return wrong
        all_type_ids = pairs.get("token_type_ids") or [None] * len(all_ids)
        return [_TokenRow(ids, type_ids) for ids, type_ids in zip(all_ids, all_type_ids, strict=True)]

    def compute(self, network: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        logits: torch.Tensor = network(**inputs).logits
        return logits

    def output(self, task: str, results: torch.Tensor) -> Output:  # noqa: ARG002 - it has one
        # In float32 the sigmoids of the best documents would all be 1.
        logits = results[:, 0].double()
        scores = logits if self._activation == _IDENTITY else logits.sigmoid()
        return Output(scores=tuple(scores.tolist()))

    def _named_activation(self, config: Mapping[str, Any]) -> str:
        """The last part of the name that sentence-transformers wrote: in a file of its own, earlier in
        ``config.json``, and there in a different place before version 4."""
        file = self._spec.path / "config_sentence_transformers.json"
        try:
            own = _read_json(file) if file.is_file() else {}
            older = config.get("sentence_transformers") or {}
            oldest = config.get("sbert_ce_default_activation_function")
            named = own.get("activation_fn") or older.get("activation_fn") or oldest or _SIGMOID
        except (OSError, ValueError, AttributeError) as error:
            raise self._error(f"{file.name} cannot be loaded: {error}") from error
        return str(named).rpartition(".")[2]
