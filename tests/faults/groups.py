"""Who owns what in a consumer group, by the broker's word."""

from dataclasses import dataclass

from confluent_kafka import ConsumerGroupState, KafkaException
from confluent_kafka.admin import AdminClient

_TIMEOUT_S = 10.0

Place = tuple[str, int]
"""Topic and partition."""


@dataclass(frozen=True, slots=True)
class Member:
    """One member; ``name`` is its INSTANCE_ID, ``member_id`` is another after every restart."""

    name: str
    member_id: str
    partitions: frozenset[Place]


def members(admin: AdminClient, group: str) -> list[Member]:
    """The members of a stable group. Empty while it is rebalancing or the broker does not know it or does not answer.

    A member that was killed or stopped stands here, with its partitions, until its session times out.
    """
    try:
        described = admin.describe_consumer_groups([group], request_timeout=_TIMEOUT_S)[group].result(_TIMEOUT_S)
    except KafkaException:
        return []
    if described.state != ConsumerGroupState.STABLE:
        return []
    return [
        Member(
            member.client_id,
            member.member_id,
            frozenset(
                (partition.topic, partition.partition)
                for partition in (member.assignment.topic_partitions if member.assignment else ())
            ),
        )
        for member in described.members
    ]
