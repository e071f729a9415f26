"""Checks before a model's folder is loaded: its files, the memory that its weights need, the device.

They come before heavy libraries read the folder, so that it fails early and the error names the file.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import torch

from inference_consumers.engine_process.process_facts import main_memory_bytes
from inference_consumers.engines.protocol import EngineLoadError, EngineSpec

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
_GIB = 1 << 30


def device_of(spec: EngineSpec) -> torch.device:
    """Raises EngineLoadError for a GPU that does not exist."""
    if spec.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(spec.device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise spec.error(f"there is no device {spec.device}; CUDA sees {torch.cuda.device_count()}")
    return device


def use_threads(threads: int) -> None:
    """Set the threads of this process; 0 leaves the choice, one per core, to torch."""
    if threads > 0:
        torch.set_num_threads(threads)


def unsafe_weights(spec: EngineSpec, file: Path, why: str) -> EngineLoadError:
    return spec.error(
        f"{file} is not loaded, because that could run any code on this machine: {why}. "
        "ALLOW_UNSAFE_WEIGHTS=true loads it all the same"
    )


def check_memory(spec: EngineSpec, path: Path, needed_bytes: int, device: torch.device) -> None:
    """Raises NoRoomError, with both figures, when the machine or the device has less than the weights need."""
    places = {"this machine": main_memory_bytes()}
    if device.type == "cuda":
        places[str(device)] = torch.cuda.mem_get_info(device)[0]
    for place, free_bytes in places.items():
        if needed_bytes > free_bytes:
            raise spec.no_room(
                f"{path}: the weights need {needed_bytes / _GIB:.2f} GiB of memory; "
                f"{place} has {free_bytes / _GIB:.2f} GiB left"
            )


def check_model_folder(spec: EngineSpec) -> None:
    """Check that the folder has a model, a tokenizer and complete weights, and supports the context length.

    Raises EngineLoadError, which names the file; also for weights that are pickles, unless they are allowed.
    """
    path = spec.path
    if not path.is_dir():
        raise spec.error(f"{path} holds no model (there is no such folder); prepare the models first")
    if not (path / "config.json").is_file():
        raise spec.error(f"{path} holds no model (config.json is missing); prepare the models first")
    described = _read_json(spec, path / "config.json")
    if not isinstance(described, dict):
        raise spec.error(f"{path / 'config.json'} cannot be loaded: it is no JSON object")
    parts = [part for part in (described, described.get("text_config")) if isinstance(part, dict)]
    stated = (part.get("max_position_embeddings") for part in parts)
    check_context(spec, next((held for held in stated if isinstance(held, int)), None))
    if not any((path / name).is_file() for name in _TOKENIZERS):
        raise spec.error(f"{path} holds no tokenizer ({_TOKENIZERS[0]} is missing)")
    # All of them: a loader goes on without some that it cannot read, and the model then answers in another way.
    for file in sorted(path.glob("*.json")):
        _read_json(spec, file)
    for weights in _weight_files(spec):
        if weights.suffix == ".safetensors":
            _tensor_bytes(spec, weights, None)
        elif not spec.allow_unsafe_weights:
            raise unsafe_weights(spec, weights, "it is a pickle; save the weights as safetensors")


def check_context(spec: EngineSpec, held: int | None) -> None:
    """Raises EngineLoadError when the weights have positions for fewer tokens than the model's context; None where
    they do not bound it."""
    if held is not None and spec.limits.max_context_tokens > held:
        raise spec.error(
            f"{spec.path}: max_context_tokens is {spec.limits.max_context_tokens}, the weights hold {held}"
        )


def tokenizer_file(path: Path) -> Path:
    return next((path / name for name in _TOKENIZERS if (path / name).is_file()), path)


def _weight_files(spec: EngineSpec) -> list[Path]:
    """The files that hold the weights, at least one. Raises EngineLoadError when one is missing."""
    path = spec.path
    index = path / "model.safetensors.index.json"
    if index.is_file():
        listed = _read_json(spec, index)
        shards = listed.get("weight_map") if isinstance(listed, dict) else None
        if not isinstance(shards, dict):
            raise spec.error(f"{index} cannot be loaded: it has no weight_map")
        files = [path / str(name) for name in sorted(set(shards.values()))]
        for file in files:
            if not file.is_file():
                raise spec.error(f"{file} is missing; {index.name} lists it")
        return files
    found = sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model*.bin"))
    if not found:
        raise spec.error(f"{path} holds no weights (model.safetensors is missing)")
    return found


def weight_bytes(spec: EngineSpec, number_bytes: int) -> int:
    """Bytes of the weights in memory at ``number_bytes`` per fractional number."""
    return sum(
        _tensor_bytes(spec, file, number_bytes) if file.suffix == ".safetensors" else file.stat().st_size
        for file in _weight_files(spec)
    )


def _read_json(spec: EngineSpec, file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise spec.error(f"{file} cannot be loaded: {error}") from error


def _tensor_bytes(spec: EngineSpec, weights: Path, number_bytes: int | None) -> int:
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
        raise spec.error(f"{weights} cannot be loaded: {error}") from error
    return total
