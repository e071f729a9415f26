"""Passwords of a stack with a secured Kafka: made once, taken from their files afterwards. Nothing is started."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy.local.layout import StackError
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
