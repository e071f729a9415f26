"""Engines by the name that ``deploy/models.yaml`` uses. torch is imported only where it is needed."""

import os
from pathlib import Path

from fairlane.records import ModelVersion
from inference_consumers.engines.protocol import Engine, EngineLimits, EngineLoadError
from inference_consumers.engines.simulated import FREE, SimulatedCost, SimulatedEngine

ENGINE_NAMES = (
    "torch-causal-lm",
    "torch-embedding",
    "torch-cross-encoder",
    "torch-classifier",
    "torchscript-classifier",
    "vllm",
    "simulated",
)


def limits_of(model: ModelVersion) -> EngineLimits:
    return EngineLimits(
        max_batch_size=model.max_batch_size,
        max_batch_tokens=model.max_batch_tokens,
        max_context_tokens=model.max_context_tokens,
        max_output_tokens=model.max_output_tokens,
    )


def create_engine(
    model: ModelVersion,
    models_dir: Path,
    threads: int,
    *,
    device: str = "auto",
    engine: str | None = None,
    simulated_cost: SimulatedCost = FREE,
    simulated_memory_tokens: int = 0,
    allow_unsafe_weights: bool = False,
) -> Engine:
    """The engine of a model, not loaded yet; ``engine`` overrides the one that models.yaml names.

    ``device`` (auto, cpu, cuda, cuda:N) and ``threads`` on the CPU (0 means one per core) are torch's.
    ``allow_unsafe_weights`` loads files that may run any code while they are loaded. Raises EngineLoadError for a name
    no engine has, and for what models.yaml asks of an engine that cannot do it.
    """
    # OpenMP reads this once, when torch is imported. By default its threads spin while they wait for one another,
    # which made generation 5 to 9 times slower on cores that other processes use as well.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    name = engine or model.engine
    path = models_dir / model.path
    limits = limits_of(model)
    match name:
        case "torch-causal-lm" | "torch-embedding" | "torch-cross-encoder":
            from inference_consumers.engines.causal_lm import CausalLmEngine
            from inference_consumers.engines.cross_encoder import CrossEncoderEngine
            from inference_consumers.engines.embedding import EmbeddingEngine
            from inference_consumers.engines.precision import device_of, dtype_of, is_int8

            engines = {kind.name: kind for kind in (CausalLmEngine, EmbeddingEngine, CrossEncoderEngine)}
            return engines[name](
                model.model,
                path,
                limits,
                threads,
                dtype=dtype_of(model),
                int8=is_int8(model),
                device=device_of(model, device),
                allow_unsafe_weights=allow_unsafe_weights,
            )
        case "torch-classifier" | "torchscript-classifier":
            from inference_consumers.engines.classifier import ClassifierEngine
            from inference_consumers.engines.precision import check_as_saved, device_of
            from inference_consumers.engines.vision_programs import EXPORTED, TORCHSCRIPT

            check_as_saved(model)
            format_ = EXPORTED if name == EXPORTED.engine else TORCHSCRIPT
            return ClassifierEngine(
                model.model,
                path,
                limits,
                threads,
                format_=format_,
                device=device_of(model, device),
                allow_unsafe_weights=allow_unsafe_weights,
            )
        case "vllm":
            from inference_consumers.engines.vllm_client import VllmOptions
            from inference_consumers.engines.vllm_engine import VllmEngine

            options = VllmOptions(
                model.dtype,
                model.quantization,
                model.tensor_parallel_size,
                device,
                allow_unsafe_weights=allow_unsafe_weights,
            )
            return VllmEngine(model.model, path, limits, threads, options)
        case "simulated":
            return SimulatedEngine(limits, simulated_cost, memory_tokens=simulated_memory_tokens)
        case _:
            raise EngineLoadError(
                f"{model.model}: {path}: no engine is called {name!r}; known: {', '.join(ENGINE_NAMES)}"
            )
