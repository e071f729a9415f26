"""Who does what in the embedded cluster of Kafka brokers, and whether all of them keep all records."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType

from deploy.local.kafka import node_names
from deploy.local.stack import LocalStack

BROKERS = dict(enumerate(node_names(3), 1))
"""The names of the brokers in their stack, by their ids."""
COPIES = 3
IN_SYNC = 2
_TRANSACTIONS = "__transaction_state"
_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Duties:
    """What the brokers do, each named as in its stack.

    Attributes:
        controller: the one that decides who leads what.
        leads: how many partitions each leads.
        coordinator: of each group and each transactional id.
    """

    controller: str
    leads: Mapping[str, int]
    coordinator: Mapping[str, str]

    @property
    def busiest(self) -> str:
        """The broker that coordinates most; of those, the one that leads most."""
        coordinated = Counter(self.coordinator.values())
        return max(BROKERS.values(), key=lambda name: (coordinated[name], self.leads[name]))

    def of(self, broker: str) -> str:
        """The duties of one broker in words."""
        coordinated = sorted(of.split(".", 1)[1] for of, name in self.coordinator.items() if name == broker)
        controls = ", controls the cluster" if broker == self.controller else ""
        return f"leads {self.leads[broker]} partitions{controls}, coordinates {', '.join(coordinated) or 'nobody'}"


def duties(cluster: LocalStack, admin: AdminClient, groups: Iterable[str], transactional_ids: Iterable[str]) -> Duties:
    """Look at the cluster; all of its brokers must run."""
    topics = admin.list_topics(timeout=_TIMEOUT_S).topics
    leads = Counter(BROKERS[partition.leader] for topic in topics.values() for partition in topic.partitions.values())
    described = admin.describe_consumer_groups(list(groups), request_timeout=_TIMEOUT_S)
    transactions = topics[_TRANSACTIONS].partitions
    coordinator = {
        **{group: BROKERS[found.result(_TIMEOUT_S).coordinator.id] for group, found in described.items()},
        **{name: BROKERS[transactions[_java_hash(name) % len(transactions)].leader] for name in transactional_ids},
    }
    return Duties(_controller(cluster), {name: leads[name] for name in BROKERS.values()}, coordinator)


def all_in_sync(admin: AdminClient) -> bool:
    """Whether each broker has all of every partition."""
    topics = admin.list_topics(timeout=_TIMEOUT_S).topics.values()
    return all(len(partition.isrs) == COPIES for topic in topics for partition in topic.partitions.values())


def badly_kept(admin: AdminClient) -> set[str]:
    """The topics with another number of copies than they should have, or of copies that must be in sync."""
    topics = admin.list_topics(timeout=_TIMEOUT_S).topics
    resources = [ConfigResource(ResourceType.TOPIC, name) for name in topics]
    described = admin.describe_configs(resources, request_timeout=_TIMEOUT_S)
    in_sync = {of.name: found.result(_TIMEOUT_S)["min.insync.replicas"].value for of, found in described.items()}
    return {
        name
        for name, topic in topics.items()
        if {len(partition.replicas) for partition in topic.partitions.values()} != {COPIES}
        or in_sync[name] != str(IN_SYNC)
    }


def _controller(cluster: LocalStack) -> str:
    """Clients are told any broker as the controller: what each node wrote down of the last election says who it is."""
    files = cluster.data_dir.kafka.glob("*/data/__cluster_metadata-0/quorum-state")
    states = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return BROKERS[max(states, key=lambda state: int(state["leaderEpoch"]))["leaderId"]]


def _java_hash(text: str) -> int:
    """The absolute value of `String.hashCode`: a transactional id's partition is this, modulo their number."""
    value = 0
    for letter in text:
        value = (31 * value + ord(letter)) & 0xFFFF_FFFF
    return value if value < 1 << 31 else (1 << 32) - value
