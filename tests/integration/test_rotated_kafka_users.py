"""Users of Kafka are replaced while every process runs: rotate, replace the files, wait for the broker, retire."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.local.layout import PROJECT_ROOT
from deploy.local.services import Service
from fairlane.client import Client
from fairlane.outcomes import Outcome
from fairlane.records import TenantSpec
from fairlane.settings import KafkaSettings
from fairlane_server.access.credentials import credentials_file
from fairlane_server.access.users import KafkaUser
from fairlane_server.topics.families import KafkaRole
from tests.kit.gateway_kit import Served, serving
from tests.kit.pipeline import Pipeline
from tests.kit.secured_kafka import CheckingKafka, PipelineUsers, checking_kafka
from tests.kit.stack import PostgresServer
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.broker]

WAIT_S = 60.0
# A client that does not log in again as the same user is disconnected after so long.
_REAUTHENTICATION = {"listener.name.secured.scram-sha-512.connections.max.reauth.ms": "4000"}
_ESTABLISHED = "01"


@dataclass(slots=True)
class MountedUsers:
    """As ``PipelineUsers``, with the user and password of each process in a file that is there to be replaced."""

    users: PipelineUsers
    folder: Path

    def __call__(self, pipeline: Pipeline, service: Service) -> dict[str, str]:
        return self.with_file(self.users(pipeline, service))

    def settings(self, pipeline: Pipeline, user: KafkaUser) -> KafkaSettings:
        env = self.with_file(self.users.env(pipeline, user))
        return KafkaSettings.model_validate({name.lower(): value for name, value in env.items()})

    def with_file(self, env: dict[str, str]) -> dict[str, str]:
        user = env.pop("KAFKA_SASL_USERNAME", None)
        if user is None:
            return env
        del env["KAFKA_SASL_PASSWORD"], env["KAFKA_SASL_MECHANISM"]
        self.mount(user, user)
        return env | {"KAFKA_CREDENTIALS_FILE": str(self.file(user))}

    def file(self, user: str) -> Path:
        return self.folder / f"{user}.env"

    def mount(self, user: str, credentials_of: str) -> None:
        """Replace the file of the processes that began as ``user``."""
        self.folder.mkdir(exist_ok=True)
        new = self.file(user).with_suffix(".new")
        shutil.copyfile(credentials_file(self.users.folder, credentials_of), new)
        new.replace(self.file(user))


@dataclass(frozen=True, slots=True)
class Rotating:
    """Everything runs, each process as the user of its role."""

    kafka: CheckingKafka
    served: Served
    mounted: MountedUsers

    def access(self, command: str, user: str) -> None:
        """``fairlane access``, by one who may do everything."""
        pipeline = self.served.pipeline
        done = subprocess.run(
            (
                *(sys.executable, "-m", "fairlane_server.cli", "access", command, user, "--json"),
                *("--credentials", str(self.mounted.users.folder)),
            ),
            cwd=PROJECT_ROOT,
            env={**os.environ, **pipeline.env},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert {one["result"] for one in json.loads(done.stdout)["applied"]} == {"done"}

    def connections(self) -> set[int]:
        """The clients' ports of the connections that the broker has, of users with a password."""
        lines = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]
        sockets = [line.split()[1:4] for line in lines]
        return {
            _port(local)
            for local, remote, state in sockets
            if state == _ESTABLISHED and _port(remote) == self.kafka.secured_port
        }

    def is_answered(self, client: Client) -> None:
        """One request over Kafka and one over HTTP are answered, and the answer is recorded."""
        model = self.served.pipeline.model_for("generate")
        reply = client.submit(model=model, prompt="hello", max_tokens=4).result(WAIT_S)
        assert reply.outcome == Outcome.OK
        with self.served.client("b") as http:
            answer = http.post("/v1/chat/completions", json=self.served.chat(stream=True))
            assert answer.text.rstrip().endswith("data: [DONE]"), answer.text
        with self.served.client("a") as http:

            def recorded() -> bool:
                return bool(http.get(f"/v1/requests/{reply.request_id}").json().get("status") == "done")

            eventually(recorded, WAIT_S, "the recorded answer")


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


@pytest.fixture
def rotating(postgres: PostgresServer, redis_url: str, tmp_path: Path) -> Iterator[Rotating]:
    with checking_kafka(tmp_path, _REAUTHENTICATION) as kafka:
        mounted = MountedUsers(PipelineUsers(kafka, tmp_path / "credentials"), tmp_path / "mounted")
        with serving(
            *(kafka.bootstrap_servers, postgres, tmp_path / "pipeline"),
            redis_url=redis_url,
            tenants=(TenantSpec("a"), TenantSpec("b")),
            env_of=mounted,
        ) as served:
            yield Rotating(kafka, served, mounted)


def test_every_process_goes_on_as_the_new_user(rotating: Rotating) -> None:
    pipeline, mounted = rotating.served.pipeline, rotating.mounted
    tenant = KafkaUser(KafkaRole.TENANT, pipeline.tenant("a"))
    # By process; that of the tenant's client is this one.
    users = {
        f"consumer-{pipeline.pool}-1": KafkaUser(KafkaRole.CONSUMER, pipeline.pool),
        "dispatcher-1": KafkaUser(KafkaRole.DISPATCHER),
        "gateway-1": KafkaUser(KafkaRole.GATEWAY),
        "recorder-1": KafkaUser(KafkaRole.RECORDER),
    }
    started = {name: process.pid for name, process in pipeline.processes.items()}
    assert started.keys() == users.keys()
    with Client(tenant=pipeline.tenant("a"), settings=mounted.settings(pipeline, tenant)) as client:
        rotating.is_answered(client)
        for user in (*users.values(), tenant):
            rotating.access("rotate", user.name)
        before = rotating.connections()
        for user in (*users.values(), tenant):
            mounted.mount(user.name, user.other.name)
        for name, user in users.items():
            process = pipeline.processes[name]
            eventually(
                lambda process=process, user=user: (  # type: ignore[misc]
                    f"kafka_credentials_replaced username={user.other.name} " in process.log()
                ),
                what=f"the new user of {name}",
            )

        def are_gone() -> bool:
            # Under load: a transaction would not survive that its connection ends.
            rotating.is_answered(client)
            return not before & rotating.connections()

        eventually(are_gone, WAIT_S, "the end of the old users' connections")
        for name in ("dispatcher-1", f"consumer-{pipeline.pool}-1"):
            assert "transactional_producers_replaced" in pipeline.processes[name].log()
        for user in (*users.values(), tenant):
            rotating.access("retire", user.name)
            assert not credentials_file(mounted.users.folder, user.name).exists()
        rotating.is_answered(client)
        # Connections of now log in again, as users that still exist.
        now = rotating.connections()
        eventually(lambda: bool(rotating.connections() - now), what="a connection since the old users are gone")
        rotating.is_answered(client)
    assert {name: process.pid for name, process in pipeline.processes.items() if process.alive} == started
    secrets = [line for file in mounted.folder.glob("*.env") for line in file.read_text().splitlines()[2:]]
    for process in pipeline.processes.values():
        text = process.log()
        assert "kafka_credentials_unusable" not in text, process.name
        assert re.search(r"(?i)authorization.?failed", text) is None, process.name
        assert not [secret for secret in secrets if secret.partition("=")[2] in text], process.name
