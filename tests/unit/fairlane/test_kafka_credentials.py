"""User and password of Kafka in a file that is replaced while a process runs."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from fairlane.kafka_config import CREDENTIALS_SOURCE, connection
from fairlane.kafka_credentials import CredentialsFile, KafkaCredentials
from fairlane.settings import KafkaSettings, Settings
from fairlane_server.access.credentials import credentials_file, keep_passwords, prepare_passwords

SECRET = "hunter2=="
SASL: dict[str, Any] = {"kafka_security_protocol": "SASL_PLAINTEXT"}


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(name.upper(), raising=False)
        monkeypatch.delenv(f"{name.upper()}_FILE", raising=False)


def text(username: str, password: str = SECRET, mechanism: str = "SCRAM-SHA-512") -> str:
    return f"KAFKA_SASL_MECHANISM={mechanism}\nKAFKA_SASL_USERNAME={username}\nKAFKA_SASL_PASSWORD={password}\n"


def replace(file: Path, content: str | bytes) -> None:
    """As mounted secrets are replaced: another file in its place."""
    new = file.with_name("new")
    new.write_bytes(content if isinstance(content, bytes) else content.encode())
    new.replace(file)


def test_the_files_of_access_are_read_as_they_are(tmp_path: Path) -> None:
    passwords = prepare_passwords(tmp_path, ["fairlane_gateway"])
    keep_passwords(tmp_path, passwords)
    settings = KafkaSettings(**SASL, kafka_credentials_file=credentials_file(tmp_path, "fairlane_gateway"))
    password = passwords["fairlane_gateway"]
    assert settings.kafka_credentials() == KafkaCredentials("fairlane_gateway", password, "SCRAM-SHA-512")
    config = connection(settings)
    assert config["sasl.mechanism"] == "SCRAM-SHA-512"
    assert (config["sasl.username"], config["sasl.password"]) == ("fairlane_gateway", password)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "its last line has no end"),
        (text("user").removesuffix("\n"), "its last line has no end"),
        (text("user")[: -len(SECRET) // 2], "its last line has no end"),
        ("KAFKA_SASL_USERNAME=user\n", "KAFKA_SASL_PASSWORD is missing"),
        ("KAFKA_SASL_USERNAME=user\nKAFKA_SASL_PASSWORD=\n", "KAFKA_SASL_PASSWORD is missing"),
        (f"{SECRET}\n", "line 1 is not NAME=VALUE"),
        (text("user") + f"OTHER={SECRET}\n", "line 4 is not NAME=VALUE"),
        (text("user") + f"KAFKA_SASL_PASSWORD={SECRET}\n", "KAFKA_SASL_PASSWORD is in it twice"),
        (SECRET * 10_000, "must hold at most 65536 bytes"),
        (b"\xff" + SECRET.encode(), "cannot be read: UnicodeDecodeError"),
    ],
)
def test_an_unusable_file_is_named_and_not_shown(tmp_path: Path, content: str | bytes, reason: str) -> None:
    file = tmp_path / "user.env"
    replace(file, content)
    with pytest.raises(ValidationError) as refused:
        KafkaSettings(**SASL, kafka_credentials_file=file)
    assert f"KAFKA_CREDENTIALS_FILE={file}" in str(refused.value)
    assert reason in str(refused.value)
    assert SECRET not in str(refused.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="cannot be read: FileNotFoundError"):
        KafkaSettings(**SASL, kafka_credentials_file=tmp_path / "user.env")


@pytest.mark.parametrize("name", ["kafka_sasl_username", "kafka_sasl_password"])
def test_a_value_and_the_file_are_not_both_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    file = tmp_path / "user.env"
    replace(file, text("user"))
    (tmp_path / "value").write_text(SECRET)
    monkeypatch.setenv("KAFKA_CREDENTIALS_FILE", str(file))
    assert KafkaSettings().kafka_sasl_username == "user"
    for variable, value in ((name.upper(), SECRET), (f"{name.upper()}_FILE", str(tmp_path / "value"))):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            with pytest.raises(ValidationError, match=f"{name.upper()} and KAFKA_CREDENTIALS_FILE are both set") as no:
                KafkaSettings()
            assert SECRET not in str(no.value)


def test_the_mechanism_of_the_file_is_that_of_the_setting(tmp_path: Path) -> None:
    file = tmp_path / "user.env"
    replace(file, text("user"))
    with pytest.raises(ValidationError, match="KAFKA_SASL_MECHANISM=PLAIN is not the one in"):
        KafkaSettings(**SASL, kafka_sasl_mechanism="PLAIN", kafka_credentials_file=file)
    replace(file, f"# a comment\n\nKAFKA_SASL_USERNAME=user\nKAFKA_SASL_PASSWORD={SECRET}\n")
    settings = KafkaSettings(**SASL, kafka_sasl_mechanism="PLAIN", kafka_credentials_file=file)
    assert settings.kafka_sasl_mechanism == "PLAIN"
    with pytest.raises(ValidationError, match="KAFKA_SASL_MECHANISM is needed"):
        KafkaSettings(**SASL, kafka_credentials_file=file)


def test_settings_follow_their_file(tmp_path: Path) -> None:
    file = tmp_path / "user.env"
    replace(file, text("first"))
    settings = KafkaSettings(**SASL, kafka_credentials_file=file)
    source = connection(settings)[CREDENTIALS_SOURCE]
    replace(file, text("second", "another"))
    for found in (settings.kafka_credentials(), source()):
        assert found == KafkaCredentials("second", "another", "SCRAM-SHA-512")
    config = connection(settings)
    assert (config["sasl.username"], config["sasl.password"]) == ("second", "another")


def test_a_password_alone_in_a_file_is_followed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "password"
    replace(file, f"{SECRET}\n")
    monkeypatch.setenv("KAFKA_SASL_PASSWORD_FILE", str(file))
    settings = KafkaSettings(**SASL, kafka_sasl_mechanism="PLAIN", kafka_sasl_username="user")
    replace(file, "another\n")
    assert connection(settings)[CREDENTIALS_SOURCE]() == KafkaCredentials("user", "another")


def test_credentials_without_a_file_have_no_source() -> None:
    given = KafkaSettings(**SASL, kafka_sasl_mechanism="PLAIN", kafka_sasl_username="user", kafka_sasl_password=SECRET)
    assert CREDENTIALS_SOURCE not in connection(given)
    assert connection(given)["sasl.password"] == SECRET
    assert KafkaSettings().kafka_credentials() is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (text("second")[:-4], "its last line has no end: it is not written completely"),
        (text("second", mechanism="PLAIN"), "only a restart changes it"),
        (b"\xff\n", "it is not UTF-8"),
        (None, "FileNotFoundError"),
    ],
)
def test_a_broken_file_changes_nothing_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str | bytes | None, reason: str
) -> None:
    file = tmp_path / "user.env"
    replace(file, text("first"))
    followed = CredentialsFile(file, KafkaCredentials.read(file), "SCRAM-SHA-512")
    if content is None:
        file.unlink()
    else:
        replace(file, content)
    assert [followed.now().username for _ in range(3)] == ["first"] * 3
    (line,) = caplog.messages
    assert line.startswith(f"kafka_credentials_unusable file={file} ")
    assert reason in line
    assert SECRET[:4] not in line
    replace(file, text("third"))
    assert followed.now().username == "third"


def test_no_password_is_shown() -> None:
    assert SECRET not in repr(KafkaCredentials("user", SECRET))
