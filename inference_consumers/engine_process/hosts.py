"""Engine processes of a pool: what each is made from, and how it is started. Part of the composition root."""

import os
import sys
from collections.abc import Mapping, Sequence

from fairlane.records import ModelVersion
from fairlane.settings import Settings
from inference_consumers.engine_process.host import EngineCommand, EngineHost
from inference_consumers.engine_process.messages import EngineSpec

MODULE = "inference_consumers.engine_process"

_VLLM = "vllm"
_VLLM_LOG_LEVEL = "VLLM_LOGGING_LEVEL"


def engine_hosts(settings: Settings, models: Sequence[ModelVersion]) -> list[EngineHost]:
    """One for each model, not started."""
    environment = without_settings(os.environ)
    return [EngineHost(_spec(settings, model), _command(settings, model, environment)) for model in models]


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what settings are read from: a process that runs a stranger's model gets no address, user
    or password of ours."""
    ours = {name.upper() for name in Settings.model_fields}
    return {name: value for name, value in environment.items() if name.upper() not in ours}


def _spec(settings: Settings, model: ModelVersion) -> EngineSpec:
    return EngineSpec(
        model=model,
        models_dir=str(settings.models_dir.absolute()),
        engine="simulated" if settings.engine == "simulated" else model.engine,
        threads=settings.engine_threads,
        device=settings.device,
        simulated_prefill_tokens_per_s=settings.simulated_prefill_tokens_per_s,
        simulated_decode_tokens_per_s=settings.simulated_decode_tokens_per_s,
        simulated_batch_ms=settings.simulated_batch_ms,
        simulated_memory_tokens=settings.simulated_memory_tokens,
        allow_unsafe_weights=settings.allow_unsafe_weights,
    )


def _command(settings: Settings, model: ModelVersion, environment: Mapping[str, str]) -> EngineCommand:
    is_vllm = model.engine == _VLLM and settings.engine != "simulated"
    if not is_vllm:
        return EngineCommand(sys.executable, MODULE, environment)
    # It has a log of its own, which is quiet unless somebody looks for something.
    debugging = {_VLLM_LOG_LEVEL: "DEBUG"} if settings.log_level == "DEBUG" else {}
    return EngineCommand(str(settings.vllm_python.absolute()), MODULE, {**debugging, **environment})
