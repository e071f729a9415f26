"""Checks of a transformers folder before heavy libraries read it: fails early and names the file."""

import json
import math
import re
from pathlib import Path
from typing import Any

from inference_consumers.engines.protocol import EngineLoadError

# Any of these makes a tokenizer; the first is what nearly every model has.
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)
_BITS = re.compile(r"\d+")


def unsafe_weights(model: str, file: Path, why: str) -> EngineLoadError:
    return EngineLoadError(
        f"{model}: {file} is not loaded, because that could run any code on this machine: {why}. "
        "ALLOW_UNSAFE_WEIGHTS=true loads it all the same"
    )


def check_model_folder(model: str, path: Path, max_context_tokens: int, *, allow_unsafe_weights: bool = False) -> None:
    """Check that the folder has a model, a tokenizer and complete weights, and supports the context length.

    Raises EngineLoadError, which names the file; also for weights that are pickles, unless they are allowed.
    """
    if not path.is_dir():
        raise EngineLoadError(f"{model}: {path} holds no model (there is no such folder); prepare the models first")
    if not (path / "config.json").is_file():
        raise EngineLoadError(f"{model}: {path} holds no model (config.json is missing); prepare the models first")
    described = _read_json(model, path / "config.json")
    if not isinstance(described, dict):
        raise EngineLoadError(f"{model}: {path / 'config.json'} cannot be loaded: it is no JSON object")
    held = _context_of(described)
    if held is not None and max_context_tokens > held:
        raise EngineLoadError(f"{model}: {path}: max_context_tokens is {max_context_tokens}, the weights hold {held}")
    if not any((path / name).is_file() for name in _TOKENIZERS):
        raise EngineLoadError(f"{model}: {path} holds no tokenizer ({_TOKENIZERS[0]} is missing)")
    # All of them: a loader goes on without some that it cannot read, and the model then answers in another way.
    for file in sorted(path.glob("*.json")):
        _read_json(model, file)
    for weights in weight_files(model, path):
        if weights.suffix == ".safetensors":
            _tensor_bytes(model, weights, None)
        elif not allow_unsafe_weights:
            raise unsafe_weights(model, weights, "it is a pickle; save the weights as safetensors")


def tokenizer_file(path: Path) -> Path:
    return next((path / name for name in _TOKENIZERS if (path / name).is_file()), path)


def weight_files(model: str, path: Path) -> list[Path]:
    """The files that hold the weights, at least one. Raises EngineLoadError when one is missing."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        listed = _read_json(model, index)
        shards = listed.get("weight_map") if isinstance(listed, dict) else None
        if not isinstance(shards, dict):
            raise EngineLoadError(f"{model}: {index} cannot be loaded: it has no weight_map")
        files = [path / str(name) for name in sorted(set(shards.values()))]
        for file in files:
            if not file.is_file():
                raise EngineLoadError(f"{model}: {file} is missing; {index.name} lists it")
        return files
    found = sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model*.bin"))
    if not found:
        raise EngineLoadError(f"{model}: {path} holds no weights (model.safetensors is missing)")
    return found


def weight_bytes(model: str, path: Path, number_bytes: int) -> int:
    """Bytes of the weights in memory at ``number_bytes`` per fractional number."""
    return sum(
        _tensor_bytes(model, file, number_bytes) if file.suffix == ".safetensors" else file.stat().st_size
        for file in weight_files(model, path)
    )


def _read_json(model: str, file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineLoadError(f"{model}: {file} cannot be loaded: {error}") from error


def _context_of(described: Any) -> int | None:
    """The longest context that the positions of the weights reach; None where the configuration does not say."""
    if not isinstance(described, dict):
        return None
    for part in (described, described.get("text_config")):
        held = part.get("max_position_embeddings") if isinstance(part, dict) else None
        if isinstance(held, int):
            return held
    return None


def _tensor_bytes(model: str, weights: Path, number_bytes: int | None) -> int:
    """Reads only the file's table of contents, which shows whether the rest is complete. None: as stored."""
    from safetensors import SafetensorError, safe_open

    total = 0
    try:
        with safe_open(weights, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                tensor = tensors.get_slice(name)
                kind = str(tensor.get_dtype())
                is_fractional = kind.startswith(("F", "BF"))
                bits = _BITS.search(kind)
                stored = int(bits[0]) // 8 if bits else 1
                each = number_bytes if number_bytes is not None and is_fractional else stored
                total += math.prod(tensor.get_shape()) * each
    except (SafetensorError, OSError) as error:
        raise EngineLoadError(f"{model}: {weights} cannot be loaded: {error}") from error
    return total
