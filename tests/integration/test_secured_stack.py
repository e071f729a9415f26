"""The embedded stack with a secured Kafka and Redis: everything works, and nobody comes in without a password."""

import json
import re
import ssl
import time
from collections.abc import Iterator
from contextlib import suppress
from logging import INFO, getLogger
from pathlib import Path
from shutil import rmtree
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType
from pydantic import SecretStr
from redis import Redis
from redis.exceptions import AuthenticationError

from deploy.local.__main__ import demo_key, demo_model
from deploy.local.certificates import prepare_certificates
from deploy.local.kafka import ADMIN_USER
from deploy.local.layout import DataDir
from deploy.local.services import default_services, default_setup
from deploy.local.stack import LocalStack
from deploy.local.status import read_status
from fairlane.client import Client
from fairlane.outcomes import Outcome
from fairlane.settings import KafkaSettings
from fairlane_server.access.admin import read_access
from fairlane_server.access.credentials import PASSWORD
from fairlane_server.access.users import KafkaUser
from fairlane_server.caching.entries import CacheName, request_key
from fairlane_server.kafka.cluster_admin import ClusterAdmin, ClusterError
from fairlane_server.private_files import write_private
from fairlane_server.redis.client import blocking_redis_client
from fairlane_server.redis.credentials import read_redis_urls
from fairlane_server.redis.keys import KeyFamily, redis_key
from fairlane_server.redis.rights import RedisRole, RedisServer, redis_user
from fairlane_server.topics.families import KafkaRole
from tests.kit.redis_users import check_no_refusal
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.broker]

WAIT_S = 60.0
ACME = KafkaUser(KafkaRole.TENANT, "acme").name


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    folder = tmp_path_factory.mktemp("secured")
    setup = default_setup(DataDir(folder).credentials)
    services = default_services(engine="simulated")
    with LocalStack(data_dir=folder, secured=True, setup=setup, services=services, environ={}) as running:
        yield running


def test_every_part_is_healthy(stack: LocalStack) -> None:
    status = read_status(stack.data_dir)
    assert status.healthy, json.dumps(status.as_json())


def test_a_tenant_is_answered_over_kafka_and_over_http(stack: LocalStack) -> None:
    model = demo_model()
    with Client("acme", settings=stack.endpoints.kafka_settings(ACME)) as client:
        reply = client.submit(model=model, prompt="hello", max_tokens=4).result(WAIT_S)
    assert reply.outcome == Outcome.OK
    key, _ = demo_key(stack.data_dir, stack.endpoints.postgres_owner_dsn)
    answers = [
        httpx.post(
            f"{stack.endpoints.gateway_url}/v1/chat/completions",
            headers={"authorization": f"Bearer {key}", "idempotency-key": "once"},
            json={
                "model": model,
                "max_tokens": 4,
                "messages": [{"role": "user", "content": "hello"}],
                "fairlane": {"cache": "exact"},
            },
            timeout=WAIT_S,
        )
        for _ in range(2)
    ]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    assert answers[0].json()["id"] == answers[1].json()["id"]
    # What each service has in Redis it wrote as its own user.
    with user_of_redis(stack, RedisServer.STATE, RedisRole.DISPATCHER) as redis:
        assert redis.get(redis_key(KeyFamily.SEEN_IDS, "acme", reply.request_id)) is not None
    with user_of_redis(stack, RedisServer.STATE, RedisRole.GATEWAY) as redis:
        assert redis.hgetall(redis_key(KeyFamily.IDEMPOTENCY_COUNTS, "acme")) != {}
    with user_of_redis(stack, RedisServer.CACHE, RedisRole.GATEWAY) as redis:
        entry = request_key(CacheName.ACCEPTED, "acme", answers[0].json()["id"].removeprefix("chatcmpl-"))
        eventually(lambda: redis.getrange(entry.name, 0, 0), what="the request in the cache")


def test_no_listener_takes_clients_without_a_password(stack: LocalStack) -> None:
    settings = stack.endpoints.kafka_settings(ADMIN_USER)
    assert read_access(ClusterAdmin(settings), settings).open_listeners == []


def settings_of_acme(stack: LocalStack, changed: dict[str, str | None]) -> KafkaSettings:
    """Of a tenant, with some of them changed or left out."""
    env = {name.lower(): value for name, value in stack.endpoints.kafka_env(ACME).items()} | changed
    return KafkaSettings.model_validate({name: value for name, value in env.items() if value is not None})


@pytest.mark.parametrize("changed", [{"kafka_sasl_password": "wrong"}, {"kafka_sasl_username": "nobody"}])
def test_nobody_comes_in_with_a_wrong_password(stack: LocalStack, changed: dict[str, str | None]) -> None:
    with pytest.raises(ClusterError, match="SASL authentication error"):
        ClusterAdmin(settings_of_acme(stack, changed), connect_timeout_s=3).metadata()
    assert ClusterAdmin(settings_of_acme(stack, {})).metadata().brokers


@pytest.mark.parametrize(
    ("protocol", "end"),
    [
        # Before anything was answered: the broker waits for TLS.
        ("PLAINTEXT", r"connection closed by peer.* in state APIVERSION_QUERY"),
        # Behind TLS and the question for versions, which needs no password.
        ("SSL", r"SSL connection closed by peer .* in state UP"),
    ],
)
def test_nobody_comes_in_without_a_password(
    stack: LocalStack, caplog: pytest.LogCaptureFixture, protocol: str, end: str
) -> None:
    config: dict[str, Any] = {
        "bootstrap.servers": stack.endpoints.kafka_bootstrap_servers,
        "security.protocol": protocol,
    }
    config["ssl.ca.location"] = stack.endpoints.kafka_ca_file
    # Kafka closes the connection and says nothing, so that no call has the reason; librdkafka's log has it.
    admin = AdminClient(config, logger=getLogger("kafka"))
    with caplog.at_level(INFO):
        with pytest.raises(KafkaException):
            admin.list_topics(timeout=2)
        admin.poll(0.1)
    assert re.search(end, caplog.messages[0])
    if protocol == "SSL":
        broker_log = stack.data_dir.logs / "kafka.log"
        assert "Unexpected Kafka request of type METADATA during SASL handshake" in broker_log.read_text("utf-8")


def test_the_brokers_certificate_is_checked(stack: LocalStack) -> None:
    settings = settings_of_acme(stack, {"kafka_ssl_ca_file": None})
    begin = time.monotonic()
    with pytest.raises(ClusterError, match="certificate verify failed"):
        ClusterAdmin(settings, connect_timeout_s=2).metadata()
    assert time.monotonic() - begin < 10


def _command_lines() -> Iterator[bytes]:
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            yield (process / "cmdline").read_bytes()


def test_no_password_is_in_a_log_or_in_the_list_of_processes(stack: LocalStack) -> None:
    passwords = [
        line.split("=", 1)[1]
        for file in stack.data_dir.credentials.iterdir()
        for line in file.read_text(encoding="utf-8").splitlines()
        if line.startswith("KAFKA_SASL_PASSWORD=")
    ]
    assert len(passwords) > 6
    for role in RedisRole:
        urls = read_redis_urls(stack.data_dir.credentials, redis_user(role))
        assert urls, role
        passwords += [str(urlsplit(url).password) for url in urls.values()]
    shown = "".join(file.read_text(encoding="utf-8", errors="replace") for file in stack.data_dir.logs.glob("*.log"))
    shown += b"".join(_command_lines()).decode(errors="replace")
    shown += json.dumps(stack.endpoints.masked()) + repr(stack.endpoints)
    assert not [password for password in passwords if password in shown]


def test_no_process_was_refused_anything(stack: LocalStack) -> None:
    for file in stack.data_dir.logs.glob("*.log"):
        log = file.read_text(encoding="utf-8", errors="replace")
        assert re.search(r"(?i)authorization.?failed|permission denied", log) is None, file
    check_no_refusal(stack.data_dir.logs.glob("*.log"))
    for server in RedisServer:
        with user_of_redis(stack, server, RedisRole.OPERATOR) as redis:
            # Wrong passwords are those of this file.
            assert [entry for entry in redis.acl_log(128) if entry["reason"] != "auth"] == []


def user_of_redis(stack: LocalStack, server: RedisServer, role: RedisRole) -> Any:
    return blocking_redis_client(SecretStr(stack.endpoints.redis_env(redis_user(role))[server.setting]), WAIT_S)


@pytest.mark.parametrize("server", RedisServer)
@pytest.mark.parametrize("login", ["", "default:any@", "fairlane_gateway:wrong@", "fairlane_gateway_2:wrong@"])
def test_nobody_reaches_redis_without_the_password_of_a_user(
    stack: LocalStack, server: RedisServer, login: str
) -> None:
    known = urlsplit(getattr(stack.endpoints, server.setting.lower()))
    url = known._replace(netloc=login + known.netloc.rpartition("@")[2]).geturl()
    with Redis.from_url(url) as redis, pytest.raises(AuthenticationError):
        redis.ping()


def test_users_come_back_after_a_restart_and_also_with_new_data(tmp_path: Path) -> None:
    data_dir = DataDir(tmp_path)
    setup = default_setup(data_dir.credentials)[:1]
    passwords = []
    for has_new_data in (True, False, True):
        if has_new_data:
            rmtree(data_dir.kafka, ignore_errors=True)
        with LocalStack(data_dir=tmp_path, parts=("kafka",), secured=True, setup=setup, environ={}) as stack:
            ClusterAdmin(stack.endpoints.kafka_settings(ACME)).metadata()
            passwords.append([stack.endpoints.kafka_env(user)[PASSWORD] for user in (ACME, ADMIN_USER)])
    first, restarted, renewed = passwords
    assert restarted == first
    assert not {*renewed} & {*first}


def test_a_new_certificate_is_served_without_a_restart(tmp_path: Path) -> None:
    """As docs/security.md says: clients trust both authorities first, then the broker reads its file again."""
    data_dir = DataDir(tmp_path)
    old, new = prepare_certificates(data_dir.certificates), prepare_certificates(tmp_path / "new")
    write_private(old.ca_file, old.ca_file.read_text() + new.ca_file.read_text())
    with LocalStack(data_dir=tmp_path, parts=("kafka",), secured=True, environ={}) as stack:
        host, port = stack.endpoints.kafka_bootstrap_servers.split(":")
        admin = ClusterAdmin(stack.endpoints.kafka_settings(ADMIN_USER)).admin
        (broker_pid,) = (view.pid for view in stack.supervisor.processes() if view.name == "kafka")

        write_private(old.server_file, new.server_file.read_text())
        place = ConfigEntry(
            "listener.name.sasl_ssl.ssl.keystore.location",
            str(old.server_file),
            incremental_operation=AlterConfigOpType.SET,
        )
        resource = ConfigResource(ResourceType.BROKER, "1", incremental_configs=[place])
        admin.incremental_alter_configs([resource])[resource].result(WAIT_S)

        def served() -> bytes:
            return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((host, int(port))))

        leaf = "-----BEGIN CERTIFICATE" + new.server_file.read_text().split("-----BEGIN CERTIFICATE")[1]
        expected = ssl.PEM_cert_to_DER_cert(leaf.strip())
        # Each of the broker's network threads reads the file for itself, and connections go to them in turn.
        eventually(lambda: {served() for _ in range(4)} == {expected}, what="the new certificate")
        assert ClusterAdmin(stack.endpoints.kafka_settings(ADMIN_USER)).metadata().brokers
        trusting = stack.endpoints.kafka_settings(ADMIN_USER)
        assert ClusterAdmin(trusting.model_copy(update={"kafka_ssl_ca_file": new.ca_file})).metadata().brokers
        assert [view.pid for view in stack.supervisor.processes() if view.name == "kafka"] == [broker_pid]
