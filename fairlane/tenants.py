"""The tenants of a deployment, from ``deploy/tenants.yaml``."""

import re
from pathlib import Path

from fairlane.names import TENANT_PATTERN
from fairlane.outcomes import Priority
from fairlane.records import TenantSpec
from fairlane.yaml_config import Node, load_yaml_with_lines

_MODEL = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_REQUIRED = frozenset({"tenant"})
_QUOTAS = frozenset({"requests_per_s", "burst_requests", "tokens_per_minute", "tokens_per_day"})
_QUEUE = frozenset({"max_requests", "max_bytes"})
_OPTIONAL = frozenset({"weight", "classes", "models", "services", "pool", "queue", "quotas"})


def load_tenants(path: Path) -> tuple[TenantSpec, ...]:
    """Read the tenants in the order of the file. Raises ConfigError with file and line."""
    root = load_yaml_with_lines(path).mapping(frozenset({"tenants"}))["tenants"]
    tenants: dict[str, TenantSpec] = {}
    for entry in root.sequence():
        spec = _tenant(entry)
        if spec.tenant in tenants:
            raise entry.fields["tenant"].error(f"{spec.tenant!r} is already defined")
        tenants[spec.tenant] = spec
    return tuple(tenants.values())


def _tenant(entry: Node) -> TenantSpec:
    fields = entry.mapping(_REQUIRED, _OPTIONAL)
    queue = fields["queue"].mapping(frozenset(), _QUEUE) if "queue" in fields else {}
    quotas = fields["quotas"].mapping(frozenset(), _QUOTAS) if "quotas" in fields else {}
    default = TenantSpec(tenant="default")
    return TenantSpec(
        tenant=fields["tenant"].string(TENANT_PATTERN),
        weight=fields["weight"].number(above=0) if "weight" in fields else default.weight,
        classes=_classes(fields["classes"]) if "classes" in fields else default.classes,
        models=fields["models"].strings(_MODEL) if "models" in fields else default.models,
        services=fields["services"].strings(TENANT_PATTERN) if "services" in fields else default.services,
        pool=fields["pool"].string(TENANT_PATTERN) if "pool" in fields else None,
        max_queue_requests=queue["max_requests"].integer(1) if "max_requests" in queue else default.max_queue_requests,
        max_queue_bytes=queue["max_bytes"].integer(1) if "max_bytes" in queue else default.max_queue_bytes,
        requests_per_s=quotas["requests_per_s"].number(above=0) if "requests_per_s" in quotas else None,
        burst_requests=_whole(quotas, "burst_requests"),
        tokens_per_minute=_whole(quotas, "tokens_per_minute"),
        tokens_per_day=_whole(quotas, "tokens_per_day"),
    )


def _whole(fields: dict[str, Node], name: str) -> int | None:
    return fields[name].integer(1) if name in fields else None


def _classes(node: Node) -> tuple[str, ...]:
    classes = node.strings()
    for item, name in zip(node.items, classes, strict=True):
        if name not in set(Priority):
            raise item.error(f"unknown class {name!r}; known: {', '.join(Priority)}")
    if not classes:
        raise node.error("at least one class is needed")
    return classes
