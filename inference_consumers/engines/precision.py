"""Device, number format and CPU threads of a torch model, from settings and models.yaml."""

import torch

from fairlane.records import ModelVersion
from inference_consumers.engines.protocol import EngineLoadError

_INT8 = "int8"


def use_threads(threads: int) -> None:
    """Set the threads of this process; 0 leaves the choice, one per core, to torch."""
    if threads > 0:
        torch.set_num_threads(threads)


def device_of(model: ModelVersion, name: str) -> torch.device:
    """``name`` is auto (the first GPU when there is one), cpu, cuda or cuda:N. Raises EngineLoadError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise EngineLoadError(f"{model.model}: there is no device {name}; CUDA sees {torch.cuda.device_count()}")
    return device


def dtype_of(model: ModelVersion) -> torch.dtype:
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return dtypes[model.dtype or "float32"]


def is_int8(model: ModelVersion) -> bool:
    """Whether the model is to be quantized. Raises EngineLoadError for any other method than int8."""
    if model.quantization not in {None, _INT8}:
        raise EngineLoadError(
            f"{model.model}: {model.engine} knows no quantization {model.quantization!r}, only {_INT8!r}"
        )
    return model.quantization == _INT8


def check_as_saved(model: ModelVersion) -> None:
    """Raises EngineLoadError where models.yaml asks to change the numbers of a program, which were fixed when it was
    saved."""
    for name in ("dtype", "quantization"):
        if getattr(model, name) is not None:
            raise EngineLoadError(f"{model.model}: {name}: {model.engine} runs a program as it was saved")
