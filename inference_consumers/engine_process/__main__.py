"""``python -m inference_consumers.engine_process DESCRIPTOR MODEL``: started by a consumer, never by hand."""

import math
import sys
from pathlib import Path

from inference_consumers.engine_process.child import main
from inference_consumers.engine_process.messages import EngineSpec
from inference_consumers.engines.protocol import Engine
from inference_consumers.engines.registry import create_engine
from inference_consumers.engines.simulated import SimulatedCost


def create(spec: EngineSpec) -> Engine:
    cost = SimulatedCost(
        prefill_tokens_per_s=spec.simulated_prefill_tokens_per_s or math.inf,
        decode_tokens_per_s=spec.simulated_decode_tokens_per_s or math.inf,
        batch_ms=spec.simulated_batch_ms,
    )
    return create_engine(
        spec.model,
        Path(spec.models_dir),
        spec.threads,
        device=spec.device,
        engine=spec.engine,
        simulated_cost=cost,
        simulated_memory_tokens=spec.simulated_memory_tokens,
        allow_unsafe_weights=spec.allow_unsafe_weights,
    )


if __name__ == "__main__":
    sys.exit(main(create))
