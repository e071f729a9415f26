"""Stack of a benchmark: real parts in a temporary folder, further services, or a single engine."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from urllib.request import urlopen

import yaml
from confluent_kafka.admin import NewPartitions, NewTopic
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from pydantic import SecretStr

from benchmarks.simulated_pool import MODEL
from deploy.local import probes
from deploy.local.kafka import ADMIN_USER
from deploy.local.ports import PortClaims
from deploy.local.run_record import RunRecord
from deploy.local.services import HOST, MODELS_FILE, Service, SetupStep, default_setup
from deploy.local.stack import LocalStack, kafka_credentials
from fairlane.kafka_clients import KafkaAdmin
from fairlane.kafka_config import connection
from fairlane.outcomes import Degradation
from fairlane.records import ModelVersion
from fairlane.settings import Settings
from fairlane_server.models.models_file import load_models
from fairlane_server.postgres.migrations import upgrade
from fairlane_server.postgres.rights import PostgresRole
from fairlane_server.processes.restarts import RestartPolicy
from inference_consumers.engines.protocol import Engine, EngineSpec
from inference_consumers.engines.registry import create_engine

MODELS_DIR = Path(".fairlane/models")
_CREATE_TIMEOUT_S = 30.0
_LOOK_S = 0.02
_STOP_TIMEOUT_S = 30.0
_READY_TIMEOUT_S = 60.0
_COMMAND_TIMEOUT_S = 600.0
_SCRAPE_TIMEOUT_S = 5.0
_NO_LIMITS = {
    "GATEWAY_KEY_RATE_PER_S": "1000000",
    "GATEWAY_KEY_BURST": "1000000",
    "GATEWAY_TENANT_RATE_PER_S": "1000000",
    "GATEWAY_TENANT_BURST": "1000000",
}
"""One key makes all the calls of a benchmark."""
# Deliberate kills every few seconds must not count as a crash loop.
_KILLED_ON_PURPOSE = RestartPolicy(window_s=3.0)


def wait_until(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    """Return as soon as ``condition()`` is true. Raises TimeoutError when it is not within ``timeout_s``."""
    wait_while(lambda: None if condition() else "", timeout_s, what)


def wait_while(problem: Callable[[], str | None], timeout_s: float, what: str) -> None:
    """Return as soon as there is no problem. Raises TimeoutError, with the last one, after ``timeout_s``."""
    deadline = monotonic() + timeout_s
    while (found := problem()) is not None:
        if monotonic() > deadline:
            raise TimeoutError(f"{what} did not come about within {timeout_s:g} s{found and f': {found}'}")
        sleep(_LOOK_S)


@dataclass(frozen=True, slots=True)
class HttpService:
    """A server that answers; ``headers`` go with every call."""

    url: str
    pid: int
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class BenchStack:
    """A running stack, the settings to reach it, and its folder."""

    stack: LocalStack
    settings: Settings
    folder: Path
    env: Mapping[str, str]

    @property
    def environment(self) -> dict[str, str]:
        """Of a process that reaches the stack; of a runner of jobs, if it uses Postgres."""
        endpoints = self.stack.endpoints
        return {**os.environ, **endpoints.service_env, **endpoints.postgres_env(PostgresRole.BACKFILL), **self.env}

    def samples(self, service: str) -> Iterator[Sample]:
        """``samples`` of a service of this stack."""
        return samples(self.stack, service, _SCRAPE_TIMEOUT_S)

    @contextmanager
    def service(self, service: Service) -> Iterator[int]:
        """Run one more service beside the stack, until it has left the group at the end. Yields its process id."""
        postgres = self.stack.endpoints.postgres_env(service.postgres_role)
        environment = {**self.environment, **postgres, **service.env, "INSTANCE_ID": service.name}
        log_file = self.folder / f"{service.name}.log"
        with log_file.open("wb") as log:
            process = subprocess.Popen([sys.executable, *service.arguments], env=environment, stderr=log, stdout=log)
            try:
                yield process.pid
            finally:
                process.terminate()
                try:
                    process.wait(_STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(_STOP_TIMEOUT_S)

    @contextmanager
    def http_service(
        self,
        name: str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        postgres_role: PostgresRole | None = None,
    ) -> Iterator[HttpService]:
        """Run ``python`` with these arguments until the context ends; ``{port}`` in an argument or in a value of
        ``env`` is the port to listen on. Raises TimeoutError, with the reason, when it is not ready within a minute."""
        ports = PortClaims()
        try:
            port = str(ports.take(name))
            settings = {key: value.format(port=port) for key, value in (env or {}).items()}
            made = tuple(one.format(port=port) for one in arguments)
            service = Service(name, made, settings, postgres_role=postgres_role)
            url = f"http://{HOST}:{port}"
            with self.service(service) as pid:
                wait_while(lambda: probes.http_ok(f"{url}/health/ready"), _READY_TIMEOUT_S, name)
                yield HttpService(url, pid, {"Content-Type": "application/json"})
        finally:
            ports.close()

    @contextmanager
    def gateway(
        self, tenant: str, name: str = "gateway-1", env: Mapping[str, str] | None = None
    ) -> Iterator[HttpService]:
        """A gateway without limits on keys, and the headers of a key of this tenant. Needs Postgres."""
        arguments = ("keys", "create", "--tenant", tenant, "--name", name)
        key = self.command("fairlane_server.cli", *arguments, env=self.stack.endpoints.owner_env)["api_key"]
        given = {"GATEWAY_PORT": "{port}", **_NO_LIMITS, **(env or {})}
        gateway = self.http_service(name, "-m", "producers.gateway", env=given, postgres_role=PostgresRole.GATEWAY)
        with gateway as service:
            headers = {**service.headers, "Authorization": f"Bearer {key}"}
            yield HttpService(service.url, service.pid, headers)

    def command(self, module: str, *arguments: str, env: Mapping[str, str] | None = None) -> Any:
        """Run a command of the project and parse its JSON output. Raises RuntimeError with its standard error."""
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments, "--json"],
            env={**self.environment, **(env or {})},
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{module} {arguments[0]} failed: {done.stderr[-500:]}")
        return json.loads(done.stdout)


def samples(stack: LocalStack, service: str, timeout_s: float) -> Iterator[Sample]:
    """The present metrics of a service. Raises OSError when it does not answer in time."""
    record = RunRecord.load(stack.data_dir.processes_file)
    urls = {} if record is None else {one.name: one.health_url for one in record.processes}
    url = (urls.get(service) or "").removesuffix("/health/ready") + "/metrics"
    with urlopen(url, timeout=timeout_s) as answer:  # noqa: S310 - our own address
        for family in text_string_to_metric_families(answer.read().decode()):
            yield from family.samples


@contextmanager
def cluster(
    services: Sequence[Service],
    *,
    parts: Sequence[str] = ("kafka", "redis"),
    tenants: Sequence[str | Mapping[str, object]] = ("acme", "globex", "initech", "umbrella"),
    topics: Sequence[str] = (),
    partitions: Mapping[str, int] | None = None,
    env: Mapping[str, str] | None = None,
    models: Sequence[Mapping[str, object]] | None = None,
    policy: RestartPolicy = _KILLED_ON_PURPOSE,
    secured: bool = False,
    both_compilers: bool = False,
) -> Iterator[BenchStack]:
    """Start the parts and services with these tenants, given by name or as entries of tenants.yaml, and with these
    models, as entries of models.yaml, or else those of the project.

    A tenant given by name gets no smaller model: its engine would add to the speed that a simulated pool declares.
    ``topics`` are created beside the project's own, and ``partitions`` says of which of those there are to be more.
    With ``secured`` Kafka has TLS, passwords and ACLs, and the settings are those of its administrator. Java runs a
    secured Kafka with both of its compilers, another one with ``both_compilers``.
    """
    with tempfile.TemporaryDirectory(prefix="fairlane-bench-") as name:
        folder = Path(name)
        tenants_file = folder / "tenants.yaml"
        entries = [
            {"tenant": tenant, "forbid": [str(Degradation.SMALLER_MODEL)]} if isinstance(tenant, str) else dict(tenant)
            for tenant in tenants
        ]
        tenants_file.write_text(yaml.safe_dump({"tenants": entries}))
        models_file = MODELS_FILE if models is None else folder / "models.yaml"
        if models is not None:
            models_file.write_text(yaml.safe_dump({"models": [dict(model) for model in models]}))
        prices_file = folder / "prices.yaml"
        prices_file.write_text(yaml.safe_dump({"currency": "XTS", "prices": _prices_of(models_file)}))
        files = {"TENANTS_FILE": str(tenants_file), "MODELS_FILE": str(models_file), "PRICES_FILE": str(prices_file)}
        shared = {**files, "LOG_LEVEL": "WARNING", **(env or {})}
        setup = [
            replace(step, env=files)
            for step in default_setup(kafka_credentials(folder / "stack", {}) if secured else None)
            if "postgres" in parts or "postgres" not in step.after
        ]
        if ours := (*topics, *(f"{topic}={count}" for topic, count in (partitions or {}).items())):
            setup.append(SetupStep("setup-baseline", ("-m", "benchmarks.cluster", *ours), after=("setup-topics",)))
        stack = LocalStack(
            data_dir=folder / "stack",
            parts=parts,
            secured=secured,
            both_compilers=both_compilers,
            setup=setup,
            services=[replace(one, env={**shared, **one.env}) for one in services],
            environ={},
            policy=policy,
        )
        with stack:
            settings = Settings(**stack.endpoints.kafka_settings(ADMIN_USER).model_dump(exclude_unset=True))
            yield BenchStack(stack, settings, folder, shared)


def _prices_of(models_file: Path) -> list[dict[str, object]]:
    """A price of every model, so that pricing is part of what is measured."""
    tokens = {"input": "0.1", "output": "0.4"}
    models = [model.model for model in load_models(models_file)]
    return [{"model": model, "from": "2026-01-01", "per_million_tokens": tokens} for model in models]


@contextmanager
def stores(*parts: str) -> Iterator[LocalStack]:
    """Postgres with its tables, and other parts without Kafka."""
    with (
        tempfile.TemporaryDirectory(prefix="fairlane-bench-") as name,
        LocalStack(data_dir=Path(name) / "stack", parts=("postgres", *parts), environ={}) as stack,
    ):
        upgrade(Settings(postgres_owner_dsn=SecretStr(stack.endpoints.postgres_owner_dsn)))
        yield stack


def shipped_model(name: str = MODEL) -> ModelVersion:
    """A model of the project's own models.yaml."""
    return next(one for one in load_models(MODELS_FILE) if one.model == name)


@contextmanager
def shipped_engine(model: ModelVersion, device: str | None = None) -> Iterator[Engine]:
    """The model's engine in this process, loaded; on the device that ``DEVICE`` names by default."""
    engine = create_engine(EngineSpec(model, str(MODELS_DIR), device=device or os.environ.get("DEVICE", "auto")))
    try:
        engine.load()
        yield engine
    finally:
        engine.close()


def create_topics(settings: Settings, names: Sequence[str]) -> None:
    """Topics of a baseline, with the same timestamps as the project's own; ``NAME=COUNT`` gives one that exists so many
    partitions."""
    admin = KafkaAdmin(connection(settings))
    config = {"message.timestamp.type": "LogAppendTime", "max.message.bytes": "8388608"}
    new = [NewTopic(name, 1, 1, config=config) for name in names if "=" not in name]
    larger = [NewPartitions(name, int(count)) for name, _, count in (name.partition("=") for name in names) if count]
    created = admin.create_topics(new, operation_timeout=_CREATE_TIMEOUT_S) if new else {}
    grown = admin.create_partitions(larger, operation_timeout=_CREATE_TIMEOUT_S) if larger else {}
    for done in (*created.values(), *grown.values()):
        done.result(_CREATE_TIMEOUT_S)


if __name__ == "__main__":
    create_topics(Settings(), sys.argv[1:])
