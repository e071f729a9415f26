"""The plan of a rollout, from a YAML file or from the body of a call."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fairlane.rollout_records import RolloutGuards
from fairlane_server.models.routes import VERSION_PATTERN, StickyBy
from fairlane_server.rollouts.changes import RolloutPlan
from fairlane_server.rollouts.guards import check_guards
from fairlane_server.yaml_config import Reader, YamlNode, load_json, load_yaml_with_lines

_LONGEST_STEP_S = 365 * 86_400


def load_plan(path: Path, candidate: str) -> RolloutPlan:
    """The plan of a file for this candidate; what the file leaves out has its default. Raises ConfigError with file,
    line and reason."""
    return _plan({"candidate": candidate, **load_yaml_with_lines(path).read({}, _PLAN)})


def plan_of_json(raw: bytes) -> RolloutPlan:
    """The plan of a call's body, which names the candidate. Raises ConfigError with the key and the reason."""
    return _plan(load_json(raw).read({"candidate": partial(YamlNode.string, pattern=VERSION_PATTERN)}, _PLAN))


def _plan(given: Mapping[str, Any]) -> RolloutPlan:
    values = dict(given)
    if "least_step_s" in values:
        values["least_step_ms"] = round(values.pop("least_step_s") * 1_000)
    return RolloutPlan(**values)


def _guards(node: YamlNode) -> RolloutGuards:
    guards = RolloutGuards(**node.read({}, _GUARDS))
    try:
        check_guards(guards)
    except ValueError as error:
        field, _, reason = str(error).partition(": ")
        raise node.fields.get(field, node).error(reason) from None
    return guards


def _percents(node: YamlNode) -> tuple[float, ...]:
    return tuple(one.number(0, 100) for one in node.sequence())


def _ratio(node: YamlNode) -> float | None:
    """A ratio, or None for ``off``, which YAML reads as false."""
    return None if _is_off(node) else node.number(1, 1_000)


def _difference(node: YamlNode) -> float | None:
    return None if _is_off(node) else node.number(0, 1)


def _is_off(node: YamlNode) -> bool:
    # A zero is no false.
    return node.value is False or node.value == "off"


_part = partial(YamlNode.number, minimum=0, maximum=1)
_count = partial(YamlNode.integer, minimum=1)
_GUARDS: dict[str, Reader] = {
    "most_added_failures": _part,
    "most_latency_ratio": _ratio,
    "latency_quantile": _part,
    "most_cost_ratio": _ratio,
    "most_lost_quality": _difference,
    "false_rollback_rate": _part,
    "false_pass_rate": _part,
    "least_requests": _count,
    "least_values": _count,
    "require_quality": YamlNode.boolean,
    "most_control_failures": _part,
    "key_correlation": _part,
}
_PLAN: dict[str, Reader] = {
    "steps": _percents,
    "least_step_s": partial(YamlNode.number, minimum=0, maximum=_LONGEST_STEP_S),
    "sticky_by": partial(YamlNode.choice, kind="sticky key", known=tuple(StickyBy)),
    "needs_approval": YamlNode.boolean,
    "guards": _guards,
}
