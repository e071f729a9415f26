"""The users of docker-compose.yml, on a broker that is configured by its variables."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

from deploy.local.layout import PROJECT_ROOT
from tests.contract.compose_file import PASSWORDS, services
from tests.kit.compose_kafka import ComposeKafka, compose_kafka

pytestmark = pytest.mark.full

TIMEOUT_S = 15.0
REGISTRY = "schema-registry"
JOURNAL = "kafkasql-journal"


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("credentials")


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory, credentials: Path) -> Iterator[ComposeKafka]:
    """After the commands of `setup` that need no registry. There is no Postgres here for the audit of tenants."""
    with compose_kafka(tmp_path_factory.mktemp("compose")) as running:
        for command in services()["setup"].python_commands[1:]:
            without_audit = ("--no-audit",) if "tenants" in command else ()
            done = set_up(running, credentials, (*command, *without_audit))
            assert done.returncode == 0, (command, done.stderr)
        yield running


def set_up(
    kafka: ComposeKafka, credentials: Path, command: Sequence[str], **changes: str
) -> subprocess.CompletedProcess[str]:
    """Run a command of the container `setup`."""
    environment = {
        **{name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ},
        **services()["setup"].environment,
        "KAFKA_BOOTSTRAP_SERVERS": kafka.addresses["ADMIN"],
        "KAFKA_SSL_CA_FILE": str(kafka.ca_file),
        **changes,
    }
    del environment["SCHEMA_REGISTRY_URL"]
    return subprocess.run(
        (sys.executable, *(str(credentials) if part == "/credentials" else part for part in command)),
        env=environment,
        cwd=PROJECT_ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def config(kafka: ComposeKafka, environment: Mapping[str, str], listener: str) -> dict[str, Any]:
    return {
        "bootstrap.servers": kafka.addresses[listener],
        "ssl.ca.location": str(kafka.ca_file),
        "security.protocol": environment["KAFKA_SECURITY_PROTOCOL"],
        "sasl.mechanism": environment["KAFKA_SASL_MECHANISM"],
        "sasl.username": environment["KAFKA_SASL_USERNAME"],
        "sasl.password": environment["KAFKA_SASL_PASSWORD"],
        "log_level": "0",
    }


def topics_of(settings: Mapping[str, Any]) -> set[str]:
    return set(AdminClient(dict(settings)).list_topics(timeout=TIMEOUT_S).topics)


def may_read(settings: Mapping[str, Any], topic: str) -> bool:
    """Whether this user may fetch the topic, without a group."""
    consumer = Consumer({**settings, "group.id": "unused", "enable.auto.commit": False, "enable.partition.eof": True})
    try:
        consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
        while (message := consumer.poll(TIMEOUT_S)) is not None:
            error = message.error()
            # The library asks for the coordinator of the group, which nobody uses.
            if error is None or error.code() != KafkaError.GROUP_AUTHORIZATION_FAILED:
                break
    finally:
        consumer.close()
    assert message is not None, "no answer"
    error = message.error()
    if error is None or error.code() == KafkaError._PARTITION_EOF:
        return True
    assert error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED, error
    return False


@pytest.mark.parametrize(
    ("name", "sees", "sees_not"),
    [
        ("dispatcher", "requests.acme", "control.prices.unknown"),
        ("gateway", "gateway.replies", "priority.generate.high"),
        ("recorder", "ledger.usage", "requests.acme"),
        ("backfill", "backfill.acme", "priority.generate.high"),
        ("consumer-generate", "priority.generate.high", "priority.encode.high"),
        ("consumer-encode", "priority.encode.high", "priority.generate.high"),
    ],
)
def test_each_container_connects_as_its_user(kafka: ComposeKafka, name: str, sees: str, sees_not: str) -> None:
    found = topics_of(config(kafka, services()[name].environment, "SERVICES"))
    assert sees in found
    assert sees_not not in found


def test_nobody_connects_without_a_password_or_with_a_wrong_one(kafka: ComposeKafka) -> None:
    wrong = config(kafka, services()["gateway"].environment, "SERVICES") | {"sasl.password": "other"}
    nobody = {"security.protocol": "PLAINTEXT", "log_level": "0"}
    # With the right password, in the clear or without the authority.
    unverified = config(kafka, services()["gateway"].environment, "SERVICES")
    del unverified["ssl.ca.location"]
    plain = unverified | {"security.protocol": "SASL_PLAINTEXT"}
    for listener in ("SERVICES", "HOST", "ADMIN"):
        for settings in (nobody, plain, unverified, wrong):
            with pytest.raises(KafkaException):
                AdminClient({**settings, "bootstrap.servers": kafka.addresses[listener]}).list_topics(timeout=3)


def test_nobody_may_more_than_follows_from_the_files_and_no_listener_is_open(
    kafka: ComposeKafka, credentials: Path
) -> None:
    done = set_up(kafka, credentials, ("-m", "fairlane_server.cli", "access", "check"))
    assert (done.returncode, done.stderr) == (0, "")


def test_kafka_ui_reads_no_prompts_and_no_answers_also_not_in_dead_letters(kafka: ComposeKafka) -> None:
    jaas = services()["kafka-ui"].environment["KAFKA_CLUSTERS_0_PROPERTIES_SASL_JAAS_CONFIG"]
    user, password = "fairlane_viewer", PASSWORDS["KAFKA_VIEWER_PASSWORD"]
    assert f'username="{user}" password="{password}"' in jaas
    operator = services()["operator"].environment
    viewer = {**operator, "KAFKA_SASL_USERNAME": user, "KAFKA_SASL_PASSWORD": password}
    settings = config(kafka, viewer, "SERVICES")
    # It sees them all, with their sizes and settings.
    topics = topics_of(settings)
    assert {"requests.acme", "replies.acme", "dead-letter.work", "ledger.usage"} <= topics
    readable = {topic for topic in topics if may_read(settings, topic)}
    assert readable == {f"control.{name}" for name in ("tenants", "models", "prices", "capacity", "dispatch")}
    # The client must outlive its question.
    admin = AdminClient(settings)
    admin.describe_consumer_groups(["fairlane.dispatcher"])["fairlane.dispatcher"].result(TIMEOUT_S)


def test_a_tenant_connects_from_this_machine_with_the_file_of_setup(kafka: ComposeKafka, credentials: Path) -> None:
    path = credentials / "fairlane_tenant_acme.env"
    given = dict(line.split("=", 1) for line in path.read_text(encoding="utf-8").splitlines())
    settings = config(kafka, {"KAFKA_SECURITY_PROTOCOL": "SASL_SSL", **given}, "HOST")
    assert {"requests.acme", "replies.acme"} <= topics_of(settings)
    assert "requests.globex" not in topics_of(settings)


def test_the_registry_has_rights_on_its_own_topics_alone(kafka: ComposeKafka) -> None:
    admin = AdminClient(config(kafka, kafka.admin, "ADMIN"))
    for acl in acls_of_the_registry():
        admin.create_acls([acl])[acl].result(TIMEOUT_S)
    settings = config(kafka, kafka.user(REGISTRY, PASSWORDS["KAFKA_REGISTRY_PASSWORD"]), "ADMIN")
    registry = AdminClient(settings)
    registry.create_topics([NewTopic(JOURNAL, 1, 1)])[JOURNAL].result(TIMEOUT_S)
    producer = Producer(settings)
    producer.produce(JOURNAL, b"schema")
    assert producer.flush(TIMEOUT_S) == 0
    consumer = Consumer({**settings, "group.id": "apicurio-1", "auto.offset.reset": "earliest"})
    consumer.subscribe([JOURNAL])
    (record,) = consumer.consume(1, timeout=TIMEOUT_S)
    assert record.value() == b"schema"
    consumer.close()
    assert topics_of(settings) == {JOURNAL}
    with pytest.raises(KafkaException, match="TOPIC_AUTHORIZATION_FAILED"):
        registry.create_topics([NewTopic("requests.intruder", 1, 1)])["requests.intruder"].result(TIMEOUT_S)


def acls_of_the_registry() -> list[AclBinding]:
    """What the commands of `setup-registry` create."""
    script = services()["setup-registry"].raw["command"][-1]
    made: list[AclBinding] = []
    for line in script.splitlines():
        words = line.split()
        if words[:2] != ["$acls", "--add"]:
            continue
        assert words[2:6] == ["--allow-principal", f"User:{REGISTRY}", "--operation", "All"]
        is_prefix = words[-2:] == ["--resource-pattern-type", "prefixed"]
        pattern = ResourcePatternType.PREFIXED if is_prefix else ResourcePatternType.LITERAL
        for option, name in zip(words[6::2], words[7::2], strict=True):
            if option == "--resource-pattern-type":
                continue
            kind = {"--topic": ResourceType.TOPIC, "--group": ResourceType.GROUP}[option]
            principal = f"User:{REGISTRY}"
            made.append(AclBinding(kind, name, pattern, principal, "*", AclOperation.ALL, AclPermissionType.ALLOW))
    assert len(made) == 4
    return made


def test_a_password_for_a_user_that_no_file_names_is_refused(kafka: ComposeKafka, credentials: Path) -> None:
    command = services()["setup"].python_commands[1]
    done = set_up(kafka, credentials, command, KAFKA_USER_PASSWORDS="fairlane_gatway=sesame")
    assert done.returncode == 1
    assert "KAFKA_USER_PASSWORDS: fairlane_gatway: the files name no such user" in done.stderr
    assert "sesame" not in done.stderr
