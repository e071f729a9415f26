"""A Kafka node (KRaft, broker and controller in one) from jars, with no shell scripts and no Docker."""

import base64
import hashlib
import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from deploy.local import probes
from deploy.local.certificates import Certificates
from deploy.local.layout import DEFAULT_DATA_DIR, KAFKA_LIBS_DIR, StackError
from deploy.local.ports import PortClaims
from deploy.local.supervisor import ProcessSpec
from fairlane_server.private_files import write_private

NAME = "kafka"
HOST = "127.0.0.1"
FIRST_ID = 1
HEAP = "512m"
# The first compiler alone: an idle broker takes 0.11 of a core instead of 0.18, requests are answered in 16 ms from the
# start instead of 25, and a request under load costs it less.
FIRST_COMPILER = "-XX:TieredStopAtLevel=1"
OPTIONS = (FIRST_COMPILER, "-Xms128m", f"-Xmx{HEAP}")
OPTIONS_OF_MANY = (FIRST_COMPILER, "-Xms64m", "-Xmx256m")
"""Java's, for each node of a cluster: about 200 MB."""
MARK = "formatted"
SECURED_MARK = "formatted-secured"
MIN_JAVA = 17
ARCHIVE_PREFIX = "kafka-classes-"
LOG_CONFIG = Path(__file__).with_name("log4j2.properties")

BROKER_SETTINGS: Mapping[str, str] = {
    "process.roles": "broker,controller",
    "node.id": str(FIRST_ID),
    "controller.listener.names": "CONTROLLER",
    "inter.broker.listener.name": "PLAINTEXT",
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    "auto.create.topics.enable": "false",
    # One node keeps one copy.
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "offsets.topic.num.partitions": "8",
    "transaction.state.log.num.partitions": "8",
    "share.coordinator.state.topic.num.partitions": "8",
    "message.max.bytes": str(8 * 1024 * 1024),
    # Longer than the retention of any topic: a pool that rests for a week must find its offsets again.
    "offsets.retention.minutes": str(30 * 24 * 60),
    # A dead member is replaced in seconds (the defaults are made for 45 s).
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "3000",
    "group.consumer.session.timeout.ms": "6000",
    "group.consumer.min.session.timeout.ms": "3000",
    "group.consumer.heartbeat.interval.ms": "500",
    "group.consumer.min.heartbeat.interval.ms": "500",
    # The open transaction of a killed producer blocks every read_committed reader until it is aborted.
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
    # After a kill the node waits until its former self counts as dead (the default is 9 s).
    "broker.session.timeout.ms": "4000",
    "broker.heartbeat.interval.ms": "500",
    # Nobody can take its partitions over, and while it shuts down in order it names no broker in its metadata: a client
    # may then forget all brokers for good (`fairlane.cluster`).
    "controlled.shutdown.enable": "false",
    # Small machine: the cleaner's buffer alone would be 128 MiB of the heap.
    "log.cleaner.dedupe.buffer.size": str(16 * 1024 * 1024),
    "num.network.threads": "2",
    "num.io.threads": "4",
}
"""Settings of a single node, also in containers."""

REPLICATED_SETTINGS: Mapping[str, str] = {
    "controlled.shutdown.enable": "true",
    "default.replication.factor": "3",
    # What is acknowledged has two copies at least, and one broker may be away; also for the groups' offsets.
    "min.insync.replicas": "2",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
    "share.coordinator.state.topic.replication.factor": "3",
    "share.coordinator.state.topic.min.isr": "2",
}
"""Settings of a node of a cluster, in addition to or instead of those of a single node."""


ADMIN_USER = "admin"
"""Of a secured node: may do everything."""
SECURED_SETTINGS: Mapping[str, str] = {
    "inter.broker.listener.name": "SASL_SSL",
    "listener.security.protocol.map": "SASL_SSL:SASL_SSL,CONTROLLER:SASL_SSL",
    "sasl.enabled.mechanisms": "SCRAM-SHA-512",
    "sasl.mechanism.inter.broker.protocol": "SCRAM-SHA-512",
    # Users are kept by the controllers, who therefore cannot be asked for them to log in there.
    "sasl.mechanism.controller.protocol": "PLAIN",
    "listener.name.controller.sasl.enabled.mechanisms": "PLAIN",
    "ssl.keystore.type": "PEM",
    "ssl.truststore.type": "PEM",
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": f"User:{ADMIN_USER}",
}
"""Settings of a node that serves only users with a password, over TLS, and what their ACLs allow."""


@dataclass(frozen=True, slots=True, repr=False)
class KafkaSecurity:
    """What secures a node: its certificates, and the password of ADMIN_USER."""

    certificates: Certificates
    admin_password: str

    @property
    def settings(self) -> dict[str, str]:
        """Properties of the node; they hold the password."""
        module = "org.apache.kafka.common.security"
        admin = f'username="{ADMIN_USER}" password="{self.admin_password}"'
        plain = f'{module}.plain.PlainLoginModule required {admin} user_{ADMIN_USER}="{self.admin_password}";'
        return {
            **SECURED_SETTINGS,
            "listener.name.controller.plain.sasl.jaas.config": plain,
            "listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config": (
                f"{module}.scram.ScramLoginModule required {admin};"
            ),
            "ssl.keystore.location": str(self.certificates.server_file),
            "ssl.truststore.location": str(self.certificates.ca_file),
        }

    @property
    def format_options(self) -> tuple[str, ...]:
        """Of the command that formats a data folder: ADMIN_USER and its password."""
        return ("--add-scram", f'SCRAM-SHA-512=[name="{ADMIN_USER}",password="{self.admin_password}"]')

    @property
    def client_config(self) -> dict[str, Any]:
        """Of librdkafka, to act as ADMIN_USER."""
        return {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": ADMIN_USER,
            "sasl.password": self.admin_password,
            "ssl.ca.location": str(self.certificates.ca_file),
        }


def new_cluster_id() -> str:
    """A random id, as Kafka writes it."""
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")


@dataclass(frozen=True, slots=True)
class Kafka:
    """One Kafka node: alone, or one of a cluster.

    Attributes:
        folder: its data and its properties file.
        libs: folder of Kafka's jars.
        voters: controller ports of all nodes of the cluster by number; empty for a single node.
        cluster_id: the same for all nodes of the cluster; a data folder is formatted with it once.
        security: None for a node that serves everybody.
        both_compilers: run with both of Java's compilers, as a secured node does anyway.
    """

    folder: Path
    port: int
    controller_port: int
    libs: Path = KAFKA_LIBS_DIR
    name: str = NAME
    node_id: int = FIRST_ID
    voters: Mapping[int, int] = field(default_factory=dict)
    cluster_id: str = field(default_factory=new_cluster_id)
    security: KafkaSecurity | None = None
    both_compilers: bool = False

    @property
    def bootstrap_servers(self) -> str:
        return f"{HOST}:{self.port}"

    def specs(self) -> tuple[ProcessSpec, ...]:
        """Write the properties file and say what to run: formatting, for a new data folder only, then the node. Raises
        StackError: Java or the jars are missing."""
        if not any(self.libs.glob("kafka_2.13-*.jar")):
            raise StackError(f"Kafka's jars are not in {self.libs}: run `make install`")
        java = find_java()
        self.folder.mkdir(parents=True, exist_ok=True)
        properties = self.folder / "server.properties"
        write_private(properties, self._properties())
        archive = class_archive(java, self.libs)
        shared = (f"-XX:SharedArchiveFile={archive}",) if archive.exists() else ()
        command = (java, *shared, f"-Dlog4j2.configurationFile={LOG_CONFIG}", "-cp", f"{self.libs}/*")
        format_name = f"{self.name}-format"
        formatted = is_formatted(self.folder)
        options: tuple[str, ...] = OPTIONS_OF_MANY if self.voters else OPTIONS
        if self.security is not None or self.both_compilers:
            # Only the second compiler uses the processor's instructions for AES.
            options = tuple(option for option in options if option != FIRST_COMPILER)
        node = ProcessSpec(
            name=self.name,
            argv=(
                *(*command[:1], *options, "-XX:+UseSerialGC", "-XX:+ExitOnOutOfMemoryError"),
                *(*command[1:], "kafka.Kafka", str(properties)),
            ),
            cwd=self.folder,
            depends_on=() if formatted else (format_name,),
            probe=lambda: probes.kafka_node(
                self.bootstrap_servers, config=None if self.security is None else self.security.client_config
            ),
            start_timeout_s=90,
            # Nodes of a cluster that end together take 5 to 10 s: the last ones wait for a leader that cannot come.
            stop_timeout_s=30,
        )
        return (node,) if formatted else (self._format(format_name, command, properties), node)

    def _format(self, name: str, command: tuple[str, ...], properties: Path) -> ProcessSpec:
        options = (
            *("kafka.tools.StorageTool", "format", "-c", str(properties)),
            f"--cluster-id={self.cluster_id}",
            *(() if self.security is None else self.security.format_options),
        )
        # In a file that Java reads: anybody may see the arguments of a process, and one of these holds a password.
        arguments = self.folder / "format.arguments"
        write_private(arguments, "".join(f"{_quoted(option)}\n" for option in options))
        tool = (*command[:1], FIRST_COMPILER, *command[1:], f"@{arguments}")
        mark = MARK if self.security is None else SECURED_MARK
        # The mark comes last, so that a folder half formatted by a killed run is formatted anew.
        script = 'data="$1"; mark="$2"; shift 2; rm -rf "$data" && "$@" && : > "$mark"'
        return ProcessSpec(
            name=name,
            argv=("/bin/sh", "-c", script, "sh", str(log_dir(self.folder)), str(self.folder / mark), *tool),
            cwd=self.folder,
            one_shot=True,
        )

    def _properties(self) -> str:
        settings = {**BROKER_SETTINGS, **REPLICATED_SETTINGS} if self.voters else BROKER_SETTINGS
        voters = self.voters or {self.node_id: self.controller_port}
        listener = "PLAINTEXT" if self.security is None else "SASL_SSL"
        listeners = f"{listener}://{HOST}:{self.port},CONTROLLER://{HOST}:{self.controller_port}"
        here = {
            **({} if self.security is None else self.security.settings),
            "node.id": str(self.node_id),
            "listeners": listeners,
            "advertised.listeners": listeners,
            # Not in the log, as voters that are agreed upon would be: after a restart every port may be another one.
            "controller.quorum.voters": ",".join(f"{node}@{HOST}:{port}" for node, port in sorted(voters.items())),
            "log.dirs": str(log_dir(self.folder)),
        }
        return "".join(f"{name}={value}\n" for name, value in {**settings, **here}.items())


def log_dir(folder: Path) -> Path:
    """Where a node with this folder keeps its partitions."""
    return folder / "data"


def is_formatted(folder: Path) -> bool:
    """Whether the folder of a node holds data, or is ready to."""
    return any((folder / mark).exists() for mark in (MARK, SECURED_MARK))


def holds_data(folder: Path, *, secured: bool) -> bool:
    """Whether any node of a cluster with this folder was formatted. Raises StackError: one was, and it is secured where
    the cluster shall not be, or the reverse."""
    nodes = [folder, *(folder / name for name in node_names(MANY))]
    expected, other = (SECURED_MARK, MARK) if secured else (MARK, SECURED_MARK)
    for node in nodes:
        if (node / other).exists():
            kind, advice = ("an unsecured", "with") if secured else ("a secured", "without")
            raise StackError(
                f"{node} holds the data of {kind} Kafka: start it {advice} --plaintext, or choose another --data-dir"
            )
    return any((node / expected).exists() for node in nodes)


def _quoted(argument: str) -> str:
    """As it stands in a file of arguments of Java."""
    escaped = argument.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def find_java() -> str:
    """The path of a Java that Kafka runs on, from JAVA_HOME or the search path. Raises StackError: there is none, or it
    is too old."""
    home = os.environ.get("JAVA_HOME")
    candidate = Path(home) / "bin" / "java" if home else None
    found = str(candidate) if candidate is not None and candidate.exists() else shutil.which("java")
    advice = "install openjdk-17-jre-headless, or set JAVA_HOME"
    if found is None:
        raise StackError(f"Java {MIN_JAVA} or newer is needed to run Kafka: {advice}")
    version = re.search(r'version "(?:1\.)?(\d+)', _java_version(found))
    if version is None or int(version[1]) < MIN_JAVA:
        known = version[1] if version else "unknown"
        raise StackError(f"Java {MIN_JAVA} or newer is needed to run Kafka, {found} is {known}: {advice}")
    return found


@cache
def _java_version(java: str) -> str:
    return subprocess.run((java, "-version"), capture_output=True, text=True, timeout=30, check=False).stderr


def class_archive(java: str, libs: Path) -> Path:
    """The archive of Kafka's loaded classes for this Java and these jars; `deploy.local.kafka_classes` makes it.

    With it a node starts in half the time and CPU. It need not exist, and Java does not use one that does not fit.
    """
    jars = [(jar.name, jar.stat().st_size, jar.stat().st_mtime_ns) for jar in sorted(libs.glob("*.jar"))]
    key = hashlib.sha256(repr((_java_version(java), str(libs), jars)).encode()).hexdigest()[:16]
    return DEFAULT_DATA_DIR / f"{ARCHIVE_PREFIX}{key}.jsa"


MANY = 3
"""The smallest number of nodes that works without one of them: the others are a majority, and two copies."""
BROKERS = (1, MANY)

_NODE = re.compile(rf"{NAME}-\d+")


def compose_kafka(
    folder: Path,
    brokers: int,
    ports: PortClaims,
    libs: Path = KAFKA_LIBS_DIR,
    security: KafkaSecurity | None = None,
    *,
    both_compilers: bool = False,
) -> tuple[Kafka, ...]:
    """The nodes in the order of their numbers, with data in `folder`, on the ports of the last run where still free.

    Raises StackError: the number is none of BROKERS, the data are those of another number, or no port is free.
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
        return (Kafka(folder, clients[0], controllers[0], libs, security=security, both_compilers=both_compilers),)
    if not cluster_id_file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # Before anything is formatted: a run that is killed in between must not leave nodes of two clusters.
        write_private(cluster_id_file, new_cluster_id())
    cluster_id = cluster_id_file.read_text(encoding="utf-8")
    voters = dict(enumerate(controllers, FIRST_ID))
    return tuple(
        Kafka(folder / name, port, voters[node_id], libs, name, node_id, voters, cluster_id, security)
        for node_id, (name, port) in enumerate(zip(names, clients, strict=True), FIRST_ID)
    )


def node_names(brokers: int) -> tuple[str, ...]:
    """The names of the nodes in the stack, in the order of their numbers."""
    if brokers == 1:
        return (NAME,)
    return tuple(f"{NAME}-{number}" for number in range(FIRST_ID, FIRST_ID + brokers))


def part_of(process: str) -> str:
    """The part that a process belongs to: that of a node of a cluster is `kafka`, any other process is its own."""
    return NAME if _NODE.fullmatch(process) else process
