"""Topic families of ``topics.yaml``, and their topics for a set of tenants and pools."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import product
from pathlib import Path

from fairlane.names import TENANT_PATTERN, topic_name
from fairlane.outcomes import Priority
from fairlane.records import ModelVersion, TenantSpec, type_by_name
from fairlane.schema_files import data_path
from fairlane_server.yaml_config import Reader, YamlNode, load_yaml_with_lines

DELETE = "delete"
COMPACT = "compact"

_FAMILY = re.compile(r"[a-z][a-z0-9-]{0,63}")
_PLACEHOLDER = re.compile(r"\{([a-z]*)\}")
# A placeholder is a whole part of a name, so that a topic's name yields one value for it.
_PART = re.compile(r"[a-z0-9][a-z0-9-]{0,38}|\{[a-z]*\}")
_FIELD = re.compile(r"[a-z][a-z0-9_]*")


class KafkaRole(StrEnum):
    """Who reads and writes topics."""

    TENANT = "tenant"
    GATEWAY = "gateway"
    BACKFILL = "backfill"
    DISPATCHER = "dispatcher"
    CONSUMER = "consumer"
    RECORDER = "recorder"
    OPERATOR = "operator"
    REPLAYER = "replayer"
    ADMIN = "admin"
    VIEWER = "viewer"
    """Looks at topics, groups and what is published about the deployment; reads nothing of a tenant's."""


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
        writers, readers: roles; `fairlane access` gives them the rights.
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
    root = load_yaml_with_lines(path or data_path("topics.yaml")).mapping({"families"})["families"]
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
    family = TopicFamily(family=key, **node.read(_REQUIRED, _OPTIONAL))
    if family.cleanup == COMPACT and "retention_ms" in node.fields:
        raise node.fields["retention_ms"].error("a compacted family keeps the last record of every key for ever")
    if family.cleanup == DELETE and "retention_ms" not in node.fields:
        raise node.error("missing: retention_ms (or cleanup: compact)")
    if "partitions_by_tenant" in node.fields and "{tenant}" not in family.name:
        raise node.fields["partitions_by_tenant"].error(f"{family.name!r} has no {{tenant}}")
    return family


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


def _partitions_by_tenant(node: YamlNode) -> dict[str, int]:
    if not isinstance(node.value, dict):
        raise node.error("must be a mapping of tenants to partitions")
    for tenant, entry in node.fields.items():
        if TENANT_PATTERN.fullmatch(tenant) is None:
            raise entry.error(f"{tenant!r} cannot name a tenant: it does not match {TENANT_PATTERN.pattern}")
    return {tenant: _partitions(entry) for tenant, entry in node.fields.items()}


_whole = partial(YamlNode.integer, minimum=1)
_partitions = partial(YamlNode.integer, minimum=1, maximum=_MAX_PARTITIONS)
_roles = partial(YamlNode.choices, kind="role", known=tuple(KafkaRole), least=1)
_REQUIRED: dict[str, Reader] = {
    "name": _name,
    "description": YamlNode.string,
    "records": partial(YamlNode.choices, kind="record", known=type_by_name),
    "key": partial(YamlNode.string, pattern=_FIELD),
    "partitions": _partitions,
    "writers": _roles,
    "readers": _roles,
}
_OPTIONAL: dict[str, Reader] = {
    "partitions_by_tenant": _partitions_by_tenant,
    "retention_ms": _whole,
    "cleanup": partial(YamlNode.choice, kind="value", known=(DELETE, COMPACT)),
    "max_message_bytes": _whole,
    "timestamp_type": partial(YamlNode.choice, kind="value", known=_TIMESTAMP_TYPES),
}


def _may_collide(one: str, other: str) -> bool:
    """Whether two family names could give the same topic name."""
    parts, others = one.split("."), other.split(".")
    return len(parts) == len(others) and all(
        left == right or "{" in left or "{" in right for left, right in zip(parts, others, strict=True)
    )
