"""Loading a transformers folder without reaching for the network."""

import os
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from inference_consumers.engines.protocol import EngineLoadError


def load_pretrained(
    auto_class: type[PreTrainedModel], model: str, path: Path, dtype: torch.dtype
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in evaluation mode and its tokenizer. Raises EngineLoadError, whatever the reason."""
    if not (path / "config.json").is_file():
        raise EngineLoadError(f"{model}: {path} holds no model (config.json is missing); prepare the models first")
    # Read by huggingface_hub when it is imported; local_files_only covers the case that it already was.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        network = auto_class.from_pretrained(path, dtype=dtype, local_files_only=True)
    except Exception as error:
        # The loader raises errors of its own, of the file formats' and of the parsers' libraries.
        raise EngineLoadError(f"{model}: {path} cannot be loaded: {error}") from error
    return network.eval(), tokenizer
