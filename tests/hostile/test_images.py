"""Images of a tenant that means harm, through a real dispatcher, consumer and engines, with another tenant's requests
beside them: each is refused by name, and nobody else notices."""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from torch import nn

from benchmarks.processes import peak_bytes
from deploy.local.services import Service
from deploy.models.prepare import prepare, recipes
from fairlane.outcomes import Code, Outcome, Task
from fairlane.records import InferenceReply, InferenceRequest, ModelVersion, RequestInput
from tests.kit.pipeline import Pipeline, unique_name
from tests.kit.processes import ServiceProcess
from tests.kit.vision_kit import save_exported

pytestmark = [pytest.mark.full, pytest.mark.broker, pytest.mark.model]

PROJECT = Path(__file__).parents[2]
PATIENCE_MS = 240_000
START_S = 120.0
LARGEST = 4_096
MOST_GROWTH_BYTES = 600 << 20
"""Of an engine's process: what decoding the largest picture takes (docs/engines.md), and a half more."""


class Colours(nn.Module):
    """Which of its colours a picture has the most of."""

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return 10 * pixels.mean([2, 3])


def saved(image: Image.Image, format_: str, **options: Any) -> bytes:
    buffer = BytesIO()
    image.save(buffer, format_, **options)
    return buffer.getvalue()


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(width: int, height: int, *more: bytes, rows: bytes = bytes(72), colour: int = 0) -> bytes:
    """A grey picture of eight bits, or of another kind of ``colour``, with chunks before its pixels."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0))
    rest = b"".join(more) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + header + rest


def picture(side: int = 40) -> Image.Image:
    noise = np.random.default_rng(1).integers(0, 256, (side, side, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def with_scans(jpeg: bytes, scans: int) -> bytes:
    """The same with its last scan again and again."""
    last = jpeg[jpeg.rfind(b"\xff\xda") : -2]
    return jpeg[:-2] + last * (scans - jpeg.count(b"\xff\xda")) + b"\xff\xd9"


def bad_images() -> dict[str, tuple[bytes, str]]:
    """By name an image and what is said of it."""
    small, turned = picture(), picture().transpose(Image.Transpose.ROTATE_180)
    flat = Image.new("RGB", (LARGEST, LARGEST), (9, 9, 9))
    progressive = saved(small, "JPEG", progressive=True)
    frames: dict[str, Any] = {"save_all": True, "append_images": [turned]}
    damaged, too_large = "damaged or incomplete", "at most 16777216 are taken"
    jpeg, webp = saved(small, "JPEG"), saved(small, "WEBP")
    vp8x = b"VP8X" + struct.pack("<I", 10) + bytes(4) + (16_383).to_bytes(3, "little") * 2
    return {
        "a PNG bomb": (png(50_000, 50_000, rows=bytes(1 << 20), colour=2), too_large),
        "a WebP bomb": (b"RIFF" + struct.pack("<I", 4 + len(vp8x)) + b"WEBP" + vp8x, too_large),
        "a picture without pixels": (png(0, 8), "which is none"),
        "a small picture in 500 scans": (with_scans(progressive, 500), "500 scans; at most 100 are taken"),
        "the largest picture in 90 scans": (
            with_scans(saved(flat, "JPEG", progressive=True), 90),
            "pixels times scans are taken",
        ),
        "an animated PNG": (saved(small, "PNG", **frames), "is animated"),
        "an animated WebP": (saved(small, "WEBP", **frames), "is animated"),
        "half a PNG": (saved(small, "PNG")[:2_000], damaged),
        "half a JPEG": (jpeg[: len(jpeg) // 2], damaged),
        "half a progressive JPEG": (progressive[: len(progressive) // 2], damaged),
        "half a WebP": (webp[: len(webp) // 2], damaged),
        "a PNG of text that inflates": (png(8, 8, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(60 << 20)))), damaged),
        "a profile that inflates": (png(8, 8, chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(200 << 20)))), damaged),
        "a JPEG that never says its size": (b"\xff\xd8" + b"\xff\xe1\0\x02" * 200_000, damaged),
        "a JPEG of nothing but fillers": (b"\xff\xd8" + b"\xff" * 900_000, damaged),
        "a GIF": (saved(small, "GIF"), "must be a PNG, JPEG or WebP file"),
        "a TIFF": (saved(small, "TIFF"), "must be a PNG, JPEG or WebP file"),
        "text": (b"not a picture at all", "must be a PNG, JPEG or WebP file"),
    }


def odd_images() -> dict[str, bytes]:
    """What is unusual, large, or slow to read, and can be answered."""
    small = picture()
    transparent = small.convert("RGBA")
    transparent.putalpha(100)
    grey16 = Image.fromarray(np.arange(1_600, dtype=np.uint16).reshape(40, 40) * 40)
    flat = Image.new("RGB", (LARGEST, LARGEST), (9, 90, 200))
    see_through = flat.convert("RGBA")
    see_through.putalpha(100)
    return {
        "16 bits": saved(grey16, "PNG"),
        "CMYK": saved(small.convert("CMYK"), "JPEG"),
        "a palette": saved(small.quantize(64), "PNG"),
        "a palette with transparency": saved(small.quantize(64), "PNG", transparency=bytes(64)),
        "grey with transparency": saved(transparent.convert("LA"), "PNG"),
        "single bits": saved(small.convert("1"), "PNG"),
        "70,000 empty chunks": png(8, 8, chunk(b"tEXt", b"a\0") * 70_000),
        "pixels that inflate to more than there are": png(8, 8, rows=bytes(200 << 20)),
        "the largest": saved(flat, "PNG"),
        "the largest with transparency": saved(see_through, "WEBP", lossless=True),
        "the largest in CMYK scans": saved(flat.convert("CMYK"), "JPEG", progressive=True),
    }


def model(name: str, path: str, pool: str) -> ModelVersion:
    return ModelVersion(name, "1", pool, "torch-classifier", (str(Task.CLASSIFY),), path, 1, 0)


@dataclass
class Bench:
    """Two classifiers, of grey pictures and of colours, whose engines are at work."""

    pipeline: Pipeline
    consumer: ServiceProcess

    def engines(self) -> dict[int, int]:
        """The most memory that each engine's process has had so far."""
        return {child.pid: peak_bytes(child.pid) for child in psutil.Process(self.consumer.pid).children()}

    def requests(self, images: dict[str, bytes]) -> dict[tuple[str, str], InferenceRequest]:
        """One of each model for each image, by its name and the model's."""
        return {
            (name, served.model): self.pipeline.request(
                Task.CLASSIFY, model=served.model, input=RequestInput(image=image), timeout_ms=PATIENCE_MS
            )
            for name, image in images.items()
            for served in self.pipeline.models
        }


@pytest.fixture(scope="module")
def bench(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder, unique = tmp_path_factory.mktemp("hostile-images"), unique_name()
    prepare(PROJECT / ".fairlane/models", recipes(), print)
    models_dir = folder / "models"
    models_dir.mkdir()
    (models_dir / "digits").symlink_to(PROJECT / ".fairlane/models/digits")
    save_exported(models_dir / "colours", Colours(), ["red", "green", "blue"], channels=3)
    models = [model(f"{unique}-{name}", name, f"{unique}-pool") for name in ("digits", "colours")]
    env = {"MODELS_DIR": str(models_dir), "ENGINE_THREADS": "1", "DEVICE": "cpu"}
    with Pipeline(broker, folder, unique, models=models, env=env) as pipeline:
        dispatcher = pipeline.dispatcher()
        arguments = ("-m", "inference_consumers", "--pool", pipeline.pool)
        consumer = pipeline.launch(Service(f"consumer-{pipeline.pool}-1", arguments, {}))
        for process in (dispatcher, consumer):
            process.wait_ready(START_S)
        pipeline.wait_all_own()
        yield Bench(pipeline, consumer)


def test_hostile_images_are_refused_by_name_and_nobody_else_notices(bench: Bench) -> None:
    pipeline, engines = bench.pipeline, bench.engines()
    assert len(engines) == 2
    bad, odd = bad_images(), odd_images()
    hostile = bench.requests({name: image for name, (image, _) in bad.items()})
    unusual = bench.requests(odd)
    honest = [
        pipeline.request(Task.CLASSIFY, model=served.model, input=RequestInput(image=image), timeout_ms=PATIENCE_MS)
        for served in pipeline.models
        for image in [saved(picture(number + 8), "PNG") for number in range(20)]
    ]
    # Side by side, so that they come together into batches.
    others = iter(honest)
    for request in (*hostile.values(), *unusual.values()):
        pipeline.publish("a", request)
        if (other := next(others, None)) is not None:
            pipeline.publish("b", other)
    beside = pipeline.replies("b").wait([request.request_id for request in honest], START_S)
    assert {(answer.outcome, answer.code, answer.message) for answer in beside.values()} == {(Outcome.OK, None, None)}

    sent = {**hostile, **unusual}
    answers = pipeline.replies("a").wait([request.request_id for request in sent.values()], START_S)
    told: dict[tuple[str, str], InferenceReply] = {case: answers[request.request_id] for case, request in sent.items()}
    assert {case: told[case] for case in unusual if told[case].outcome != Outcome.OK} == {}
    for case in hostile:
        answer = told[case]
        assert (answer.outcome, answer.code, answer.field) == (Outcome.REJECTED, Code.INVALID, "input.image"), case
        assert bad[case[0]][1] in (answer.message or ""), case

    after = bench.engines()
    assert after.keys() == engines.keys(), "no engine's process ended"
    grown = {pid: after[pid] - before for pid, before in engines.items()}
    print(f"engines grew by {grown}")  # noqa: T201 - shown when the test fails
    assert max(grown.values()) < MOST_GROWTH_BYTES, grown
    assert bench.consumer.metric("fairlane_engine_restarts_total") == 0
    assert bench.consumer.metric("fairlane_dead_letters_total") == 0
    assert bench.consumer.alive
