"""Topic families of ``topics.yaml``, and their topics for a set of tenants and pools."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from fairlane.names import TENANT_PATTERN, topic_name
from fairlane.outcomes import Priority
from fairlane.records import ModelVersion, TenantSpec, type_by_name
from fairlane.schema_files import data_path
from fairlane_server.yaml_config import YamlNode, load_yaml_with_lines

DELETE = "delete"
COMPACT = "compact"

_FAMILY = re.compile(r"[a-z][a-z0-9-]{0,63}")
_PLACEHOLDER = re.compile(r"\{([a-z]*)\}")
# A placeholder is a whole part of a name, so that a topic's name yields one value for it.
_PART = re.compile(r"[a-z0-9][a-z0-9-]{0,38}|\{[a-z]*\}")
_FIELD = re.compile(r"[a-z][a-z0-9_]*")

_REQUIRED = frozenset({"name", "description", "records", "key", "partitions", "writers", "readers"})
_OPTIONAL = frozenset({"partitions_by_tenant", "retention_ms", "cleanup", "max_message_bytes", "timestamp_type"})
_ROLES = ("tenant", "gateway", "backfill", "dispatcher", "consumer", "recorder", "operator", "replayer")
_CLEANUPS = (DELETE, COMPACT)
_TIMESTAMP_TYPES = ("CreateTime", "LogAppendTime")
_SCOPES = ((), ("tenant",), ("tenant", "service"), ("pool",), ("pool", "class"))
_DAY_MS = 86_400_000
_MAX_PARTITIONS = 10_000


@dataclass(frozen=True, slots=True)
class TopicFamily:
    """One entry of ``topics.yaml``.

    Attributes:
        family: its key in the file.
        name: the name of its topics, with the placeholders ``{tenant}``, ``{service}``, ``{pool}`` and ``{class}``;
            TOPIC_PREFIX comes before it.
        records: names of the records it carries; empty for a dead-letter topic, which carries any bytes.
        key: the field that is the message key, or ``original``.
        retention_ms: None for a compacted family.
        max_message_bytes: None for the broker's own limit.
        partitions_by_tenant: overrides of ``partitions``.
        writers, readers: roles that need ACLs; nothing creates the ACLs yet.
    """

    family: str
    name: str
    description: str
    records: tuple[str, ...]
    key: str
    partitions: int
    writers: tuple[str, ...]
    readers: tuple[str, ...]
    retention_ms: int | None = None
    cleanup: str = DELETE
    max_message_bytes: int | None = None
    timestamp_type: str = "CreateTime"
    partitions_by_tenant: Mapping[str, int] = field(default_factory=dict)

    @property
    def placeholders(self) -> tuple[str, ...]:
        return tuple(_PLACEHOLDER.findall(self.name))

    @property
    def config(self) -> dict[str, str]:
        config = {"cleanup.policy": self.cleanup, "message.timestamp.type": self.timestamp_type}
        if self.max_message_bytes is not None:
            config["max.message.bytes"] = str(self.max_message_bytes)
        if self.retention_ms is not None:
            config["retention.ms"] = str(self.retention_ms)
            if self.retention_ms < _DAY_MS:
                # Kafka deletes only closed segments, and by default a segment stays open for a week.
                config["segment.ms"] = str(self.retention_ms)
        return config

    def matches(self, topic: str) -> bool:
        """Whether a topic of this name would belong to this family."""
        pattern = _PLACEHOLDER.sub(TENANT_PATTERN.pattern, topic_name(self.name).replace(".", r"\."))
        return re.fullmatch(pattern, topic) is not None


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """Desired state of one topic."""

    name: str
    family: str
    partitions: int
    config: Mapping[str, str]
    records: tuple[str, ...]


def load_families(path: Path | None = None) -> tuple[TopicFamily, ...]:
    """Read the families in file order, by default from the file shipped with this installation.

    Raises ConfigError with file and line: unknown key, invalid name, unknown placeholder, record, role or value, a
    duplicate family or name, retention of a compacted family.
    """
    root = load_yaml_with_lines(path or data_path("topics.yaml")).mapping(frozenset({"families"}))["families"]
    if not isinstance(root.value, dict) or not root.fields:
        raise root.error("must be a mapping of at least one family")
    families: dict[str, TopicFamily] = {}
    for key, node in root.fields.items():
        if _FAMILY.fullmatch(key) is None:
            raise node.error(f"{key!r} cannot name a family: it does not match {_FAMILY.pattern}")
        family = _family(key, node)
        for other in families.values():
            if _may_collide(family.name, other.name):
                raise node.fields["name"].error(f"{family.name!r} could name a topic of family {other.family!r}")
        families[key] = family
    return tuple(families.values())


def expand(
    families: Iterable[TopicFamily], tenants: Iterable[TenantSpec], models: Iterable[ModelVersion]
) -> tuple[TopicSpec, ...]:
    """All topics of these families: for each tenant and its services, for each pool of the models and each class."""
    tenants = tuple(tenants)
    pools = pools_of(tenants, models)
    return tuple(
        TopicSpec(
            topic_name(family.name.format_map(values)),
            family.family,
            family.partitions_by_tenant.get(values.get("tenant", ""), family.partitions),
            family.config,
            family.records,
        )
        for family in families
        for values in _fillings(family.placeholders, tenants, pools)
    )


def pools_of(tenants: Iterable[TenantSpec], models: Iterable[ModelVersion]) -> tuple[str, ...]:
    """The pools that serve models or are dedicated to tenants, each once, in order."""
    models = tuple(models)
    shared = [model.pool for model in models]
    dedicated = [tenant.pool for tenant in tenants if tenant.pool is not None]
    return tuple(dict.fromkeys([*shared, *dedicated, *(pool for model in models for pool in model.dedicated_pools)]))


def _fillings(
    placeholders: tuple[str, ...], tenants: tuple[TenantSpec, ...], pools: tuple[str, ...]
) -> list[dict[str, str]]:
    if "service" in placeholders:
        return [{"tenant": tenant.tenant, "service": service} for tenant in tenants for service in tenant.services]
    if "tenant" in placeholders:
        return [{"tenant": tenant.tenant} for tenant in tenants]
    if "class" in placeholders:
        return [{"pool": pool, "class": name} for pool, name in product(pools, Priority)]
    if "pool" in placeholders:
        return [{"pool": pool} for pool in pools]
    return [{}]


def _family(key: str, node: YamlNode) -> TopicFamily:
    fields = node.mapping(_REQUIRED, _OPTIONAL)
    name = _name(fields["name"])
    cleanup = _one_of(fields["cleanup"], _CLEANUPS) if "cleanup" in fields else DELETE
    if cleanup == COMPACT and "retention_ms" in fields:
        raise fields["retention_ms"].error("a compacted family keeps the last record of every key for ever")
    if cleanup == DELETE and "retention_ms" not in fields:
        raise node.error("missing: retention_ms (or cleanup: compact)")
    by_tenant = fields.get("partitions_by_tenant")
    if by_tenant is not None and "{tenant}" not in name:
        raise by_tenant.error(f"{name!r} has no {{tenant}}")
    return TopicFamily(
        family=key,
        name=name,
        description=fields["description"].string(),
        records=_records(fields["records"]),
        key=fields["key"].string(_FIELD),
        partitions=fields["partitions"].integer(1, _MAX_PARTITIONS),
        writers=_roles(fields["writers"]),
        readers=_roles(fields["readers"]),
        retention_ms=fields["retention_ms"].integer(1) if "retention_ms" in fields else None,
        cleanup=cleanup,
        max_message_bytes=fields["max_message_bytes"].integer(1) if "max_message_bytes" in fields else None,
        timestamp_type=_one_of(fields["timestamp_type"], _TIMESTAMP_TYPES)
        if "timestamp_type" in fields
        else "CreateTime",
        partitions_by_tenant={} if by_tenant is None else _partitions_by_tenant(by_tenant),
    )


def _name(node: YamlNode) -> str:
    name = node.string()
    for part in name.split("."):
        if _PART.fullmatch(part) is None:
            raise node.error(
                f"{name!r}: {part!r} is no part of a name (lower case, digits, hyphens, or {{placeholder}})"
            )
    placeholders = tuple(_PLACEHOLDER.findall(name))
    known = sorted({word for scope in _SCOPES for word in scope})
    for word in placeholders:
        if word not in known:
            raise node.error(f"unknown placeholder {{{word}}}; known: {', '.join(known)}")
    if placeholders not in _SCOPES:
        scopes = "; ".join(", ".join(scope) for scope in _SCOPES if scope)
        raise node.error(f"{name!r}: placeholders must be one of these, in this order: {scopes}")
    return name


def _records(node: YamlNode) -> tuple[str, ...]:
    return _known(node, "record", tuple(type_by_name))


def _roles(node: YamlNode) -> tuple[str, ...]:
    if not node.strings():
        raise node.error("at least one role is needed")
    return _known(node, "value", _ROLES)


def _known(node: YamlNode, kind: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    values = node.strings()
    for item, value in zip(node.items, values, strict=True):
        if value not in allowed:
            raise item.error(f"unknown {kind} {value!r}; known: {', '.join(allowed)}")
    return values


def _one_of(node: YamlNode, allowed: tuple[str, ...]) -> str:
    value = node.string()
    if value not in allowed:
        raise node.error(f"unknown value {value!r}; known: {', '.join(allowed)}")
    return value


def _partitions_by_tenant(node: YamlNode) -> dict[str, int]:
    if not isinstance(node.value, dict):
        raise node.error("must be a mapping of tenants to partitions")
    for tenant, entry in node.fields.items():
        if TENANT_PATTERN.fullmatch(tenant) is None:
            raise entry.error(f"{tenant!r} cannot name a tenant: it does not match {TENANT_PATTERN.pattern}")
    return {tenant: entry.integer(1, _MAX_PARTITIONS) for tenant, entry in node.fields.items()}


def _may_collide(one: str, other: str) -> bool:
    """Whether two family names could give the same topic name."""
    parts, others = one.split("."), other.split(".")
    return len(parts) == len(others) and all(
        left == right or "{" in left or "{" in right for left, right in zip(parts, others, strict=True)
    )
