"""The command line without a cluster: what it says about mistakes, and that it says nothing else."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairlane_server.cli import main
from fairlane_server.kafka import cluster_admin
from tests.contract.registry_double import RegistryDouble, running_registry

NOWHERE = "127.0.0.1:1"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "KAFKA_SECURITY_PROTOCOL",
        "SCHEMA_REGISTRY_URL",
        "TENANTS_FILE",
        "MODELS_FILE",
        "PRICES_FILE",
        "METRICS_PORT",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", NOWHERE)
    monkeypatch.setattr(cluster_admin, "CONNECT_TIMEOUT_S", 0.2)


@pytest.fixture
def registry() -> Iterator[RegistryDouble]:
    with running_registry() as double:
        yield double


def _run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


def _error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a failing command says."""
    assert _run(*arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("error: ").rstrip()


@pytest.mark.parametrize(
    "command",
    [
        *("topics plan", "topics apply", "tenants apply", "tenants list", "models apply", "models list"),
        *("models status", "prices apply", "prices list"),
        *("schemas register", "top", "dlq list", "dlq show", "dlq replay", "dlq purge"),
    ],
)
def test_help_names_every_option_in_full(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert _run(*command.split(), "--help") == 0
    text = capsys.readouterr().out
    assert f"Usage: fairlane {command} [OPTIONS]" in " ".join(text.split())
    assert "--json" in text
    assert "--registry-url URL" in text or "--bootstrap-servers HOSTS" in text


def test_command_without_a_subcommand_shows_its_help_as_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("topics") == 1
    assert "Show what `apply` would change." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("topics plan --colour", "No such option: --colour (see --help)"),
        ("topics paint", "No such command 'paint'."),
        ("topics plan --replication-factor 0", "Invalid value for '--replication-factor'"),
        ("schemas register", "SCHEMA_REGISTRY_URL is not set, and there is no --registry-url"),
        ("schemas register --registry-url ftp://registry", "SCHEMA_REGISTRY_URL=ftp://registry: must be an http"),
        ("tenants apply --tenants-file none.yaml", "none.yaml: cannot be read"),
        ("models apply --models-file none.yaml", "none.yaml: cannot be read"),
        ("prices apply --prices-file none.yaml", "none.yaml: cannot be read"),
        ("prices apply --models-file none.yaml", "none.yaml: cannot be read"),
        ("topics apply --topics-file none.yaml", "none.yaml: cannot be read"),
        ("dlq list --since yesterday", "--since yesterday: neither a time (2026-01-31T12:00:00Z) nor an age ("),
        ("dlq list --offsets 1-4", "--offsets: each topic has its own offsets, so it needs --topic as well"),
        ("dlq list --topic work --offsets 4-1", "--offsets 4-1: ends at 1, before it begins"),
        ("dlq list --topic other", "Invalid value for '--topic'"),
        ("dlq show", "Missing argument 'OFFSET'"),
        ("dlq replay", "say what to replay: --topic or another filter, --limit, or --all"),
        ("dlq replay --all --rate 0", "Invalid value for '--rate'"),
        ("dlq purge --until 2h", "say where: --topic requests or --topic work"),
        ("dlq purge --topic work", "say up to where: --until TIME or --offsets -N"),
        ("dlq purge --topic work --until 2h --tenant acme", "--tenant: Kafka deletes a partition only from its begin"),
        ("dlq purge --topic work --until 2h --limit 3", "--limit: Kafka deletes a partition only from its begin"),
        ("dlq purge --topic work --since 2h", "--since: Kafka deletes a partition only from its begin"),
        ("dlq purge --topic work --offsets 3-9", "--offsets 3-9: Kafka deletes a partition only from its begin"),
    ],
)
def test_mistake_is_one_line_and_never_status_2(
    capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    assert message in _error(capsys, *arguments.split())


@pytest.mark.parametrize(
    ("command", "option"),
    [("topics plan", "--tenants-file"), ("tenants apply", "--tenants-file"), ("models apply", "--models-file")],
)
def test_mistake_in_a_file_is_named_with_its_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, option: str
) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(f"{option[2:9].rstrip('-')}:\n  - colour: red\n")
    assert _error(capsys, *command.split(), option, str(file)).startswith(f"{file}:2: ")


@pytest.mark.parametrize(
    "command",
    [
        *("topics plan", "topics apply", "tenants apply", "tenants list", "models apply", "models list", "top --once"),
        *("models status", "prices apply", "prices list"),
        *("dlq list", "dlq show 1", "dlq replay --all", "dlq purge --topic work --until 2h"),
    ],
)
def test_unreachable_broker_is_one_line_that_names_the_setting(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("ALLOW_OPEN_KAFKA", "true")
    message = _error(capsys, *command.split())
    assert message.startswith(f"KAFKA_BOOTSTRAP_SERVERS={NOWHERE}: no broker answers (")
    assert "Connection refused" in message


def test_option_overrides_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    message = _error(capsys, "topics", "plan", "--bootstrap-servers", "127.0.0.1:2")
    assert message.startswith("KAFKA_BOOTSTRAP_SERVERS=127.0.0.1:2: ")


def test_default_timeout_is_within_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert cluster_admin.CONNECT_TIMEOUT_S <= 9


def test_wrong_setting_is_named_without_its_value(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METRICS_PORT", "hunter2")
    message = _error(capsys, "topics", "plan")
    assert message.startswith("METRICS_PORT: Input should be a valid integer")
    assert "hunter2" not in message


def test_secret_is_never_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_SECURITY_PROTOCOL", "SASL_PLAINTEXT")
    monkeypatch.setenv("KAFKA_SASL_PASSWORD", "hunter2")
    assert (
        _error(capsys, "topics", "plan") == "KAFKA_SASL_MECHANISM is needed with KAFKA_SECURITY_PROTOCOL=SASL_PLAINTEXT"
    )
    monkeypatch.setenv("KAFKA_SASL_MECHANISM", "PLAIN")
    monkeypatch.setenv("KAFKA_SASL_USERNAME", "operator")
    assert "hunter2" not in _error(capsys, "topics", "plan")
    assert "hunter2" not in _error(
        capsys, "schemas", "register", "--registry-url", "http://operator:hunter2@127.0.0.1:1"
    )


def test_missing_certificate_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KAFKA_SECURITY_PROTOCOL", "SSL")
    monkeypatch.setenv("KAFKA_SSL_CA_FILE", str(tmp_path / "none.pem"))
    assert _error(capsys, "topics", "plan") == f"KAFKA_SSL_CA_FILE={tmp_path}/none.pem: no such file or folder"


def test_schemas_are_registered_once(capsys: pytest.CaptureFixture[str], registry: RegistryDouble) -> None:
    assert _run("schemas", "register", "--registry-url", registry.url, "--json") == 0
    registered = json.loads(capsys.readouterr().out)["registered"]
    newest = registry.subjects["fairlane.WorkItem"]
    assert {
        "record": "WorkItem",
        "subject": "fairlane.WorkItem",
        "version": len(newest),
        "schema_id": newest[-1],
        "new": True,
    } in registered
    assert set(registry.subjects) == {item["subject"] for item in registered}

    assert _run("schemas", "register", "--registry-url", registry.url) == 0
    text = capsys.readouterr().out
    assert text.count("was there") == len(registered)
    assert "registered" not in text


def test_refusal_of_a_registry_is_one_line(capsys: pytest.CaptureFixture[str], registry: RegistryDouble) -> None:
    registry.answer_with = (409, {"error_code": 409, "message": "Schema being registered is incompatible"})
    message = _error(capsys, "schemas", "register", "--registry-url", registry.url)
    assert message == f"SCHEMA_REGISTRY_URL={registry.url}: Schema being registered is incompatible (status 409)"


def test_module_runs_and_loads_nothing_heavy() -> None:
    probe = (
        "import sys, fairlane_server.cli, fairlane.schema_registry;"
        "heavy = {'torch', 'faust', 'fastapi', 'psycopg', 'alembic', 'confluent_kafka.schema_registry'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    loaded = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=30, check=True)
    assert loaded.stdout.strip() == "[]"
    shown = subprocess.run(
        [sys.executable, "-m", "fairlane_server.cli", "--help"], capture_output=True, text=True, timeout=30, check=True
    )
    assert "topics" in shown.stdout
