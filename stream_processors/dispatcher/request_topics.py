"""The topics a dispatcher reads: which exist, and which part of a tenant's partitions is read here."""

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
from fairlane.records import ModelVersion, TenantSpec
from fairlane_server.topics.families import pools_of

log = get_logger(__name__)

_TIMEOUT_S = 5.0
_LOOK_FOR_NEW_EVERY_S = 1.0
_LOOK_AGAIN_EVERY_S = 30.0


class CommittedOffsets(Protocol):
    """The part of a consumer of the dispatchers' group that tells what the group ever read; it never joins."""

    def committed(self, partitions: list[TopicPartition], timeout: float) -> list[TopicPartition]: ...


class RequestTopics:
    """Asks the cluster off the event loop, and remembers how many partitions each topic has.

    Besides the topics of the tenants and pools that there are, those are read that the group ever committed in. Their
    tenant was withdrawn, or their pool left: what was accepted there is answered nevertheless. A topic that is merely
    named like one of ours is left alone.

    ``wanted`` and ``parts`` take what is replaced when it changes and never changes in place: handed the same objects,
    they answer with the same object and work nothing out.
    """

    def __init__(self, admin: AdminClient, group: CommittedOffsets) -> None:
        self._admin = admin
        self._group = group
        self._read_before: frozenset[str] = frozenset()
        """Nobody's topics that the group committed in."""
        self._looked_at = 0.0
        self._counts: dict[str, int] = {}
        self._wanted_by: tuple[object, ...] = ()
        self._wanted: frozenset[str] = frozenset()
        self._parts_by: tuple[object, ...] = ()
        self._parts: dict[str, float] = {}

    def wanted(self, tenants: Mapping[str, TenantSpec], models: Mapping[str, ModelVersion]) -> frozenset[str]:
        """The topics there should be for these tenants and models."""
        wanted_by = (tenants, models)
        if not _same(wanted_by, self._wanted_by):
            self._wanted_by = wanted_by
            pools = pools_of(tenants.values(), models.values())
            self._wanted = frozenset(
                (
                    *map(names.requests_topic, tenants),
                    *map(names.backfill_topic, tenants),
                    *map(names.returned_topic, pools),
                )
            )
        return self._wanted

    def should_look(self, wanted: Set[str], subscribed: Set[str]) -> bool:
        """Whether it is time to ask: often while something is wanted that is not read yet."""
        now_s = monotonic()
        if now_s < self._looked_at + _LOOK_FOR_NEW_EVERY_S:
            return False
        return now_s >= self._looked_at + _LOOK_AGAIN_EVERY_S or not wanted <= subscribed

    async def existing(self, wanted: Set[str]) -> frozenset[str]:
        """Those that the cluster already shows with a leader, and those besides that the group read before; none while
        the cluster does not answer."""
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
        """How many partitions each of these and each that was read before has."""
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
        """For each tenant that is not read here whole, the part of its request partitions that is."""
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
