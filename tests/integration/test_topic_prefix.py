"""Two pipelines with different TOPIC_PREFIX on one broker, with the same tenants, groups and INSTANCE_IDs."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from deploy.local.layout import PROJECT_ROOT
from deploy.local.ports import PortClaims
from deploy.local.services import Service
from fairlane.records import TenantSpec
from fairlane.settings import KafkaSettings
from fairlane_server.postgres.rights import PostgresRole
from tests.kit.deployment import default_model, write_models, write_tenants
from tests.kit.log_reader import LogReader
from tests.kit.pipeline import unique_name
from tests.kit.processes import ServiceProcess
from tests.kit.recorder_kit import Tables
from tests.kit.stack import PostgresServer, migrated_database
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.broker]

TENANT = "acme"
REQUESTS = 20
TIMEOUT_S = 120
SERVICES = (
    Service("dispatcher-1", ("-m", "stream_processors.dispatcher"), postgres_role=PostgresRole.DISPATCHER),
    Service("consumer-1", ("-m", "inference_consumers", "--pool", "words", "--engine", "simulated")),
    Service("recorder-1", ("-m", "stream_processors.recorder"), postgres_role=PostgresRole.RECORDER),
)
ASK = f"""
import json
from fairlane import Client

with Client("{TENANT}") as client:
    ask = lambda number: client.submit(model="any-words", prompt=f"question {{number}}", max_tokens=4)
    replies = [handle.reply(timeout={TIMEOUT_S}) for handle in map(ask, range({REQUESTS}))]
    read = [reply.request_id for reply in client.replies("billing", idle_timeout_ms=3_000)]
ids, outcomes = [reply.request_id for reply in replies], [reply.outcome for reply in replies]
print(json.dumps({{"ids": ids, "outcomes": outcomes, "read": read}}))
"""


class PrefixedPipeline:
    """Everything but the prefix, the database and the folder is the same in each of them."""

    def __init__(self, broker: str, prefix: str, database: PostgresServer, folder: Path, ports: PortClaims) -> None:
        self.prefix = prefix
        self.database = database
        folder.mkdir()
        model = default_model("any", "words")
        write_models(folder / "models.yaml", [model])
        write_tenants(folder / "tenants.yaml", [TenantSpec(TENANT)])
        self.env = {
            "KAFKA_BOOTSTRAP_SERVERS": broker,
            "POSTGRES_DSN": database.operator_dsn,
            "TOPIC_PREFIX": prefix,
            "GROUP_PREFIX": "fairlane",
            "MODELS_FILE": str(folder / "models.yaml"),
            "TENANTS_FILE": str(folder / "tenants.yaml"),
        }
        self.services = [
            ServiceProcess(one, self._env_of(one), ports.take(f"{prefix}{one.name}"), folder / f"{one.name}.log")
            for one in SERVICES
        ]

    def _env_of(self, service: Service) -> dict[str, str]:
        if service.postgres_role is None:
            return {name: value for name, value in self.env.items() if name != "POSTGRES_DSN"}
        return self.env | {"POSTGRES_DSN": self.database.dsn(service.postgres_role)}

    def command(self, *arguments: str) -> str:
        """The output of the command line."""
        return self.python("-m", "fairlane_server.cli", *arguments)

    def python(self, *arguments: str) -> str:
        ended = subprocess.run(
            (sys.executable, *arguments),
            env={**os.environ, **self.env},
            cwd=PROJECT_ROOT,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout


@pytest.fixture(scope="module")
def pair(
    broker: str, postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[PrefixedPipeline, PrefixedPipeline]]:
    """Two that run. The prefix of the second begins with that of the first."""
    unique, folder = unique_name(), tmp_path_factory.mktemp("prefixes")
    with ExitStack() as stack:
        ports = PortClaims()
        stack.callback(ports.close)
        made = []
        for number, prefix in enumerate((f"{unique}.", f"{unique}.next-")):
            database = stack.enter_context(migrated_database(postgres, f"{unique}_{number}"))
            pipeline = PrefixedPipeline(broker, prefix, database, folder / str(number), ports)
            for kind in ("topics", "models", "tenants"):
                pipeline.command(kind, "apply")
            for service in pipeline.services:
                stack.callback(service.kill)
                service.start()
            made.append(pipeline)
        for pipeline in made:
            for service in pipeline.services:
                service.wait_ready(TIMEOUT_S)
        first, second = made
        yield first, second


def topics_of(admin: AdminClient, pipeline: PrefixedPipeline, but: str | None = None) -> list[str]:
    return [
        topic
        for topic in admin.list_topics(timeout=10).topics
        if topic.startswith(pipeline.prefix) and (but is None or not topic.startswith(but))
    ]


def seen_in(settings: KafkaSettings, topics: list[str], ids: list[str]) -> dict[str, set[str]]:
    """By topic, which of these requests its records are about."""
    reader = LogReader(settings, topics)
    reader.read_to_end()
    found: dict[str, set[str]] = {topic: set() for topic in topics}
    for record in reader.records:
        raw_value = bytes(record.value() or b"")
        content = bytes(record.key() or b"") + raw_value
        found[str(record.topic())] |= {one for one in ids if one.encode() in content}
    reader.close()
    return found


def wait_recorded(pipeline: PrefixedPipeline, ids: set[str]) -> None:
    """Wait until the pipeline's database holds the replies to these requests, and no others."""
    tables = Tables(pipeline.database)
    eventually(
        lambda: {str(row[0]) for row in tables.rows("SELECT request_id FROM results")} == ids, what="the rows of each"
    )


def test_each_pipeline_has_its_own_requests_and_no_others(
    broker: str, pair: tuple[PrefixedPipeline, PrefixedPipeline]
) -> None:
    answers = []
    for pipeline in pair:
        answer = json.loads(pipeline.python("-c", ASK))
        assert answer["outcomes"] == ["ok"] * REQUESTS
        assert set(answer["read"]) == set(answer["ids"]), "a service with the same group id reads its own replies"
        answers.append(answer["ids"])
    first, second = pair
    settings, everyones = KafkaSettings(kafka_bootstrap_servers=broker), [*answers[0], *answers[1]]
    admin = AdminClient({"bootstrap.servers": broker})
    sides = (topics_of(admin, first, but=second.prefix), topics_of(admin, second))
    assert [topic.removeprefix(first.prefix) for topic in sides[0]] != []
    assert {topic.removeprefix(first.prefix) for topic in sides[0]} == {
        topic.removeprefix(second.prefix) for topic in sides[1]
    }
    for pipeline, topics, ids in zip(pair, sides, answers, strict=True):
        seen = seen_in(settings, topics, everyones)
        assert set().union(*seen.values()) == set(ids)
        for name in (
            f"requests.{TENANT}",
            f"replies.{TENANT}",
            "priority.words.normal",
            "ledger.usage",
            "ledger.audit",
        ):
            assert seen[pipeline.prefix + name] == set(ids)
        wait_recorded(pipeline, set(ids))


def test_neither_plans_to_change_or_delete_the_topics_of_the_other(
    pair: tuple[PrefixedPipeline, PrefixedPipeline],
) -> None:
    for pipeline in pair:
        made = json.loads(pipeline.command("topics", "plan", "--delete", "--json"))
        assert made["changes"] == []
        assert [one for one in made["findings"] if one["problem"] == "extra_topic"] == []


def test_their_groups_differ_although_group_prefix_is_the_same(
    broker: str, pair: tuple[PrefixedPipeline, PrefixedPipeline]
) -> None:
    admin = AdminClient({"bootstrap.servers": broker})
    groups = {one.group_id for one in admin.list_consumer_groups().result(10).valid}
    for pipeline in pair:
        assert {f"{pipeline.prefix}fairlane.{end}" for end in ("dispatcher", "pool.words", "recorder")} <= groups
    assert all(service.alive for pipeline in pair for service in pipeline.services), "none fenced its like"
