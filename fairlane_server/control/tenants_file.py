"""Tenants of a deployment, read from ``deploy/tenants.yaml``. The file is accepted as a whole or not at all."""

import re
from pathlib import Path

from fairlane.names import TENANT_PATTERN
from fairlane.outcomes import CacheMode, Degradation, Priority
from fairlane.records import TenantGroup, TenantSpec
from fairlane_server.yaml_config import YamlNode, cycle_from, load_yaml_with_lines

_MODEL = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_REQUIRED = frozenset({"tenant"})
_QUOTAS = frozenset({"requests_per_s", "burst_requests", "tokens_per_minute", "tokens_per_day"})
_QUEUE = frozenset({"max_requests", "max_bytes"})
_PER_REQUEST = frozenset({"max_prompt_tokens", "max_completion_tokens"})
_OPTIONAL = _PER_REQUEST | frozenset(
    {"weight", "classes", "models", "services", "pool", "queue", "quotas", "groups", "forbid", "cache"}
)
# Of weights, which divide service, and of rates, which divide waiting times. Beyond these bounds sums would lose their
# small parts, and times would overflow their fields.
_LEAST_RATE, _LARGEST_RATE = 0.001, 1_000_000

FORBIDDABLE = tuple(step for step in Degradation if step is not Degradation.NO_HISTORY)
"""Degradations that a tenant may forbid. A missing history is a failure and not a step that the dispatcher chooses."""


def load_tenants(path: Path) -> tuple[TenantSpec, ...]:
    """Read the tenants in file order.

    Raises ConfigError with file, line and reason: unknown or missing keys, values out of bounds, unknown classes or
    degradations, duplicate tenants or groups, groups with a missing parent or a cycle of parents, a dedicated pool of
    two tenants.
    """
    root = load_yaml_with_lines(path).mapping(frozenset({"tenants"}))["tenants"]
    tenants: dict[str, TenantSpec] = {}
    owners: dict[str, str] = {}
    for entry in root.sequence():
        spec = _tenant(entry)
        if spec.tenant in tenants:
            raise entry.fields["tenant"].error(f"{spec.tenant!r} is already defined")
        if spec.pool is not None and owners.setdefault(spec.pool, spec.tenant) != spec.tenant:
            raise entry.fields["pool"].error(f"{spec.pool!r} is already the dedicated pool of {owners[spec.pool]!r}")
        tenants[spec.tenant] = spec
    return tuple(tenants.values())


def check_numbers(spec: TenantSpec) -> None:
    """Check a specification that was not read from a file against the file's bounds. Raises ValueError."""
    rates = {"weight": spec.weight, "requests_per_s": spec.requests_per_s}
    rates |= {f"weight of group {group.group}": group.weight for group in spec.groups}
    counts = {
        "max_queue_requests": spec.max_queue_requests,
        "max_queue_bytes": spec.max_queue_bytes,
        "burst_requests": spec.burst_requests,
        "tokens_per_minute": spec.tokens_per_minute,
        "tokens_per_day": spec.tokens_per_day,
        "max_prompt_tokens": spec.max_prompt_tokens,
        "max_completion_tokens": spec.max_completion_tokens,
    }
    for name, rate in rates.items():
        if rate is not None and not _LEAST_RATE <= rate <= _LARGEST_RATE:
            raise ValueError(f"{name}: must be from {_LEAST_RATE} to {_LARGEST_RATE}, not {rate}")
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{name}: must be at least 1, not {count}")


def _tenant(entry: YamlNode) -> TenantSpec:
    fields = entry.mapping(_REQUIRED, _OPTIONAL)
    queue = fields["queue"].mapping(frozenset(), _QUEUE) if "queue" in fields else {}
    quotas = fields["quotas"].mapping(frozenset(), _QUOTAS) if "quotas" in fields else {}
    default = TenantSpec(tenant="default")
    return TenantSpec(
        tenant=fields["tenant"].string(TENANT_PATTERN),
        weight=_rate(fields["weight"]) if "weight" in fields else default.weight,
        classes=_classes(fields["classes"]) if "classes" in fields else default.classes,
        models=fields["models"].strings(_MODEL) if "models" in fields else default.models,
        services=fields["services"].strings(TENANT_PATTERN) if "services" in fields else default.services,
        pool=fields["pool"].string(TENANT_PATTERN) if "pool" in fields else None,
        max_queue_requests=queue["max_requests"].integer(1) if "max_requests" in queue else default.max_queue_requests,
        max_queue_bytes=queue["max_bytes"].integer(1) if "max_bytes" in queue else default.max_queue_bytes,
        requests_per_s=_rate(quotas["requests_per_s"]) if "requests_per_s" in quotas else None,
        burst_requests=_whole(quotas, "burst_requests"),
        tokens_per_minute=_whole(quotas, "tokens_per_minute"),
        tokens_per_day=_whole(quotas, "tokens_per_day"),
        groups=_groups(fields["groups"]) if "groups" in fields else (),
        forbidden_degradations=_degradations(fields["forbid"]) if "forbid" in fields else (),
        max_prompt_tokens=_whole(fields, "max_prompt_tokens"),
        max_completion_tokens=_whole(fields, "max_completion_tokens"),
        cache=_cache(fields["cache"]) if "cache" in fields else default.cache,
    )


def _rate(node: YamlNode) -> float:
    rate = node.number(above=0)
    if not _LEAST_RATE <= rate <= _LARGEST_RATE:
        raise node.error(f"must be from {_LEAST_RATE} to {_LARGEST_RATE}, not {node.value}")
    return rate


def _groups(node: YamlNode) -> tuple[TenantGroup, ...]:
    nodes: dict[str, YamlNode] = {}
    groups: dict[str, TenantGroup] = {}
    for entry in node.sequence():
        fields = entry.mapping(frozenset({"group"}), frozenset({"weight", "parent"}))
        name = fields["group"].string(TENANT_PATTERN)
        if name in groups:
            raise fields["group"].error(f"{name!r} is already defined on line {nodes[name].fields['group'].line}")
        nodes[name] = entry
        groups[name] = TenantGroup(
            group=name,
            weight=_rate(fields["weight"]) if "weight" in fields else 1.0,
            parent=fields["parent"].string(TENANT_PATTERN) if "parent" in fields else None,
        )
    # In the file a parent may come after its children.
    for name, group in groups.items():
        if group.parent is not None and group.parent not in groups:
            known = ", ".join(groups)
            raise nodes[name].fields["parent"].error(f"unknown group {group.parent!r}; known here: {known}")
    parents = {name: group.parent for name, group in groups.items()}
    for name in groups:
        if circle := cycle_from(name, parents):
            raise nodes[name].fields["parent"].error(f"the parents go round in a circle: {' -> '.join(circle)}")
    return tuple(groups.values())


def _degradations(node: YamlNode) -> tuple[str, ...]:
    names = node.strings()
    for item, name in zip(node.items, names, strict=True):
        if name not in FORBIDDABLE:
            raise item.error(f"unknown degradation {name!r}; known: {', '.join(FORBIDDABLE)}")
    return names


def _cache(node: YamlNode) -> str:
    mode = node.string()
    if mode not in set(CacheMode):
        raise node.error(f"unknown cache {mode!r}; known: {', '.join(CacheMode)}")
    return mode


def _whole(fields: dict[str, YamlNode], name: str) -> int | None:
    return fields[name].integer(1) if name in fields else None


def _classes(node: YamlNode) -> tuple[str, ...]:
    classes = node.strings()
    for item, name in zip(node.items, classes, strict=True):
        if name not in set(Priority):
            raise item.error(f"unknown class {name!r}; known: {', '.join(Priority)}")
    if not classes:
        raise node.error("at least one class is needed")
    return classes
