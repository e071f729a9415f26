"""Brokers that ask for passwords, and check rights."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from deploy.local.kafka import HOST, Kafka
from deploy.local.layout import PROJECT_ROOT
from deploy.local.ports import PortClaims
from deploy.local.supervisor import Supervisor
from fairlane.settings import KafkaSettings
from fairlane_server.access.credentials import PASSWORD, read_credentials
from fairlane_server.access.users import KafkaUser
from fairlane_server.topics.families import KafkaRole
from tests.kit.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class SecuredKafka(Kafka):
    """A node that asks clients for SCRAM on one more port."""

    secured_port: int = field(kw_only=True)

    def _properties(self) -> str:
        plain = f"{HOST}:{self.port},CONTROLLER://{HOST}:{self.controller_port}"
        secured = f"PLAINTEXT://{plain},SECURED://{HOST}:{self.secured_port}"
        here = {
            "listeners": secured,
            "advertised.listeners": secured,
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SECURED:SASL_PLAINTEXT",
            "listener.name.secured.sasl.enabled.mechanisms": "SCRAM-SHA-512",
            "listener.name.secured.scram-sha-512.sasl.jaas.config": (
                "org.apache.kafka.common.security.scram.ScramLoginModule required;"
            ),
        }
        # The last of two lines counts.
        return Kafka._properties(self) + "".join(f"{name}={value}\n" for name, value in here.items())


@dataclass(frozen=True, slots=True)
class CheckingKafka(SecuredKafka):
    """One that allows users only what it was told; whoever comes without a password may do everything."""

    settings: Mapping[str, str] = field(default_factory=dict)
    """More properties of the node."""

    @property
    def secured_servers(self) -> str:
        return f"{HOST}:{self.secured_port}"

    def user_env(self, user: str, password: str) -> dict[str, str]:
        """Settings of a process that acts as this user."""
        return {
            "KAFKA_BOOTSTRAP_SERVERS": self.secured_servers,
            "KAFKA_SECURITY_PROTOCOL": "SASL_PLAINTEXT",
            "KAFKA_SASL_MECHANISM": "SCRAM-SHA-512",
            "KAFKA_SASL_USERNAME": user,
            "KAFKA_SASL_PASSWORD": password,
        }

    def _properties(self) -> str:
        here = {
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
            **self.settings,
        }
        return SecuredKafka._properties(self) + "".join(f"{name}={value}\n" for name, value in here.items())


@contextmanager
def checking_kafka(folder: Path, settings: Mapping[str, str] | None = None) -> Iterator[CheckingKafka]:
    """One that runs, with these properties besides its own."""
    ports = PortClaims()
    port, controller, secured = (ports.take(name) for name in ("kafka", "controller", "secured"))
    node = CheckingKafka(folder / "kafka", port, controller, secured_port=secured, settings=settings or {})
    (folder / "logs").mkdir()
    with Supervisor(node.specs(), log_dir=folder / "logs", processes_file=folder / "processes.json"):
        yield node
    ports.close()


@dataclass(slots=True)
class PipelineUsers:
    """The users of a pipeline on such a broker: each process acts as the one of its role. To be a pipeline's
    ``env_of``; rights are applied before the first process starts."""

    kafka: CheckingKafka
    folder: Path

    def __call__(self, pipeline: Pipeline, service: str) -> dict[str, str]:
        role, _, number = service.partition("-")
        pool = number.rpartition("-")[0] if role == KafkaRole.CONSUMER else ""
        return self.env(pipeline, KafkaUser(KafkaRole(role), pool))

    def env(self, pipeline: Pipeline, user: KafkaUser) -> dict[str, str]:
        """Settings of a process that acts as this user."""
        if not self.folder.exists():
            self._apply(pipeline)
        return self.kafka.user_env(user.name, read_credentials(self.folder, user.name)[PASSWORD])

    def settings(self, pipeline: Pipeline, user: KafkaUser) -> KafkaSettings:
        """The same, for a client in this process."""
        return KafkaSettings.model_validate({name.lower(): value for name, value in self.env(pipeline, user).items()})

    def _apply(self, pipeline: Pipeline) -> None:
        command = ("-m", "fairlane_server.cli", "access", "apply", "--credentials", str(self.folder), "--json")
        done = subprocess.run(
            (sys.executable, *command),
            cwd=PROJECT_ROOT,
            env={**os.environ, **pipeline.env},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
