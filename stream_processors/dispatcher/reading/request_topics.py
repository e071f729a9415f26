"""Topics to subscribe to, and the fraction of each tenant's partitions read here."""

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping, Set
from time import monotonic
from typing import Protocol

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, TopicMetadata

from fairlane import names
from fairlane.logs import get_logger
from fairlane.ownership import PartitionId
from fairlane.records import TenantSpec
from fairlane_server.models.catalog import ModelCatalog
from fairlane_server.topics.families import pools_of

log = get_logger(__name__)

_TIMEOUT_S = 5.0
_LOOK_FOR_NEW_EVERY_S = 1.0
_LOOK_AGAIN_EVERY_S = 30.0


class CommittedOffsets(Protocol):
    """Committed offsets of the dispatchers' group, from a consumer that never joins it."""

    def committed(self, partitions: list[TopicPartition], timeout: float) -> list[TopicPartition]: ...


class RequestTopics:
    """Queries topic metadata off the event loop and caches partition counts.

    Besides the topics of present tenants and pools, it includes topics with committed offsets of the group: their
    tenant was withdrawn or their pool removed, and accepted requests there are still answered. A topic that only has a
    matching name is ignored.

    The arguments of ``wanted`` and ``parts`` must be replaced, never mutated: for the same objects both return the same
    object without computing anything.
    """

    def __init__(self, admin: AdminClient, group: CommittedOffsets) -> None:
        self._admin = admin
        self._group = group
        self._read_before: frozenset[str] = frozenset()
        """Topics without a present tenant or pool in which the group has committed."""
        self._looked_at = 0.0
        self._counts: dict[str, int] = {}
        self._wanted_by: tuple[object, ...] = ()
        self._wanted: frozenset[str] = frozenset()
        self._parts_by: tuple[object, ...] = ()
        self._parts: dict[str, float] = {}

    def wanted(self, tenants: Mapping[str, TenantSpec], models: ModelCatalog) -> frozenset[str]:
        """The request, backfill and requeue topics of these tenants and models, and the topic of copies."""
        wanted_by = (tenants, models)
        if not _same(wanted_by, self._wanted_by):
            self._wanted_by = wanted_by
            pools = pools_of(tenants.values(), models.versions.values())
            self._wanted = frozenset(
                (
                    *map(names.requests_topic, tenants),
                    *map(names.backfill_topic, tenants),
                    *map(names.returned_topic, pools),
                    names.EVALUATION_WORK,
                )
            )
        return self._wanted

    def should_look(self, wanted: Set[str], subscribed: Set[str]) -> bool:
        """Whether to call ``existing`` now: every second while a wanted topic is not subscribed, else every 30 s."""
        now_s = monotonic()
        if now_s < self._looked_at + _LOOK_FOR_NEW_EVERY_S:
            return False
        return now_s >= self._looked_at + _LOOK_AGAIN_EVERY_S or not wanted <= subscribed

    async def existing(self, wanted: Set[str]) -> frozenset[str]:
        """The wanted topics that have leaders, plus those the group committed in before; empty while the cluster does
        not answer."""
        self._looked_at = monotonic()
        try:
            counts = await asyncio.get_running_loop().run_in_executor(None, self._look, wanted)
        except KafkaException as error:
            log.warning("metadata_unavailable", error=error.args[0].name())
            return frozenset()
        if counts != self._counts:
            self._counts = counts
        return frozenset(counts)

    def _look(self, wanted: Set[str]) -> dict[str, int]:
        """Partition counts of these topics and of those the group committed in before."""
        shown = {
            topic: len(topic_metadata.partitions)
            for topic, topic_metadata in self._admin.list_topics(timeout=_TIMEOUT_S).topics.items()
            if (topic in wanted or names.is_read_by_dispatchers(topic)) and _is_led(topic_metadata)
        }
        nobodys = shown.keys() - wanted
        new = nobodys - self._read_before
        self._read_before = (self._read_before & nobodys) | (self._committed_in(new, shown) if new else set())
        return {topic: count for topic, count in shown.items() if topic in wanted or topic in self._read_before}

    def _committed_in(self, topics: Collection[str], counts: Mapping[str, int]) -> set[str]:
        partitions = [TopicPartition(topic, number) for topic in topics for number in range(counts[topic])]
        found = self._group.committed(partitions, timeout=_TIMEOUT_S)
        return {partition.topic for partition in found if partition.error is None and partition.offset >= 0}

    def parts(self, tenants: Mapping[str, TenantSpec], owned: tuple[PartitionId, ...]) -> Mapping[str, float]:
        """The fraction of request partitions read here, for each tenant with more than one partition."""
        parts_by = (tenants, owned, self._counts)
        if not _same(parts_by, self._parts_by):
            self._parts_by = parts_by
            self._parts = self._divided(tenants, owned)
        return self._parts

    def _divided(self, tenants: Mapping[str, TenantSpec], owned: tuple[PartitionId, ...]) -> dict[str, float]:
        divided = {
            tenant: count for tenant in tenants if (count := self._counts.get(names.requests_topic(tenant), 1)) > 1
        }
        if not divided:
            return {}
        here = Counter(partition.topic for partition in owned)
        return {tenant: max(1, here[names.requests_topic(tenant)]) / count for tenant, count in divided.items()}


def _is_led(topic: TopicMetadata) -> bool:
    partitions = topic.partitions.values()
    return topic.error is None and bool(partitions) and all(partition.leader >= 0 for partition in partitions)


def _same(these: tuple[object, ...], those: tuple[object, ...]) -> bool:
    return len(these) == len(those) and all(this is that for this, that in zip(these, those, strict=True))
