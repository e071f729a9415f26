"""Engines by the name that ``deploy/models.yaml`` uses. torch is imported only where it is needed."""

import os

from inference_consumers.engines.protocol import Engine, EngineSpec
from inference_consumers.engines.simulated import SimulatedEngine

_ENGINE_NAMES = (
    "torch-causal-lm",
    "torch-embedding",
    "torch-cross-encoder",
    "torch-classifier",
    "torchscript-classifier",
    "static-ranking",
    "vllm",
    "openai-endpoint",
    "v2-endpoint",
    "simulated",
)


def create_engine(spec: EngineSpec) -> Engine:
    """The engine of a model, not loaded yet. Raises EngineLoadError for a name no engine has, and for what models.yaml
    asks of an engine that cannot do it."""
    # OpenMP reads this once, when torch is imported. By default its threads spin while they wait for one another,
    # which made generation 5 to 9 times slower on cores that other processes use as well.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    match spec.engine_name:
        case "torch-causal-lm":
            from inference_consumers.engines.causal_lm import CausalLmEngine

            return CausalLmEngine(spec)
        case "torch-embedding":
            from inference_consumers.engines.encoders import EmbeddingEngine

            return EmbeddingEngine(spec)
        case "torch-cross-encoder":
            from inference_consumers.engines.encoders import CrossEncoderEngine

            return CrossEncoderEngine(spec)
        case "torch-classifier" | "torchscript-classifier" as name:
            from inference_consumers.engines.classifier import EXPORTED, TORCHSCRIPT, ClassifierEngine

            return ClassifierEngine(spec, EXPORTED if name == EXPORTED.engine else TORCHSCRIPT)
        case "static-ranking":
            from inference_consumers.engines.static_ranker import StaticRankingEngine

            return StaticRankingEngine(spec)
        case "vllm":
            from inference_consumers.engines.vllm_engine import VllmEngine

            return VllmEngine(spec)
        case "openai-endpoint":
            from inference_consumers.engines.remote.engine import RemoteEngine
            from inference_consumers.engines.remote.openai_wire import OpenAiWire

            return RemoteEngine(spec, lambda spec, entry: OpenAiWire(spec, entry.max_rows))
        case "v2-endpoint":
            from inference_consumers.engines.remote.engine import RemoteEngine
            from inference_consumers.engines.remote.v2_wire import V2Wire

            return RemoteEngine(spec, lambda spec, entry: V2Wire(spec, entry.max_rows, entry.tensors))
        case "simulated":
            return SimulatedEngine(spec.limits, spec.simulated)
        case name:
            raise spec.error(f"{spec.path}: no engine is called {name!r}; known: {', '.join(_ENGINE_NAMES)}")
