"""Which dispatcher owns which tenants: a run with two of which one idles says nothing about two."""

from collections.abc import Mapping, Sequence
from time import monotonic, sleep

from confluent_kafka import ConsumerGroupState, KafkaException
from confluent_kafka.admin import AdminClient

from fairlane.kafka_config import connection
from fairlane.names import dispatcher_group, requests_topic
from fairlane.settings import Settings

_TIMEOUT_S = 60.0
_CALL_TIMEOUT_S = 10.0
_LOOK_EVERY_S = 0.1

Owners = Mapping[str, frozenset[str]]
"""By the id of each member of the dispatchers' group, its tenants."""


def owners(settings: Settings, tenants: Sequence[str]) -> Owners:
    """By the broker's word; nothing while the group rebalances or the broker does not answer."""
    admin = AdminClient(connection(settings))
    group = dispatcher_group(settings.group_prefix)
    try:
        described = admin.describe_consumer_groups([group], request_timeout=_CALL_TIMEOUT_S)[group]
        found = described.result(_CALL_TIMEOUT_S)
    except KafkaException:
        return {}
    if found.state != ConsumerGroupState.STABLE:
        return {}
    tenant_of = {requests_topic(tenant): tenant for tenant in tenants}
    return {
        member.member_id: frozenset(
            tenant_of[one.topic]
            for one in (member.assignment.topic_partitions if member.assignment else ())
            if one.topic in tenant_of
        )
        for member in found.members
    }


def wait_owned(settings: Settings, tenants: Sequence[str], dispatchers: int, timeout_s: float = _TIMEOUT_S) -> Owners:
    """Wait until so many dispatchers share all of these tenants and each has some. Returns who has whom.

    Raises:
        TimeoutError: they do not within ``timeout_s``.
    """
    deadline = monotonic() + timeout_s
    while not are_shared(found := owners(settings, tenants), tenants, dispatchers):
        if monotonic() > deadline:
            raise TimeoutError(f"not {dispatchers} dispatchers share {len(tenants)} tenants, but: {found}")
        sleep(_LOOK_EVERY_S)
    return found


def are_shared(found: Owners, tenants: Sequence[str], dispatchers: int) -> bool:
    """Whether so many dispatchers share all of these tenants, and each has some."""
    counts = [len(own) for own in found.values()]
    return len(counts) == dispatchers and all(counts) and sum(counts) == len(tenants)
