"""Passwords of a stack with a secured Kafka and Redis: made once, taken from files afterwards. Nothing is started."""

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from deploy.local.layout import StackError
from deploy.local.redis import Redis
from deploy.local.services import default_services, default_setup
from deploy.local.stack import LocalStack, kafka_credentials
from fairlane_server.access.credentials import PASSWORD, keep_passwords, read_credentials

GATEWAY = "fairlane_gateway"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    libs = tmp_path / "libs"
    libs.mkdir()
    (libs / "kafka_2.13-4.2.0.jar").touch()
    return tmp_path / "data"


@contextmanager
def prepared(folder: Path, *, secured: bool = True, kafka: str = "") -> Iterator[LocalStack]:
    stack = LocalStack(
        data_dir=folder,
        parts=("kafka",),
        secured=secured,
        setup=default_setup(folder / "credentials" if secured else None),
        services=default_services(),
        environ={"KAFKA_BOOTSTRAP_SERVERS": kafka},
        kafka_libs=folder.parent / "libs",
    )
    try:
        stack.prepare()
        yield stack
    finally:
        stack.stop()


def password(folder: Path, user: str) -> str:
    return read_credentials(folder / "credentials", user)[PASSWORD]


def given_password(stack: LocalStack, user: str) -> str:
    return stack.endpoints.kafka_env(user)[PASSWORD]


def test_passwords_are_made_before_kafka_starts_and_used_again(folder: Path) -> None:
    with prepared(folder) as stack:
        admin, gateway = given_password(stack, "admin"), given_password(stack, GATEWAY)
    with prepared(folder) as stack:
        assert (given_password(stack, "admin"), given_password(stack, GATEWAY)) == (admin, gateway), "not formatted yet"

    # The users exist once Kafka was formatted and `setup-access` has run.
    (folder / "kafka" / "formatted-secured").touch()
    keep_passwords(folder / "credentials", [GATEWAY])
    with prepared(folder) as stack:
        assert (given_password(stack, "admin"), given_password(stack, GATEWAY)) == (admin, gateway)
    assert (folder / "credentials" / "admin.env").exists()


def test_a_new_kafka_gets_new_passwords_whatever_files_there_are(folder: Path) -> None:
    with prepared(folder) as stack:
        users = ["admin", GATEWAY]
        before = [given_password(stack, user) for user in users]
    keep_passwords(folder / "credentials", users)
    with prepared(folder) as stack:
        after = [given_password(stack, user) for user in users]
    assert not {*before} & {*after}


def test_data_without_the_password_of_their_administrator_are_refused(folder: Path) -> None:
    with prepared(folder):
        pass
    (folder / "kafka" / "formatted-secured").touch()
    for file in (folder / "credentials").iterdir():
        file.unlink()
    with (
        pytest.raises(StackError, match=r"kafka holds the data of a secured Kafka, but \S+admin\.env is gone"),
        prepared(folder),
    ):
        pass


def test_a_folder_opens_only_as_it_was_formatted(folder: Path) -> None:
    with prepared(folder):
        pass
    (folder / "kafka" / "formatted-secured").touch()
    with pytest.raises(StackError, match="holds the data of a secured Kafka"), prepared(folder, secured=False):
        pass


def test_a_kafka_of_others_is_not_secured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalStack, "_check", lambda *_: None)
    with prepared(folder, kafka="127.0.0.1:1") as stack:
        assert stack.endpoints.kafka_env(GATEWAY) == {"KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:1"}
    assert not (folder / "credentials").exists()
    assert kafka_credentials(folder, {"KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:1"}) is None
    assert kafka_credentials(folder, {}) == folder / "credentials"


def test_services_may_share_an_open_kafka_only_where_the_stack_was_asked_for_one(folder: Path) -> None:
    with prepared(folder) as stack:
        assert "ALLOW_OPEN_KAFKA" not in stack.endpoints.service_env
    with prepared(folder.parent / "other", secured=False) as stack:
        assert stack.endpoints.service_env["ALLOW_OPEN_KAFKA"] == "true"


def redis_urls(stack: LocalStack, user: str) -> dict[str, str]:
    return stack.endpoints.redis_env(user)


@contextmanager
def with_redis(folder: Path, *parts: str, environ: dict[str, str] | None = None) -> Iterator[LocalStack]:
    """Prepared, with every service that there is."""
    stack = LocalStack(data_dir=folder, parts=parts, secured=True, services=default_services(), environ=environ or {})
    try:
        stack.prepare()
        yield stack
    finally:
        stack.stop()


def test_every_service_gets_the_urls_of_its_own_user_of_redis_and_no_others(folder: Path) -> None:
    with with_redis(folder, "redis", "redis-cache") as stack:
        found = {one.name: one.spec(stack.endpoints, 20_001, ()).env for one in default_services()}
        endpoints = stack.endpoints
    users = {
        "dispatcher-1": "fairlane_dispatcher",
        "gateway-1": GATEWAY,
        "admin-1": "fairlane_admin",
        "consumer-generate-1": "fairlane_consumer",
    }
    for name, env in found.items():
        given = {variable: urlsplit(env[variable]) for variable in ("REDIS_URL", "REDIS_CACHE_URL") if variable in env}
        user = users.get(name.replace("-encode-", "-generate-"))
        assert {url.username for url in given.values()} == ({user} if user else set()), name
        assert ("REDIS_URL" in given) is (name in {"dispatcher-1", "gateway-1", "admin-1"}), name
    assert urlsplit(endpoints.redis_url).username == urlsplit(endpoints.redis_cache_url).username == "fairlane_operator"
    words = {urlsplit(url).password for env in found.values() for url in env.values() if url.startswith("redis")}
    words |= {urlsplit(endpoints.redis_url).password}
    assert len(words) == 7, "a password for each user of each server"
    servers = [Redis(folder / name, 1, name, folder / "credentials") for name in ("redis", "redis-cache")]
    argv = [word for server in servers for word in server.spec().argv]
    shown = " ".join([*argv, repr(endpoints), str(endpoints.masked())])
    assert not [word for word in words if str(word) in shown]
    for name in ("redis", "redis-cache"):
        file = folder / name / "users.acl"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert str(file) in argv
        assert not [word for word in words if str(word) in file.read_text(encoding="utf-8")]


def test_passwords_of_redis_stay_over_restarts(folder: Path) -> None:
    with with_redis(folder, "redis", "redis-cache") as stack:
        before = redis_urls(stack, GATEWAY)
    with with_redis(folder, "redis", "redis-cache") as stack:
        after = redis_urls(stack, GATEWAY)
    assert [urlsplit(url).password for url in after.values()] == [urlsplit(url).password for url in before.values()]


def test_whoever_has_no_right_on_the_servers_of_a_stack_gets_none(folder: Path) -> None:
    with with_redis(folder, "redis") as stack:
        assert redis_urls(stack, "fairlane_consumer") == redis_urls(stack, "") == {}
        assert redis_urls(stack, GATEWAY).keys() == {"REDIS_URL"}


def test_a_broken_password_of_redis_is_named(folder: Path) -> None:
    with with_redis(folder, "redis"):
        pass
    (folder / "credentials" / f"{GATEWAY}.redis.env").write_text("REDIS_URL=redis://127.0.0.1:1/0\n")
    with (
        pytest.raises(StackError, match=r"fairlane_gateway\.redis\.env: holds no password"),
        with_redis(folder, "redis"),
    ):
        pass


@pytest.mark.parametrize("variable", ["REDIS_URL", "REDIS_CACHE_URL"])
def test_a_redis_of_others_is_not_secured(folder: Path, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalStack, "_check", lambda *_: None)
    with with_redis(folder, "redis", "redis-cache", environ={variable: "redis://127.0.0.1:1/0"}) as stack:
        assert redis_urls(stack, GATEWAY)[variable] == "redis://127.0.0.1:1/0"
        assert all("@" not in url for url in redis_urls(stack, GATEWAY).values())
    assert not (folder / "credentials").exists()
