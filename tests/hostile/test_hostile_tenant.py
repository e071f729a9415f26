"""A short run of the hostile tenant (`python -m tests.hostile_tenant`), and proofs of what it finds."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from uuid import uuid4

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourcePatternType,
    ResourceType,
    ScramMechanism,
    UserScramCredentialDeletion,
)

from deploy.local.layout import KAFKA_LIBS_DIR
from fairlane.kafka_config import transactional_producer
from fairlane.settings import KafkaSettings
from tests.hostile_tenant import __main__ as command
from tests.hostile_tenant import run as hostile
from tests.hostile_tenant.admin_routes import PREFIX, AdminServer, admin_server, try_routes
from tests.hostile_tenant.cluster import PLAIN, Cluster, cluster
from tests.hostile_tenant.cluster_operations import OPERATIONS
from tests.hostile_tenant.connections import Connection
from tests.hostile_tenant.messages import Api, load_messages
from tests.hostile_tenant.operation import Target
from tests.hostile_tenant.report import Report
from tests.hostile_tenant.services import Services
from tests.hostile_tenant.state import Allowance, Reader, State, changes
from tests.hostile_tenant.tally import Tally
from tests.hostile_tenant.world import describe_world
from tests.kit.pipeline import unique_name
from tests.kit.stack import PostgresServer, migrated_database

pytestmark = [pytest.mark.full, pytest.mark.broker]

SEED = 20
_TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("hostile")) as one:
        yield one


@pytest.fixture(scope="module")
def admin(
    started: Cluster, postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AdminServer]:
    folder = tmp_path_factory.mktemp("admin")
    with migrated_database(postgres, unique_name()) as database, admin_server(started, database, folder) as server:
        yield server


def test_no_attacker_gets_what_is_not_its_own(started: Cluster, admin: AdminServer) -> None:
    report = hostile.attack(started, 8_000, SEED, admin=admin)
    assert report.is_clean, "\n".join(report.lines())
    assert report.tally.tries == 8_000
    tried = {*report.tally.permitted, *report.tally.refused}
    assert {f"admin {method} {path.removeprefix(PREFIX)}" for method, path in admin.routes} <= tried
    of_admin = {name: count for name, count in report.tally.refused.items() if name.startswith("admin ")}
    assert sum(of_admin.values()) == 400
    assert not any(name.startswith("admin ") for name in report.tally.permitted)
    # The broker offers no version of a request that would have it.
    assert {operation.name for operation in OPERATIONS} - tried == {"InitProducerId, two phases"}
    assert report.tally.permitted.total() > 300
    assert report.tally.refused.total() > 2_000


# ------------------------------------------------------------------ what it would find


def test_a_key_of_the_deployment_in_the_hands_of_a_tenant_would_be_found(admin: AdminServer) -> None:
    stolen = replace(admin, shown=[("stolen", {"authorization": f"Bearer {admin.honest}"})])
    tally = Tally()
    before = admin.state()
    asyncio.run(try_routes(stolen, Random(SEED), 200, tally))
    assert tally.kinds == {"allowed": tally.kinds.total()}
    assert tally.kinds.total() > 60
    assert tally.refused.total() + tally.kinds.total() == 200
    assert admin.state() != before, "keys were made"


def test_an_answer_that_is_no_refusal_would_be_found(admin: AdminServer) -> None:
    tally = Tally()
    asyncio.run(try_routes(replace(admin, url="http://127.0.0.1:1"), Random(SEED), 5, tally))
    assert tally.kinds == {"unanswered": 5}
    health = replace(admin, routes=[("GET", "/health")])
    asyncio.run(try_routes(health, Random(SEED), 20, tally))
    assert tally.kinds["allowed"] > 10


def test_a_prefix_that_opens_the_topics_of_others_would_be_found(started: Cluster) -> None:
    """The mistake that whole names prevent."""
    user = PLAIN.user("tenant", "a")
    with right(started, user, ResourceType.TOPIC, "requests.a", AclOperation.WRITE, ResourcePatternType.PREFIXED):
        report = hostile.attack(started, 1_000, SEED, users=[user], names=["Produce", "Produce by id"])
    found = [finding for finding in report.tally.findings if finding.operation.startswith("Produce")]
    assert found
    assert {(finding.what, finding.target.attacker) for finding in found} == {("allowed", user)}
    assert all(finding.target.topic.startswith("requests.a") for finding in found)
    assert any(what.startswith("end of requests.ac") for what in report.changed)
    assert not report.is_clean


def test_a_right_on_a_transactional_id_would_be_found_and_so_would_the_fenced_service(started: Cluster) -> None:
    user = PLAIN.user("tenant", "acme")
    with right(started, user, ResourceType.TRANSACTIONAL_ID, "*", AclOperation.WRITE):
        report = hostile.attack(
            started, 500, SEED, users=[user], names=["InitProducerId", "InitProducerId without an id"]
        )
    assert {(one.what, one.operation) for one in report.tally.findings} == {("allowed", "InitProducerId")}
    assert any("cannot commit" in what for what in report.changed)


def test_a_right_that_is_missing_would_be_found(started: Cluster) -> None:
    user = PLAIN.user("tenant", "acme")
    admin = AdminClient({"bootstrap.servers": started.kafka.bootstrap_servers})
    taken = binding(user, ResourceType.TOPIC, "requests.acme", AclOperation.WRITE)
    admin.delete_acls([_filter(taken)])[_filter(taken)].result(_TIMEOUT_S)
    try:
        report = hostile.attack(started, 1_000, SEED, users=[user])
    finally:
        admin.create_acls([taken])[taken].result(_TIMEOUT_S)
    assert report.tally.kinds.keys() == {"refused", "not told"}
    assert {one.target.topic for one in report.tally.findings if one.what == "refused"} == {"requests.acme"}


def test_a_service_that_was_fenced_would_be_found(started: Cluster) -> None:
    async def failed() -> list[str]:
        services = Services(started)
        try:
            await services.start()
            await services.open()
            settings = KafkaSettings(kafka_bootstrap_servers=started.kafka.bootstrap_servers)
            Producer(transactional_producer(settings, "fairlane.dispatcher.1", 10_000)).init_transactions(_TIMEOUT_S)
            return await services.commit()
        finally:
            await services.close()

    (found,) = asyncio.run(failed())
    assert found.startswith("fairlane.dispatcher.1 cannot commit: ")


def test_everything_that_changes_would_be_found(started: Cluster) -> None:
    admin = AdminClient({"bootstrap.servers": started.kafka.bootstrap_servers})
    before = asyncio.run(state(started))
    given = binding("intruder", ResourceType.TOPIC, "x", AclOperation.READ)
    admin.create_acls([given])[given].result(_TIMEOUT_S)
    user = PLAIN.user("recorder")
    deletion = UserScramCredentialDeletion(user, ScramMechanism.SCRAM_SHA_512)
    admin.alter_user_scram_credentials([deletion])[user].result(_TIMEOUT_S)
    entry = ConfigEntry("retention.ms", "1000000", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, "replies.acme2", incremental_configs=[entry])
    admin.incremental_alter_configs([resource])[resource].result(_TIMEOUT_S)
    producer = Producer({"bootstrap.servers": started.kafka.bootstrap_servers})
    producer.produce("ledger.audit", b"x", partition=0)
    producer.produce("backfill.acme2", b"x", partition=0)
    assert producer.flush(_TIMEOUT_S) == 0
    place = TopicPartition("backfill.acme2", 0, 1)
    admin.delete_records([place])[place].result(_TIMEOUT_S)
    after = asyncio.run(state(started))
    found = "\n".join(changes(before, after, Allowance({}, (), ())))
    for what in ("rights: ", "users: ", "settings: ", "begins: ", "end of ledger.audit-0", "end of backfill.acme2-0"):
        assert what in found
    assert found.count("\n") == 5


async def state(started: Cluster) -> State:
    async with Connection(started.kafka.bootstrap_servers) as connection:
        return await Reader(connection).read(PLAIN.groups())


@contextmanager
def right(
    started: Cluster,
    user: str,
    resource: ResourceType,
    name: str,
    operation: AclOperation,
    pattern: ResourcePatternType = ResourcePatternType.LITERAL,
) -> Iterator[None]:
    """One that does not follow from the files, for a while."""
    given = binding(user, resource, name, operation, pattern)
    admin = AdminClient({"bootstrap.servers": started.kafka.bootstrap_servers})
    admin.create_acls([given])[given].result(_TIMEOUT_S)
    try:
        yield
    finally:
        admin.delete_acls([_filter(given)])[_filter(given)].result(_TIMEOUT_S)


def binding(
    user: str,
    resource: ResourceType,
    name: str,
    operation: AclOperation,
    pattern: ResourcePatternType = ResourcePatternType.LITERAL,
) -> AclBinding:
    return AclBinding(resource, name, pattern, f"User:{user}", "*", operation, AclPermissionType.ALLOW)


def _filter(one: AclBinding) -> AclBindingFilter:
    return AclBindingFilter(
        *(one.restype, one.name, one.resource_pattern_type, one.principal, one.host),
        *(one.operation, one.permission_type),
    )


def test_a_request_that_nobody_tries_would_be_named() -> None:
    assert hostile.missed([0, 18]) == []
    assert hostile.missed([0, 56]) == ["AlterPartition"]


def test_every_operation_can_be_written_in_every_version() -> None:
    messages = load_messages(KAFKA_LIBS_DIR)
    topics = {"requests.acme": uuid4()}
    world = describe_world((PLAIN,), topics, ())
    target = Target("fairlane_tenant_a", "requests.acme", "g", "t", "fairlane_gateway", 12_345)
    for operation in OPERATIONS:
        message = Api.named(messages, operation.api).request
        versions = operation.range.common(message.versions)
        assert versions.first <= versions.last, operation.name
        for version in range(versions.first, versions.last + 1):
            written = message.encode(version, operation.body([target], world))
            assert message.encode(version, message.decode(version, written)) == written or operation.api == "Fetch"


def test_the_command_says_what_it_found_and_the_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report(5)
    report.tally.permitted["Fetch"] += 2
    report.tally.refused["Fetch"] += 1
    monkeypatch.setattr(command, "run", lambda *_: report)
    assert command.main(["--seed", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seed"] == 5
    report.changed.append("users: gone")
    assert command.main(["--tries", "3"]) == 1
    said = capsys.readouterr().out
    assert "CHANGED users: gone" in said
    assert said.splitlines()[-1] == "seed 5"
    with pytest.raises(SystemExit):
        command.main(["--tries", "0"])
