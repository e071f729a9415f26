"""Models of a deployment, read from ``deploy/models.yaml``."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from fairlane.names import MODEL_PATTERN
from fairlane.outcomes import Task
from fairlane.records import ModelMetric, ModelVersion
from fairlane_server.artifacts.digest import DIGEST_PATTERN
from fairlane_server.models.routes import ALIAS_PATTERN, CHAMPION, VERSION_PATTERN
from fairlane_server.yaml_config import Reader, YamlNode, cycle_from, load_json, load_yaml_with_lines

# No dots: a pool is one part of a topic name, and dots separate the parts.
_POOL = re.compile(r"[a-z0-9][a-z0-9-]{0,38}")
_ENGINE = re.compile(r"[a-z][a-z0-9-]{0,63}")
_QUANTIZATION = re.compile(r"[a-z][a-z0-9_-]{0,63}")

_LARGEST_METRIC = 1e300
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ModelsFile:
    """The versions in file order, and by model its aliases with their versions."""

    versions: tuple[ModelVersion, ...]
    aliases: Mapping[str, Mapping[str, str]]


def load_models(path: Path) -> tuple[ModelVersion, ...]:
    """The versions of ``read_models``."""
    return read_models(path).versions


def read_models(path: Path) -> ModelsFile:
    """Read the file. The only version of a model is its champion; of several, one must have this alias.

    Raises ConfigError with file, line and reason: unknown or missing keys, values out of bounds, unknown tasks or data
    types, a version given twice, an alias given twice or no champion, a smaller model that is unknown or has no task of
    the larger one, a cycle of smaller models.
    """
    root = load_yaml_with_lines(path).mapping({"models"})["models"]
    entries: dict[tuple[str, str], YamlNode] = {}
    versions: dict[tuple[str, str], ModelVersion] = {}
    aliases: dict[str, dict[str, str]] = {}
    for entry in root.sequence():
        model, named = _model(entry)
        key = model.model, model.version
        if key in versions:
            raise entry.fields["version"].error(
                f"{model.version!r} of {model.model!r} is already defined on line {entries[key].line}"
            )
        entries[key], versions[key] = entry, model
        of_model = aliases.setdefault(model.model, {})
        for alias in named:
            if of_model.setdefault(alias, model.version) != model.version:
                raise entry.fields["aliases"].error(f"{alias!r} is also an alias of version {of_model[alias]!r}")
    if not versions:
        raise root.error("at least one model is needed")
    for entry, model in zip(root.items, versions.values(), strict=True):
        _default_champion(entry, model, versions, aliases[model.model])
        if "smaller_model" in entry.fields:
            _check_smaller(entry.fields["smaller_model"], model, tuple(versions.values()))
    return ModelsFile(tuple(versions.values()), aliases)


def version_of_json(model: str, version: str, raw: bytes) -> ModelVersion:
    """A version from a JSON object with the other keys of an entry of the file, but for those of aliases, and of files
    that must be fetched to be registered. Raises ConfigError with the key and the reason."""
    entry = load_json(raw)
    required = {name: reader for name, reader in SERVED.items() if name != "model"}
    optional = {name: _OPTIONAL[name] for name in (*SERVED_OPTIONS, "signature", "requirements", "metrics")}
    return version_of(entry, {"model": model, "version": version, **entry.read(required, optional)})


def _default_champion(
    entry: YamlNode, model: ModelVersion, versions: Iterable[tuple[str, str]], aliases: dict[str, str]
) -> None:
    if CHAMPION in aliases:
        return
    if sum(name == model.model for name, _ in versions) > 1:
        raise entry.fields["model"].error(f"one of the versions of {model.model!r} must have the alias {CHAMPION}")
    aliases[CHAMPION] = model.version


def _check_smaller(node: YamlNode, model: ModelVersion, models: Sequence[ModelVersion]) -> None:
    name = node.string(MODEL_PATTERN)
    smaller = [one for one in models if one.model == name]
    if not smaller:
        raise node.error(f"unknown model {name!r}; known here: {', '.join(dict.fromkeys(one.model for one in models))}")
    if not any(set(model.tasks).intersection(one.tasks) for one in smaller):
        raise node.error(f"{name!r} serves none of {', '.join(model.tasks)}")
    # Of a model with several versions the last one's: the versions of a model rarely differ in this.
    if circle := cycle_from(model.model, {one.model: one.smaller_model for one in models}):
        raise node.error(f"the smaller models go round in a circle: {' -> '.join(circle)}")


def _model(entry: YamlNode) -> tuple[ModelVersion, tuple[str, ...]]:
    """A version and its aliases."""
    given = entry.read({**SERVED, "version": partial(YamlNode.string, pattern=VERSION_PATTERN)}, _OPTIONAL)
    if "artifact_digest" in given and "source" not in given:
        raise entry.fields["artifact_digest"].error("needs `source`, from which the files of this digest come")
    aliases = given.pop("aliases", ())
    return version_of(entry, given), aliases


def version_of(entry: YamlNode, given: dict[str, Any]) -> ModelVersion:
    """The version that an entry describes, from the values of its fields. Raises ConfigError."""
    if given["pool"] in given.get("dedicated_pools", ()):
        item = entry.fields["dedicated_pools"].items[given["dedicated_pools"].index(given["pool"])]
        raise item.error(f"{given['pool']!r} is the model's shared pool")
    return ModelVersion(**given.pop("limits"), **given)


def _relative_path(node: YamlNode) -> str:
    path = PurePosixPath(node.string())
    if path.is_absolute() or ".." in path.parts:
        raise node.error(f"{node.value!r} must be a path inside the models folder")
    return str(path)


def _metrics(node: YamlNode) -> tuple[ModelMetric, ...]:
    names = frozenset(node.mapping(set(), set(node.fields)))
    figures = {name: node.fields[name].number(-_LARGEST_METRIC, _LARGEST_METRIC) for name in sorted(names)}
    return tuple(ModelMetric(name, value) for name, value in figures.items())


_whole = partial(YamlNode.integer, minimum=1)
_LIMITS: dict[str, Reader] = {
    "max_context_tokens": _whole,
    "max_output_tokens": partial(YamlNode.integer, minimum=0),
}
_OPTIONAL_LIMITS: dict[str, Reader] = {"max_batch_size": _whole, "max_batch_tokens": _whole}
SERVED: dict[str, Reader] = {
    "model": partial(YamlNode.string, pattern=MODEL_PATTERN),
    "pool": partial(YamlNode.string, pattern=_POOL),
    "engine": partial(YamlNode.string, pattern=_ENGINE),
    "tasks": partial(YamlNode.choices, kind="task", known=tuple(Task), least=1),
    "path": _relative_path,
    "limits": lambda node: node.read(_LIMITS, _OPTIONAL_LIMITS),
}
"""What every entry says of how a version is served."""
SERVED_OPTIONS: dict[str, Reader] = {
    "dedicated_pools": partial(YamlNode.strings, pattern=_POOL),
    "smaller_model": partial(YamlNode.string, pattern=MODEL_PATTERN),
    "dtype": partial(YamlNode.choice, kind="data type", known=_DTYPES),
    "quantization": partial(YamlNode.string, pattern=_QUANTIZATION),
    "tensor_parallel_size": _whole,
}
"""What an entry may say of it."""
_OPTIONAL: dict[str, Reader] = {
    **SERVED_OPTIONS,
    "aliases": partial(YamlNode.strings, pattern=ALIAS_PATTERN),
    "source": YamlNode.string,
    "artifact_digest": partial(YamlNode.string, pattern=DIGEST_PATTERN),
    "signature": YamlNode.string,
    "requirements": YamlNode.strings,
    "metrics": _metrics,
}
