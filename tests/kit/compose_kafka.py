"""The broker of docker-compose.yml, configured by the program that its image starts with."""

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from deploy.certificates import make as make_certificates
from deploy.local import probes
from deploy.local.kafka import ADMIN_USER, FIRST_COMPILER, HOST, find_java
from deploy.local.layout import KAFKA_LIBS_DIR
from deploy.local.ports import PortClaims
from deploy.local.supervisor import ProcessSpec, Supervisor
from tests.contract.compose_file import PASSWORDS, services

_LISTENERS = ("SERVICES", "HOST", "ADMIN", "CONTROLLER")


@dataclass(frozen=True, slots=True)
class ComposeKafka:
    """A running one. ``addresses``: by listener; ``ca_file``: of the authority that made its certificate."""

    addresses: Mapping[str, str]
    ca_file: Path

    @property
    def admin(self) -> dict[str, str]:
        """Settings of a process that may do everything."""
        return self.user(ADMIN_USER, PASSWORDS["KAFKA_ADMIN_PASSWORD"])

    def user(self, name: str, password: str) -> dict[str, str]:
        """Settings of a process that acts as this user of the listener ADMIN."""
        return {
            "KAFKA_BOOTSTRAP_SERVERS": self.addresses["ADMIN"],
            "KAFKA_SECURITY_PROTOCOL": "SASL_SSL",
            "KAFKA_SSL_CA_FILE": str(self.ca_file),
            "KAFKA_SASL_MECHANISM": "PLAIN",
            "KAFKA_SASL_USERNAME": name,
            "KAFKA_SASL_PASSWORD": password,
        }


def formatted(folder: Path, changes: Mapping[str, str]) -> Path:
    """Write the properties as the image does, and format the data folder with them. Returns their file.

    ``changes``: of the variables of the container.
    """
    environment = {**services()["kafka"].environment, **changes}
    folders = {name: folder / name for name in ("default", "mounted", "final")}
    for each in folders.values():
        each.mkdir(parents=True)
    for name in ("server.properties", "log4j2.yaml", "tools-log4j2.yaml"):
        (folders["default"] / name).touch()
    subprocess.run(
        (
            *(*_java(), "kafka.docker.KafkaDockerWrapper"),
            *("setup", "-D", str(folders["default"]), "-M", str(folders["mounted"]), "-F", str(folders["final"])),
        ),
        env={"PATH": os.environ["PATH"], **environment},
        cwd=folder,
        check=True,
        capture_output=True,
        timeout=60,
    )
    return folders["final"] / "server.properties"


@contextmanager
def compose_kafka(folder: Path) -> Iterator[ComposeKafka]:
    """Run it on free ports of this machine until the end of the block."""
    ca_file = folder / "certificates" / "authority" / "ca.pem"
    make_certificates(folder / "certificates", ["kafka"])
    with closing(PortClaims()) as ports:
        addresses = {name: f"{HOST}:{ports.take(name.lower())}" for name in _LISTENERS}
        listeners = ",".join(f"{name}://{address}" for name, address in addresses.items())
        changes = {
            "KAFKA_LISTENERS": listeners,
            "KAFKA_ADVERTISED_LISTENERS": listeners.rpartition(",")[0],
            "KAFKA_CONTROLLER_QUORUM_VOTERS": f"1@{addresses['CONTROLLER']}",
            "KAFKA_LOG_DIRS": str(folder / "data"),
            "KAFKA_SSL_KEYSTORE_LOCATION": str(folder / "certificates" / "kafka" / "server.pem"),
            "KAFKA_SSL_TRUSTSTORE_LOCATION": str(ca_file),
        }
        properties = formatted(folder / "config", changes)
        kafka = ComposeKafka(addresses, ca_file)
        node = ProcessSpec(
            name="kafka",
            argv=(
                find_java(),
                FIRST_COMPILER,
                "-Xmx256m",
                "-cp",
                f"{KAFKA_LIBS_DIR}/*",
                "kafka.Kafka",
                str(properties),
            ),
            cwd=folder,
            probe=lambda: probes.kafka_node(addresses["ADMIN"], config=_client_config(kafka)),
            start_timeout_s=90,
            stop_timeout_s=30,
        )
        (folder / "logs").mkdir()
        with Supervisor([node], log_dir=folder / "logs", processes_file=folder / "processes.json"):
            yield kafka


def _java() -> tuple[str, ...]:
    return (find_java(), FIRST_COMPILER, "-cp", f"{KAFKA_LIBS_DIR}/*")


def _client_config(kafka: ComposeKafka) -> dict[str, str]:
    return {
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": str(kafka.ca_file),
        "sasl.mechanism": "PLAIN",
        "sasl.username": ADMIN_USER,
        "sasl.password": kafka.admin["KAFKA_SASL_PASSWORD"],
    }
