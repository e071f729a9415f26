"""A file of rules, which divide the requests for models among their versions."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from fairlane.names import MODEL_PATTERN, TENANT_PATTERN
from fairlane.outcomes import Task
from fairlane.records import RouteArm, RouteRule
from fairlane_server.models.routes import ALIAS_PATTERN, StickyBy
from fairlane_server.yaml_config import Reader, YamlNode, load_json, load_yaml_with_lines


def load_rules(path: Path) -> Mapping[str, tuple[RouteRule, ...]]:
    """The rules of each model in the file; a model with an empty list has none from then on.

    Raises ConfigError with file, line and reason. What versions and aliases there are is not known here: see
    ``check_route``.
    """
    root = load_yaml_with_lines(path).mapping({"routes"})["routes"]
    rules: dict[str, tuple[RouteRule, ...]] = {}
    for entry in root.sequence():
        given = entry.read(_ROUTE, {})
        if given["model"] in rules:
            raise entry.fields["model"].error(f"{given['model']!r} is in the file twice")
        rules[given["model"]] = given["rules"]
    return rules


def rules_of_json(raw: bytes) -> tuple[RouteRule, ...]:
    """All rules of one model, from a JSON object with the key ``rules``. Raises ConfigError with the key and the
    reason."""
    rules: tuple[RouteRule, ...] = load_json(raw).read({"rules": _rules}, {})["rules"]
    return rules


def _rules(node: YamlNode) -> tuple[RouteRule, ...]:
    return tuple(_rule(entry) for entry in node.sequence())


def _rule(entry: YamlNode) -> RouteRule:
    given = entry.read(_RULE, _RULE_OPTIONAL)
    return RouteRule(**{_FIELDS.get(name, name): value for name, value in given.items()})


def _arms(node: YamlNode) -> tuple[RouteArm, ...]:
    return tuple(RouteArm(**entry.read(_ARM, {})) for entry in node.sequence())


_FIELDS = {"from": "from_ms", "until": "until_ms"}
_name = partial(YamlNode.string, pattern=ALIAS_PATTERN)
_ROUTE: dict[str, Reader] = {"model": partial(YamlNode.string, pattern=MODEL_PATTERN), "rules": _rules}
_ARM: dict[str, Reader] = {
    "arm": _name,
    "target": YamlNode.string,
    "percent": partial(YamlNode.number, minimum=0, maximum=100),
}
_RULE: dict[str, Reader] = {"rule": _name, "arms": _arms}
_RULE_OPTIONAL: dict[str, Reader] = {
    "tenants": partial(YamlNode.strings, pattern=TENANT_PATTERN),
    "callers": YamlNode.strings,
    "tasks": partial(YamlNode.choices, kind="task", known=tuple(Task)),
    "from": YamlNode.utc_ms,
    "until": YamlNode.utc_ms,
    "sticky_by": partial(YamlNode.choice, kind="sticky key", known=tuple(StickyBy)),
}
