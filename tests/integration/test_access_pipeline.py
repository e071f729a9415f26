"""The whole pipeline on a broker that checks rights: every process as the user of its role, every tenant as its own."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from confluent_kafka import KafkaError, Producer

from deploy.local.layout import PROJECT_ROOT
from fairlane import names
from fairlane.client import Client
from fairlane.kafka_config import connection
from fairlane.outcomes import Outcome
from fairlane.records import TenantSpec
from fairlane.settings import KafkaSettings
from fairlane_server.access.credentials import PASSWORD, read_credentials
from fairlane_server.access.users import KafkaUser
from fairlane_server.topics.families import KafkaRole
from tests.kit.gateway_kit import Served, serving
from tests.kit.secured_kafka import CheckingKafka, PipelineUsers, checking_kafka
from tests.kit.stack import PostgresServer
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.broker]

WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class SecuredPipeline:
    """Everything runs."""

    kafka: CheckingKafka
    served: Served
    users: PipelineUsers

    def client(self, tenant: str) -> Client:
        """Of a tenant, as itself."""
        name = self.served.pipeline.tenant(tenant)
        return Client(tenant=name, settings=self.settings(name))

    def command(self, *arguments: str) -> None:
        """Run a command of the administrator of the cluster and the tables."""
        pipeline = self.served.pipeline
        env = {
            **os.environ,
            **pipeline.env,
            "KAFKA_BOOTSTRAP_SERVERS": self.kafka.bootstrap_servers,
            "POSTGRES_OWNER_DSN": self.served.database.owner_dsn,
        }
        done = subprocess.run(
            (sys.executable, "-m", "fairlane_server.cli", *arguments),
            cwd=PROJECT_ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    def settings(self, tenant: str) -> KafkaSettings:
        """To connect as this tenant; its name is the whole one."""
        return self.users.settings(self.served.pipeline, KafkaUser(KafkaRole.TENANT, tenant))


@pytest.fixture(scope="module")
def secured(
    postgres: PostgresServer, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SecuredPipeline]:
    folder = tmp_path_factory.mktemp("secured")
    tenants = (TenantSpec("a", services=("billing",)), TenantSpec("b"))
    with checking_kafka(folder) as kafka:
        users = PipelineUsers(kafka, folder / "credentials")
        with serving(
            *(kafka.bootstrap_servers, postgres, folder / "pipeline"),
            redis_url=redis_url,
            tenants=tenants,
            env_of=users,
        ) as served:
            yield SecuredPipeline(kafka, served, users)


def test_requests_are_answered_over_kafka_streamed_and_recorded(secured: SecuredPipeline) -> None:
    model = secured.served.pipeline.model_for("generate")
    with secured.client("a") as client:
        reply = client.submit(model=model, prompt="hello", max_tokens=4).result(WAIT_S)
        assert reply.outcome == Outcome.OK
        with client.stream(model=model, prompt="hello", max_tokens=4, timeout=WAIT_S) as stream:
            pieces = "".join(delta.text for delta in stream)
        final = stream.reply(WAIT_S)
        assert final.output is not None
        assert pieces == final.output.text
        handle = client.submit(
            model=model, prompt="hello", reply_to=names.replies_topic(secured.served.pipeline.tenant("a"), "billing")
        )
        booked: list[str] = []
        service = client.serve_replies(
            "billing", lambda one: booked.append(one.request_id), service="billing", idle_timeout_ms=2_000
        )
        service.run()
    assert booked == [handle.request_id]
    with secured.served.client("a") as http:

        def recorded() -> bool:
            return bool(http.get(f"/v1/requests/{reply.request_id}").json().get("status") == "done")

        eventually(recorded, what="the recorded answer")


def test_requests_are_answered_over_http(secured: SecuredPipeline) -> None:
    with secured.served.client("b") as http:
        answer = http.post("/v1/chat/completions", json=secured.served.chat())
        assert answer.status_code == 200, answer.text
        streamed = http.post("/v1/chat/completions", json=secured.served.chat(stream=True))
        assert streamed.text.rstrip().endswith("data: [DONE]")


def test_a_new_tenant_over_kafka_needs_no_restart(secured: SecuredPipeline) -> None:
    pipeline = secured.served.pipeline
    running = {name: process.pid for name, process in pipeline.processes.items()}
    newcomer = TenantSpec(pipeline.tenant("newcomer"))
    pipeline.tenants[newcomer.tenant] = newcomer  # taken back with the others
    pipeline.write_files()
    secured.command("tenants", "apply")
    secured.command("access", "apply", "--credentials", str(secured.users.folder))
    user = KafkaUser(KafkaRole.TENANT, newcomer.tenant).name
    env = secured.kafka.user_env(user, read_credentials(secured.users.folder, user)[PASSWORD])
    settings = KafkaSettings.model_validate({name.lower(): value for name, value in env.items()})
    with Client(tenant=newcomer.tenant, settings=settings) as client:
        reply = client.submit(model=pipeline.model_for("generate"), prompt="hello", max_tokens=4).result(WAIT_S)
    assert reply.outcome == Outcome.OK
    assert {name: process.pid for name, process in pipeline.processes.items() if process.alive} == running


def test_no_process_was_refused_anything(secured: SecuredPipeline) -> None:
    for process in secured.served.pipeline.processes.values():
        assert re.search(r"(?i)authorization.?failed", process.log()) is None, process.name


def test_a_tenant_can_neither_write_for_another_nor_skip_admission(secured: SecuredPipeline) -> None:
    pipeline = secured.served.pipeline
    settings = secured.settings(pipeline.tenant("a"))
    others = [
        names.requests_topic(pipeline.tenant("b")),
        names.replies_topic(pipeline.tenant("b")),
        names.replies_topic(pipeline.tenant("a")),
        names.priority_topic(pipeline.pool, "high"),
        *(names.GATEWAY_REPLIES, names.JOBS_REPLIES, names.LEDGER_USAGE, names.CONTROL_TENANTS, names.CONTROL_CAPACITY),
    ]
    outcomes: dict[str | None, KafkaError | None] = {}
    producer = Producer({**connection(settings), "log_level": 0})
    for topic in others:
        producer.produce(topic, b"forged", on_delivery=lambda error, sent: outcomes.update({sent.topic(): error}))
    assert producer.flush(WAIT_S) == 0
    assert {topic: error.code() if error else None for topic, error in outcomes.items()} == dict.fromkeys(
        others, KafkaError.TOPIC_AUTHORIZATION_FAILED
    )
