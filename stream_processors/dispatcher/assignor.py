"""Which dispatcher reads which partitions: everything of a tenant on one of them, and the tenants spread evenly.

A tenant's fair queue is then on one dispatcher, and its online and offline requests wait in the same one. A place is
what stays together: partition p of ``requests.<tenant>`` and of ``backfill.<tenant>``; any other topic's partition is a
place of its own. Places go in order to the member that has the fewest, so members that want the same topics differ by
one place at most, in tenants and in all. It is deterministic, and does not try to keep places where they were: a
rebalance of a dispatcher gives up everything anyhow.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment

from fairlane.logs import get_logger
from fairlane.names import tenant_of_source

log = get_logger(__name__)

Assignment = dict[str, dict[str, list[int]]]
"""Partitions by topic by member."""


def assign_places(partitions: Mapping[str, Collection[int]], wanted: Mapping[str, Collection[str]]) -> Assignment:
    """Give each partition to one member.

    Args:
        partitions: of each topic.
        wanted: the topics each member subscribed to. While a new tenant becomes known they differ: what belongs
            together goes to a member that wants all of it, and is parted only when there is none.
    """
    assigned: Assignment = {member: {} for member in wanted}
    load = dict.fromkeys(sorted(wanted), 0)
    subscribed = {member: frozenset(topics) for member, topics in wanted.items()}

    def give(topics: list[str], partition: int, able: list[str]) -> None:
        chosen = min(able, key=load.__getitem__)
        load[chosen] += 1
        for topic in topics:
            assigned[chosen].setdefault(topic, []).append(partition)

    for _, partition, topics in _places(partitions):
        able = [member for member in load if subscribed[member].issuperset(topics)]
        if able:
            give(topics, partition, able)
            continue
        for topic in topics:
            if able := [member for member in load if topic in subscribed[member]]:
                give([topic], partition, able)
    return assigned


def _places(partitions: Mapping[str, Collection[int]]) -> list[tuple[tuple[bool, str], int, list[str]]]:
    """What is kept together, its partition, and its topics: the tenants first, both in order."""
    places: dict[tuple[tuple[bool, str], int], list[str]] = defaultdict(list)
    for topic in sorted(partitions):
        for partition in partitions[topic]:
            places[_together(topic), partition].append(topic)
    return [(name, partition, topics) for (name, partition), topics in sorted(places.items())]


def _together(topic: str) -> tuple[bool, str]:
    try:
        return False, tenant_of_source(topic)
    except ValueError:
        return True, topic


class TenantAssignor(RoundRobinPartitionAssignor):  # type: ignore[misc]  # aiokafka has no types
    """``assign_places`` as the leader of a group of aiokafka members runs it."""

    name = "fairlane-tenants"

    @classmethod
    def assign(cls, cluster: Any, members: Mapping[str, Any]) -> dict[str, ConsumerProtocolMemberAssignment]:
        """``cluster`` knows the partitions, ``members`` the subscriptions. A topic without metadata is left out."""
        wanted = {member: metadata.subscription for member, metadata in members.items()}
        found = {topic: cluster.partitions_for_topic(topic) for topics in wanted.values() for topic in topics}
        if unknown := [topic for topic, partitions in found.items() if partitions is None]:
            log.warning("topics_without_metadata", topics=sorted(unknown))
        assigned = assign_places({topic: known for topic, known in found.items() if known is not None}, wanted)
        return {
            member: ConsumerProtocolMemberAssignment(cls.version, sorted(topics.items()), b"")
            for member, topics in assigned.items()
        }
