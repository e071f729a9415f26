"""The models that ``fairlane models sync`` follows: registered models of MLflow, and how their versions are served."""

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fairlane.records import ModelVersion
from fairlane_server.models.models_file import SERVED, SERVED_OPTIONS, version_of
from fairlane_server.models.rollout_arms import RESERVED
from fairlane_server.models.routes import ALIAS_PATTERN, CHAMPION
from fairlane_server.yaml_config import Reader, YamlNode, load_yaml_with_lines

_REGISTERED = re.compile(r"[^/@:'\"\\]{1,250}")
_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
_LATEST_NUMBER = 10**18


@dataclass(frozen=True, slots=True)
class FollowedModel:
    """A registered model and the model here that gets its versions.

    ``template`` is a version without its name, source and files. The name here is ``version_prefix`` and the number in
    the registry. Versions before ``first_version`` are left out. ``alias`` is moved to each new version; None moves
    none.
    """

    registered_model: str
    template: ModelVersion
    version_prefix: str = ""
    first_version: int = 1
    alias: str | None = None


def read_followed_models(path: Path) -> tuple[FollowedModel, ...]:
    """Read the file. Raises ConfigError with file, line and reason: unknown or missing keys, values out of bounds, a
    model that two registered models would fill."""
    root = load_yaml_with_lines(path).mapping({"models"})["models"]
    followed: dict[str, FollowedModel] = {}
    for entry in root.sequence():
        one = _followed(entry)
        if one.template.model in followed:
            raise entry.fields["model"].error(f"{one.template.model!r} is already filled by another entry")
        followed[one.template.model] = one
    if not followed:
        raise root.error("at least one model is needed")
    return tuple(followed.values())


def _followed(entry: YamlNode) -> FollowedModel:
    given = entry.read({**SERVED, "registered_model": partial(YamlNode.string, pattern=_REGISTERED)}, _OPTIONAL)
    options = {name: given.pop(name) for name in ("registered_model", *_FOLLOWING) if name in given}
    return FollowedModel(template=version_of(entry, {**given, "version": "0"}), **options)


def _alias(node: YamlNode) -> str:
    if node.string(ALIAS_PATTERN) == CHAMPION:
        raise node.error(f"{CHAMPION!r} gets all traffic: a new version is proposed under another alias")
    if node.string() in RESERVED:
        raise node.error(f"{node.string()!r} is an arm of rollouts")
    return node.string()


_FOLLOWING: dict[str, Reader] = {
    "version_prefix": partial(YamlNode.string, pattern=_PREFIX),
    "first_version": partial(YamlNode.integer, minimum=1, maximum=_LATEST_NUMBER),
    "alias": _alias,
}
_OPTIONAL: dict[str, Reader] = {**SERVED_OPTIONS, **_FOLLOWING}
