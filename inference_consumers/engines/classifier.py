"""Image classification with any program saved by torch.export.

The folder holds ``model.pt2``, which maps float32 pixels in 0..1 of shape (batch, 1, height, width) to logits
of shape (batch, labels), and ``model.json`` with the labels in that order and the input's height and width.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fairlane.outcomes import Code, Task
from fairlane.records import LabelScore, Output, TokenUsage
from inference_consumers.engines.protocol import (
    EngineItem,
    EngineLimits,
    EngineLoadError,
    Failure,
    ItemOutcome,
    Success,
)
from inference_consumers.engines.threads import use_threads


@dataclass(frozen=True, slots=True)
class _Loaded:
    program: torch.nn.Module
    labels: tuple[str, ...]
    height: int
    width: int


class ClassifierEngine:
    """``torch-classifier``: an exported program on the CPU.

    An image is its raw grey pixels, one byte each, row by row, 0 for no ink and 255 for full ink.
    """

    name = "torch-classifier"

    def __init__(self, model: str, path: Path, limits: EngineLimits, threads: int) -> None:
        self.limits = limits
        self._model = model
        self._path = path
        self._threads = threads
        self._loaded: _Loaded | None = None

    def load(self) -> None:
        """Load and classify an empty image. Raises EngineLoadError."""
        use_threads(self._threads)
        if not (self._path / "model.pt2").is_file():
            raise EngineLoadError(
                f"{self._model}: {self._path} holds no model (model.pt2 is missing); prepare the models first"
            )
        try:
            described = json.loads((self._path / "model.json").read_text(encoding="utf-8"))
            labels = tuple(str(label) for label in described["labels"])
            height, width = int(described["height"]), int(described["width"])
            program = torch.export.load(self._path / "model.pt2").module()
            self._loaded = _Loaded(program, labels, height, width)
            logits = self._logits([bytes(height * width)], self._loaded)
        except Exception as error:
            # The archive, what is pickled in it and the program itself fail each in their own way.
            self._loaded = None
            raise EngineLoadError(f"{self._model}: {self._path} cannot be loaded: {error}") from error
        if logits.shape != (1, len(labels)):
            raise EngineLoadError(
                f"{self._model}: {self._path}: {len(labels)} labels, but logits {tuple(logits.shape)}"
            )

    def run(self, batch: Sequence[EngineItem]) -> list[ItemOutcome]:
        """Answer every item, in order."""
        if self._loaded is None:
            raise EngineLoadError(f"{self._model}: not loaded")
        loaded = self._loaded
        checked = [_pixels(item, loaded) for item in batch]
        images = [pixels for pixels in checked if isinstance(pixels, bytes)]
        logits = iter(self._logits(images, loaded) if images else ())
        return [_outcome(next(logits), loaded.labels) if isinstance(pixels, bytes) else pixels for pixels in checked]

    def close(self) -> None:
        """Let go of the program."""
        self._loaded = None

    def _logits(self, images: list[bytes], loaded: _Loaded) -> torch.Tensor:
        """float32 of shape (images, labels)."""
        # bytearray, because torch warns about memory it must not write to.
        pixels = torch.frombuffer(bytearray(b"".join(images)), dtype=torch.uint8)
        scaled = pixels.reshape(len(images), 1, loaded.height, loaded.width).float() / 255
        with torch.inference_mode():
            logits: torch.Tensor = loaded.program(scaled)
        return logits


def _pixels(item: EngineItem, loaded: _Loaded) -> bytes | Failure:
    if item.task != Task.CLASSIFY:
        return Failure(Code.INVALID, f"this engine does not do {item.task!r}", "task")
    image = item.input.image or b""
    if len(image) != loaded.height * loaded.width:
        return Failure(
            Code.INVALID,
            f"must be {loaded.height} x {loaded.width} grey pixels, {loaded.height * loaded.width} bytes; "
            f"got {len(image)} bytes",
            "input.image",
        )
    return image


def _outcome(logits: torch.Tensor, labels: tuple[str, ...]) -> ItemOutcome:
    if not bool(torch.isfinite(logits).all()):
        return Failure(Code.ENGINE_ERROR, "the model computed a value that is not a finite number")
    probabilities, order = logits.softmax(-1).sort(descending=True, stable=True)
    ranked = zip(order.tolist(), probabilities.tolist(), strict=True)
    scores = tuple(LabelScore(labels[index], probability) for index, probability in ranked)
    return Success(Output(labels=scores), TokenUsage())
