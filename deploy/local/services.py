"""Our own processes on top of the parts: the steps that set the stack up, and the services."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deploy.local import probes
from deploy.local.kafka import ADMIN_USER, part_of
from deploy.local.layout import (
    POSTGRES_OWNER_VARIABLE,
    POSTGRES_VARIABLE,
    POSTGRES_VARIABLES,
    PROJECT_ROOT,
    Endpoints,
    StackError,
)
from deploy.local.supervisor import ProcessSpec
from fairlane_server.access.users import KafkaUser
from fairlane_server.models.models_file import load_models
from fairlane_server.postgres.rights import PostgresRole
from fairlane_server.redis.rights import RedisRole, redis_user
from fairlane_server.topics.families import KafkaRole, pools_of
from fairlane_server.yaml_config import ConfigError

MODELS_FILE = PROJECT_ROOT / "deploy" / "models.yaml"
TENANTS_FILE = PROJECT_ROOT / "deploy" / "tenants.yaml"
HOST = "127.0.0.1"
GATEWAY = "gateway-1"
ADMIN = "admin-1"
START_TIMEOUT_S = 180.0
"""Loading a language model on a small machine takes its time."""
STOP_TIMEOUT_S = 30.0
ENGINES = ("real", "simulated")
_POSTGRES = (POSTGRES_VARIABLE, POSTGRES_OWNER_VARIABLE, *POSTGRES_VARIABLES.values())
"""A process has what it is given, and not what the supervisor's environment has."""


@dataclass(frozen=True, slots=True)
class SetupStep:
    """A command that must succeed before any service starts.

    Attributes:
        arguments: of `python`.
        after: parts or steps that it needs.
        user: user of a secured Kafka that it acts as; empty: it does not use Kafka.
        as_owner: whether it gets the role that owns the tables.
        postgres_role: role of Postgres that it acts as; None: it does not use Postgres.
        without_postgres: more arguments, where the stack has no Postgres.
        env: added to the addresses of the parts.
    """

    name: str
    arguments: tuple[str, ...]
    after: tuple[str, ...]
    user: str = ""
    as_owner: bool = False
    postgres_role: PostgresRole | None = None
    without_postgres: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    def spec(self, endpoints: Endpoints, known: Sequence[str]) -> ProcessSpec:
        """What to run; of `after` only what the stack itself runs counts, the rest is external."""
        env = endpoints.owner_env if self.as_owner else endpoints.service_env
        if self.user:
            env |= endpoints.kafka_env(self.user)
        on_postgres = endpoints.postgres_env(self.postgres_role)
        return ProcessSpec(
            name=self.name,
            argv=(sys.executable, *self.arguments, *(() if on_postgres else self.without_postgres)),
            env={**env, **on_postgres, "PYTHONUNBUFFERED": "1", **self.env},
            without_env=_POSTGRES,
            depends_on=tuple(name for name in known if part_of(name) in self.after),
            one_shot=True,
            start_timeout_s=120,
        )


@dataclass(frozen=True, slots=True)
class Service:
    """A long-running process with `/health/ready` on a port of its own.

    Attributes:
        name: also its INSTANCE_ID: stable over restarts.
        arguments: of `python`.
        env: added to the addresses of the parts.
        port_variable: setting that gets the port of its own server, if it has one.
        user: user of a secured Kafka that it acts as; empty: it does not use Kafka.
        postgres_role: role of Postgres that it acts as; None: it does not use Postgres.
        redis_user: user of a secured Redis that it acts as; empty: it does not use Redis.
    """

    name: str
    arguments: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    port_variable: str | None = None
    user: str = ""
    postgres_role: PostgresRole | None = None
    redis_user: str = ""

    def spec(
        self, endpoints: Endpoints, metrics_port: int, after: Sequence[str], port: int | None = None
    ) -> ProcessSpec:
        """What to run: ready when its health check says so. ``port`` is for what it serves."""
        url = f"http://{HOST}:{metrics_port}/health/ready"
        serving = {} if self.port_variable is None or port is None else {self.port_variable: str(port)}
        return ProcessSpec(
            name=self.name,
            argv=(sys.executable, *self.arguments),
            env={
                **endpoints.service_env,
                **endpoints.postgres_env(self.postgres_role),
                **(endpoints.kafka_env(self.user) if self.user else {}),
                **endpoints.redis_env(self.redis_user),
                "METRICS_PORT": str(metrics_port),
                "INSTANCE_ID": self.name,
                "PYTHONUNBUFFERED": "1",
                **serving,
                **self.env,
            },
            without_env=_POSTGRES,
            depends_on=tuple(after),
            probe=lambda: probes.http_ok(url),
            start_timeout_s=START_TIMEOUT_S,
            stop_timeout_s=STOP_TIMEOUT_S,
            health_url=url,
        )


def default_setup(credentials: Path | None = None) -> tuple[SetupStep, ...]:
    """The tables, and topics, models, tenants, prices, which build on each other; changes of tenants are recorded in
    the tables. ``credentials``: folder of a secured Kafka's; its users get their rights before all."""
    command, operator = ("-m", "fairlane_server.cli"), _user(KafkaRole.OPERATOR)
    access = ("access", "apply", "--credentials", str(credentials))
    rights = SetupStep("setup-access", (*command, *access), after=("kafka",), user=ADMIN_USER)
    return (
        *(() if credentials is None else (rights,)),
        SetupStep("setup-topics", (*command, "topics", "apply"), after=("kafka", "setup-access"), user=operator),
        SetupStep("setup-models", (*command, "models", "apply"), after=("kafka", "setup-topics"), user=operator),
        SetupStep("setup-tables", (*command, "db", "upgrade"), after=("postgres",), as_owner=True),
        SetupStep(
            "setup-tenants",
            (*command, "tenants", "apply"),
            after=("kafka", "setup-models", "setup-tables"),
            user=operator,
            postgres_role=PostgresRole.OPERATOR,
            without_postgres=("--no-audit",),
        ),
        SetupStep("setup-prices", (*command, "prices", "apply"), after=("kafka", "setup-tenants"), user=operator),
    )


def default_services(
    *, dispatchers: int = 1, consumers: int = 1, engine: str | None = None, models_file: Path = MODELS_FILE
) -> tuple[Service, ...]:
    """Every service of the pipeline. ``consumers``: of each pool of ``models_file``; ``engine``: one of ENGINES, for
    every service, or None to leave it to their settings."""
    override = {"ENGINE": engine} if engine else {}
    return (
        *(
            Service(
                name,
                ("-m", "stream_processors.dispatcher"),
                override,
                user=_user(KafkaRole.DISPATCHER),
                postgres_role=PostgresRole.DISPATCHER,
                redis_user=redis_user(RedisRole.DISPATCHER),
            )
            for name in (f"dispatcher-{number}" for number in range(1, dispatchers + 1))
        ),
        Service(
            "recorder-1",
            ("-m", "stream_processors.recorder"),
            user=_user(KafkaRole.RECORDER),
            postgres_role=PostgresRole.RECORDER,
        ),
        Service(
            GATEWAY,
            ("-m", "producers.gateway"),
            port_variable="GATEWAY_PORT",
            user=_user(KafkaRole.GATEWAY),
            postgres_role=PostgresRole.GATEWAY,
            redis_user=redis_user(RedisRole.GATEWAY),
        ),
        Service(
            ADMIN,
            ("-m", "producers.admin"),
            port_variable="ADMIN_PORT",
            user=_user(KafkaRole.ADMIN),
            postgres_role=PostgresRole.ADMIN,
            redis_user=redis_user(RedisRole.ADMIN),
        ),
        Service(
            "backfill-1",
            ("-m", "producers.backfill", "run", "--all"),
            user=_user(KafkaRole.BACKFILL),
            postgres_role=PostgresRole.BACKFILL,
        ),
        Service("ingest-1", ("-m", "producers.ingest"), postgres_role=PostgresRole.INGEST),
        *(
            Service(
                f"consumer-{pool}-{number}",
                ("-m", "inference_consumers", "--pool", pool),
                override,
                user=_user(KafkaRole.CONSUMER, pool),
                redis_user=redis_user(RedisRole.CONSUMER),
            )
            for pool in read_pools(models_file)
            for number in range(1, consumers + 1)
        ),
    )


def read_pools(models_file: Path = MODELS_FILE) -> tuple[str, ...]:
    """The pools of the models file, each once, in its order; those of single tenants come last. Raises StackError."""
    try:
        return pools_of((), load_models(models_file))
    except ConfigError as error:
        raise StackError(str(error)) from None


def _user(role: KafkaRole, owner: str = "") -> str:
    """Name of the Kafka user."""
    return KafkaUser(role, owner).name
