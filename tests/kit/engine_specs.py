"""Specifications of engines for folders that a test made."""

from pathlib import Path
from typing import Any

from fairlane.records import ModelVersion
from inference_consumers.engines.protocol import EngineLimits, EngineSpec

THREADS = 2


def spec_of(
    folder: Path,
    limits: EngineLimits,
    name: str = "tiny",
    *,
    dtype: str | None = None,
    quantization: str | None = None,
    **options: Any,
) -> EngineSpec:
    """``options`` are fields of the EngineSpec; its device is the CPU."""
    model = ModelVersion(
        name,
        "1",
        "p",
        "torch",
        (),
        folder.name,
        limits.max_context_tokens,
        limits.max_output_tokens,
        limits.max_batch_size,
        limits.max_batch_tokens,
        dtype=dtype,
        quantization=quantization,
    )
    fields: dict[str, Any] = {"threads": THREADS, "device": "cpu"} | options
    return EngineSpec(model, str(folder.parent), **fields)
