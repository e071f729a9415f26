"""The Kafka of a stack: one node, or three that keep every record together."""

import re
from dataclasses import dataclass
from pathlib import Path

from deploy.local import kafka
from deploy.local.kafka import FIRST_ID, Kafka, is_formatted, new_cluster_id
from deploy.local.layout import KAFKA_LIBS_DIR, StackError, write_private
from deploy.local.ports import PortClaims
from deploy.local.process import ProcessSpec

MANY = 3
"""The smallest number of nodes of which one may be away: the others are a majority, and two copies."""
BROKERS = (1, MANY)

_NODE = re.compile(rf"{kafka.NAME}-\d+")


@dataclass(frozen=True, slots=True)
class KafkaCluster:
    """The Kafka nodes of one stack, in the order of their numbers."""

    nodes: tuple[Kafka, ...]

    @property
    def bootstrap_servers(self) -> str:
        """The addresses for clients, in the order of the nodes, with commas."""
        return ",".join(node.bootstrap_servers for node in self.nodes)

    def specs(self) -> tuple[ProcessSpec, ...]:
        """What to run. No node waits for another one: none is ready before most of them run.

        Raises:
            StackError: Java or the jars are missing.
        """
        return tuple(spec for node in self.nodes for spec in node.specs())


def compose_kafka(folder: Path, brokers: int, ports: PortClaims, libs: Path = KAFKA_LIBS_DIR) -> KafkaCluster:
    """The nodes whose data are in `folder`, on the ports of the last run where these are still free.

    Raises:
        StackError: the number is none of BROKERS, the data are those of another number, or no port is free.
    """
    if brokers not in BROKERS:
        raise StackError(f"{brokers} Kafka brokers: there can be {' or '.join(map(str, BROKERS))}")
    cluster_id_file = folder / "cluster-id"
    found = MANY if cluster_id_file.exists() else 1 if is_formatted(folder) else brokers
    if found != brokers:
        raise StackError(f"{folder} holds the data of {found} Kafka broker(s), not of {brokers}: choose another folder")
    names = node_names(brokers)
    clients = [ports.take(name) for name in names]
    controllers = [ports.take(f"{name}-controller") for name in names]
    if brokers == 1:
        return KafkaCluster((Kafka(folder, clients[0], controllers[0], libs),))
    if not cluster_id_file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # Before anything is formatted: a run that is killed in between must not leave nodes of two clusters.
        write_private(cluster_id_file, new_cluster_id())
    cluster_id = cluster_id_file.read_text(encoding="utf-8")
    voters = dict(enumerate(controllers, FIRST_ID))
    return KafkaCluster(
        tuple(
            Kafka(folder / name, port, voters[node_id], libs, name, node_id, voters, cluster_id)
            for node_id, (name, port) in enumerate(zip(names, clients, strict=True), FIRST_ID)
        )
    )


def node_names(brokers: int) -> tuple[str, ...]:
    """The names of the nodes in the stack, in the order of their numbers."""
    if brokers == 1:
        return (kafka.NAME,)
    return tuple(f"{kafka.NAME}-{number}" for number in range(FIRST_ID, FIRST_ID + brokers))


def part_of(process: str) -> str:
    """The part that a process belongs to: that of a node of a cluster is `kafka`, any other process is its own."""
    return kafka.NAME if _NODE.fullmatch(process) else process
