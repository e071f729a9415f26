"""Brokers that ask for passwords, and check rights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.local.kafka import HOST, Kafka
from deploy.local.ports import PortClaims
from deploy.local.services import Service
from deploy.local.supervisor import Supervisor
from fairlane.settings import KafkaSettings
from fairlane_server.access.admin import apply_access, read_access
from fairlane_server.access.credentials import PASSWORD, keep_passwords, prepare_passwords, read_credentials
from fairlane_server.access.plan import CreateUser, plan
from fairlane_server.access.users import KafkaUser, first_users
from fairlane_server.kafka.cluster_admin import ClusterAdmin
from fairlane_server.topics.families import KafkaRole, load_families, pools_of

if TYPE_CHECKING:
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


_RUNNING: dict[str, CheckingKafka] = {}
"""By the address of those who come without a password."""


@contextmanager
def checking_kafka(folder: Path, settings: Mapping[str, str] | None = None) -> Iterator[CheckingKafka]:
    """One that runs, with these properties besides its own."""
    ports = PortClaims()
    port, controller, secured = (ports.take(name) for name in ("kafka", "controller", "secured"))
    node = CheckingKafka(folder / "kafka", port, controller, secured_port=secured, settings=settings or {})
    (folder / "logs").mkdir(parents=True)
    with Supervisor(node.specs(), log_dir=folder / "logs", processes_file=folder / "processes.json"):
        _RUNNING[node.bootstrap_servers] = node
        yield node
        del _RUNNING[node.bootstrap_servers]
    ports.close()


def users_on(bootstrap_servers: str) -> "PipelineUsers | None":
    """Users for a pipeline on this broker; None if it checks no rights."""
    kafka = _RUNNING.get(bootstrap_servers)
    return None if kafka is None else PipelineUsers(kafka, kafka.folder / "credentials")


@dataclass(slots=True)
class PipelineUsers:
    """The users of a pipeline on such a broker: each process acts as the one of its role. To be a pipeline's
    ``env_of``. Their rights are those of the pipeline that asked last: one at a time runs."""

    kafka: CheckingKafka
    folder: Path
    _applied: tuple[tuple[str, ...], tuple[str, ...]] | None = None

    def __call__(self, pipeline: "Pipeline", service: Service) -> dict[str, str]:
        user = _user_of(service)
        return {} if user is None else self.env(pipeline, user)

    def env(self, pipeline: "Pipeline", user: KafkaUser) -> dict[str, str]:
        """Settings of a process that acts as this user."""
        self._apply(pipeline)
        return self.kafka.user_env(user.name, read_credentials(self.folder, user.name)[PASSWORD])

    def settings(self, pipeline: "Pipeline", user: KafkaUser) -> KafkaSettings:
        """The same, for a client in this process."""
        return KafkaSettings.model_validate({name.lower(): value for name, value in self.env(pipeline, user).items()})

    def _apply(self, pipeline: "Pipeline") -> None:
        """As `fairlane access apply --delete` does, within this process."""
        tenants, pools = tuple(pipeline.tenants), pools_of(pipeline.tenants.values(), pipeline.models)
        if self._applied == (tenants, pools):
            return
        cluster = ClusterAdmin(pipeline.settings)
        state, users = read_access(cluster, pipeline.settings), first_users(tenants, pools)
        made = plan(state, users, load_families(), pipeline.group_prefix, {}, delete=True)
        passwords = prepare_passwords(
            self.folder, [change.user for change in made.changes if isinstance(change, CreateUser)]
        )
        failed = [
            one for one in apply_access(cluster, pipeline.settings, made.changes, passwords) if one.result == "failed"
        ]
        assert not failed, failed
        keep_passwords(self.folder, passwords)
        self._applied = tenants, pools


_ROLES = {
    "stream_processors.dispatcher": KafkaRole.DISPATCHER,
    "stream_processors.recorder": KafkaRole.RECORDER,
    "producers.gateway": KafkaRole.GATEWAY,
    "producers.admin": KafkaRole.ADMIN,
    "producers.backfill": KafkaRole.BACKFILL,
}


def _user_of(service: Service) -> KafkaUser | None:
    """Who a process acts as, by what it runs; None for a program of a test's own."""
    if "--pool" in service.arguments:
        return KafkaUser(KafkaRole.CONSUMER, service.arguments[service.arguments.index("--pool") + 1])
    role = _ROLES.get(service.arguments[1])
    return None if role is None else KafkaUser(role)
