"""Loading a transformers folder without reaching for the network, and the base of the engines that do."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from inference_consumers.engines.int8 import quantize_linears
from inference_consumers.engines.memory import check_memory
from inference_consumers.engines.model_folder import check_model_folder, tokenizer_file, weight_bytes
from inference_consumers.engines.precision import use_threads
from inference_consumers.engines.protocol import EngineLimits, EngineLoadError


class PretrainedEngine(ABC):
    """A transformers folder on one device. ``int8`` is for the weights of linear layers; what is between them is of
    type ``dtype``. ``allow_unsafe_weights`` loads pickles."""

    name: ClassVar[str]

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
        self.limits = limits
        self._model = model
        self._path = path
        self._threads = threads
        self._dtype = dtype
        self._int8 = int8
        self._device = torch.device(device)
        self._allow_unsafe_weights = allow_unsafe_weights

    @abstractmethod
    def close(self) -> None:
        """Let go of the weights."""

    def _load_folder(self, auto_class: type[PreTrainedModel]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        use_threads(self._threads)
        network, tokenizer = load_pretrained(
            auto_class,
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
        return network, tokenizer

    def _load_error(self, reason: str) -> EngineLoadError:
        return EngineLoadError(f"{self._model}: {self._path}: {reason}")


def _held_positions(network: PreTrainedModel) -> int | None:
    """The longest row that the weights have positions for; None where that is not bounded by them."""
    stated: int | None = getattr(network.config, "max_position_embeddings", None)
    for name, module in network.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            # RoBERTa and its kin count from behind the padding's own position.
            taken = 0 if module.padding_idx is None else module.padding_idx + 1
            return module.num_embeddings - taken
    return stated


def load_pretrained(
    auto_class: type[PreTrainedModel],
    model: str,
    path: Path,
    dtype: torch.dtype,
    *,
    int8: bool = False,
    device: torch.device | str = "cpu",
    allow_unsafe_weights: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in evaluation mode on its device, and its tokenizer.

    Raises EngineLoadError, whatever the reason: files that are missing, damaged or not of this kind of model, weights
    that need more memory than there is.
    """
    check_model_folder(model, path, 0, allow_unsafe_weights=allow_unsafe_weights)
    device = torch.device(device)
    if dtype == torch.float16 and device.type == "cpu":
        raise EngineLoadError(f"{model}: {path}: float16 is for a GPU; on the CPU use bfloat16 or float32")
    check_memory(model, path, weight_bytes(model, path, dtype.itemsize), device)
    # Read by huggingface_hub when it is imported; local_files_only covers the case that it already was.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    # A folder's own code is never run: without the answer given here, the loader would ask for it.
    options = {"local_files_only": True, "trust_remote_code": False}
    at_fault = path / "config.json"
    try:
        config = AutoConfig.from_pretrained(path, **options)
        _check_architecture(auto_class, config, model, path)
        at_fault = tokenizer_file(path)
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
        # From here on it may be the configuration that the weights do not fit, or the weights.
        at_fault = path
        network, info = auto_class.from_pretrained(
            path,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            # None: safetensors if there are any, or else a pickle.
            use_safetensors=None if allow_unsafe_weights else True,
            **options,
        )
    except EngineLoadError:
        raise
    except Exception as error:
        # The loader raises errors of its own, of the file formats' and of the parsers' libraries.
        raise EngineLoadError(f"{model}: {at_fault} cannot be loaded: {type(error).__name__}: {error}") from error
    _check_shapes(model, path, info["mismatched_keys"])
    _check_weights(model, path, network, info["missing_keys"])
    if len(tokenizer) > network.get_input_embeddings().num_embeddings:
        raise EngineLoadError(
            f"{model}: {path}: the tokenizer has {len(tokenizer)} tokens, "
            f"the weights know {network.get_input_embeddings().num_embeddings}"
        )
    if int8:
        quantize_linears(network)
    return network.eval().to(device), tokenizer


def _check_architecture(auto_class: type[PreTrainedModel], config: PreTrainedConfig, model: str, path: Path) -> None:
    """Check that the architecture in config.json fits this class. Bare encoders fit models of every kind."""
    if auto_class is AutoModel:
        return
    known = auto_class._model_mapping.get(type(config), ())
    names = {entry.__name__ for entry in (known if isinstance(known, tuple) else (known,))}
    stated = config.architectures or ()
    if not names or (stated and names.isdisjoint(stated)):
        described = ", ".join(stated) or f"a model of type {config.model_type!r}"
        wanted = ", ".join(sorted(names)) or f"one that {auto_class.__name__} knows"
        raise EngineLoadError(f"{model}: {path / 'config.json'} describes {described}; needed is {wanted}")


def _check_shapes(model: str, path: Path, mismatched: Iterable[tuple[str, torch.Size, torch.Size]]) -> None:
    """The loader would fill these with random numbers too, or else fail without a word on which they are."""
    for name, stored, described in sorted(mismatched)[:1]:
        raise EngineLoadError(
            f"{model}: {path}: {name} is of shape {tuple(stored)} in the weights, {tuple(described)} by config.json"
        )


def _check_weights(model: str, path: Path, network: PreTrainedModel, missing: set[str]) -> None:
    """The loader fills what the file does not have with random numbers. No engine looks at a pooler's."""
    needed = sorted(name for name in missing if not name.startswith("pooler."))
    if needed:
        raise EngineLoadError(
            f"{model}: {path}: these are no weights of {type(network).__name__}: "
            f"{len(needed)} of its tensors are missing, {needed[0]} among them"
        )
