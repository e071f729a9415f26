"""Base of the engines that read texts and write none: loading, input checks, running in groups.

Texts of like length run together, so that little is padded, and few at once, so that a group is done soon, whatever the
number of texts in a request.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fairlane.outcomes import Code
from fairlane.records import MOST_INPUT_ITEMS, Output, TokenUsage
from inference_consumers.engines.pretrained import PretrainedEngine
from inference_consumers.engines.protocol import (
    Cancelled,
    EngineItem,
    EngineLoadError,
    Failure,
    RunCost,
    RunObserver,
    Success,
    try_once,
)

_CPU_GROUP_TOKENS = 1_024
"""On a CPU larger groups were no faster per token, and slower beyond 4,096 tokens: they leave its caches."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One text, or one pair of them, as the network takes it. ``type_ids`` tell the two texts of a pair apart."""

    ids: list[int]
    type_ids: list[int] | None = None


Prepare = Callable[[EngineItem], Sequence[TokenRow] | Failure]
Compute = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
"""From ``input_ids``, ``attention_mask`` and, for pairs, ``token_type_ids``, each int64 of shape (rows, width), to
numbers of shape (rows, n), on any device."""
ToOutput = Callable[[str, torch.Tensor], Output]
"""From an item's task and what was computed of its rows, float32 of shape (rows, n) on the CPU, in their order."""


@dataclass(slots=True)
class _Progress:
    item: EngineItem
    rows: Sequence[TokenRow]
    results: dict[int, torch.Tensor] = field(default_factory=dict)
    spent_tokens: int = 0


def group_tokens(device: torch.device, max_batch_tokens: int) -> int:
    """Most tokens of a group with its padding; a single longer text is a group of its own."""
    return min(_CPU_GROUP_TOKENS, max_batch_tokens) if device.type == "cpu" else max_batch_tokens


class GroupedRun:
    """One run of a batch. ``pad_id`` fills the rows up; ``most_tokens`` bounds a group."""

    def __init__(
        self, batch: Sequence[EngineItem], observer: RunObserver, *, most_tokens: int, pad_id: int, device: torch.device
    ) -> None:
        self._batch = batch
        self._observer = observer
        self._most_tokens = most_tokens
        self._pad_id = pad_id
        self._device = device
        self._running: dict[int, _Progress] = {}

    def run(self, prepare: Prepare, compute: Compute, to_output: ToOutput) -> RunCost:
        """Tell every item's outcome, each when the last of its rows is computed. The shortest rows come first."""
        for index, item in enumerate(self._batch):
            self._prepare(index, item, prepare)
            self._observer.step()
        useful = computed = 0
        places = [(index, row) for index, progress in self._running.items() for row in range(len(progress.rows))]
        for whole_group in _groups(places, lambda place: len(self._row(place).ids), self._most_tokens):
            self._drop_cancelled()
            group = [place for place in whole_group if place[0] in self._running]
            if group:
                inputs = self._inputs([self._row(place) for place in group])
                results = compute(inputs).float().cpu()
                useful += sum(len(self._row(place).ids) for place in group)
                computed += inputs["input_ids"].numel()
                for place, result in zip(group, results, strict=True):
                    self._take(place, result, to_output)
            self._observer.step()
        return RunCost(useful_tokens=useful, computed_tokens=computed)

    def _row(self, place: tuple[int, int]) -> TokenRow:
        index, row = place
        return self._running[index].rows[row]

    def _prepare(self, index: int, item: EngineItem, prepare: Prepare) -> None:
        if self._observer.is_cancelled(index):
            self._observer.finished(index, Cancelled(TokenUsage()))
            return
        rows = prepare(item)
        if not isinstance(rows, Failure):
            rows = _within_allowance(item, rows)
        if isinstance(rows, Failure):
            self._observer.finished(index, rows)
        else:
            self._running[index] = _Progress(item, rows)

    def _drop_cancelled(self) -> None:
        for index in [index for index in self._running if self._observer.is_cancelled(index)]:
            progress = self._running.pop(index)
            self._observer.finished(index, Cancelled(TokenUsage(prompt_tokens=progress.spent_tokens)))

    def _inputs(self, rows: Sequence[TokenRow]) -> dict[str, torch.Tensor]:
        """Padded on the right."""
        shape = len(rows), max(len(row.ids) for row in rows)
        inputs = {"input_ids": torch.full(shape, self._pad_id), "attention_mask": torch.zeros(shape, dtype=torch.int64)}
        if any(row.type_ids is not None for row in rows):
            inputs["token_type_ids"] = torch.zeros(shape, dtype=torch.int64)
        for number, row in enumerate(rows):
            length = len(row.ids)
            inputs["input_ids"][number, :length] = torch.tensor(row.ids)
            inputs["attention_mask"][number, :length] = 1
            if row.type_ids is not None:
                inputs["token_type_ids"][number, :length] = torch.tensor(row.type_ids)
        return {name: tensor.to(self._device) for name, tensor in inputs.items()}

    def _take(self, place: tuple[int, int], result: torch.Tensor, to_output: ToOutput) -> None:
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
            self._observer.finished(index, Success(to_output(progress.item.task, results), usage))
        else:
            message = "the model computed a value that is not a finite number"
            self._observer.finished(index, Failure(Code.ENGINE_ERROR, message))


def _within_allowance(item: EngineItem, rows: Sequence[TokenRow]) -> Sequence[TokenRow] | Failure:
    tokens, most = sum(len(row.ids) for row in rows), item.max_prompt_tokens
    if most is None or tokens <= most:
        return rows
    return Failure(Code.CONTEXT_TOO_LONG, f"the input has {tokens} tokens; the tenant's limit is {most}", "input")


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


class EncoderEngine(PretrainedEngine):
    """A transformers folder that runs whole batches. No text is ever cut: one that is too long is a Failure."""

    auto_class: ClassVar[type[PreTrainedModel]]

    _loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase] | None = None

    def load(self) -> None:
        network, tokenizer = self._load_folder(self.auto_class)
        self.check(network)
        self._loaded = network, tokenizer
        try_once(self, self.warm_up_items(), f"{self._model}: {self._path}")

    def run(self, batch: Sequence[EngineItem], observer: RunObserver) -> RunCost:
        """Answer every item. A step is an item made into tokens, or a group of texts computed."""
        if self._loaded is None:
            raise EngineLoadError(f"{self._model}: not loaded")
        network, tokenizer = self._loaded

        def compute(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
            with torch.inference_mode():
                return self.compute(network, inputs)

        run = GroupedRun(
            batch,
            observer,
            most_tokens=group_tokens(self._device, self.limits.max_batch_tokens),
            pad_id=tokenizer.pad_token_id or 0,
            device=self._device,
        )
        return run.run(lambda item: self.prepare(item, tokenizer), compute, self.output)

    def close(self) -> None:
        self._loaded = None

    @abstractmethod
    def check(self, network: PreTrainedModel) -> None:
        """Raises EngineLoadError when the folder is not of this engine's kind."""

    @abstractmethod
    def warm_up_items(self) -> Sequence[EngineItem]:
        """Items of different lengths, so that padding is tried as well."""

    @abstractmethod
    def prepare(self, item: EngineItem, tokenizer: PreTrainedTokenizerBase) -> Sequence[TokenRow] | Failure:
        """The rows of an item, at least one, none of them empty or longer than the context."""

    @abstractmethod
    def compute(self, network: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See token_groups.Compute."""

    @abstractmethod
    def output(self, task: str, results: torch.Tensor, /) -> Output:
        """See token_groups.ToOutput."""


def wrong_task(item: EngineItem) -> Failure:
    return Failure(Code.INVALID, f"this engine does not do {item.task!r}", "task")


def wrong_texts(texts: Sequence[str] | None, name: str) -> Failure | None:
    """Failure if there are too few or too many texts or documents; ``name`` is the field of the input."""
    if not texts:
        return Failure(Code.INVALID, "at least one is needed", f"input.{name}")
    if len(texts) > MOST_INPUT_ITEMS:
        return Failure(Code.INVALID, f"{len(texts)} items are more than {MOST_INPUT_ITEMS}", f"input.{name}")
    return None


def wrong_length(tokens: int, limit: int, field: str) -> Failure | None:
    if tokens == 0:
        return Failure(Code.INVALID, "the text has no tokens", field)
    if tokens > limit:
        return Failure(Code.CONTEXT_TOO_LONG, f"the text has {tokens} tokens; the context holds {limit}", field)
    return None
