"""Plan the changes that bring a cluster's topics to their desired state. Decides only; ``admin`` reads and acts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Literal

from fairlane_server.topics.families import TopicFamily, TopicSpec

OFFSETS_RETENTION = "offsets.retention.minutes"
_RETENTION = "retention.ms"
_CLEANUP = "cleanup.policy"
_MIN_ISR = "min.insync.replicas"
_MANAGED = frozenset({_CLEANUP, _RETENTION, _MIN_ISR, "segment.ms", "max.message.bytes", "message.timestamp.type"})
"""Settings managed by topics.yaml: one that it no longer names is reset to the broker's default."""
_MS_PER_MINUTE = 60_000


@dataclass(frozen=True, slots=True)
class ExistingTopic:
    """A topic as it exists on the cluster: effective settings, empty when they were not requested, and the names of
    those that are set on the topic itself."""

    name: str
    partitions: int
    replication_factor: int
    config: Mapping[str, str]
    overrides: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class CreateTopic:
    """Create a missing topic."""

    action: ClassVar[str] = "create"
    topic: str
    partitions: int
    replication_factor: int
    config: Mapping[str, str]

    @property
    def detail(self) -> str:
        settings = ", ".join(f"{key}={value}" for key, value in sorted(self.config.items()))
        return f"partitions={self.partitions}, replication factor={self.replication_factor}, {settings}"


@dataclass(frozen=True, slots=True)
class AddPartitions:
    """Add partitions to a topic that has too few. Keys may move to other partitions."""

    action: ClassVar[str] = "add-partitions"
    topic: str
    before: int
    after: int

    @property
    def detail(self) -> str:
        return f"partitions {self.before} → {self.after}"


@dataclass(frozen=True, slots=True)
class Setting:
    """One changed topic setting; ``after`` None removes the topic's own value."""

    key: str
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True)
class ChangeConfig:
    """Change settings of a topic."""

    action: ClassVar[str] = "change-config"
    topic: str
    settings: tuple[Setting, ...]

    @property
    def detail(self) -> str:
        return ", ".join(f"{item.key} {item.before} → {item.after or 'default'}" for item in self.settings)


@dataclass(frozen=True, slots=True)
class DeleteTopic:
    """Delete a topic of a family that belongs to no tenant or pool any more."""

    action: ClassVar[str] = "delete"
    topic: str
    family: str

    @property
    def detail(self) -> str:
        return f"of family {self.family}; its records are lost"


Change = CreateTopic | AddPartitions | ChangeConfig | DeleteTopic


class DeviationKind(StrEnum):
    """Subject of a finding."""

    EXTRA_TOPIC = "extra_topic"
    FEWER_PARTITIONS = "fewer_partitions"
    SHORTER_RETENTION = "shorter_retention"
    REPLICATION_FACTOR = "replication_factor"
    OFFSETS_RETENTION = "offsets_retention"
    UNKNOWN_TENANT = "unknown_tenant"


@dataclass(frozen=True, slots=True)
class Deviation:
    """A deviation that no planned change corrects."""

    level: Literal["warning", "error"]
    problem: DeviationKind
    topic: str | None
    message: str


@dataclass(frozen=True, slots=True)
class TopicPlan:
    """Changes in the order to make them, and findings that no change corrects."""

    changes: tuple[Change, ...]
    findings: tuple[Deviation, ...]

    @property
    def errors(self) -> tuple[Deviation, ...]:
        return tuple(finding for finding in self.findings if finding.level == "error")


def plan(
    wanted: Iterable[TopicSpec],
    existing: Mapping[str, ExistingTopic],
    *,
    families: Iterable[TopicFamily],
    broker_config: Mapping[str, str] | None,
    replication_factor: int,
    delete: bool = False,
    shrink: bool = False,
) -> TopicPlan:
    """Compare the desired topics with the existing ones.

    ``existing`` holds all topics of the cluster; those of no family are ignored. ``families`` are those that ``wanted``
    was expanded from. ``broker_config`` is None when the cluster does not show it. Topics are created with
    ``replication_factor``; for an existing topic a lower one is only reported. ``delete`` permits the deletion of extra
    topics, ``shrink`` of records.
    """
    wanted = tuple(wanted)
    changes: list[Change] = []
    findings: list[Deviation] = []
    for topic in wanted:
        found = existing.get(topic.name)
        if found is None:
            config = _with_durability(topic.config, replication_factor)
            changes.append(CreateTopic(topic.name, topic.partitions, replication_factor, config))
            continue
        if found.partitions < topic.partitions:
            changes.append(AddPartitions(topic.name, found.partitions, topic.partitions))
        elif found.partitions > topic.partitions:
            message = f"has {found.partitions} partitions, wanted {topic.partitions}; Kafka cannot remove any"
            findings.append(_warning(DeviationKind.FEWER_PARTITIONS, topic.name, message))
        settings = _changed_settings(_with_durability(topic.config, found.replication_factor), found)
        losing = () if shrink else tuple(filter(_loses_records, settings))
        if kept := tuple(item for item in settings if item not in losing):
            changes.append(ChangeConfig(topic.name, kept))
        if losing:
            message = f"{ChangeConfig(topic.name, losing).detail} would delete records; `topics apply --shrink` does it"
            findings.append(_warning(DeviationKind.SHORTER_RETENTION, topic.name, message))
        if found.replication_factor < replication_factor:
            replicas = f"has {found.replication_factor} replicas, wanted {replication_factor}; reassign its partitions"
            findings.append(_warning(DeviationKind.REPLICATION_FACTOR, topic.name, replicas))
    extra = sorted(existing.keys() - {topic.name for topic in wanted})
    placed = [family for family in families if family.placeholders]
    for name, family in [(name, family.family) for name in extra for family in placed if family.matches(name)]:
        if delete:
            changes.append(DeleteTopic(name, family))
        else:
            message = f"of family {family}, but of no tenant or pool that is named; `topics apply --delete` removes it"
            findings.append(_warning(DeviationKind.EXTRA_TOPIC, name, message))
    findings.extend(_check_offsets_retention(wanted, broker_config))
    return TopicPlan(tuple(changes), tuple(findings))


def unknown_override_tenants(families: Iterable[TopicFamily], tenants: Iterable[str]) -> tuple[Deviation, ...]:
    """Findings for partition overrides of unknown tenants, most likely misspelt names."""
    known = frozenset(tenants)
    return tuple(
        Deviation(
            "warning",
            DeviationKind.UNKNOWN_TENANT,
            None,
            f"{family.family}: partitions_by_tenant names {tenant!r}, no tenant",
        )
        for family in families
        for tenant in family.partitions_by_tenant
        if tenant not in known
    )


def _warning(problem: DeviationKind, topic: str, message: str) -> Deviation:
    return Deviation("warning", problem, topic, f"{topic}: {message}")


def _with_durability(config: Mapping[str, str], replication_factor: int) -> dict[str, str]:
    # With acks=all and min.insync.replicas=1, losing one broker could lose an acknowledged record.
    return {**config, _MIN_ISR: "2" if replication_factor >= 3 else "1"}


def _changed_settings(config: Mapping[str, str], found: ExistingTopic) -> tuple[Setting, ...]:
    changed = [
        Setting(key, found.config.get(key), value)
        for key, value in sorted(config.items())
        if found.config.get(key) != value
    ]
    dropped = sorted((found.overrides & _MANAGED) - config.keys())
    return (*changed, *(Setting(key, found.config.get(key), None) for key in dropped))


def _loses_records(setting: Setting) -> bool:
    if setting.key == _CLEANUP:
        return True
    if setting.key != _RETENTION or setting.before is None:
        return False
    if setting.after is None:
        return True  # the broker's default may be shorter
    before, after = int(setting.before), int(setting.after)
    return before < 0 or after < before  # negative: kept for ever


def _check_offsets_retention(
    wanted: tuple[TopicSpec, ...], broker_config: Mapping[str, str] | None
) -> tuple[Deviation, ...]:
    kept = {topic.name: int(topic.config[_RETENTION]) for topic in wanted if _RETENTION in topic.config}
    if not kept:
        return ()
    if broker_config is None or OFFSETS_RETENTION not in broker_config:
        message = f"the broker does not show {OFFSETS_RETENTION}; make sure it is longer than every topic's retention"
        return (Deviation("warning", DeviationKind.OFFSETS_RETENTION, None, message),)
    minutes = int(broker_config[OFFSETS_RETENTION])
    too_long = sorted((name for name in kept if kept[name] >= minutes * _MS_PER_MINUTE), key=kept.__getitem__)
    if not too_long:
        return ()
    longest = too_long[-1]
    more = f" and {len(too_long) - 1} more" if len(too_long) > 1 else ""
    message = (
        f"the broker's {OFFSETS_RETENTION}={minutes} is not longer than the retention of {longest}{more}: a group that"
        f" rests would lose its offsets before the records; set it above {kept[longest] // _MS_PER_MINUTE}"
    )
    return (Deviation("error", DeviationKind.OFFSETS_RETENTION, longest, message),)
