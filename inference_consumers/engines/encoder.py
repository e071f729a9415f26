"""Base of the engines that read texts and write none: loading, input checks, running in groups."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fairlane.outcomes import Code
from fairlane.records import MOST_INPUT_ITEMS, Output
from inference_consumers.engines.pretrained import PretrainedEngine
from inference_consumers.engines.protocol import EngineItem, EngineLoadError, Failure, RunCost, RunObserver, try_once
from inference_consumers.engines.token_groups import GroupedRun, TokenRow, group_tokens


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
