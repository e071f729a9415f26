"""Read the topics of a cluster and apply a plan. Idempotent; several processes may apply at once."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Literal, TypeVar

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (
    AlterConfigOpType,
    ClusterMetadata,
    ConfigEntry,
    ConfigResource,
    ConfigSource,
    NewPartitions,
    NewTopic,
    ResourceType,
)

from fairlane.cluster import reason_of
from fairlane_server.kafka.cluster_admin import REQUEST_TIMEOUT_S, ClusterAdmin, ClusterError
from fairlane_server.topics.plan import (
    AddPartitions,
    Change,
    ChangeConfig,
    CreateTopic,
    DeleteTopic,
    ExistingTopic,
    Setting,
    TopicPlan,
)

# One request for thousands of topics would exceed its timeout on a small controller.
_BATCH = 200
_VISIBLE_TIMEOUT_S = 30.0

_COPIES = 3
_DEFAULT_REPLICATION_FACTOR = "default.replication.factor"

# librdkafka times requests out itself; this only guards against one that it forgot.
_ANSWER_TIMEOUT_S = REQUEST_TIMEOUT_S + 5.0

ChangeT = TypeVar("ChangeT", CreateTopic, AddPartitions, ChangeConfig, DeleteTopic)
_Futures = Mapping[str, "Future[None]"]


@dataclass(frozen=True, slots=True)
class ClusterState:
    """Input of a plan. ``broker_config`` is None when the cluster does not show it to this user."""

    brokers: int
    topics: Mapping[str, ExistingTopic]
    broker_config: Mapping[str, str] | None

    @property
    def default_replication_factor(self) -> int:
        """Replicas of a new topic: three if there are three brokers, and never fewer than the cluster's own default.

        The default covers a cluster with a broker temporarily down: it is not counted, and will hold a replica.
        """
        own = int((self.broker_config or {}).get(_DEFAULT_REPLICATION_FACTOR, 1))
        return max(min(_COPIES, self.brokers), own)


@dataclass(frozen=True, slots=True)
class Applied:
    """Result of one change. ``already``: another process was faster. ``reason`` is set when it failed."""

    change: Change
    result: Literal["done", "already", "failed"]
    reason: str | None = None


def read_state(cluster: ClusterAdmin, describe: Iterable[str]) -> ClusterState:
    """Read all topics of the cluster, and the settings of those in ``describe``. Raises ClusterError."""
    metadata = cluster.metadata()
    described = _topic_configs(cluster, [name for name in describe if name in metadata.topics])
    topics = {}
    for name, topic in metadata.topics.items():
        entries = described.get(name, {})
        topics[name] = ExistingTopic(
            name,
            len(topic.partitions),
            min((len(partition.replicas) for partition in topic.partitions.values()), default=0),
            {key: entry.value for key, entry in entries.items() if entry.value is not None},
            frozenset(key for key, entry in entries.items() if _is_override(entry)),
        )
    return ClusterState(len(metadata.brokers), topics, _broker_config(cluster, metadata))


def apply_plan(
    cluster: ClusterAdmin, plan: TopicPlan, visible_timeout_s: float = _VISIBLE_TIMEOUT_S
) -> tuple[Applied, ...]:
    """Apply the changes, then wait until new topics and partitions have leaders and deleted topics are gone.

    A failed change does not stop the others. Raises ClusterError when the cluster cannot be reached or the changes do
    not appear in time.
    """
    creates = [change for change in plan.changes if isinstance(change, CreateTopic)]
    grows = [change for change in plan.changes if isinstance(change, AddPartitions)]
    configs = [change for change in plan.changes if isinstance(change, ChangeConfig)]
    deletes = [change for change in plan.changes if isinstance(change, DeleteTopic)]
    admin = cluster.admin
    timeouts = {"operation_timeout": REQUEST_TIMEOUT_S, "request_timeout": REQUEST_TIMEOUT_S}
    applied = [
        *_each(
            creates, lambda batch: admin.create_topics(_new_topics(batch), **timeouts), KafkaError.TOPIC_ALREADY_EXISTS
        ),
        # The broker also refuses a partition count that the topic already has.
        *_each(
            grows,
            lambda batch: admin.create_partitions(
                [NewPartitions(change.topic, change.after) for change in batch], **timeouts
            ),
            KafkaError.INVALID_PARTITIONS,
        ),
        *_each(configs, lambda batch: _configure(cluster, batch), None),
        *_each(
            deletes,
            lambda batch: admin.delete_topics([change.topic for change in batch], **timeouts),
            KafkaError.UNKNOWN_TOPIC_OR_PART,
        ),
    ]
    failed = {item.change.topic for item in applied if item.result == "failed"}
    wanted = {change.topic: change.partitions for change in creates} | {change.topic: change.after for change in grows}
    wanted = {topic: partitions for topic, partitions in wanted.items() if topic not in failed}
    gone = {change.topic for change in deletes} - failed
    if wanted or gone:
        cluster.wait_for(lambda metadata: _not_yet(metadata, wanted, gone), visible_timeout_s)
    return tuple(applied)


def _not_yet(metadata: ClusterMetadata, wanted: Mapping[str, int], gone: set[str]) -> str | None:
    for name, partitions in wanted.items():
        topic = metadata.topics.get(name)
        if topic is None or len(topic.partitions) < partitions:
            return f"{name} with {partitions} partitions"
        if any(partition.leader < 0 for partition in topic.partitions.values()):
            return f"leaders of {name}"
    still = gone & metadata.topics.keys()
    return f"the end of {min(still)}" if still else None


def _each(changes: list[ChangeT], send: Callable[[list[ChangeT]], _Futures], harmless: int | None) -> Iterator[Applied]:
    for start in range(0, len(changes), _BATCH):
        batch = changes[start : start + _BATCH]
        futures = send(batch)
        for change in batch:
            try:
                futures[change.topic].result(timeout=_ANSWER_TIMEOUT_S)
            except KafkaException as error:
                if error.args[0].code() == harmless:
                    yield Applied(change, "already")
                else:
                    yield Applied(change, "failed", reason_of(error))
            except FutureTimeout:
                yield Applied(change, "failed", f"no answer within {_ANSWER_TIMEOUT_S:g} s")
            else:
                yield Applied(change, "done")


def _new_topics(batch: list[CreateTopic]) -> list[NewTopic]:
    return [
        NewTopic(change.topic, change.partitions, change.replication_factor, config=dict(change.config))
        for change in batch
    ]


def _configure(cluster: ClusterAdmin, batch: list[ChangeConfig]) -> _Futures:
    resources = [
        ConfigResource(
            ResourceType.TOPIC, change.topic, incremental_configs=[_config_entry(item) for item in change.settings]
        )
        for change in batch
    ]
    futures = cluster.admin.incremental_alter_configs(resources, request_timeout=REQUEST_TIMEOUT_S)
    return {resource.name: future for resource, future in futures.items()}


def _config_entry(setting: Setting) -> ConfigEntry:
    operation = AlterConfigOpType.DELETE if setting.after is None else AlterConfigOpType.SET
    return ConfigEntry(setting.key, setting.after, incremental_operation=operation)


def _topic_configs(cluster: ClusterAdmin, names: list[str]) -> dict[str, dict[str, ConfigEntry]]:
    found: dict[str, dict[str, ConfigEntry]] = {}
    for start in range(0, len(names), _BATCH):
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in names[start : start + _BATCH]]
        for resource, entries in _describe(cluster, resources).items():
            if isinstance(entries, str):
                raise ClusterError(f"{resource}: its settings cannot be read: {entries}")
            found[resource] = entries
    return found


def _broker_config(cluster: ClusterAdmin, metadata: ClusterMetadata) -> dict[str, str] | None:
    if not metadata.brokers:
        return None
    broker = str(min(metadata.brokers))
    entries = _describe(cluster, [ConfigResource(ResourceType.BROKER, broker)])[broker]
    if isinstance(entries, str):
        return None
    return {key: entry.value for key, entry in entries.items() if entry.value is not None}


def _describe(cluster: ClusterAdmin, resources: list[ConfigResource]) -> dict[str, dict[str, ConfigEntry] | str]:
    """Settings of each resource by its name, or the reason why they cannot be read."""
    described: dict[str, dict[str, ConfigEntry] | str] = {}
    for resource, future in cluster.admin.describe_configs(resources, request_timeout=REQUEST_TIMEOUT_S).items():
        try:
            described[resource.name] = future.result(timeout=_ANSWER_TIMEOUT_S)
        except KafkaException as error:
            described[resource.name] = reason_of(error)
        except FutureTimeout:
            described[resource.name] = f"no answer within {_ANSWER_TIMEOUT_S:g} s"
    return described


def _is_override(entry: ConfigEntry) -> bool:
    # The client's type stubs declare the enum, but it returns the plain number.
    return entry.source in {ConfigSource.DYNAMIC_TOPIC_CONFIG, ConfigSource.DYNAMIC_TOPIC_CONFIG.value}
