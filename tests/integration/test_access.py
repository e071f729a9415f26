"""`fairlane access` on a broker that checks rights: who may do what, with every user, topic, group and id."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)

from deploy.local.layout import PROJECT_ROOT
from fairlane import names
from fairlane.kafka_config import connection, read_committed_consumer
from fairlane.records import ModelVersion, TenantSpec
from fairlane.settings import KafkaSettings
from fairlane_server.access.credentials import PASSWORD, read_credentials
from fairlane_server.access.users import KafkaUser, first_users
from fairlane_server.kafka.cluster_admin import ClusterAdmin, ClusterError
from fairlane_server.topics.families import KafkaRole, expand, load_families
from tests.kit.deployment import write_models, write_tenants
from tests.kit.secured_kafka import CheckingKafka, checking_kafka
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.broker]

GROUP_PREFIX = "fairlane"
TENANTS = (TenantSpec("acme", services=("search",)), TenantSpec("acme2"))
MODELS = tuple(
    ModelVersion(f"model-{pool}", "1", pool, "simulated", ("generate",), "-", 100, 100) for pool in ("fast", "fast-2")
)
USERS = first_users([spec.tenant for spec in TENANTS], [model.pool for model in MODELS])
ACME, ACME2 = (KafkaUser(KafkaRole.TENANT, spec.tenant) for spec in TENANTS)
_TIMEOUT_S = 20.0
_NOT_YET = {KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_NOT_AVAILABLE, KafkaError.COORDINATOR_LOAD_IN_PROGRESS}


@dataclass(frozen=True, slots=True)
class Rights:
    """A broker with all users of two tenants and two pools, whose names begin alike."""

    kafka: CheckingKafka
    folder: Path

    @property
    def credentials(self) -> Path:
        return self.folder / "credentials"

    def run(self, *arguments: str, tenants: tuple[TenantSpec, ...] = TENANTS) -> tuple[int, str, str]:
        """The exit status and the output of a command, by one who may do everything."""
        write_models(self.folder / "models.yaml", MODELS)
        write_tenants(self.folder / "tenants.yaml", tenants)
        files = {"TENANTS_FILE": self.folder / "tenants.yaml", "MODELS_FILE": self.folder / "models.yaml"}
        done = subprocess.run(
            (sys.executable, "-m", "fairlane_server.cli", *arguments),
            cwd=PROJECT_ROOT,
            env={
                **os.environ,
                **{name: str(file) for name, file in files.items()},
                "KAFKA_BOOTSTRAP_SERVERS": self.kafka.bootstrap_servers,
            },
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    def access(self, *arguments: str, tenants: tuple[TenantSpec, ...] = TENANTS) -> dict[str, Any]:
        code, text, complaint = self.run("access", *arguments, "--json", tenants=tenants)
        assert code in {0, 2}, complaint
        found: dict[str, Any] = json.loads(text)
        return found

    def apply(self, *options: str, tenants: tuple[TenantSpec, ...] = TENANTS) -> dict[str, Any]:
        return self.access("apply", "--credentials", str(self.credentials), *options, tenants=tenants)

    def alter_user(self, alteration: Any) -> None:
        """Create or delete a user behind the back of the commands."""
        admin = AdminClient({"bootstrap.servers": self.kafka.bootstrap_servers})
        for future in admin.alter_user_scram_credentials([alteration]).values():
            future.result(_TIMEOUT_S)

    def settings(self, user: str) -> KafkaSettings:
        """Of a client that acts as this user, with the password of its file."""
        env = self.kafka.user_env(user, read_credentials(self.credentials, user)[PASSWORD])
        return KafkaSettings.model_validate({name.lower(): value for name, value in env.items()})


@pytest.fixture(scope="module")
def rights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rights]:
    folder = tmp_path_factory.mktemp("rights")
    with checking_kafka(folder) as kafka:
        found = Rights(kafka, folder)
        assert found.run("topics", "apply")[0] == 0
        assert {one["result"] for one in found.apply()["applied"]} == {"done"}
        yield found


def test_what_was_applied_is_applied_and_the_passwords_are_private(rights: Rights) -> None:
    assert rights.access("plan") == {
        "changes": [],
        "removals": [],
        "foreign": [],
        "unknown_users": [],
        "allows_unlisted": False,
        # Of this test's administrator.
        "open_listeners": ["CONTROLLER", "PLAINTEXT"],
    }
    assert rights.apply()["applied"] == []
    code, text, complaint = rights.run("access", "check")
    assert (code, text) == (1, "nothing to change\n")
    assert complaint.splitlines()[-1].startswith("error: the brokers listen on CONTROLLER, PLAINTEXT without")
    files = sorted(rights.credentials.iterdir())
    assert [file.name for file in files] == sorted(f"{user.name}.env" for user in USERS)
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


def owner_of(topic: str) -> str:
    """The tenant whose topic it is; empty for a topic that is nobody's."""
    parts = topic.removeprefix("dead-letter.").split(".")
    return parts[1] if parts[0] in {"requests", "backfill", "replies", "chunks"} and len(parts) > 1 else ""


def concerns(user: KafkaUser, topic: str) -> bool:
    """Whether a role's right on a family is also one on this topic of it."""
    if user.role is KafkaRole.TENANT:
        return owner_of(topic) == user.owner
    if user.role is KafkaRole.CONSUMER and topic.startswith(("priority.", "returned.")):
        return topic.split(".")[1] == user.owner
    return True


@pytest.mark.parametrize("user", USERS, ids=lambda user: user.name)
def test_every_user_writes_and_reads_the_topics_of_its_role_and_no_others(rights: Rights, user: KafkaUser) -> None:
    families = load_families()
    topics = {topic.name: topic.family for topic in expand(families, TENANTS, MODELS)}
    writers = {family.family: family.writers for family in families}
    readers = {family.family: family.readers for family in families}
    may_write = {name for name, family in topics.items() if user.role in writers[family] and concerns(user, name)}
    may_read = {name for name, family in topics.items() if user.role in readers[family] and concerns(user, name)}
    settings = rights.settings(user.name)
    assert written(settings, topics) == may_write
    assert readable(settings, topics) == may_read


def written(settings: KafkaSettings, topics: Mapping[str, str]) -> set[str]:
    """The topics that took a record. Every other one must have refused it for lack of rights."""
    producer = Producer({**connection(settings), "message.timeout.ms": 10_000, "log_level": 0})
    outcomes: dict[str, Any] = {}
    for topic in topics:
        producer.produce(
            topic, b"x", b"key", on_delivery=lambda error, sent: outcomes.update({str(sent.topic()): error})
        )
    assert producer.flush(_TIMEOUT_S) == 0
    refused = {topic for topic, error in outcomes.items() if error is not None}
    assert {outcomes[topic].code() for topic in refused} <= {KafkaError.TOPIC_AUTHORIZATION_FAILED}
    return outcomes.keys() - refused


def readable(settings: KafkaSettings, topics: Mapping[str, str]) -> set[str]:
    """The topics whose records were let out, to their ends."""
    config = read_committed_consumer(settings, names.observer_group("test"))
    consumer = Consumer(config | {"enable.partition.eof": True, "log_level": 0})
    seen: set[str] = set()
    refused: set[str] = set()
    try:
        # A topic that a user may do nothing with is not in its metadata.
        shown = topics.keys() & consumer.list_topics(timeout=_TIMEOUT_S).topics.keys()
        consumer.assign([TopicPartition(topic, 0, 0) for topic in shown])
        while len(seen) + len(refused) < len(shown):
            message = consumer.poll(_TIMEOUT_S)
            assert message is not None, f"nothing about {shown - seen - refused}"
            error, topic = message.error(), str(message.topic())
            if error is None or error.code() == KafkaError._PARTITION_EOF:
                seen.add(topic)
            elif error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                refused.add(topic)
            else:
                assert error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED, error
    finally:
        consumer.close()
    return seen


_FAST, _FAST_2 = (KafkaUser(KafkaRole.CONSUMER, model.pool) for model in MODELS)
_DISPATCHER, _GATEWAY, _RECORDER = map(KafkaUser, (KafkaRole.DISPATCHER, KafkaRole.GATEWAY, KafkaRole.RECORDER))
_OPERATOR, _VIEWER = map(KafkaUser, (KafkaRole.OPERATOR, KafkaRole.VIEWER))
_BACKFILL, _REPLAYER, _ADMIN = map(KafkaUser, (KafkaRole.BACKFILL, KafkaRole.REPLAYER, KafkaRole.ADMIN))

GROUPS = {
    names.dispatcher_group(GROUP_PREFIX): _DISPATCHER,
    names.gateway_group(GROUP_PREFIX): _GATEWAY,
    names.recorder_group(GROUP_PREFIX): _RECORDER,
    names.job_group(GROUP_PREFIX, "j1"): _BACKFILL,
    names.log_replay_group(GROUP_PREFIX, "r1"): _ADMIN,
    names.pool_group(GROUP_PREFIX, "fast"): _FAST,
    names.pool_group(GROUP_PREFIX, "fast-2"): _FAST_2,
    names.tenant_group("acme", "readers"): ACME,
    names.tenant_group("acme2", "readers"): ACME2,
    # Nobody joins these.
    names.gateway_chunks_group(GROUP_PREFIX): None,
    names.dispatcher_archive_group(GROUP_PREFIX): None,
    names.jobs_group(GROUP_PREFIX): None,
    names.observer_group("top"): None,
    "someone-else": None,
}
DESCRIBED: Mapping[str, set[KafkaUser]] = {
    **{group: {_VIEWER} for group in GROUPS if group.startswith("fairlane.")},
    # Nobody joins these, and so they have no lag.
    names.gateway_chunks_group(GROUP_PREFIX): {_GATEWAY},
    names.dispatcher_archive_group(GROUP_PREFIX): {_DISPATCHER},
    names.jobs_group(GROUP_PREFIX): {_BACKFILL},
    names.observer_group("top"): {user for user in USERS if user.role is not KafkaRole.TENANT},
    # What a pool has finished is known from its offsets.
    names.pool_group(GROUP_PREFIX, "fast"): {_DISPATCHER, _VIEWER},
    names.pool_group(GROUP_PREFIX, "fast-2"): {_DISPATCHER, _VIEWER},
}
"""Who may look at a group besides those who may join it."""
IDS = {
    names.dispatcher_transactional_ids(GROUP_PREFIX, "dispatcher-1")[0]: {_DISPATCHER},
    names.dispatcher_transactional_ids(GROUP_PREFIX, "dispatcher-1")[1]: {_DISPATCHER},
    names.consumer_transactional_ids(GROUP_PREFIX, "fast", "consumer-1")[0]: {_FAST},
    names.consumer_transactional_ids(GROUP_PREFIX, "fast-2", "consumer-1")[1]: {_FAST_2},
    names.job_transactional_id(GROUP_PREFIX, "j1"): {_BACKFILL},
    names.log_replay_transactional_id(GROUP_PREFIX, "r1"): {_ADMIN},
    names.dead_letter_replay_id("acme"): {_REPLAYER, _ADMIN},
    names.MODEL_CHANGES_ID: {_OPERATOR, _ADMIN},
    names.tenant_group("acme", "writer"): set[KafkaUser](),
    "someone-else": set[KafkaUser](),
}


@pytest.mark.parametrize("user", USERS, ids=lambda user: user.name)
def test_every_user_joins_its_own_groups_and_fences_its_own_ids_alone(rights: Rights, user: KafkaUser) -> None:
    settings = rights.settings(user.name)
    assert {group for group in GROUPS if may_commit(settings, group)} == {
        group for group, owner in GROUPS.items() if owner == user
    }
    assert {one for one in IDS if may_begin(settings, one)} == {one for one, owners in IDS.items() if user in owners}
    assert {group for group in GROUPS if may_describe(settings, group)} == {
        group for group, owner in GROUPS.items() if owner == user or user in DESCRIBED.get(group, ())
    }
    assert not any(may_delete(settings, group) for group in GROUPS)


# By Kafka's operations, and whose they are: by hand, not by `wanted_grants`.
_PLACES = ("requests.", "backfill.", "priority.", "returned.", "replies.", "chunks.", "dead-letter.replies.")
_LETTERS = {names.DEAD_LETTER_REQUESTS, names.DEAD_LETTER_WORK}


@pytest.mark.parametrize("user", USERS, ids=lambda user: user.name)
def test_topics_are_made_changed_and_emptied_by_the_operator_and_the_admin_api_alone(
    rights: Rights, user: KafkaUser
) -> None:
    families = load_families()
    topics = {topic.name for topic in expand(families, TENANTS, MODELS)}
    newcomer = TenantSpec("newcomer", services=("search",), pool="newcomer")
    new = {topic.name for topic in expand([one for one in families if one.placeholders], [newcomer], ())}
    unrelated = {"ledger.other", "control.other", "gateway.replies2", "other"}
    assert all(topic.startswith(_PLACES) for topic in new)
    is_operator, is_admin = user == _OPERATOR, user == _ADMIN
    admin = AdminClient({**connection(rights.settings(user.name)), "log_level": 0})
    timeout = {"request_timeout": _TIMEOUT_S}

    # Nothing is changed: each request is only checked, or is about no record.
    created = {
        topic: admin.create_topics([NewTopic(topic, 1, 1)], validate_only=True, **timeout)[topic]
        for topic in (*topics, *new, *unrelated)
    }
    may_create = topics | new if is_operator else {one for one in topics | new if is_admin and one.startswith(_PLACES)}
    assert permitted(created, KafkaError.TOPIC_ALREADY_EXISTS) == may_create
    grown = {
        topic: admin.create_partitions([NewPartitions(topic, 50)], validate_only=True, **timeout)[topic]
        for topic in topics
    }
    assert permitted(grown) == (topics if is_operator else set())
    emptied = {topic: sole(admin.delete_records([TopicPartition(topic, 0, 0)], **timeout)) for topic in topics}
    # Of compacted topics nothing may be deleted, which is said behind the check of rights.
    assert permitted(emptied, KafkaError.POLICY_VIOLATION) == (
        topics if is_operator else _LETTERS if is_admin else set()
    )
    configured = {
        topic: sole(admin.incremental_alter_configs([retention_of(topic)], validate_only=True, **timeout))
        for topic in topics
    }
    assert permitted(configured) == (topics if is_operator else set())
    described = {
        topic: sole(admin.describe_configs([ConfigResource(ConfigResource.Type.TOPIC, topic)], **timeout))
        for topic in topics
    }
    assert permitted(described) == (topics if user in {_OPERATOR, _VIEWER} else set())


def retention_of(topic: str) -> ConfigResource:
    entry = ConfigEntry("retention.ms", "1", incremental_operation=AlterConfigOpType.SET)
    return ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[entry])


def sole(asked: "Mapping[Any, Future[Any]]") -> "Future[Any]":
    (found,) = asked.values()
    return found


def permitted(asked: "Mapping[str, Future[Any]]", *harmless: int) -> set[str]:
    """What was not refused for lack of rights; no other error is accepted but those that come behind the check."""
    allowed = set()
    for name, future in asked.items():
        try:
            future.result(_TIMEOUT_S)
        except KafkaException as error:
            code = error.args[0].code()
            # The library looks for the leader first, and a topic that a user may not describe has none for it.
            if code in {KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError._NOENT}:
                continue
            if code not in harmless:
                raise
        allowed.add(name)
    return allowed


def test_a_topic_is_deleted_by_the_operator_alone(rights: Rights) -> None:
    owner = AdminClient({"bootstrap.servers": rights.kafka.bootstrap_servers})
    topic = "requests.short-lived"
    owner.create_topics([NewTopic(topic, 1, 1)], operation_timeout=_TIMEOUT_S)[topic].result(_TIMEOUT_S)
    by_users = sorted(USERS, key=lambda user: user == _OPERATOR)
    for user in by_users:
        admin = AdminClient({**connection(rights.settings(user.name)), "log_level": 0})
        asked = {topic: admin.delete_topics([topic], request_timeout=_TIMEOUT_S)[topic]}
        assert permitted(asked) == ({topic} if user == _OPERATOR else set()), user.name


def may_commit(settings: KafkaSettings, group: str) -> bool:
    """Whether the group takes an offset from this user. Of a topic that it may not read, it is another error."""
    admin = AdminClient({**connection(settings), "log_level": 0})

    def refusal() -> int | None:
        place = ConsumerGroupTopicPartitions(group, [TopicPartition("replies.acme", 0, 0)])
        try:
            altered = admin.alter_consumer_group_offsets([place], request_timeout=_TIMEOUT_S)[group].result(_TIMEOUT_S)
        except KafkaException as error:
            return int(error.args[0].code())
        (answer,) = altered.topic_partitions
        return None if answer.error is None else int(answer.error.code())

    # The coordinator of a group that nobody asked for before needs a moment.
    eventually(lambda: refusal() not in _NOT_YET, what=f"an answer about {group}")
    code = refusal()
    assert code in {None, KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.GROUP_AUTHORIZATION_FAILED}
    return code != KafkaError.GROUP_AUTHORIZATION_FAILED


def may_describe(settings: KafkaSettings, group: str) -> bool:
    admin = AdminClient({**connection(settings), "log_level": 0})
    return group_is_open(lambda: admin.describe_consumer_groups([group], request_timeout=_TIMEOUT_S)[group])


def may_delete(settings: KafkaSettings, group: str) -> bool:
    admin = AdminClient({**connection(settings), "log_level": 0})
    return group_is_open(lambda: admin.delete_consumer_groups([group], request_timeout=_TIMEOUT_S)[group])


def group_is_open(ask: "Callable[[], Future[Any]]") -> bool:
    """Whether the coordinator does not refuse it for lack of rights. A group that nobody has used does not exist."""

    def refusal() -> int | None:
        try:
            ask().result(_TIMEOUT_S)
        except KafkaException as error:
            return int(error.args[0].code())
        return None

    eventually(lambda: refusal() not in _NOT_YET, what="an answer of the coordinator")
    code = refusal()
    assert code in {None, KafkaError.GROUP_ID_NOT_FOUND, KafkaError.GROUP_AUTHORIZATION_FAILED}, code
    return code != KafkaError.GROUP_AUTHORIZATION_FAILED


def may_begin(settings: KafkaSettings, transactional_id: str) -> bool:
    producer = Producer({**connection(settings), "transactional.id": transactional_id, "log_level": 0})
    try:
        producer.init_transactions(_TIMEOUT_S)
    except KafkaException as error:
        refusal = error.args[0].code()
    else:
        return True
    assert refusal == KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    return False


def test_a_rotated_password_and_the_new_one_are_valid_until_the_old_one_is_retired(rights: Rights) -> None:
    old, new = ACME2.name, ACME2.other.name
    given = ("--credentials", str(rights.credentials))
    assert {one["user"] for one in rights.access("rotate", old, *given)["applied"]} == {new}
    before, after = rights.settings(old), rights.settings(new)
    topics = {"requests.acme2": "", "requests.acme": ""}
    assert written(before, topics) == written(after, topics) == {"requests.acme2"}
    code, _, complaint = rights.run("access", "rotate", old, *given)
    assert (code, complaint) == (
        1,
        f"error: {new} exists already: `fairlane access retire` the one that is no longer used\n",
    )
    file = rights.credentials / f"{old}.env"
    left = file.read_bytes()
    assert {one["user"] for one in rights.access("retire", old, *given)["applied"]} == {old}
    assert not file.exists()
    with pytest.raises(ClusterError, match="uthentication"):
        ClusterAdmin(before).metadata()
    assert written(after, topics) == {"requests.acme2"}
    assert rights.access("plan")["changes"] == []
    # As if the command had ended before it removed the file.
    file.touch(mode=0o600)
    file.write_bytes(left)
    assert [one["result"] for one in rights.access("retire", old, *given)["applied"]] == ["done"]
    assert not file.exists()
    code, _, complaint = rights.run("access", "retire", new, *given)
    assert (code, complaint) == (
        1,
        f"error: {new}: there is no {old} in its place; `fairlane access rotate` creates it\n",
    )
    # As it was, for the other tests.
    rights.access("rotate", new, *given)
    rights.access("retire", new, *given)


def test_a_removed_tenant_loses_its_rights_when_told_so_and_a_new_one_needs_no_restart(rights: Rights) -> None:
    gone, new = rights.settings(ACME2.name), TenantSpec("zeta")
    given = ("--credentials", str(rights.credentials))
    # A client that is connected stays so.
    producer = Producer({**connection(gone), "log_level": 0})
    errors: list[Any] = []

    def refusal() -> int | None:
        try:
            producer.produce("requests.acme2", b"x", on_delivery=lambda error, _: errors.append(error))
        except KafkaException as error:
            return int(error.args[0].code())
        assert producer.flush(_TIMEOUT_S) == 0
        found = errors.pop()
        return None if found is None else int(found.code())

    assert refusal() is None
    tenants = (TENANTS[0], new)
    assert rights.run("topics", "apply", tenants=tenants)[0] == 0
    # A rotation does nothing else, and not for a tenant that is gone.
    assert {one["user"] for one in rights.access("rotate", ACME.name, *given, tenants=tenants)["applied"]} == {
        ACME.other.name
    }
    rights.access("retire", ACME.other.name, *given, tenants=tenants)
    code, _, complaint = rights.run("access", "rotate", ACME2.name, *given, tenants=tenants)
    assert (code, complaint.startswith(f"error: {ACME2.name}: the files name no such user; there are ")) == (1, True)
    applied = rights.apply(tenants=tenants)
    assert {one["user"] for one in applied["applied"]} == {KafkaUser(KafkaRole.TENANT, "zeta").name}
    assert {one["user"] for one in applied["removals"]} == {ACME2.name}
    assert refusal() is None
    code, _, complaint = rights.run("access", "apply", *given, tenants=tenants)
    assert (code, complaint.count("\n")) == (0, 2)
    assert complaint.startswith(f"warning: {ACME2.name}: no file names its tenant or pool any more; ")
    assert rights.run("access", "check", tenants=tenants)[0] == 1

    deleted = rights.apply("--delete", tenants=tenants)["applied"]
    assert {one["user"] for one in deleted} == {ACME2.name}
    assert rights.access("plan", tenants=tenants)["changes"] == [], "its quotas are gone, too"
    assert refusal() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    assert not (rights.credentials / f"{ACME2.name}.env").exists()
    zeta = rights.settings(KafkaUser(KafkaRole.TENANT, "zeta").name)
    assert written(zeta, {"requests.zeta": "", "requests.acme": ""}) == {"requests.zeta"}
    rights.apply("--delete")


def test_a_user_that_others_created_is_not_given_rights(rights: Rights) -> None:
    planted = KafkaUser(KafkaRole.TENANT, "planted").name
    info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
    rights.alter_user(UserScramCredentialUpsertion(planted, info, b"known to others"))
    tenants = (*TENANTS, TenantSpec("planted"))
    for command in ("plan", "check", "apply"):
        given = ("--credentials", str(rights.credentials)) if command == "apply" else ()
        code, _, complaint = rights.run("access", command, *given, tenants=tenants)
        assert code == 1
        assert complaint.endswith(
            f"error: {planted}: exists and has none of the rights of this pipeline, so others may know its password; "
            "delete it, or use another TOPIC_PREFIX\n"
        )
    rights.alter_user(UserScramCredentialDeletion(planted, ScramMechanism.SCRAM_SHA_512))
    assert rights.access("plan")["changes"] == []


def test_the_password_of_a_user_that_was_deleted_does_not_come_back(rights: Rights) -> None:
    before = rights.settings(ACME2.name)
    rights.alter_user(UserScramCredentialDeletion(ACME2.name, ScramMechanism.SCRAM_SHA_512))
    assert [(one["action"], one["user"]) for one in rights.apply()["applied"]] == [("create-user", ACME2.name)]
    with pytest.raises(ClusterError, match="uthentication"):
        ClusterAdmin(before).metadata()
    assert written(rights.settings(ACME2.name), {"requests.acme2": ""}) == {"requests.acme2"}


def test_rights_of_others_are_an_error_and_stay(rights: Rights) -> None:
    binding = AclBinding(
        *(ResourceType.TOPIC, "replies.", ResourcePatternType.PREFIXED, "User:intruder", "*"),
        *(AclOperation.READ, AclPermissionType.ALLOW),
    )
    admin = AdminClient({"bootstrap.servers": rights.kafka.bootstrap_servers})
    admin.create_acls([binding])[binding].result(10)
    assert rights.apply()["applied"] == []
    code, _, complaint = rights.run("access", "check")
    assert code == 1
    assert "intruder may read topic replies.*, which does not follow from the files" in complaint
    assert complaint.endswith("error: 0 changes pending, 1 rights that do not follow from the files\n")
    assert rights.access("plan")["foreign"] == [{"user": "intruder", "right": "read topic replies.*"}]


def test_a_broker_that_allows_everybody_what_no_acl_names_is_an_error(tmp_path: Path) -> None:
    with checking_kafka(tmp_path, {"allow.everyone.if.no.acl.found": "true"}) as kafka:
        rights = Rights(kafka, tmp_path)
        rights.apply()
        assert rights.access("plan")["allows_unlisted"] is True
        code, _, complaint = rights.run("access", "check")
    assert code == 1
    assert complaint.endswith("may be open to everybody; remove that setting\n")


def test_a_broker_that_checks_no_rights_is_an_error_in_one_line(tmp_path: Path) -> None:
    write_models(tmp_path / "models.yaml", MODELS)
    write_tenants(tmp_path / "tenants.yaml", TENANTS)
    files = ("--tenants-file", str(tmp_path / "tenants.yaml"), "--models-file", str(tmp_path / "models.yaml"))
    command = (sys.executable, "-m", "fairlane_server.cli", "access", "plan", *files)
    with checking_kafka(tmp_path, {"authorizer.class.name": ""}) as kafka:
        done = subprocess.run(
            (*command, "--bootstrap-servers", kafka.bootstrap_servers),
            cwd=PROJECT_ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: the brokers have no authorizer.class.name: ")
    assert done.stderr.count("\n") == 1
