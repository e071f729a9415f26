"""Connections with SASL, by settings alone; and no password anywhere that somebody reads."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import (
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from deploy.local.kafka import HOST
from deploy.local.layout import PROJECT_ROOT
from deploy.local.ports import PortClaims
from deploy.local.supervisor import Supervisor
from fairlane.outcomes import Outcome
from tests.kit.pipeline import Pipeline, unique_name
from tests.kit.secured_kafka import SecuredKafka

pytestmark = pytest.mark.broker

USER = "fairlane"
PASSWORD = "planted-s3cret-of-kafka"
OTHER_SECRETS = {
    "POSTGRES_DSN": "postgresql://fairlane:planted-s3cret-of-postgres@127.0.0.1:1/fairlane",
    "REDIS_URL": "redis://:planted-s3cret-of-redis@127.0.0.1:1/0",
}
MARK = "planted-s3cret"


@dataclass(frozen=True, slots=True)
class Brokers:
    """Two ways into one broker."""

    plain: str
    secured: str

    @property
    def env(self) -> dict[str, str]:
        """What a process needs for the secured one."""
        return {
            "KAFKA_BOOTSTRAP_SERVERS": self.secured,
            "KAFKA_SECURITY_PROTOCOL": "SASL_PLAINTEXT",
            "KAFKA_SASL_MECHANISM": "SCRAM-SHA-512",
            "KAFKA_SASL_USERNAME": USER,
            "KAFKA_SASL_PASSWORD": PASSWORD,
        }


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    folder = tmp_path_factory.mktemp("secured")
    ports = PortClaims()
    node = SecuredKafka(
        folder / "kafka", ports.take("kafka"), ports.take("controller"), secured_port=ports.take("secured")
    )
    (folder / "logs").mkdir()
    with Supervisor(node.specs(), log_dir=folder / "logs", processes_file=folder / "processes.json"):
        found = Brokers(node.bootstrap_servers, f"{HOST}:{node.secured_port}")
        credentials: Any = UserScramCredentialUpsertion(
            USER, ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096), PASSWORD.encode()
        )
        admin = AdminClient({"bootstrap.servers": found.plain})
        admin.alter_user_scram_credentials([credentials])[USER].result(10)
        yield found
    ports.close()


def cli(env: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        (sys.executable, "-m", "fairlane_server.cli", *arguments),
        cwd=PROJECT_ROOT,
        env=dict(os.environ) | OTHER_SECRETS | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def refused(brokers: Brokers) -> Iterator[subprocess.Popen[str]]:
    """A command with a wrong password; it takes its time until it gives up, beside the other test."""
    with cli(brokers.env | {"KAFKA_SASL_PASSWORD": f"{PASSWORD}-but-wrong"}, "tenants", "list", "--json") as process:
        yield process


@pytest.mark.usefixtures("refused")
def test_everything_works_over_sasl_and_shows_no_password(brokers: Brokers, tmp_path: Path) -> None:
    env = {**brokers.env, **OTHER_SECRETS, "LOG_LEVEL": "DEBUG"}
    with Pipeline(brokers.plain, tmp_path, unique_name(), tenants=("a",), env=env) as pipeline:
        pipeline.start()
        files = ("--tenants-file", f"{tmp_path}/tenants.yaml", "--models-file", f"{tmp_path}/models.yaml")
        commands = [cli(brokers.env, "topics", "plan", "--json", *files), cli(brokers.env, "tenants", "list", "--json")]
        replies = pipeline.replies()
        request = pipeline.request()
        pipeline.publish("a", request)
        assert replies.wait([request.request_id])[request.request_id].outcome == Outcome.OK

        shown = [text for command in commands for text in command.communicate(timeout=60)]
        assert {command.returncode for command in commands} <= {0, 2}, shown
        shown += [
            process.get(path)[1] for process in pipeline.processes.values() for path in ("/metrics", "/health/ready")
        ]
        assert [process.stop() for process in pipeline.processes.values()] == [0, 0]
        logs = [process.log() for process in pipeline.processes.values()]
    assert all("assigned" in log for log in logs)
    assert MARK not in "".join([*shown, *logs])


def test_a_wrong_password_is_an_error_that_shows_no_password(refused: subprocess.Popen[str]) -> None:
    output, errors = refused.communicate(timeout=60)
    assert refused.returncode == 1
    assert "uthentication" in errors
    assert MARK not in output + errors
