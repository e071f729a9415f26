"""A stack of real parts for one benchmark, in a folder of its own that is removed afterwards."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka.admin import AdminClient, NewTopic

from deploy.local.restarts import RestartPolicy
from deploy.local.services import Service, Step
from deploy.local.stack import LocalStack
from fairlane.kafka import connection
from fairlane.settings import Settings

_CREATE_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 30.0
# A benchmark that kills a process every few seconds must not look like a crash loop.
_KILLED_ON_PURPOSE = RestartPolicy(window_s=3.0)


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running stack, the settings to reach it, and its folder."""

    stack: LocalStack
    settings: Settings
    folder: Path
    env: Mapping[str, str]

    @contextmanager
    def service(self, service: Service) -> Iterator[None]:
        """Run one more service beside the stack, until it has left the group at the end."""
        environment = {**os.environ, **self.stack.endpoints.service_env, **self.env, **service.env}
        environment["INSTANCE_ID"] = service.name
        log_file = self.folder / f"{service.name}.log"
        with log_file.open("wb") as log:
            process = subprocess.Popen([sys.executable, *service.arguments], env=environment, stderr=log, stdout=log)
            try:
                yield
            finally:
                process.terminate()
                try:
                    process.wait(_STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(_STOP_TIMEOUT_S)


@contextmanager
def cluster(
    services: Sequence[Service],
    *,
    parts: Sequence[str] = ("kafka", "redis"),
    tenants: Sequence[str] = ("acme", "globex", "initech", "umbrella"),
    topics: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[Cluster]:
    """Start the parts and services with tenants of these names and two simulated pools; ``{folder}`` in a service's
    environment becomes the folder's path."""
    with tempfile.TemporaryDirectory(prefix="fairlane-bench-") as name:
        folder = Path(name)
        tenants_file = folder / "tenants.yaml"
        tenants_file.write_text("tenants:\n" + "".join(f"  - tenant: {tenant}\n" for tenant in tenants))
        shared = {"TENANTS_FILE": str(tenants_file), "LOG_LEVEL": "WARNING", **(env or {})}
        stack = LocalStack(
            data_dir=folder / "stack",
            parts=parts,
            setup=_setup(str(tenants_file), topics, tables="postgres" in parts),
            services=[Service(one.name, one.arguments, {**shared, **one.env}) for one in services],
            environ={},
            policy=_KILLED_ON_PURPOSE,
        )
        with stack:
            settings = Settings(kafka_bootstrap_servers=stack.endpoints.kafka_bootstrap_servers)
            yield Cluster(stack, settings, folder, shared)


def _setup(tenants_file: str, topics: Sequence[str], *, tables: bool) -> tuple[Step, ...]:
    command = ("-m", "fairlane.cli")
    steps = (
        Step("setup-topics", (*command, "topics", "apply", "--tenants-file", tenants_file), after=("kafka",)),
        *((Step("setup-baseline", ("-m", "benchmarks.cluster", *topics), after=("kafka",)),) if topics else ()),
        Step("setup-models", (*command, "models", "apply"), after=("setup-topics",)),
        Step("setup-tenants", (*command, "tenants", "apply", "--tenants-file", tenants_file), after=("setup-models",)),
    )
    return (
        (*steps, Step("setup-tables", (*command, "db", "upgrade"), ("postgres",), as_owner=True)) if tables else steps
    )


def create_topics(settings: Settings, names: Sequence[str]) -> None:
    """Topics of a baseline, with the same timestamps as the project's own."""
    admin = AdminClient(connection(settings))
    config = {"message.timestamp.type": "LogAppendTime", "max.message.bytes": "8388608"}
    topics = [NewTopic(name, 1, 1, config=config) for name in names]
    for created in admin.create_topics(topics, operation_timeout=_CREATE_TIMEOUT_S).values():
        created.result(_CREATE_TIMEOUT_S)


if __name__ == "__main__":
    create_topics(Settings(), sys.argv[1:])
