"""Base of the engines that read texts and write none: loading, input checks, running in groups."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fairlane.outcomes import Code
from fairlane.records import MOST_INPUT_ITEMS, Output
from inference_consumers.engines.pretrained import load_pretrained
from inference_consumers.engines.protocol import (
    EngineItem,
    EngineLimits,
    EngineLoadError,
    Failure,
    RunCost,
    RunObserver,
    Success,
    run_batch,
)
from inference_consumers.engines.threads import use_threads
from inference_consumers.engines.token_groups import GroupedRun, TokenRow, group_tokens


class EncoderEngine(ABC):
    """A transformers folder that runs whole batches. No text is ever cut: one that is too long is a Failure."""

    name: ClassVar[str]
    auto_class: ClassVar[type[PreTrainedModel]]

    def __init__(
        self,
        model: str,
        path: Path,
        limits: EngineLimits,
        threads: int,
        *,
        dtype: torch.dtype = torch.float32,
        int8: bool = False,
        device: torch.device | str = "cpu",
        allow_unsafe_weights: bool = False,
    ) -> None:
        """``int8`` is for the weights of linear layers; what is between them is of type ``dtype``.
        ``allow_unsafe_weights`` loads pickles."""
        self.limits = limits
        self._model = model
        self._path = path
        self._threads = threads
        self._dtype = dtype
        self._int8 = int8
        self._device = torch.device(device)
        self._allow_unsafe_weights = allow_unsafe_weights
        self._loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase] | None = None

    def load(self) -> None:
        use_threads(self._threads)
        network, tokenizer = load_pretrained(
            self.auto_class,
            self._model,
            self._path,
            self._dtype,
            int8=self._int8,
            device=self._device,
            allow_unsafe_weights=self._allow_unsafe_weights,
        )
        held = _held_positions(network)
        if held is not None and self.limits.max_context_tokens > held:
            raise self._load_error(f"max_context_tokens is {self.limits.max_context_tokens}, the weights hold {held}")
        self.check(network)
        self._loaded = network, tokenizer
        try:
            outcomes = run_batch(self, self.warm_up_items())
        except Exception as error:
            # Weights that load may still be of a kind of model that takes other inputs, or too large to be run.
            self._loaded = None
            raise self._load_error(f"the first run failed: {type(error).__name__}: {error}") from error
        for outcome in outcomes:
            if not isinstance(outcome, Success):
                self._loaded = None
                raise self._load_error(f"the first run failed: {outcome}")

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

    def _load_error(self, reason: str) -> EngineLoadError:
        return EngineLoadError(f"{self._model}: {self._path}: {reason}")


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


def _held_positions(network: PreTrainedModel) -> int | None:
    """The longest row that the weights have positions for; None where that is not bounded by them."""
    stated: int | None = getattr(network.config, "max_position_embeddings", None)
    for name, module in network.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            # RoBERTa and its kin count from behind the padding's own position.
            taken = 0 if module.padding_idx is None else module.padding_idx + 1
            return module.num_embeddings - taken
    return stated
