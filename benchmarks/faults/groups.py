"""Who owns what in a consumer group, by the broker's word."""

from dataclasses import dataclass
from typing import Any

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
    described = _described(admin, group)
    if described is None or described.state != ConsumerGroupState.STABLE:
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


def is_without(admin: AdminClient, group: str, name: str) -> bool:
    """Whether the broker counts this member no more and the group has settled without it. False while nobody knows."""
    described = _described(admin, group)
    settled = (ConsumerGroupState.STABLE, ConsumerGroupState.EMPTY)
    return (
        described is not None
        and described.state in settled
        and all(member.client_id != name for member in described.members)
    )


def _described(admin: AdminClient, group: str) -> Any:
    """What the broker says of it; None when it does not answer."""
    try:
        return admin.describe_consumer_groups([group], request_timeout=_TIMEOUT_S)[group].result(_TIMEOUT_S)
    except KafkaException:
        return None
