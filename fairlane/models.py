"""The models a deployment serves, from ``deploy/models.yaml``."""

import re
from pathlib import Path, PurePosixPath

from fairlane.outcomes import Task
from fairlane.records import ModelVersion
from fairlane.yaml_config import Node, load_yaml_with_lines

_MODEL = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
# A pool is part of topic names, where a dot separates.
_POOL = re.compile(r"[a-z0-9][a-z0-9-]{0,38}")
_ENGINE = re.compile(r"[a-z][a-z0-9-]{0,63}")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_MODEL_KEYS = frozenset({"model", "version", "pool", "engine", "tasks", "path", "limits"})
_LIMIT_KEYS = frozenset({"max_context_tokens", "max_output_tokens"})
_OPTIONAL_LIMIT_KEYS = frozenset({"max_batch_size", "max_batch_tokens"})


def load_models(path: Path) -> tuple[ModelVersion, ...]:
    """Read the models in the order of the file. Raises ConfigError with file and line."""
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
    return tuple(models.values())


def _model(entry: Node) -> ModelVersion:
    fields = entry.mapping(_MODEL_KEYS)
    limits = fields["limits"].mapping(_LIMIT_KEYS, _OPTIONAL_LIMIT_KEYS)
    defaults = {name: limits[name].integer(1) for name in _OPTIONAL_LIMIT_KEYS if name in limits}
    return ModelVersion(
        model=fields["model"].string(_MODEL),
        version=fields["version"].string(_VERSION),
        pool=fields["pool"].string(_POOL),
        engine=fields["engine"].string(_ENGINE),
        tasks=_tasks(fields["tasks"]),
        path=_relative_path(fields["path"]),
        max_context_tokens=limits["max_context_tokens"].integer(1),
        max_output_tokens=limits["max_output_tokens"].integer(0),
        **defaults,
    )


def _tasks(node: Node) -> tuple[str, ...]:
    tasks = node.strings()
    if not tasks:
        raise node.error("at least one task is needed")
    for item, task in zip(node.items, tasks, strict=True):
        if task not in set(Task):
            raise item.error(f"unknown task {task!r}; known: {', '.join(Task)}")
    return tasks


def _relative_path(node: Node) -> str:
    path = PurePosixPath(node.string())
    if path.is_absolute() or ".." in path.parts:
        raise node.error(f"{node.value!r} must be a path inside the models folder")
    return str(path)
