"""What models.yaml says of a model, and what vLLM is told."""

from pathlib import Path

import pytest
import yaml

from fairlane_server.models.models_file import load_models
from inference_consumers.engines.protocol import EngineLoadError, EngineSpec
from inference_consumers.engines.vllm_client import arguments_of

SHIPPED = yaml.safe_load(Path("deploy/models.yaml").read_text(encoding="utf-8"))


def served(tmp_path: Path, **fields: object) -> EngineSpec:
    """The shipped language model with these fields, alone."""
    [language] = [dict(model) for model in SHIPPED["models"] if model["model"] == "smollm2-135m-instruct"]
    del language["smaller_model"]
    file = tmp_path / "models.yaml"
    file.write_text(yaml.safe_dump(SHIPPED | {"models": [language | {"engine": "vllm"} | fields]}), encoding="utf-8")
    [model] = load_models(file)
    return EngineSpec(model, str(tmp_path))


def test_what_models_yaml_says_is_what_vllm_is_told(tmp_path: Path) -> None:
    model = served(tmp_path, dtype="bfloat16", quantization="fp8", tensor_parallel_size=2)
    told = arguments_of(model, on_cpu=False)
    assert (told["dtype"], told["quantization"], told["tensor_parallel_size"]) == ("bfloat16", "fp8", 2)
    assert (told["max_model_len"], told["max_num_seqs"]) == (
        model.limits.max_context_tokens,
        model.limits.max_batch_size,
    )
    assert told["enable_prefix_caching"] is True
    assert told["enforce_eager"] is False
    assert told["model"] == str(tmp_path / "smollm2-135m-instruct")


def test_what_it_does_not_say_depends_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPU_MEMORY_UTILIZATION", raising=False)
    model = served(tmp_path)
    on_cpu, on_gpu = arguments_of(model, on_cpu=True), arguments_of(model, on_cpu=False)
    assert (on_cpu["dtype"], on_gpu["dtype"]) == ("float32", "auto")
    assert on_cpu["enforce_eager"] is True
    assert on_gpu["gpu_memory_utilization"] == 0.9
    monkeypatch.setenv("GPU_MEMORY_UTILIZATION", "0.4")
    assert arguments_of(model, on_cpu=False)["gpu_memory_utilization"] == 0.4
    monkeypatch.setenv("GPU_MEMORY_UTILIZATION", "most")
    with pytest.raises(EngineLoadError, match="GPU_MEMORY_UTILIZATION is no number: 'most'"):
        arguments_of(model, on_cpu=False)
