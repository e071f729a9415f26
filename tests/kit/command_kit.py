"""A deployment of its own on the shared broker, and `fairlane` commands in it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fairlane_server import cli
from fairlane_server.cli import control as control_cli
from fairlane_server.cli import models as models_cli
from fairlane_server.control import published_models, published_tenants, route_change

TOPICS = """\
families:
  requests:
    name: UNIQUE.requests.{tenant}
    description: Requests.
    records: [InferenceRequest]
    key: request_id
    partitions: 1
    partitions_by_tenant: {globex: 2}
    retention_ms: 604800000
    max_message_bytes: 4194304
    timestamp_type: LogAppendTime
    writers: [tenant]
    readers: [dispatcher]
  priority:
    name: UNIQUE.priority.{pool}.{class}
    description: Work.
    records: [WorkItem]
    key: request_id
    partitions: 2
    retention_ms: 600000
    writers: [dispatcher]
    readers: [consumer]
  control-tenants:
    name: UNIQUE.control.tenants
    description: Tenants.
    records: [TenantSpec]
    key: tenant
    partitions: 1
    cleanup: compact
    writers: [operator]
    readers: [dispatcher]
  control-models:
    name: UNIQUE.control.models
    description: Models.
    records: [ModelVersion]
    key: model
    partitions: 1
    cleanup: compact
    writers: [operator]
    readers: [dispatcher]
"""
TENANTS = "tenants:\n  - tenant: acme\n  - tenant: globex\n    weight: 2\n"
MODELS = """\
models:
  - model: tiny
    version: "1"
    pool: generate
    engine: simulated
    tasks: [generate]
    path: tiny
    limits: {max_context_tokens: 128, max_output_tokens: 16}
"""

Run = Callable[..., tuple[int, Any, str]]
"""Runs a command with --json: exit status, what it printed, what it complained about."""


def write_deployment(folder: Path, unique: str) -> None:
    """The three files that commands read."""
    (folder / "topics.yaml").write_text(TOPICS.replace("UNIQUE", unique))
    (folder / "tenants.yaml").write_text(TENANTS)
    (folder / "models.yaml").write_text(MODELS)


def command_runner(
    broker: str,
    postgres_dsn: str,
    folder: Path,
    unique: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    """Commands of that deployment, whose control topics are its own."""
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", broker)
    monkeypatch.setenv("ALLOW_OPEN_KAFKA", "true")
    monkeypatch.setenv("POSTGRES_DSN", postgres_dsn)
    monkeypatch.setenv("TENANTS_FILE", str(folder / "tenants.yaml"))
    monkeypatch.setenv("MODELS_FILE", str(folder / "models.yaml"))
    for module in (control_cli, published_tenants):
        monkeypatch.setattr(module, "CONTROL_TENANTS", f"{unique}.control.tenants")
    for module in (models_cli, published_models):
        monkeypatch.setattr(module, "CONTROL_MODELS", f"{unique}.control.models")
    monkeypatch.setattr(route_change, "MODEL_CHANGES_ID", f"{unique}-model-changes")

    def run_command(*arguments: str) -> tuple[int, Any, str]:
        makes_topics = arguments[1] in {"plan", "apply"} and arguments[0] != "routes"
        files = ("--topics-file", str(folder / "topics.yaml")) if makes_topics else ()
        with pytest.raises(SystemExit) as caught:
            cli.main([*arguments, "--json", *files])
        captured = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, json.loads(captured.out) if captured.out else None, captured.err

    return run_command


def edit(file: Path, old: str, new: str) -> None:
    """Replace the first occurrence, which must be there."""
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
