"""``fairlane shadow`` on a real broker and a real Postgres: what it publishes and reports."""

import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from fairlane.clock import now_ms
from fairlane.evaluation_records import EvaluationMark
from fairlane.names import CONTROL_TENANTS, EVALUATION_REPLIES, EVALUATION_TENANT, LEDGER_AUDIT, replies_topic
from fairlane.records import AuditEvent, InferenceReply, LabelScore, Output, SourceCoordinate, TenantSpec, Timings
from fairlane.schema_files import default_codec
from stream_processors.recorder.projection import LogRecord, project
from stream_processors.recorder.store import RecorderStore
from tests.kit.command_kit import MODELS, Run, command_runner, write_deployment
from tests.kit.stack import PostgresServer, migrated_database

pytestmark = [pytest.mark.full, pytest.mark.broker]

TWO_VERSIONS = MODELS + MODELS.removeprefix("models:\n").replace('"1"', '"2"\n    aliases: [next]')
TWO_VERSIONS = TWO_VERSIONS.replace('version: "1"', 'version: "1"\n    aliases: [champion]')
_numbers = count()


@pytest.fixture(scope="module")
def tables(postgres: PostgresServer) -> Iterator[PostgresServer]:
    with migrated_database(postgres, f"shadows{uuid.uuid4().hex[:12]}") as made:
        yield made


@pytest.fixture
def run(
    broker: str,
    tables: PostgresServer,
    tmp_path: Path,
    unique: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    """Commands of a deployment that has two versions of one model."""
    write_deployment(tmp_path, unique)
    (tmp_path / "models.yaml").write_text(TWO_VERSIONS.replace("tiny", unique))
    made = command_runner(broker, tables.operator_dsn, tmp_path, unique, monkeypatch, capsys)
    assert made("models", "apply")[0] == 0
    return made


def labelled(label: str) -> Output:
    return Output(labels=(LabelScore(label, 0.9),))


def record(topic: str, value: Any, key: str = "") -> LogRecord:
    return LogRecord(topic, 0, next(_numbers), now_ms(), key.encode(), default_codec().encode(value))


def pair(run_id: str, tenant: str, original: str, copied: str, outcome: str = "ok") -> list[LogRecord]:
    """A reply of the champion, and that to its copy, on the log."""
    number, times = next(_numbers), Timings(engine_started_at_ms=1_000, engine_finished_at_ms=1_020)
    source = SourceCoordinate(f"requests.{tenant}", 0, number)
    fields: dict[str, Any] = {"task": "classify", "model": "digits", "source": source, "timings": times}
    reply = InferenceReply(f"id-{number}", tenant, "ok", output=labelled(original), model_version="1", **fields)
    copy = InferenceReply(
        *(f"copy-{number}", EVALUATION_TENANT, outcome),
        code=None if outcome == "ok" else "poison",
        output=labelled(copied) if outcome == "ok" else None,
        model_version="2",
        evaluation=EvaluationMark("shadow", run_id, "candidate", tenant, f"id-{number}"),
        **fields,
    )
    return [record(replies_topic(tenant), reply), record(EVALUATION_REPLIES, copy)]


def sampled(run_id: str, result: str) -> LogRecord:
    number = next(_numbers)
    source = SourceCoordinate("requests.acme", 0, number)
    inputs = {"shadow_run": run_id, "shadow": result}
    return record(
        LEDGER_AUDIT, AuditEvent(f"id-{number}", "acme", "dispatched", "dispatcher-1", now_ms(), source, inputs=inputs)
    )


def write(tables: PostgresServer, records: Sequence[LogRecord]) -> None:
    with closing(RecorderStore(tables.recorder_dsn)) as store:
        store.write(project(records, default_codec()), {})


def allow(tables: PostgresServer, tenant: str, evaluation: str) -> None:
    write(tables, [record(CONTROL_TENANTS, TenantSpec(tenant, evaluation=evaluation), tenant)])


def test_a_shadow_is_started_shown_and_stopped_by_commands(run: Run, unique: str) -> None:
    code, made, complaint = run("shadow", "start", unique, "2", "--percent", "5", "--reason", "new weights")
    assert (code, made["candidate"], made["percent"], made["stopped_at_ms"]) == (0, "2", 5.0, None), complaint
    code, _, complaint = run("shadow", "start", unique, "2")
    assert code == 1
    assert "the shadow of version 2 is under way; stop it first" in complaint
    code, shown, _ = run("shadow", "status", unique)
    assert (code, shown[unique]["shadow"]["run"], shown[unique]["ended"]) == (0, made["run"], {})
    code, stopped, _ = run("shadow", "stop", unique)
    assert (code, stopped["run"], stopped["stopped_at_ms"] is not None) == (0, made["run"], True)
    code, _, complaint = run("shadow", "stop", unique)
    assert (code, "no shadow is under way" in complaint) == (1, True)
    for version, why in (("1", "is the champion"), ("9", "unknown version")):
        code, _, complaint = run("shadow", "start", unique, version)
        assert (code, why in complaint) == (1, True), complaint


def test_a_report_compares_the_pairs_of_tenants_that_allow_it(run: Run, tables: PostgresServer, unique: str) -> None:
    _, made, _ = run("shadow", "start", unique, "2")
    run_id = made["run"]
    allow(tables, "acme", "allowed")
    allow(tables, "globex", "denied")
    records = [one for _ in range(18) for one in pair(run_id, "acme", "3", "3")]
    records += [*pair(run_id, "acme", "3", "5"), *pair(run_id, "acme", "3", "", "failed")]
    records += [one for _ in range(5) for one in pair(run_id, "globex", "3", "5")]
    records += [sampled(run_id, result) for result in ("copied", "copied", "load")]
    write(tables, records)
    code, report, complaint = run("shadow", "report", unique)
    assert code == 0, complaint
    assert report["counts"] == {"sampled": {"copied": 2, "load": 1}, "ended": {"completed": 24, "failed": 1}}
    (task,) = report["tasks"]
    assert (task["task"], task["pairs"], task["compared"]) == ("classify", 20, 19)
    assert task["equal"]["mean"] == pytest.approx(18 / 19)
    assert (task["answered"]["worse"], task["failed_codes"]) == (1, {"poison": 1})
    assert task["engine_ms"]["ratio"] == pytest.approx(1.0)
    allow(tables, "acme", "denied")
    assert run("shadow", "report", unique)[1]["tasks"] == []
