"""Models of a deployment, read from ``deploy/models.yaml``."""

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path, PurePosixPath

from fairlane.names import MODEL_PATTERN
from fairlane.outcomes import Task
from fairlane.records import ModelVersion
from fairlane_server.yaml_config import Reader, YamlNode, cycle_from, load_yaml_with_lines

# No dots: a pool is one part of a topic name, and dots separate the parts.
_POOL = re.compile(r"[a-z0-9][a-z0-9-]{0,38}")
_ENGINE = re.compile(r"[a-z][a-z0-9-]{0,63}")
_QUANTIZATION = re.compile(r"[a-z][a-z0-9_-]{0,63}")
VERSION_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_DTYPES = ("float32", "bfloat16", "float16")


def load_models(path: Path) -> tuple[ModelVersion, ...]:
    """Read the models in file order.

    Raises ConfigError with file, line and reason: unknown or missing keys, values out of bounds, unknown tasks or data
    types, a duplicate model, a smaller model that is unknown or has no task of the larger one, a cycle of smaller
    models.
    """
    root = load_yaml_with_lines(path).mapping({"models"})["models"]
    models: dict[str, ModelVersion] = {}
    for entry in root.sequence():
        model = _model(entry)
        if model.model in models:
            first = root.items[list(models).index(model.model)].line
            raise entry.fields["model"].error(f"{model.model!r} is already defined on line {first}")
        models[model.model] = model
    if not models:
        raise root.error("at least one model is needed")
    for entry, model in zip(root.items, models.values(), strict=True):
        if "smaller_model" in entry.fields:
            _check_smaller(entry.fields["smaller_model"], model, models)
    return tuple(models.values())


def _check_smaller(node: YamlNode, model: ModelVersion, models: Mapping[str, ModelVersion]) -> None:
    name = node.string(MODEL_PATTERN)
    if name not in models:
        raise node.error(f"unknown model {name!r}; known here: {', '.join(models)}")
    if not set(model.tasks).intersection(models[name].tasks):
        raise node.error(f"{name!r} serves none of {', '.join(model.tasks)}")
    if circle := cycle_from(model.model, {one.model: one.smaller_model for one in models.values()}):
        raise node.error(f"the smaller models go round in a circle: {' -> '.join(circle)}")


def _model(entry: YamlNode) -> ModelVersion:
    given = entry.read(_REQUIRED, _OPTIONAL)
    if given["pool"] in given.get("dedicated_pools", ()):
        item = entry.fields["dedicated_pools"].items[given["dedicated_pools"].index(given["pool"])]
        raise item.error(f"{given['pool']!r} is the model's shared pool")
    return ModelVersion(**given.pop("limits"), **given)


def _relative_path(node: YamlNode) -> str:
    path = PurePosixPath(node.string())
    if path.is_absolute() or ".." in path.parts:
        raise node.error(f"{node.value!r} must be a path inside the models folder")
    return str(path)


_whole = partial(YamlNode.integer, minimum=1)
_LIMITS: dict[str, Reader] = {
    "max_context_tokens": _whole,
    "max_output_tokens": partial(YamlNode.integer, minimum=0),
}
_OPTIONAL_LIMITS: dict[str, Reader] = {"max_batch_size": _whole, "max_batch_tokens": _whole}
_REQUIRED: dict[str, Reader] = {
    "model": partial(YamlNode.string, pattern=MODEL_PATTERN),
    "version": partial(YamlNode.string, pattern=VERSION_PATTERN),
    "pool": partial(YamlNode.string, pattern=_POOL),
    "engine": partial(YamlNode.string, pattern=_ENGINE),
    "tasks": partial(YamlNode.choices, kind="task", known=tuple(Task), least=1),
    "path": _relative_path,
    "limits": lambda node: node.read(_LIMITS, _OPTIONAL_LIMITS),
}
_OPTIONAL: dict[str, Reader] = {
    "dedicated_pools": partial(YamlNode.strings, pattern=_POOL),
    "smaller_model": partial(YamlNode.string, pattern=MODEL_PATTERN),
    "dtype": partial(YamlNode.choice, kind="data type", known=_DTYPES),
    "quantization": partial(YamlNode.string, pattern=_QUANTIZATION),
    "tensor_parallel_size": _whole,
}
