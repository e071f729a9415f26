"""Image classification with a program saved by torch.export or torch.jit; see vision_programs.py for its folder and
images.py for the pictures it takes."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from fairlane.outcomes import Code, Task
from fairlane.records import LabelScore, Output, TokenUsage
from inference_consumers.engines.images import ImageError, pixels_of
from inference_consumers.engines.precision import use_threads
from inference_consumers.engines.protocol import (
    Cancelled,
    EngineItem,
    EngineLimits,
    EngineLoadError,
    Failure,
    ItemOutcome,
    RunCost,
    RunObserver,
    Success,
)
from inference_consumers.engines.vision_programs import EXPORTED, ProgramFormat, VisionProgram, load_program


class ClassifierEngine:
    """``torch-classifier`` or ``torchscript-classifier``, by the format of its program, which fixes its data type.

    A classification counts no tokens for its sender; to the cost of a run each picture is one.
    """

    def __init__(
        self,
        model: str,
        path: Path,
        limits: EngineLimits,
        threads: int,
        *,
        format_: ProgramFormat = EXPORTED,
        device: torch.device | str = "cpu",
        allow_unsafe_weights: bool = False,
    ) -> None:
        self.limits = limits
        self._model = model
        self._path = path
        self._threads = threads
        self._format = format_
        self._device = torch.device(device)
        self._allow_unsafe_weights = allow_unsafe_weights
        self._program: VisionProgram | None = None

    @property
    def name(self) -> str:
        return self._format.engine

    def load(self) -> None:
        """Load, and classify black pictures. Raises EngineLoadError."""
        use_threads(self._threads)
        self._program = load_program(
            self._model,
            self._path,
            self._format,
            self._device,
            self.limits.max_batch_size,
            allow_unsafe_weights=self._allow_unsafe_weights,
        )

    def run(self, batch: Sequence[EngineItem], observer: RunObserver) -> RunCost:
        """Answer every item. A step is one picture decoded, or ``max_batch_size`` of them classified."""
        if self._program is None:
            raise EngineLoadError(f"{self._model}: not loaded")
        pictures = _decoded(batch, self._program, observer)
        classified = 0
        for start in range(0, len(pictures), self.limits.max_batch_size):
            group = []
            for index, pixels in pictures[start : start + self.limits.max_batch_size]:
                if observer.is_cancelled(index):
                    observer.finished(index, Cancelled(TokenUsage()))
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


def _decoded(batch: Sequence[EngineItem], program: VisionProgram, observer: RunObserver) -> list[tuple[int, bytes]]:
    """Pixels of the items with a valid image, by their index in the batch; the others get a failure."""
    pictures = []
    for index, item in enumerate(batch):
        if observer.is_cancelled(index):
            observer.finished(index, Cancelled(TokenUsage()))
        elif item.task != Task.CLASSIFY:
            observer.finished(index, Failure(Code.INVALID, f"this engine does not do {item.task!r}", "task"))
        else:
            try:
                pictures.append((index, pixels_of(item.input.image or b"", program.pixels)))
            except ImageError as error:
                observer.finished(index, Failure(Code.INVALID, str(error), "input.image"))
        observer.step()
    return pictures


def _logits(pictures: Sequence[bytes], program: VisionProgram, device: torch.device) -> Iterator[torch.Tensor]:
    """float32 on the CPU, one row of shape (labels,) per picture."""
    # bytearray, because torch warns about memory it must not write to.
    pixels = torch.frombuffer(bytearray(b"".join(pictures)), dtype=torch.uint8).to(device)
    wanted = program.pixels
    # As bytes the colours of a pixel stand together; a program takes one plane for each.
    planes = pixels.reshape(len(pictures), wanted.height, wanted.width, wanted.channels).permute(0, 3, 1, 2)
    scaled = planes.contiguous().float() / 255
    with torch.inference_mode():
        return iter(program.forward(scaled).float().cpu())


def _outcome(logits: torch.Tensor, labels: tuple[str, ...]) -> ItemOutcome:
    if not bool(torch.isfinite(logits).all()):
        return Failure(Code.ENGINE_ERROR, "the model computed a value that is not a finite number")
    probabilities, order = logits.softmax(-1).sort(descending=True, stable=True)
    ranked = zip(order.tolist(), probabilities.tolist(), strict=True)
    return Success(Output(labels=tuple(LabelScore(labels[index], score) for index, score in ranked)), TokenUsage())
