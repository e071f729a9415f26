"""The Kafka, Postgres and Redis of a test run: FAIRLANE_TEST_STACK is embedded (default), containers or external."""

import gc
import os
import secrets
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Protocol, Self
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg import sql

from deploy.local.kafka import BROKER_SETTINGS, log_dir
from deploy.local.layout import POSTGRES_OWNER_VARIABLE, POSTGRES_VARIABLE, POSTGRES_VARIABLES, Endpoints
from deploy.local.ports import PortClaims
from deploy.local.postgres import DATABASE, OWNER_ROLE, SERVICE_ROLES, create_roles
from deploy.local.stack import LocalStack
from fairlane.settings import Settings
from fairlane_server.postgres.migrations import upgrade
from fairlane_server.postgres.rights import PostgresRole
from tests.kit.secured_kafka import CheckingKafka, checking_kafka

CHOICE_VARIABLE = "FAIRLANE_TEST_STACK"
KAFKA_IMAGE = "apache/kafka:4.2.0"
POSTGRES_IMAGE = "pgvector/pgvector:0.8.5-pg18"
REDIS_IMAGE = "redis:7.4-alpine"
CONTAINER_START_TIMEOUT_S = 120


class StackChoiceError(Exception):
    """The chosen stack cannot be used here; the message says why and what to choose instead."""


@dataclass(frozen=True, slots=True)
class PostgresServer:
    """The ways into one database, by role.

    Attributes:
        owner_dsn: the role that owns the tables; it may create databases.
        template: name of the database that `migrated_database` copies; empty if there is none.
    """

    owner_dsn: str
    dispatcher_dsn: str
    recorder_dsn: str
    gateway_dsn: str
    backfill_dsn: str
    ingest_dsn: str
    operator_dsn: str
    admin_dsn: str
    template: str = ""

    @classmethod
    def of(cls, endpoints: Endpoints) -> Self:
        """The Postgres of a stack."""
        dsns = {f"{role}_dsn": dsn for role, dsn in endpoints.postgres_dsns.items()}
        return cls(owner_dsn=endpoints.postgres_owner_dsn, **dsns)

    def dsn(self, role: PostgresRole) -> str:
        """The way in of a service."""
        return str(getattr(self, f"{role}_dsn"))

    @property
    def environ(self) -> Mapping[str, str]:
        """The variables by which a stack takes it for its external Postgres."""
        own = {variable: self.dsn(role) for role, variable in POSTGRES_VARIABLES.items()}
        return {POSTGRES_VARIABLE: self.operator_dsn, POSTGRES_OWNER_VARIABLE: self.owner_dsn, **own}

    def database(self, name: str) -> Self:
        """Another database of the same server, without a template."""
        dsns = [field.name for field in fields(self) if field.name.endswith("_dsn")]
        return replace(self, template="", **{dsn: _with_database(getattr(self, dsn), name) for dsn in dsns})


@contextmanager
def with_template(server: PostgresServer) -> Iterator[PostgresServer]:
    """The server with a migrated database as its template: a copy costs a fifth of the migrations."""
    with migrated_database(server, f"template_{secrets.token_hex(6)}") as made:
        yield replace(server, template=urlsplit(made.owner_dsn).path.removeprefix("/"))


@contextmanager
def migrated_database(server: PostgresServer, unique: str) -> Iterator[PostgresServer]:
    """A database with the tables, dropped at the end: a copy of the server's template if there is one."""
    with empty_database(server, unique, server.template or "template1") as made:
        if not server.template:
            upgrade(Settings(postgres_owner_dsn=made.owner_dsn))
        yield made


@contextmanager
def empty_database(server: PostgresServer, unique: str, template: str = "template1") -> Iterator[PostgresServer]:
    """An empty database with the vector extension, or a copy of another template, dropped at the end."""
    name = f"test_{unique.replace('-', '_')}"
    _as_owner(server, sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), sql.Identifier(template)))
    yield server.database(name)
    # Not WITH (FORCE): the owner may not end sessions of the services' roles. Postgres waits 5 s for their end.
    _as_owner(server, sql.SQL("DROP DATABASE {}").format(sql.Identifier(name)))


def _as_owner(server: PostgresServer, statement: sql.Composed) -> None:
    # A connection for each: a test may have restarted the server since the last one.
    with psycopg.connect(server.owner_dsn, autocommit=True, connect_timeout=5) as connection:
        connection.execute(statement)


def _with_database(dsn: str, name: str) -> str:
    return urlunsplit(urlsplit(dsn)._replace(path=f"/{name}"))


class ServerStack(Protocol):
    """Starts each part when it is first asked for."""

    def kafka(self) -> str:
        """The bootstrap servers."""

    def postgres(self) -> PostgresServer:
        """The database server."""

    def redis(self) -> str:
        """The URL."""

    def close(self) -> None:
        """Stop everything that was started."""


def choose_stack(environ: Mapping[str, str] = os.environ) -> ServerStack:
    """The stack that FAIRLANE_TEST_STACK names; starts nothing yet.

    Raises:
        StackChoiceError: there is no such choice, or it cannot be used here.
    """
    choice = environ.get(CHOICE_VARIABLE, "embedded")
    match choice:
        case "embedded":
            return EmbeddedStack()
        case "external":
            return ExternalStack(environ)
        case "containers":
            return ContainerStack()
        case _:
            raise StackChoiceError(f"{CHOICE_VARIABLE}={choice}: choose embedded, containers or external")


class EmbeddedStack:
    """The embedded stack in a folder of its own that goes away with it; whatever the environment names is not used."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="fairlane-tests-"))
        self._running = ExitStack()
        self._parts: dict[str, LocalStack] = {}
        self._kafka: CheckingKafka | None = None

    def kafka(self) -> str:
        """The bootstrap servers, for tests and what they start by themselves: whoever comes without a password may do
        everything. The services of a pipeline act as the users of their roles."""
        return self._checking_kafka().bootstrap_servers

    @property
    def kafka_log_dir(self) -> Path:
        """The folder that its broker keeps the partitions in."""
        return log_dir(self._checking_kafka().folder)

    def postgres(self) -> PostgresServer:
        """The database server."""
        return PostgresServer.of(self._part("postgres").endpoints)

    def redis(self) -> str:
        """The URL."""
        return self._part("redis").endpoints.redis_url

    def close(self) -> None:
        """Stop everything that was started and remove its data."""
        self._running.close()
        shutil.rmtree(self._folder)

    def _checking_kafka(self) -> CheckingKafka:
        if self._kafka is None:
            self._kafka = self._running.enter_context(checking_kafka(self._folder / "kafka"))
        return self._kafka

    def _part(self, name: str) -> LocalStack:
        if name not in self._parts:
            stack = LocalStack(data_dir=self._folder / name, parts=(name,), environ={})
            self._parts[name] = self._running.enter_context(stack)
        return self._parts[name]


class ExternalStack:
    """Servers that somebody else runs, named by the same variables as for the services."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def kafka(self) -> str:
        """The bootstrap servers."""
        return self._get("KAFKA_BOOTSTRAP_SERVERS")

    def postgres(self) -> PostgresServer:
        """The database server."""
        shared_dsn = self._get(POSTGRES_VARIABLE)
        dsns = {role: self._environ.get(variable) or shared_dsn for role, variable in POSTGRES_VARIABLES.items()}
        return PostgresServer.of(Endpoints(postgres_owner_dsn=self._get(POSTGRES_OWNER_VARIABLE), postgres_dsns=dsns))

    def redis(self) -> str:
        """The URL."""
        return self._get("REDIS_URL")

    def close(self) -> None:
        """Nothing was started."""

    def _get(self, variable: str) -> str:
        if not (value := self._environ.get(variable)):
            raise StackChoiceError(f"{CHOICE_VARIABLE}=external needs {variable}")
        return value


class ContainerStack:
    """Containers of testcontainers; needs a Docker daemon.

    Raises:
        StackChoiceError: there is none. It is asked at once, so that its absence is said once and not by every test.
    """

    def __init__(self) -> None:
        if problem := docker_problem():
            raise StackChoiceError(
                f"{CHOICE_VARIABLE}=containers needs a Docker daemon, and none answers ({problem}); "
                f"start one, or use {CHOICE_VARIABLE}=embedded"
            )
        self._running = ExitStack()
        self._kafka: str | None = None
        self._postgres: PostgresServer | None = None
        self._redis: str | None = None

    def kafka(self) -> str:
        """The bootstrap servers."""
        if self._kafka is None:
            self._kafka = self._start_kafka()
        return self._kafka

    def postgres(self) -> PostgresServer:
        """The database server."""
        if self._postgres is None:
            self._postgres = self._start_postgres()
        return self._postgres

    def redis(self) -> str:
        """The URL."""
        if self._redis is None:
            self._redis = self._start_redis()
        return self._redis

    def close(self) -> None:
        """Stop the containers."""
        self._running.close()

    def _start_kafka(self) -> str:
        from testcontainers.core.container import DockerContainer
        from testcontainers.core.waiting_utils import wait_for_logs

        # Clients are sent to the advertised address, which must be known before the container starts.
        ports = PortClaims()
        self._running.callback(ports.close)
        port = ports.take("kafka")
        settings = {
            **BROKER_SETTINGS,
            "listeners": f"PLAINTEXT://:{port},CONTROLLER://:9093",
            "advertised.listeners": f"PLAINTEXT://localhost:{port}",
            "controller.quorum.voters": "1@localhost:9093",
        }
        container = DockerContainer(KAFKA_IMAGE).with_bind_ports(port, port)
        for name, value in settings.items():
            container.with_env(f"KAFKA_{name.upper().replace('.', '_')}", value)
        self._running.enter_context(container)
        wait_for_logs(container, "Kafka Server started", timeout=CONTAINER_START_TIMEOUT_S)
        return f"localhost:{port}"

    def _start_postgres(self) -> PostgresServer:
        from testcontainers.community.postgres import PostgresContainer

        container = self._running.enter_context(PostgresContainer(POSTGRES_IMAGE, driver=None))
        passwords = {role: secrets.token_urlsafe(24) for role in (OWNER_ROLE, *SERVICE_ROLES)}
        create_roles(container.get_connection_url(), passwords)
        host, port = container.get_container_host_ip(), container.get_exposed_port(5432)
        dsns = {role: f"postgresql://{role}:{word}@{host}:{port}/{DATABASE}" for role, word in passwords.items()}
        of_services = {role: dsns[role.name_in()] for role in PostgresRole}
        return PostgresServer.of(Endpoints(postgres_owner_dsn=dsns[OWNER_ROLE], postgres_dsns=of_services))

    def _start_redis(self) -> str:
        from testcontainers.community.redis import RedisContainer

        container = self._running.enter_context(RedisContainer(REDIS_IMAGE))
        return f"redis://{container.get_container_host_ip()}:{container.get_exposed_port(6379)}/0"


def docker_problem() -> str | None:
    """Why no container can be started here, or None."""
    import docker  # type: ignore[import-untyped]  # ships no types
    from docker.errors import DockerException  # type: ignore[import-untyped]  # ships no types

    with warnings.catch_warnings():
        # The client forgets a socket when nobody answers; it is collected here, where its warning disturbs no test.
        warnings.simplefilter("ignore", ResourceWarning)
        problem: str | None = None
        try:
            client = docker.from_env(timeout=5)
            client.ping()
            client.close()
        except DockerException as error:
            problem = str(error)
        gc.collect()
    return problem
