"""Image classifiers: programs of both formats, pictures in every form, and folders that hold no such program.

Decoding itself is tested in tests/unit/dispatcher/test_images.py.
"""

import math
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from torch import nn

from deploy.models.digits_data import load_split
from deploy.models.prepare import prepare, recipes
from deploy.models.train_digits import build_network
from fairlane.outcomes import Code
from fairlane.records import ModelVersion, Parameters, RequestInput, TokenUsage
from fairlane_server.models.models_file import load_models
from inference_consumers.engines.classifier import EXPORTED, TORCHSCRIPT, ClassifierEngine
from inference_consumers.engines.protocol import (
    CancelledItem,
    Engine,
    EngineItem,
    EngineLimits,
    EngineLoadError,
    EngineSpec,
    Failure,
    ItemOutcome,
    Outcomes,
    RunCost,
    Success,
    run_batch,
)
from inference_consumers.engines.registry import create_engine
from tests.kit.engine_specs import spec_of
from tests.kit.vision_kit import describe, save_exported, save_script

pytestmark = [pytest.mark.full, pytest.mark.model]

PROJECT = Path(__file__).parents[2]
MODELS_DIR = PROJECT / ".fairlane/models"
THREADS = 2
LIMITS = EngineLimits(max_batch_size=32, max_batch_tokens=1, max_context_tokens=1, max_output_tokens=0)


@pytest.fixture(scope="module")
def digits() -> ModelVersion:
    prepare(MODELS_DIR, recipes(), print)
    [model] = [model for model in load_models(PROJECT / "deploy/models.yaml") if model.engine == EXPORTED.engine]
    return model


@pytest.fixture(scope="module")
def engines(digits: ModelVersion, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Engine]:
    """The digits in both formats, with the same weights."""
    folder = tmp_path_factory.mktemp("models")
    program = torch.export.load(MODELS_DIR / digits.path / EXPORTED.file)
    network = build_network()
    network.load_state_dict(program.state_dict)
    save_script(folder / digits.path, network, 10)
    scripted = replace(digits, engine=TORCHSCRIPT.engine)
    built = {
        EXPORTED.engine: create_engine(EngineSpec(digits, str(MODELS_DIR), THREADS, device="cpu")),
        TORCHSCRIPT.engine: create_engine(
            EngineSpec(scripted, str(folder), THREADS, device="cpu", allow_unsafe_weights=True)
        ),
    }
    for engine in built.values():
        engine.load()
    return built


def tiny(folder: Path, network: nn.Module | None = None, labels: int = 2, **limits: int) -> ClassifierEngine:
    save_script(folder, network or Brightness(), labels)
    return ClassifierEngine(spec_of(folder, replace(LIMITS, **limits), allow_unsafe_weights=True), TORCHSCRIPT)


class Brightness(nn.Module):
    """Label 1 for a bright picture, 0 for a dark one, and no number for one that is white all over."""

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        brightness = pixels.mean([1, 2, 3])
        brightness = torch.where(brightness == 1, torch.full_like(brightness, math.nan), brightness)
        return torch.stack([1 - brightness, brightness], dim=1)


def classify(image: bytes | None) -> EngineItem:
    return EngineItem("classify", "classify", RequestInput(image=image), Parameters())


def best(outcome: ItemOutcome) -> str:
    assert isinstance(outcome, Success), outcome
    assert outcome.output.labels is not None
    return outcome.output.labels[0].label


def enlarged(image: npt.NDArray[np.uint8], format_: str) -> bytes:
    buffer = BytesIO()
    Image.fromarray(np.kron(image, np.ones((10, 10), dtype=np.uint8))).save(buffer, format_, quality=90)
    return buffer.getvalue()


def bomb() -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


both = pytest.mark.parametrize("name", [EXPORTED.engine, TORCHSCRIPT.engine])


@both
def test_held_out_digits_are_recognised_raw_and_from_files(engines: dict[str, Engine], name: str) -> None:
    split = load_split()
    images, labels = split.test_images, [str(label) for label in split.test_labels]
    outcomes = run_batch(engines[name], [classify(image.tobytes()) for image in images])
    assert sum(map(str.__eq__, map(best, outcomes), labels)) / len(labels) >= 0.95
    for outcome in outcomes:
        assert isinstance(outcome, Success)
        assert outcome.usage == TokenUsage()
        scores = [entry.score for entry in outcome.output.labels or ()]
        assert sum(scores) == pytest.approx(1, abs=1e-5)
        assert scores == sorted(scores, reverse=True)
    for format_ in ("PNG", "JPEG", "WEBP"):
        from_files = run_batch(engines[name], [classify(enlarged(image, format_)) for image in images[:96]])
        assert sum(map(str.__eq__, map(best, from_files), map(best, outcomes))) >= 94
        if format_ == "PNG":
            # The same pixels in groups of the same size.
            assert from_files == outcomes[:96]


def test_both_formats_give_the_same_probabilities(engines: dict[str, Engine]) -> None:
    items = [classify(image.tobytes()) for image in load_split().test_images[:40]]
    for one, other in zip(*(run_batch(engine, items) for engine in engines.values()), strict=True):
        assert isinstance(one, Success)
        assert isinstance(other, Success)
        assert {entry.label: entry.score for entry in one.output.labels or ()} == pytest.approx(
            {entry.label: entry.score for entry in other.output.labels or ()}, abs=1e-5
        )


@both
def test_a_bad_picture_is_refused_and_its_neighbours_are_answered(engines: dict[str, Engine], name: str) -> None:
    image = load_split().test_images[0]
    jpeg, alone = enlarged(image, "JPEG"), run_batch(engines[name], [classify(image.tobytes())])[0]
    bad = {
        "the PNG has 50000 x 50000 pixels; at most 16777216 are taken": bomb(),
        "the JPEG cannot be decoded: it is damaged or incomplete": jpeg[: len(jpeg) // 2],
        "must be a PNG, JPEG or WebP file, or 8 x 8 grey pixels, 64 bytes; got 65 bytes of something else": bytes(65),
        "must be a PNG, JPEG or WebP file, or 8 x 8 grey pixels, 64 bytes; got 0 bytes of something else": None,
    }
    items = [entry for picture in bad.values() for entry in (classify(image.tobytes()), classify(picture))]
    items.append(replace(items[0], task="embed"))
    outcomes = run_batch(engines[name], items)
    assert [outcome for outcome in outcomes[:-1:2] if best(outcome) != best(alone)] == []
    assert outcomes[1:-1:2] == [Failure(Code.INVALID, message, "input.image") for message in bad]
    assert outcomes[-1] == Failure(Code.INVALID, "this engine does not do 'embed'", "task")
    assert run_batch(engines[name], items[1:-1:2]) == outcomes[1:-1:2]


def test_a_value_that_is_not_a_number_fails_its_item_only(tmp_path: Path) -> None:
    engine = tiny(tmp_path)
    engine.load()
    dark, broken, bright = run_batch(engine, [classify(bytes([shade]) * 64) for shade in (20, 255, 240)])
    assert (best(dark), best(bright)) == ("0", "1")
    assert broken == Failure(Code.ENGINE_ERROR, "the model computed a value that is not a finite number")


class Colours(nn.Module):
    """Which of its colours a picture has the most of."""

    def __init__(self) -> None:
        super().__init__()
        self.strength = nn.Parameter(torch.ones(3))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return 10 * self.strength * pixels.mean([2, 3])


def test_a_model_of_three_colours_sees_them_raw_and_from_files(tmp_path: Path) -> None:
    save_exported(tmp_path, Colours(), ["red", "green", "blue"], channels=3)
    engine = ClassifierEngine(spec_of(tmp_path, LIMITS, "colours"))
    engine.load()
    shades = {"red": (200, 30, 40), "green": (20, 180, 10), "blue": (0, 60, 250)}
    raw = [classify(bytes(shade) * 64) for shade in shades.values()]
    outcomes = run_batch(engine, raw)
    assert list(map(best, outcomes)) == list(shades)
    files, grey = [], Image.new("L", (20, 20), 90)
    for shade in shades.values():
        buffer = BytesIO()
        Image.new("RGB", (40, 30), shade).save(buffer, "PNG")
        files.append(classify(buffer.getvalue()))
    assert run_batch(engine, files) == outcomes
    buffer = BytesIO()
    grey.save(buffer, "PNG")
    (equal,) = run_batch(engine, [classify(buffer.getvalue())])
    assert isinstance(equal, Success)
    assert [entry.score for entry in equal.output.labels or ()] == pytest.approx([1 / 3] * 3)
    (refused,) = run_batch(engine, [classify(bytes(64))])
    assert refused == Failure(
        Code.INVALID,
        "must be a PNG, JPEG or WebP file, or 8 x 8 RGB pixels, 192 bytes; got 64 bytes of something else",
        "input.image",
    )


@pytest.mark.parametrize("channels", [0, 2, 4, "3", True])
def test_a_number_of_channels_that_is_none_is_a_load_error(tmp_path: Path, channels: object) -> None:
    save_exported(tmp_path, Colours(), ["red", "green", "blue"], channels=3)
    describe(tmp_path, ["red", "green", "blue"], channels=channels)
    with pytest.raises(EngineLoadError, match=r"model\.json: channels must be 1 \(grey\) or 3 \(RGB\), not"):
        ClassifierEngine(spec_of(tmp_path, LIMITS, "colours")).load()


class Impatient(Outcomes):
    """Cancels everything that is left once the first item is answered."""

    def finished(self, index: int, outcome: ItemOutcome) -> None:
        super().finished(index, outcome)
        self.cancelled = set(range(100))


def test_a_large_batch_is_run_in_groups_between_which_it_can_be_cancelled(tmp_path: Path) -> None:
    engine = tiny(tmp_path, max_batch_size=4)
    engine.load()
    items = [classify(bytes([shade]) * 64) for shade in range(10)]
    outcomes = Outcomes()
    assert engine.run(items, outcomes) == RunCost(10, 10)
    assert outcomes.steps == len(items) + 3
    assert all(isinstance(outcome, Success) for outcome in outcomes.by_index.values())

    impatient = Impatient()
    assert engine.run(items, impatient) == RunCost(4, 4)
    assert [index for index in range(10) if isinstance(impatient.by_index[index], Success)] == [0, 1, 2, 3]
    assert [impatient.by_index[index] for index in range(4, 10)] == [CancelledItem(TokenUsage())] * 6

    before = Outcomes(cancelled=(1,))
    engine.run([items[0], classify(bomb())], before)
    assert before.by_index[1] == CancelledItem(TokenUsage())


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:1000])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "model.pt").unlink(), r"holds no model \(model.pt is missing\)"),
        (lambda folder: (folder / "model.json").unlink(), r"holds no model \(model.json is missing\)"),
        (lambda folder: truncate(folder / "model.pt"), r"model\.pt cannot be loaded: RuntimeError"),
        (lambda folder: (folder / "model.pt").write_bytes(b""), r"model\.pt cannot be loaded"),
        (
            lambda folder: torch.save({"weight": torch.zeros(2)}, folder / "model.pt"),
            r"model\.pt cannot be loaded: RuntimeError",
        ),
        (lambda folder: (folder / "model.json").write_text("{"), r"model\.json cannot be loaded"),
        (lambda folder: (folder / "model.json").write_text("[]"), r"model\.json cannot be loaded"),
        (lambda folder: (folder / "model.json").write_text("{}"), r"model\.json has no 'labels'"),
        (
            lambda folder: describe(folder, ["a", "b", "c"]),
            r"model\.pt gives logits \(1, 2\) .* model\.json has 3 labels",
        ),
        (lambda folder: describe(folder, ["a", "a"]), r"model\.json: a label is listed twice"),
        (lambda folder: describe(folder, []), r"model\.json: labels must be"),
        (lambda folder: describe(folder, ["a", "b"], 0), r"model\.json: height must be a whole number from 1, not 0"),
        (lambda folder: describe(folder, ["a", "b"], "8"), r"model\.json: height must be .* not '8'"),
        (lambda folder: describe(folder, ["a", "b"], 5_000), r"model\.json: 5000 x 5000 pixels are more than"),
    ],
)
def test_a_folder_that_holds_no_such_program_is_a_load_error(
    tmp_path: Path, damage: Callable[[Path], object], said: str
) -> None:
    engine = tiny(tmp_path)
    damage(tmp_path)
    with pytest.raises(EngineLoadError, match=f"^tiny: {tmp_path}.*{said}"):
        engine.load()
    with pytest.raises(EngineLoadError, match="tiny: not loaded"):
        engine.run([classify(bytes(64))], Outcomes())


class TwoAnswers(nn.Module):
    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return pixels, pixels


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (nn.Conv2d(3, 2, 1), r"model\.pt does not take pixels \(1, 1, 8, 8\): RuntimeError"),
        (nn.Identity(), r"model\.pt gives logits \(1, 1, 8, 8\)"),
        (TwoAnswers(), r"model\.pt gives a tuple, not logits"),
    ],
)
def test_a_program_of_another_kind_is_a_load_error(tmp_path: Path, network: nn.Module, said: str) -> None:
    with pytest.raises(EngineLoadError, match=said):
        tiny(tmp_path, network).load()


def test_an_exported_program_for_one_picture_only_is_a_load_error(tmp_path: Path) -> None:
    program = torch.export.export(Brightness(), (torch.zeros(1, 1, 8, 8),))
    torch.export.save(program, tmp_path / EXPORTED.file)
    describe(tmp_path, ["dark", "bright"])
    with pytest.raises(EngineLoadError, match=r"model\.pt2 does not take pixels \(32, 1, 8, 8\)"):
        ClassifierEngine(spec_of(tmp_path, LIMITS)).load()
    truncate(tmp_path / EXPORTED.file)
    with pytest.raises(EngineLoadError, match=r"model\.pt2 cannot be loaded"):
        ClassifierEngine(spec_of(tmp_path, LIMITS)).load()


@pytest.mark.parametrize("asked", [{"dtype": "bfloat16"}, {"quantization": "int8"}])
def test_the_numbers_of_a_program_cannot_be_changed(digits: ModelVersion, asked: dict[str, str]) -> None:
    [name] = asked
    with pytest.raises(EngineLoadError, match=f"digits: {name}: torch-classifier runs a program as it was saved"):
        create_engine(EngineSpec(replace(digits, **asked), str(MODELS_DIR), THREADS))  # type: ignore[arg-type] # strings, both
