"""Settings: security reaches every client's configuration, and no secret reaches an eye."""

import json
import logging
import pickle
from pathlib import Path
from typing import Any

import faust
import pytest
import structlog
from pydantic import ValidationError

from fairlane.kafka_config import connection, idempotent_producer, read_committed_consumer, transactional_producer
from fairlane.logs import configure
from fairlane.settings import KafkaSettings, Settings
from stream_processors.dispatcher.reading.stream import _credentials

SECRET = "planted-s3cret"
SASL: dict[str, Any] = {
    "kafka_security_protocol": "SASL_SSL",
    "kafka_sasl_mechanism": "SCRAM-SHA-512",
    "kafka_sasl_username": "fairlane",
    "kafka_sasl_password": SECRET,
    "kafka_ssl_ca_file": "/etc/kafka/ca.pem",
}
SECRETS: dict[str, Any] = {
    **SASL,
    "postgres_dsn": f"postgresql://fairlane:{SECRET}@db/fairlane",
    "postgres_owner_dsn": f"postgresql://owner:{SECRET}@db/fairlane",
    "redis_url": f"redis://:{SECRET}@cache:6379/0",
}


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(name.upper(), raising=False)
        monkeypatch.delenv(f"{name.upper()}_FILE", raising=False)


def test_security_reaches_every_kind_of_client() -> None:
    settings = Settings(**SASL)
    for config in (
        connection(settings),
        idempotent_producer(settings),
        transactional_producer(settings, "id", 10_000),
        read_committed_consumer(settings, "group"),
    ):
        assert config["security.protocol"] == "SASL_SSL"
        assert config["sasl.mechanism"] == "SCRAM-SHA-512"
        assert config["sasl.username"] == "fairlane"
        assert config["sasl.password"] == SECRET
        assert config["ssl.ca.location"] == "/etc/kafka/ca.pem"


def test_without_security_nothing_of_it_is_set() -> None:
    assert not [name for name in connection(KafkaSettings()) if name.startswith(("sasl.", "ssl."))]


@pytest.mark.parametrize(
    ("protocol", "kind"),
    [("SASL_PLAINTEXT", faust.SASLCredentials), ("SASL_SSL", faust.SASLCredentials), ("SSL", faust.SSLCredentials)],
)
def test_security_reaches_faust(protocol: str, kind: type[Any]) -> None:
    settings = Settings(**(SASL | {"kafka_security_protocol": protocol, "kafka_ssl_ca_file": None}))
    credentials: Any = _credentials(settings)
    assert isinstance(credentials, kind)
    assert credentials.protocol.value == protocol
    if protocol.startswith("SASL"):
        assert (credentials.mechanism.value, credentials.username) == ("SCRAM-SHA-512", "fairlane")
        assert credentials.password == SECRET
    assert SECRET not in repr(credentials)
    assert _credentials(Settings()) is None


@pytest.mark.parametrize("missing", ["kafka_sasl_mechanism", "kafka_sasl_username", "kafka_sasl_password"])
def test_half_a_sasl_configuration_is_refused_by_name(missing: str) -> None:
    with pytest.raises(ValidationError, match=missing.upper()) as refused:
        Settings(**(SASL | {missing: None}))
    assert SECRET not in str(refused.value)


def test_a_value_may_be_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("postgres_dsn", f"{SECRETS['postgres_dsn']}\n"), ("kafka_sasl_username", "fairlane")):
        (tmp_path / name).write_text(text)
        monkeypatch.setenv(f"{name.upper()}_FILE", str(tmp_path / name))
    settings = Settings()
    assert settings.postgres_dsn.get_secret_value() == SECRETS["postgres_dsn"]
    assert settings.kafka_sasl_username == "fairlane"
    assert Settings(kafka_sasl_username="given").kafka_sasl_username == "given"
    assert KafkaSettings().kafka_sasl_username == "fairlane"
    monkeypatch.setenv("POSTGRES_DSN", "postgresql://elsewhere/fairlane")
    with pytest.raises(ValidationError, match="POSTGRES_DSN and POSTGRES_DSN_FILE are both set"):
        Settings()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read: FileNotFoundError"),
        (b"", "must hold one line of at most 65536 bytes"),
        (b"\n", "must hold one line"),
        (f"{SECRET}\n{SECRET}\n".encode(), "must hold one line"),
        (SECRET.encode() * 10_000, "must hold at most 65536 bytes"),
        (b"\xff" + SECRET.encode(), "cannot be read: UnicodeDecodeError"),
    ],
)
def test_a_file_without_a_value_is_named_and_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, problem: str
) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv("REDIS_URL_FILE", str(file))
    with pytest.raises(ValidationError) as raised:
        Settings()
    assert f"REDIS_URL_FILE={file} {problem}" in str(raised.value)
    assert SECRET not in str(raised.value)


def test_a_secret_is_not_shown() -> None:
    settings = Settings(**SECRETS)
    shown = (repr(settings), str(settings), settings.model_dump_json(), json.dumps(settings.model_dump(), default=str))
    for text in shown:
        assert SECRET not in text


@pytest.mark.parametrize("field", ["max_batch_size", "kafka_security_protocol"])
def test_a_settings_error_shows_no_secret(field: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Settings(**(SECRETS | {field: SECRET}))
    assert SECRET not in str(refused.value)


def test_a_secret_is_masked_in_logs(capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(**SECRETS)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        configure(settings, "test")
        log = logging.getLogger("a.library")
        log.warning("cannot reach %s", settings.postgres_dsn.get_secret_value())
        log.warning("settings: %r", settings)
        log.error("failed", exc_info=ConnectionError(f"no route to {SECRETS['redis_url']}"))
    finally:
        root.handlers, root.level = handlers, level
        structlog.reset_defaults()
    text = capsys.readouterr().err
    assert "cannot reach" in text
    assert SECRET not in text


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_BATCH_SIZE", "7")
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", "one:9092,two:9092")
    monkeypatch.setenv("MODELS_FILE", "/etc/fairlane/models.yaml")
    settings = Settings()
    assert (settings.max_batch_size, settings.kafka_bootstrap_servers) == (7, "one:9092,two:9092")
    assert settings.models_file == Path("/etc/fairlane/models.yaml")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("instance_id", ""),
        ("instance_id", "a b"),
        ("metrics_port", 65_536),
        ("max_undone_span", 20_001),
        ("batch_timeout_ms", 101),
        ("consumer_group_protocol", "eager"),
    ],
)
def test_a_setting_out_of_bounds_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=field):
        Settings(**{field: value})


def test_settings_cannot_be_changed_afterwards() -> None:
    settings = Settings()
    with pytest.raises(ValidationError):
        settings.max_batch_size = 3  # type: ignore[misc]  # what is tested
    assert pickle.loads(pickle.dumps(settings)) == settings  # noqa: S301 - our own bytes


def test_where_files_are_is_the_same_from_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Settings().files_url == str(tmp_path / ".fairlane" / "files")
    assert Settings(files_url="files").files_url == str(tmp_path / "files")
    assert Settings(files_url="/files").files_url == "/files"
    assert Settings(files_url="s3://bucket/files").files_url == "s3://bucket/files"
