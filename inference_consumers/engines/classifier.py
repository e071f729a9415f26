"""Image classification with a program saved by torch.export or torch.jit; images.py names the pictures it takes.

A folder holds the program, ``model.pt2`` of torch.export or ``model.pt`` of torch.jit, and ``model.json`` with the
``labels``, the ``height`` and ``width`` of the pictures, and their ``channels``: 1 for grey, which is the default, or 3
for red, green and blue. The program maps float32 pixels in 0..1 of shape (batch, channels, height, width), for batches
of any size, to logits of shape (batch, labels), in the order of the labels.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fairlane.outcomes import Code, Task
from fairlane.records import LabelScore, Output, TokenUsage
from inference_consumers.engines.exported_archive import UnsafeArchiveError, check_exported
from inference_consumers.engines.images import ImageError, PixelFormat, pixels_of
from inference_consumers.engines.model_folder import check_memory, device_of, unsafe_weights, use_threads
from inference_consumers.engines.picture_labels import read_picture_labels
from inference_consumers.engines.protocol import (
    NOT_FINITE,
    CancelledItem,
    EngineItem,
    EngineSpec,
    Failure,
    ItemOutcome,
    RunCost,
    RunObserver,
    Success,
    wrong_task,
)

_Forward = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _ProgramFormat:
    """Program format of torch: the engine that serves it, its file, its safety check and its loader."""

    engine: str
    file: str
    check: Callable[[Path], None]
    read: Callable[[Path, torch.device], _Forward]


@dataclass(frozen=True, slots=True)
class _VisionProgram:
    """A loaded classifier; ``labels`` name the columns of its logits."""

    forward: _Forward
    labels: tuple[str, ...]
    pixels: PixelFormat


def _check_torchscript(_file: Path) -> None:
    raise UnsafeArchiveError("it is a program of torch.jit; export it anew with torch.export")


def _read_exported(file: Path, device: torch.device) -> _Forward:
    # Before it raises what is wrong with a file, it logs a traceback of it.
    logging.getLogger("torch.export").setLevel(logging.CRITICAL)
    program = torch.export.load(file)
    if device.type != "cpu":
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, device)
    return program.module()


def _read_torchscript(file: Path, device: torch.device) -> _Forward:
    with warnings.catch_warnings():
        # torch advises to export anew, which is impossible with only the old file.
        warnings.simplefilter("ignore", DeprecationWarning)
        program: torch.jit.ScriptModule = torch.jit.load(file, map_location=device)  # type: ignore[no-untyped-call] # torch leaves torch.jit.load without types
        return program.eval()


def _first_line(error: Exception) -> str:
    """torch puts a traceback of its own into the message of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


EXPORTED = _ProgramFormat("torch-classifier", "model.pt2", check_exported, _read_exported)
TORCHSCRIPT = _ProgramFormat("torchscript-classifier", "model.pt", _check_torchscript, _read_torchscript)


class ClassifierEngine:
    """``torch-classifier`` or ``torchscript-classifier``, by the format of its program, which fixes its data type.

    A classification counts no tokens for its sender; to the cost of a run each picture is one.
    """

    _program: _VisionProgram | None = None

    def __init__(self, spec: EngineSpec, format_: _ProgramFormat = EXPORTED) -> None:
        """Raises EngineLoadError where models.yaml asks to change the numbers of a program, which were fixed when it
        was saved, and for a device that does not exist."""
        self.limits = spec.limits
        self.name = format_.engine
        self._spec = spec
        self._format = format_
        self._device = device_of(spec)
        for field in ("dtype", "quantization"):
            if getattr(spec.model, field) is not None:
                raise spec.error(f"{field}: {self.name} runs a program as it was saved")

    def load(self) -> None:
        """Load the folder, and classify black pictures: one, and ``max_batch_size``. Raises EngineLoadError, which
        names the file at fault and the reason."""
        spec, path = self._spec, self._spec.path
        use_threads(spec.threads)
        file, description = path / self._format.file, path / "model.json"
        for needed in (file, description):
            if not needed.is_file():
                raise spec.error(f"{path} holds no model ({needed.name} is missing); prepare the models first")
        labels, pixels = read_picture_labels(spec, description)
        check_memory(spec, file, file.stat().st_size, self._device)
        try:
            if not spec.allow_unsafe_weights:
                self._format.check(file)
            forward = self._format.read(file, self._device)
        except UnsafeArchiveError as error:
            raise unsafe_weights(spec, file, str(error)) from error
        except Exception as error:
            # The archive, what is pickled in it and what was compiled from it fail each in their own way.
            raise spec.error(f"{file} cannot be loaded: {_first_line(error)}") from error
        for batch in sorted({1, self.limits.max_batch_size}):
            shape = (batch, pixels.channels, pixels.height, pixels.width)
            try:
                with torch.inference_mode():
                    logits = forward(torch.zeros(shape, device=self._device))
            except Exception as error:
                raise spec.error(f"{file} does not take pixels {shape}: {_first_line(error)}") from error
            if not isinstance(logits, torch.Tensor):
                raise spec.error(f"{file} gives a {type(logits).__name__}, not logits")
            if logits.shape != (batch, len(labels)):
                raise spec.error(
                    f"{file} gives logits {tuple(logits.shape)} for {batch} pictures; "
                    f"{description.name} has {len(labels)} labels"
                )
        self._program = _VisionProgram(forward, labels, pixels)

    def run(self, batch: Sequence[EngineItem], observer: RunObserver) -> RunCost:
        """Answer every item. A step is one picture decoded, or ``max_batch_size`` of them classified."""
        if self._program is None:
            raise self._spec.error("not loaded")
        pictures = _decoded(batch, self._program, observer)
        classified = 0
        for start in range(0, len(pictures), self.limits.max_batch_size):
            group = []
            for index, pixels in pictures[start : start + self.limits.max_batch_size]:
                if observer.is_cancelled(index):
                    observer.finished(index, CancelledItem(TokenUsage()))
                else:
                    group.append((index, pixels))
            if group:
                classified += len(group)
                logits = _logits([pixels for _, pixels in group], self._program, self._device)
                for (index, _), row in zip(group, logits, strict=True):
                    observer.finished(index, _outcome(row, self._program.labels))
            observer.step()
        return RunCost(useful_tokens=classified, computed_tokens=classified)

    def close(self) -> None:
        self._program = None


def _decoded(batch: Sequence[EngineItem], program: _VisionProgram, observer: RunObserver) -> list[tuple[int, bytes]]:
    """Pixels of the items with a valid image, by their index in the batch; the others get a failure."""
    pictures = []
    for index, item in enumerate(batch):
        if observer.is_cancelled(index):
            observer.finished(index, CancelledItem(TokenUsage()))
        elif item.task != Task.CLASSIFY:
            observer.finished(index, wrong_task(item))
        else:
            try:
                pictures.append((index, pixels_of(item.input.image or b"", program.pixels)))
            except ImageError as error:
                observer.finished(index, Failure(Code.INVALID, str(error), "input.image"))
        observer.step()
    return pictures


def _logits(pictures: Sequence[bytes], program: _VisionProgram, device: torch.device) -> Iterator[torch.Tensor]:
    """float32 on the CPU, one row of shape (labels,) per picture."""
    # bytearray, because torch warns about memory it must not write to.
    pixels = torch.frombuffer(bytearray(b"".join(pictures)), dtype=torch.uint8).to(device)
    wanted = program.pixels
    # The bytes are pixel by pixel; a program takes one plane for each colour.
    planes = pixels.reshape(len(pictures), wanted.height, wanted.width, wanted.channels).permute(0, 3, 1, 2)
    scaled = planes.contiguous().float() / 255
    with torch.inference_mode():
        return iter(program.forward(scaled).float().cpu())


def _outcome(logits: torch.Tensor, labels: tuple[str, ...]) -> ItemOutcome:
    if not bool(torch.isfinite(logits).all()):
        return NOT_FINITE
    probabilities, order = logits.softmax(-1).sort(descending=True, stable=True)
    ranked = zip(order.tolist(), probabilities.tolist(), strict=True)
    return Success(Output(labels=tuple(LabelScore(labels[index], score) for index, score in ranked)), TokenUsage())
