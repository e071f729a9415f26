"""Engines by the name that ``deploy/models.yaml`` uses. torch is imported only where it is needed."""

import os
from pathlib import Path

from fairlane.records import ModelVersion
from inference_consumers.engines.protocol import Engine, EngineLimits, EngineLoadError
from inference_consumers.engines.simulated import FREE, SimulatedCost, SimulatedEngine

ENGINE_NAMES = ("torch-causal-lm", "torch-embedding", "torch-classifier", "simulated")


def limits_of(model: ModelVersion) -> EngineLimits:
    """The limits that models.yaml gives the model."""
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
    engine: str | None = None,
    simulated_cost: SimulatedCost = FREE,
) -> Engine:
    """The engine of a model, not loaded yet; ``engine`` overrides the one that models.yaml names.

    ``threads`` is for torch on the CPU; 0 means one per core. Raises EngineLoadError for a name no engine has.
    """
    # OpenMP reads this once, when torch is imported. By default its threads spin while they wait for one another,
    # which made generation 5 to 9 times slower on cores that other processes use as well.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    name = engine or model.engine
    path = models_dir / model.path
    limits = limits_of(model)
    match name:
        case "torch-causal-lm":
            from inference_consumers.engines.causal_lm import CausalLmEngine

            return CausalLmEngine(model.model, path, limits, threads)
        case "torch-embedding":
            from inference_consumers.engines.embedding import EmbeddingEngine

            return EmbeddingEngine(model.model, path, limits, threads)
        case "torch-classifier":
            from inference_consumers.engines.classifier import ClassifierEngine

            return ClassifierEngine(model.model, path, limits, threads)
        case "simulated":
            return SimulatedEngine(limits, simulated_cost)
        case _:
            raise EngineLoadError(
                f"{model.model}: {path}: no engine is called {name!r}; known: {', '.join(ENGINE_NAMES)}"
            )
