"""Image classifiers that were saved as programs, in either of torch's two formats.

A folder holds the program, ``model.pt2`` of torch.export or ``model.pt`` of torch.jit, and ``model.json`` with the
``labels``, the ``height`` and ``width`` of the pictures, and their ``channels``: 1 for grey, which is the default, or 3
for red, green and blue. The program maps float32 pixels in 0..1 of shape (batch, channels, height, width), for batches
of any size, to logits of shape (batch, labels), in the order of the labels.
"""

import json
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from fairlane_server.image_header import MAX_PIXELS
from inference_consumers.engines.exported_archive import UnsafeArchiveError, check_exported
from inference_consumers.engines.images import PixelFormat
from inference_consumers.engines.memory import check_memory
from inference_consumers.engines.model_folder import unsafe_weights
from inference_consumers.engines.protocol import EngineLoadError

Forward = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ProgramFormat:
    """Program format of torch: the engine that serves it, its file, its safety check and its loader."""

    engine: str
    file: str
    check: Callable[[Path], None]
    read: Callable[[Path, torch.device], Forward]


@dataclass(frozen=True, slots=True)
class VisionProgram:
    """A loaded classifier; ``labels`` name the columns of its logits."""

    forward: Forward
    labels: tuple[str, ...]
    pixels: PixelFormat


def load_program(
    model: str,
    path: Path,
    format_: ProgramFormat,
    device: torch.device,
    max_batch_size: int,
    *,
    allow_unsafe_weights: bool = False,
) -> VisionProgram:
    """Load a folder and try it with one picture and with ``max_batch_size``. ``allow_unsafe_weights`` loads a program
    that may run any code.

    Raises EngineLoadError, which names the model, the file at fault and the reason.
    """
    file, description = path / format_.file, path / "model.json"
    for needed in (file, description):
        if not needed.is_file():
            raise EngineLoadError(
                f"{model}: {path} holds no model ({needed.name} is missing); prepare the models first"
            )
    labels, pixels = _described(model, description)
    check_memory(model, file, file.stat().st_size, device)
    try:
        if not allow_unsafe_weights:
            format_.check(file)
        forward = format_.read(file, device)
    except UnsafeArchiveError as error:
        raise unsafe_weights(model, file, str(error)) from error
    except Exception as error:
        # The archive, what is pickled in it and what was compiled from it fail each in their own way.
        raise EngineLoadError(f"{model}: {file} cannot be loaded: {_first_line(error)}") from error
    for batch in sorted({1, max_batch_size}):
        shape = (batch, pixels.channels, pixels.height, pixels.width)
        try:
            with torch.inference_mode():
                logits = forward(torch.zeros(shape, device=device))
        except Exception as error:
            raise EngineLoadError(f"{model}: {file} does not take pixels {shape}: {_first_line(error)}") from error
        _check_logits(logits, batch, labels, f"{model}: {file}", description.name)
    return VisionProgram(forward, labels, pixels)


def _described(model: str, file: Path) -> tuple[tuple[str, ...], PixelFormat]:
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
        labels, height, width = described["labels"], described["height"], described["width"]
        channels = described.get("channels", 1)
    except KeyError as error:
        raise EngineLoadError(f"{model}: {file} has no {error}") from error
    except (OSError, ValueError, TypeError) as error:
        raise EngineLoadError(f"{model}: {file} cannot be loaded: {error}") from error
    if not isinstance(labels, list) or not labels or not all(isinstance(label, str) for label in labels):
        raise EngineLoadError(f"{model}: {file}: labels must be a list of strings")
    if len(set(labels)) < len(labels):
        raise EngineLoadError(f"{model}: {file}: a label stands there twice")
    for name, side in (("height", height), ("width", width)):
        if type(side) is not int or side < 1:
            raise EngineLoadError(f"{model}: {file}: {name} must be a whole number from 1, not {side!r}")
    if type(channels) is not int or channels not in {1, 3}:
        raise EngineLoadError(f"{model}: {file}: channels must be 1 (grey) or 3 (RGB), not {channels!r}")
    if height * width > MAX_PIXELS:
        raise EngineLoadError(f"{model}: {file}: {height} x {width} pixels are more than {MAX_PIXELS}")
    return tuple(labels), PixelFormat(height, width, channels)


def _check_logits(logits: object, batch: int, labels: tuple[str, ...], where: str, description: str) -> None:
    if not isinstance(logits, torch.Tensor):
        raise EngineLoadError(f"{where} gives a {type(logits).__name__}, not logits")
    if logits.shape != (batch, len(labels)):
        raise EngineLoadError(
            f"{where} gives logits {tuple(logits.shape)} for {batch} pictures; {description} has {len(labels)} labels"
        )


def _check_torchscript(_file: Path) -> None:
    raise UnsafeArchiveError("it is a program of torch.jit; export it anew with torch.export")


def _read_exported(file: Path, device: torch.device) -> Forward:
    # Before it raises what is wrong with a file, it logs a traceback of it.
    logging.getLogger("torch.export").setLevel(logging.CRITICAL)
    program = torch.export.load(file)
    if device.type != "cpu":
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, device)
    return program.module()


def _read_torchscript(file: Path, device: torch.device) -> Forward:
    with warnings.catch_warnings():
        # torch advises to export anew; whoever has only the old file cannot.
        warnings.simplefilter("ignore", DeprecationWarning)
        program: torch.jit.ScriptModule = torch.jit.load(file, map_location=device)  # type: ignore[no-untyped-call] # torch leaves torch.jit.load without types
        return program.eval()


def _first_line(error: Exception) -> str:
    """torch puts a traceback of its own into the message of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


EXPORTED = ProgramFormat("torch-classifier", "model.pt2", check_exported, _read_exported)
TORCHSCRIPT = ProgramFormat("torchscript-classifier", "model.pt", _check_torchscript, _read_torchscript)
