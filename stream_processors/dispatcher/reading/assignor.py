"""Partition assignor that keeps the co-partitions of a tenant together and spreads them evenly.

The fair queue of a tenant's partition is then on one dispatcher, for online and backfill requests alike. A unit of
assignment is partition p of both ``requests.<tenant>`` and ``backfill.<tenant>``; a partition of any other topic is a
unit of its own. Units go in order to the member with the fewest, so members with equal subscriptions differ by at most
one unit, among tenants' units and overall. The assignment is deterministic and not sticky: a rebalance revokes
everything from a dispatcher anyway.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment

from fairlane.logs import get_logger
from fairlane.names import tenant_of_request_topic

log = get_logger(__name__)

Assignment = dict[str, dict[str, list[int]]]
"""Partitions by topic by member."""


def assign_co_partitions(
    partitions: Mapping[str, Collection[int]], wanted: Mapping[str, Collection[str]]
) -> Assignment:
    """Assign each partition to one member.

    Args:
        partitions: partition numbers by topic.
        wanted: subscribed topics by member. They differ while a new tenant becomes known: a unit goes to a member that
            subscribed to all its topics, and is split only when there is none.
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
    """Units of assignment as (sort key, partition, topics), sorted: tenants first."""
    places: dict[tuple[tuple[bool, str], int], list[str]] = defaultdict(list)
    for topic in sorted(partitions):
        for partition in partitions[topic]:
            places[_together(topic), partition].append(topic)
    return [(name, partition, topics) for (name, partition), topics in sorted(places.items())]


def _together(topic: str) -> tuple[bool, str]:
    try:
        return False, tenant_of_request_topic(topic)
    except ValueError:
        return True, topic


class TenantAssignor(RoundRobinPartitionAssignor):  # type: ignore[misc]  # aiokafka has no types
    """``assign_co_partitions`` as an aiokafka assignor, run by the group leader."""

    name = "fairlane-tenants"

    @classmethod
    def assign(cls, cluster: Any, members: Mapping[str, Any]) -> dict[str, ConsumerProtocolMemberAssignment]:
        """Assign the partitions in ``cluster`` to ``members`` by subscription. A topic without metadata is left out."""
        wanted = {member: metadata.subscription for member, metadata in members.items()}
        found = {topic: cluster.partitions_for_topic(topic) for topics in wanted.values() for topic in topics}
        if unknown := [topic for topic, partitions in found.items() if partitions is None]:
            log.warning("topics_without_metadata", topics=sorted(unknown))
        assigned = assign_co_partitions({topic: known for topic, known in found.items() if known is not None}, wanted)
        return {
            member: ConsumerProtocolMemberAssignment(cls.version, sorted(topics.items()), b"")
            for member, topics in assigned.items()
        }
