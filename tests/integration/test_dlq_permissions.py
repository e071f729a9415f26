"""`fairlane dlq` where Kafka checks rights: what follows from topics.yaml for a role is what the commands need."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from fairlane.names import DEAD_LETTER_REPLAY_IDS
from fairlane_server.dead_letters.bulk import DeadLetters
from fairlane_server.topics.families import load_families
from tests.kit.dead_letters_bench import DeadLettersBench, dead_letters
from tests.kit.pipeline import unique_name
from tests.kit.secured_kafka import CheckingKafka, checking_kafka

pytestmark = [pytest.mark.full, pytest.mark.broker]

PASSWORD = "planted-s3cret-of-kafka"
LITERAL, PREFIXED = ResourcePatternType.LITERAL, ResourcePatternType.PREFIXED


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckingKafka]:
    with checking_kafka(tmp_path_factory.mktemp("checking")) as node:
        yield node


def allow(
    admin: AdminClient, user: str, rules: list[tuple[ResourceType, str, ResourcePatternType, AclOperation]]
) -> None:
    credentials: Any = UserScramCredentialUpsertion(
        user, ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096), PASSWORD.encode()
    )
    admin.alter_user_scram_credentials([credentials])[user].result(10)
    bindings = [
        AclBinding(kind, name, pattern, f"User:{user}", "*", operation, AclPermissionType.ALLOW)
        for kind, name, pattern, operation in rules
    ]
    for future in admin.create_acls(bindings).values():
        future.result(10)


def of_role(
    role: str, topics: dict[DeadLetters, str]
) -> list[tuple[ResourceType, str, ResourcePatternType, AclOperation]]:
    """The rights that follow from topics.yaml, the dead-letter topics being those of this test."""
    rules = []
    for family in load_families():
        fixed, _, rest = family.name.partition("{")
        pattern = PREFIXED if rest else LITERAL
        own = {f"dead-letter.{name}": topic for name, topic in topics.items()}.get(family.name)
        for verb, operation in (("readers", AclOperation.READ), ("writers", AclOperation.WRITE)):
            if role in getattr(family, verb):
                rules.append((ResourceType.TOPIC, own or fixed, pattern, operation))
    return rules


@pytest.fixture
def bench(
    kafka: CheckingKafka,
    unique: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[DeadLettersBench]:
    with dead_letters(kafka.bootstrap_servers, unique, tmp_path, monkeypatch, capsys) as bench:
        for name, value in kafka.user_env("nobody", PASSWORD).items():
            monkeypatch.setenv(name, value)
        yield bench


def act_as(bench: DeadLettersBench, role: str, monkeypatch: pytest.MonkeyPatch, *more: Any) -> None:
    user = f"{role}-{unique_name()}"
    allow(bench.pipeline.admin, user, [*of_role(role, bench.topics), *more])
    monkeypatch.setenv("KAFKA_SASL_USERNAME", user)


def test_a_replayer_may_replay(bench: DeadLettersBench, monkeypatch: pytest.MonkeyPatch) -> None:
    may_begin = (ResourceType.TRANSACTIONAL_ID, DEAD_LETTER_REPLAY_IDS, PREFIXED, AclOperation.WRITE)
    act_as(bench, "replayer", monkeypatch, may_begin)
    bench.bury(bench.pipeline.request())
    code, text, complaint = bench.run("replay", "--all")
    assert (code, complaint) == (0, ""), complaint
    assert "1 replayed" in text
    assert bench.json("list")["letters"][0]["replayed_as"]
    assert bench.run("purge", "--topic", "work", "--until", "0s", "--yes")[2].endswith(
        "not deleted: Broker: Topic authorization failed\n"
    )


def test_an_operator_may_look_and_not_replay(bench: DeadLettersBench, monkeypatch: pytest.MonkeyPatch) -> None:
    act_as(bench, "operator", monkeypatch)
    bench.bury(bench.pipeline.request())
    assert bench.json("list")["found"] == 1
    assert bench.run("show", "0")[0] == 0
    assert bench.run("replay", "--all", "--dry-run")[0] == 0
    code, text, complaint = bench.run("replay", "--all")
    assert (code, text) == (1, "")
    assert complaint.startswith("error: no transaction can be begun: ")
    assert "Transactional Id authorization failed" in complaint


def test_who_may_not_write_a_tenants_topic_is_told_so(bench: DeadLettersBench, monkeypatch: pytest.MonkeyPatch) -> None:
    may_begin = (ResourceType.TRANSACTIONAL_ID, DEAD_LETTER_REPLAY_IDS, PREFIXED, AclOperation.WRITE)
    topic = bench.topics[DeadLetters.WORK]
    rules = [(ResourceType.TOPIC, topic, LITERAL, right) for right in (AclOperation.READ, AclOperation.WRITE)]
    describe = (ResourceType.TOPIC, "requests.", PREFIXED, AclOperation.DESCRIBE)
    act_as(bench, "nobody", monkeypatch, may_begin, *rules, describe)
    for _ in range(2):
        bench.bury(bench.pipeline.request())
    code, text, complaint = bench.run("replay", "--topic", "work")
    assert code == 1
    assert "0 replayed, 2 failed\n" in text, complaint
    assert "work-0@0: failed: " in complaint
    assert complaint.count("Topic authorization failed") == 2
    assert [one["replayed_as"] for one in bench.json("list", "--topic", "work")["letters"]] == [[], []]


def test_who_may_delete_may_purge(bench: DeadLettersBench, monkeypatch: pytest.MonkeyPatch) -> None:
    may_delete = (ResourceType.TOPIC, bench.topics[DeadLetters.WORK], LITERAL, AclOperation.DELETE)
    act_as(bench, "operator", monkeypatch, may_delete)
    bench.bury(bench.pipeline.request())
    code, _, complaint = bench.run("purge", "--topic", "work", "--until", "0s", "--yes")
    assert (code, complaint) == (0, "")
    assert bench.json("list")["found"] == 0
