"""Loading a transformers folder without reaching for the network, and the base of the engines that do."""

import os
from abc import ABC, abstractmethod
from typing import Any, ClassVar

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
from inference_consumers.engines.model_folder import (
    check_context,
    check_memory,
    check_model_folder,
    device_of,
    tokenizer_file,
    use_threads,
    weight_bytes,
)
from inference_consumers.engines.protocol import EngineLoadError, EngineSpec

_DTYPES = {None: torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_INT8 = "int8"


class PretrainedEngine(ABC):
    """A transformers folder on one device. ``int8`` quantizes the weights of linear layers; what is between them is of
    the model's dtype."""

    name: ClassVar[str]

    def __init__(self, spec: EngineSpec) -> None:
        """Raises EngineLoadError for a device that does not exist, and for a quantization other than int8."""
        self.limits = spec.limits
        self._spec = spec
        self._device = device_of(spec)
        quantization = spec.model.quantization
        if quantization not in {None, _INT8}:
            raise spec.error(f"{self.name} knows no quantization {quantization!r}, only {_INT8!r}")

    @abstractmethod
    def close(self) -> None:
        """Let go of the weights."""

    def _load_folder(self, auto_class: type[PreTrainedModel]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The model in evaluation mode on its device, and its tokenizer.

        Raises EngineLoadError, whatever the reason: files that are missing, damaged or not of this kind of model,
        weights that need more memory than there is.
        """
        spec, path = self._spec, self._spec.path
        use_threads(spec.threads)
        check_model_folder(spec)
        dtype = _DTYPES[spec.model.dtype]
        if dtype == torch.float16 and self._device.type == "cpu":
            raise self._error("float16 is for a GPU; on the CPU use bfloat16 or float32")
        check_memory(spec, path, weight_bytes(spec, dtype.itemsize), self._device)
        # Read by huggingface_hub when it is imported; local_files_only covers the case that it already was.
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        # A folder's own code is never run: without the answer given here, the loader would ask for it.
        options = {"local_files_only": True, "trust_remote_code": False}
        at_fault = path / "config.json"
        try:
            config = AutoConfig.from_pretrained(path, **options)
            self._check_architecture(auto_class, config)
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
                use_safetensors=None if spec.allow_unsafe_weights else True,
                **options,
            )
        except EngineLoadError:
            raise
        except Exception as error:
            # The loader raises errors of its own, of the file formats' and of the parsers' libraries.
            raise spec.error(f"{at_fault} cannot be loaded: {type(error).__name__}: {error}") from error
        self._check_weights(network, info)
        if len(tokenizer) > network.get_input_embeddings().num_embeddings:
            raise self._error(
                f"the tokenizer has {len(tokenizer)} tokens, "
                f"the weights know {network.get_input_embeddings().num_embeddings}"
            )
        check_context(spec, _held_positions(network))
        if spec.model.quantization == _INT8:
            quantize_linears(network)
        return network.eval().to(self._device), tokenizer

    def _check_architecture(self, auto_class: type[PreTrainedModel], config: PreTrainedConfig) -> None:
        """Check that the architecture in config.json fits this class. Bare encoders fit models of every kind."""
        if auto_class is AutoModel:
            return
        known = auto_class._model_mapping.get(type(config), ())
        names = {entry.__name__ for entry in (known if isinstance(known, tuple) else (known,))}
        stated = config.architectures or ()
        if not names or (stated and names.isdisjoint(stated)):
            described = ", ".join(stated) or f"a model of type {config.model_type!r}"
            wanted = ", ".join(sorted(names)) or f"one that {auto_class.__name__} knows"
            raise self._spec.error(f"{self._spec.path / 'config.json'} describes {described}; needed is {wanted}")

    def _check_weights(self, network: PreTrainedModel, info: dict[str, Any]) -> None:
        """The loader fills with random numbers what the file does not have, and what is of another shape."""
        for name, stored, described in sorted(info["mismatched_keys"])[:1]:
            raise self._error(f"{name} is of shape {tuple(stored)} in the weights, {tuple(described)} by config.json")
        # No engine looks at a pooler's.
        needed = sorted(name for name in info["missing_keys"] if not name.startswith("pooler."))
        if needed:
            raise self._error(
                f"these are no weights of {type(network).__name__}: "
                f"{len(needed)} of its tensors are missing, {needed[0]} among them"
            )

    def _error(self, reason: str) -> EngineLoadError:
        return self._spec.error(f"{self._spec.path}: {reason}")


def _held_positions(network: PreTrainedModel) -> int | None:
    """The longest row that the weights have positions for; None where that is not bounded by them."""
    for name, module in network.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            # RoBERTa and its kin count from behind the padding's own position.
            taken = 0 if module.padding_idx is None else module.padding_idx + 1
            return module.num_embeddings - taken
    stated: int | None = getattr(network.config, "max_position_embeddings", None)
    return stated
