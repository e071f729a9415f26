"""A broker that checks rights, with two pipelines whose names resemble each other, set up by the project's commands."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from deploy.local.layout import PROJECT_ROOT
from fairlane.records import ModelVersion, TenantSpec
from fairlane.settings import KafkaSettings
from fairlane_server.access.credentials import PASSWORD, read_credentials
from tests.hostile_tenant.oracle import GROUP_PREFIX, Actor
from tests.hostile_tenant.world import Attacker, Pipeline
from tests.kit.deployment import write_models, write_tenants
from tests.kit.secured_kafka import CheckingKafka, checking_kafka

POOLS = ("fast", "fast-2")
HONEST = "acme2"
"""The tenant of each pipeline that attacks nobody."""
_TENANTS: Mapping[str, Sequence[str]] = {
    "acme": ("search", "search-2"),
    HONEST: ("search",),
    "acme-2": (),
    "a": ("cme",),
    # Like the prefix of the other pipeline, like the end of a second user's name, and like the start of a group's.
    "staging": (),
    "2": (),
    "tenant": (),
}
PLAIN = Pipeline("", _TENANTS, POOLS)
STAGING = Pipeline("staging.", {name: _TENANTS[name] for name in ("acme", HONEST, "a")}, POOLS)
PIPELINES = (PLAIN, STAGING)
ROTATED = PLAIN.user("tenant", "acme")
"""The user whose password is being replaced, so that it is one of two."""
SECOND_USER = f"{ROTATED}_2"
COMPROMISED_POOL = "fast"

# Kafka's default: many a cluster makes topics that somebody asks about.
_BROKER_SETTINGS = {"auto.create.topics.enable": "true"}
_COMMAND_TIMEOUT_S = 120


def attackers() -> tuple[Attacker, ...]:
    """Every tenant but the honest ones, the second user of one, and one pool's consumers."""
    tenants = [
        Attacker(pipeline.user("tenant", tenant), Actor(pipeline.prefix, "tenant", tenant))
        for pipeline in PIPELINES
        for tenant in pipeline.tenants
        if tenant != HONEST
    ]
    second = Attacker(SECOND_USER, Actor(PLAIN.prefix, "tenant", "acme"))
    consumer = Attacker(PLAIN.user("consumer", COMPROMISED_POOL), Actor(PLAIN.prefix, "consumer", COMPROMISED_POOL))
    return (*tenants, second, consumer)


@dataclass(frozen=True)
class Cluster:
    """It runs; topics, users and rights are applied."""

    kafka: CheckingKafka
    folder: Path

    @cached_property
    def passwords(self) -> Mapping[str, str]:
        """Of every user, as its processes get them."""
        return {
            file.name.removesuffix(".env"): read_credentials(folder, file.name.removesuffix(".env"))[PASSWORD]
            for folder in (_credentials(self.folder, pipeline) for pipeline in PIPELINES)
            for file in folder.iterdir()
        }

    def settings(self, user: str) -> KafkaSettings:
        """Of a client that acts as this user."""
        env = self.kafka.user_env(user, self.passwords[user])
        return KafkaSettings.model_validate({name.lower(): value for name, value in env.items()})


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Start it, and apply everything. Raises RuntimeError when a command fails."""
    with checking_kafka(folder, _BROKER_SETTINGS) as kafka:
        for pipeline in PIPELINES:
            _apply(kafka, folder, pipeline)
        yield Cluster(kafka, folder)


def _apply(kafka: CheckingKafka, folder: Path, pipeline: Pipeline) -> None:
    models, tenants = (folder / f"{pipeline.prefix}{name}.yaml" for name in ("models", "tenants"))
    write_models(
        models,
        (
            ModelVersion(f"model-{pool}", "1", pool, "simulated", ("generate",), "-", 100, 100)
            for pool in pipeline.pools
        ),
    )
    write_tenants(tenants, (TenantSpec(name, services=tuple(given)) for name, given in pipeline.tenants.items()))
    env = {
        # Without the connection of somebody's cluster.
        **{name: value for name, value in os.environ.items() if not name.startswith("KAFKA_")},
        "TENANTS_FILE": str(tenants),
        "MODELS_FILE": str(models),
        "TOPIC_PREFIX": pipeline.prefix,
        "GROUP_PREFIX": GROUP_PREFIX,
        "KAFKA_BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
    }
    given = ("--credentials", str(_credentials(folder, pipeline)))
    _run(env, "topics", "apply")
    _run(env, "access", "apply", *given)
    if pipeline is PLAIN:
        _run(env, "access", "rotate", ROTATED, *given)


def _model(pool: str) -> ModelVersion:
    return ModelVersion(f"model-{pool}", "1", pool, "simulated", ("generate",), "-", 100, 100)


def _credentials(folder: Path, pipeline: Pipeline) -> Path:
    return folder / f"{pipeline.prefix}credentials"


def _run(env: Mapping[str, str], *arguments: str) -> None:
    done = subprocess.run(
        (sys.executable, "-m", "fairlane_server.cli", *arguments),
        cwd=PROJECT_ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=_COMMAND_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"fairlane {' '.join(arguments)}: {done.stderr}")
