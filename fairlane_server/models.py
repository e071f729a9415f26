"""Models of a deployment, read from ``deploy/models.yaml``."""

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from fairlane.names import MODEL_PATTERN
from fairlane.outcomes import Task
from fairlane.records import ModelVersion
from fairlane_server.yaml_config import YamlNode, cycle_from, load_yaml_with_lines

# No dots: a pool is one part of a topic name, and dots separate the parts.
_POOL = re.compile(r"[a-z0-9][a-z0-9-]{0,38}")
_ENGINE = re.compile(r"[a-z][a-z0-9-]{0,63}")
_QUANTIZATION = re.compile(r"[a-z][a-z0-9_-]{0,63}")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_MODEL_KEYS = frozenset({"model", "version", "pool", "engine", "tasks", "path", "limits"})
_LIMIT_KEYS = frozenset({"max_context_tokens", "max_output_tokens"})
_OPTIONAL_MODEL_KEYS = frozenset({"dedicated_pools", "smaller_model", "dtype", "quantization", "tensor_parallel_size"})
_DTYPES = ("float32", "bfloat16", "float16")
_OPTIONAL_LIMIT_KEYS = frozenset({"max_batch_size", "max_batch_tokens"})


def load_models(path: Path) -> tuple[ModelVersion, ...]:
    """Read the models in file order.

    Raises ConfigError with file, line and reason: unknown or missing keys, values out of bounds, unknown tasks or data
    types, a duplicate model, a smaller model that is unknown or lacks a task of the larger one, a cycle of smaller
    models.
    """
    root = load_yaml_with_lines(path).mapping(frozenset({"models"}))["models"]
    models: dict[str, ModelVersion] = {}
    for entry in root.sequence():
        model = _model(entry)
        if model.model in models:
            first = root.line_of(list(models).index(model.model))
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
    if missing := [task for task in model.tasks if task not in models[name].tasks]:
        raise node.error(f"{name!r} does not serve {', '.join(missing)}")
    if circle := cycle_from(model.model, {one.model: one.smaller_model for one in models.values()}):
        raise node.error(f"the smaller models go round in a circle: {' -> '.join(circle)}")


def _model(entry: YamlNode) -> ModelVersion:
    fields = entry.mapping(_MODEL_KEYS, _OPTIONAL_MODEL_KEYS)
    limits = fields["limits"].mapping(_LIMIT_KEYS, _OPTIONAL_LIMIT_KEYS)
    defaults = {name: limits[name].integer(1) for name in _OPTIONAL_LIMIT_KEYS if name in limits}
    return ModelVersion(
        model=fields["model"].string(MODEL_PATTERN),
        version=fields["version"].string(_VERSION),
        pool=fields["pool"].string(_POOL),
        engine=fields["engine"].string(_ENGINE),
        tasks=_tasks(fields["tasks"]),
        path=_relative_path(fields["path"]),
        max_context_tokens=limits["max_context_tokens"].integer(1),
        max_output_tokens=limits["max_output_tokens"].integer(0),
        **defaults,
        dedicated_pools=_dedicated_pools(fields) if "dedicated_pools" in fields else (),
        smaller_model=fields["smaller_model"].string(MODEL_PATTERN) if "smaller_model" in fields else None,
        dtype=_dtype(fields["dtype"]) if "dtype" in fields else None,
        quantization=fields["quantization"].string(_QUANTIZATION) if "quantization" in fields else None,
        tensor_parallel_size=fields["tensor_parallel_size"].integer(1) if "tensor_parallel_size" in fields else 1,
    )


def _dtype(node: YamlNode) -> str:
    dtype = node.string()
    if dtype not in _DTYPES:
        raise node.error(f"unknown data type {dtype!r}; known: {', '.join(_DTYPES)}")
    return dtype


def _dedicated_pools(fields: Mapping[str, YamlNode]) -> tuple[str, ...]:
    node = fields["dedicated_pools"]
    pools = node.strings(_POOL)
    for item, pool in zip(node.items, pools, strict=True):
        if pool == fields["pool"].value:
            raise item.error(f"{pool!r} is the model's shared pool")
    return pools


def _tasks(node: YamlNode) -> tuple[str, ...]:
    tasks = node.strings()
    if not tasks:
        raise node.error("at least one task is needed")
    for item, task in zip(node.items, tasks, strict=True):
        if task not in set(Task):
            raise item.error(f"unknown task {task!r}; known: {', '.join(Task)}")
    return tasks


def _relative_path(node: YamlNode) -> str:
    path = PurePosixPath(node.string())
    if path.is_absolute() or ".." in path.parts:
        raise node.error(f"{node.value!r} must be a path inside the models folder")
    return str(path)
