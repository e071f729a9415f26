"""The commands that make topics and publish control records, on a real broker.

Every test has families and control topics of its own: the broker is shared, and `--delete` means it.
"""

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer

from fairlane.kafka_config import idempotent_producer
from fairlane.records import TenantSpec
from fairlane.schema_files import default_codec
from fairlane.settings import KafkaSettings
from fairlane_server import cli
from fairlane_server.administration.events import AdminAudit, EventFilter, RecordedEvent
from fairlane_server.command_author import command_author
from fairlane_server.control.publisher import ControlTopic
from fairlane_server.control.tenants_file import API, load_tenants
from fairlane_server.kafka.cluster_admin import ClusterAdmin, ClusterError
from fairlane_server.models.models_file import load_models
from fairlane_server.topics.admin import Applied, apply_plan, read_state
from fairlane_server.topics.families import expand, load_families
from fairlane_server.topics.plan import plan
from tests.kit.command_kit import Run, command_runner, edit, write_deployment
from tests.kit.stack import PostgresServer, migrated_database

pytestmark = pytest.mark.broker


@pytest.fixture
def settings(broker: str) -> KafkaSettings:
    return KafkaSettings(kafka_bootstrap_servers=broker)


@pytest.fixture(scope="module")
def tables(postgres: PostgresServer) -> Iterator[PostgresServer]:
    """Tables, to which changes of tenants are recorded."""
    with migrated_database(postgres, f"apply{uuid.uuid4().hex[:12]}") as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path, unique: str) -> Path:
    write_deployment(tmp_path, unique)
    return tmp_path


@pytest.fixture
def run(
    broker: str,
    tables: PostgresServer,
    folder: Path,
    unique: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    return command_runner(broker, tables.operator_dsn, folder, unique, monkeypatch, capsys)


def test_plan_and_apply(run: Run, folder: Path, unique: str, settings: KafkaSettings) -> None:
    names = {
        f"{unique}.{name}"
        for name in (
            *("requests.acme", "requests.globex", "control.tenants", "control.models"),
            *("priority.generate.high", "priority.generate.normal", "priority.generate.low"),
        )
    }
    code, planned, _ = run("topics", "plan")
    assert code == 2
    assert {(change["action"], change["topic"]) for change in planned["changes"]} == {
        ("create", name) for name in names
    }
    assert planned["findings"] == []

    code, applied, _ = run("topics", "apply")
    assert code == 0
    assert {(item["topic"], item["result"]) for item in applied["applied"]} == {(name, "done") for name in names}

    state = read_state(ClusterAdmin(settings), names)
    requests = state.topics[f"{unique}.requests.globex"]
    assert (requests.partitions, requests.replication_factor) == (2, 1)
    assert requests.config["message.timestamp.type"] == "LogAppendTime"
    assert requests.config["max.message.bytes"] == "4194304"
    assert state.topics[f"{unique}.priority.generate.low"].config["segment.ms"] == "600000"
    assert state.topics[f"{unique}.control.tenants"].config["cleanup.policy"] == "compact"

    assert run("topics", "plan")[:2] == (0, {"changes": [], "findings": []})
    assert run("topics", "apply")[:2] == (0, {"applied": [], "findings": []})


def test_difference_is_shown_and_made_good_but_nothing_is_lost_unasked(run: Run, folder: Path, unique: str) -> None:
    assert run("topics", "apply")[0] == 0
    topics, tenants = folder / "topics.yaml", folder / "tenants.yaml"
    edit(topics, "{globex: 2}", "{acme: 3}")
    edit(topics, "retention_ms: 604800000", "retention_ms: 3600000")
    edit(topics, "    timestamp_type: LogAppendTime\n", "")
    edit(topics, "    max_message_bytes: 4194304\n", "")
    edit(topics, "retention_ms: 600000", "retention_ms: 172800000")
    edit(tenants, "  - tenant: globex\n    weight: 2\n", "")

    code, planned, complaints = run("topics", "plan")
    assert code == 2
    acme, globex = f"{unique}.requests.acme", f"{unique}.requests.globex"
    by_topic = {(change["topic"], change["action"]): change for change in planned["changes"]}
    assert by_topic[acme, "add-partitions"] == {"action": "add-partitions", "topic": acme, "before": 1, "after": 3}
    assert {"key": "max.message.bytes", "before": "4194304", "after": None} in by_topic[acme, "change-config"][
        "settings"
    ]
    assert {(finding["topic"], finding["problem"]) for finding in planned["findings"]} == {
        (acme, "shorter_retention"),
        (globex, "extra_topic"),
    }
    assert complaints == ""

    assert run("topics", "apply")[0] == 0
    code, planned, _ = run("topics", "plan")
    assert (code, planned["changes"]) == (0, [])
    assert len(planned["findings"]) == 2

    code, planned, _ = run("topics", "plan", "--delete", "--shrink")
    assert code == 2
    assert {(change["topic"], change["action"]) for change in planned["changes"]} == {
        (acme, "change-config"),
        (globex, "delete"),
    }
    assert run("topics", "apply", "--delete", "--shrink")[0] == 0
    assert run("topics", "plan")[:2] == (0, {"changes": [], "findings": []})


def test_offsets_that_would_not_outlive_records_stop_the_command(run: Run, folder: Path, unique: str) -> None:
    edit(folder / "topics.yaml", "retention_ms: 604800000", "retention_ms: 31536000000")  # a year
    code, planned, _ = run("topics", "plan")
    assert code == 1
    assert [(finding["level"], finding["problem"]) for finding in planned["findings"]] == [
        ("error", "offsets_retention")
    ]

    code, printed, complaints = run("topics", "apply")
    assert (code, printed) == (1, None)
    assert complaints.startswith("error: the broker's offsets.retention.minutes=")
    assert complaints.count("\n") == 1
    assert len(run("topics", "plan")[1]["changes"]) == 7, "nothing was created"

    assert run("topics", "apply", "--force")[0] == 0
    assert run("topics", "plan")[1]["changes"] == []


def test_change_that_fails_is_named_and_does_not_stop_the_others(run: Run, unique: str) -> None:
    code, printed, complaints = run("tenants", "apply", "--replication-factor", "30")
    assert (code, printed) == (1, None)
    assert complaints.startswith(f"error: {unique}.requests.acme: create failed: ")
    assert complaints.endswith("(and 2 more)\n")
    assert complaints.count("\n") == 1


def test_several_may_apply_at_once(folder: Path, settings: KafkaSettings) -> None:
    families = load_families(folder / "topics.yaml")
    wanted = expand(families, load_tenants(folder / "tenants.yaml"), load_models(folder / "models.yaml"))
    cluster = ClusterAdmin(settings)
    state = read_state(cluster, [])
    made = plan(wanted, state.topics, families=families, broker_config=state.broker_config, replication_factor=1)
    assert len(made.changes) == len(wanted)
    results: list[tuple[Applied, ...]] = []
    start = threading.Barrier(4)

    def apply() -> None:
        own = ClusterAdmin(settings)
        start.wait(timeout=10)
        results.append(apply_plan(own, made))

    threads = [threading.Thread(target=apply) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(results) == 4
    outcomes = [item.result for applied in results for item in applied]
    assert outcomes.count("done") == len(wanted)
    assert outcomes.count("already") == 3 * len(wanted)
    metadata = cluster.metadata()
    assert all(len(metadata.topics[topic.name].partitions) == topic.partitions for topic in wanted)


def test_new_topics_can_be_written_at_once(run: Run, unique: str, settings: KafkaSettings) -> None:
    assert run("topics", "apply")[0] == 0
    delivered: list[object] = []
    producer = Producer(idempotent_producer(settings))
    for name in ("requests.acme", "requests.globex"):
        producer.produce(f"{unique}.{name}", b"x", on_delivery=lambda error, _message: delivered.append(error))
    assert producer.flush(10) == 0
    assert delivered == [None, None]


def test_several_tenants_are_not_published_on_a_kafka_that_is_open_to_all(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ALLOW_OPEN_KAFKA")
    code, applied, complaints = run("tenants", "apply")
    assert (code, applied) == (1, None)
    assert "KAFKA_SECURITY_PROTOCOL is PLAINTEXT" in complaints
    monkeypatch.setenv("ALLOW_OPEN_KAFKA", "true")
    assert len(run("tenants", "apply")[1]["published"]) == 2, "nothing was published before"


def test_tenants_are_published_when_they_change(run: Run, folder: Path) -> None:
    code, applied, _ = run("tenants", "apply")
    assert code == 0
    assert len(applied["topics"]) == 3, "two tenants' topics and the control topic"
    assert applied["published"] == ["acme", "globex"]

    _, applied, _ = run("tenants", "apply")
    assert applied == {
        "topics": [],
        "published": [],
        "unchanged": ["acme", "globex"],
        "unknown": [],
        "foreign": [],
        "withdrawn": [],
    }

    file = folder / "tenants.yaml"
    file.write_text("tenants:\n  - tenant: globex\n    weight: 3\n  - tenant: initech\n    pool: own\n")
    code, applied, complaints = run("tenants", "apply")
    assert (code, applied["published"], applied["unknown"]) == (0, ["globex", "initech"], ["acme"])
    assert applied["withdrawn"] == []
    assert len(applied["topics"]) == 4, "initech's topic and the three classes of its pool"
    assert "requests.acme" in complaints, "a topic that is left over is reported"
    listed = {tenant["tenant"]: tenant for tenant in run("tenants", "list")[1]["tenants"]}
    assert listed.keys() == {"acme", "globex", "initech"}
    assert (listed["globex"]["weight"], listed["initech"]["pool"]) == (3.0, "own")

    _, applied, _ = run("tenants", "apply", "--delete")
    assert (applied["published"], applied["withdrawn"]) == ([], ["acme"])
    assert [tenant["tenant"] for tenant in run("tenants", "list")[1]["tenants"]] == ["globex", "initech"]
    assert run("tenants", "apply")[1]["unknown"] == []
    # Its topic stays: what is in it may still be wanted.
    assert "requests.acme" in run("topics", "plan")[1]["findings"][0]["topic"]


def test_changes_of_tenants_are_in_the_audit_with_what_was_before(
    run: Run, folder: Path, tables: PostgresServer
) -> None:
    with AdminAudit(tables.owner_dsn) as audit:
        known = {event.event_id for event in audit.list(EventFilter(), None, 1_000)}

        def new() -> list[RecordedEvent]:
            found = [one for one in reversed(audit.list(EventFilter(), None, 1_000)) if one.event_id not in known]
            known.update(one.event_id for one in found)
            return found

        assert run("tenants", "apply")[0] == 0
        events = new()
        assert [(one.tenant, one.event, one.outcome) for one in events] == [
            ("acme", "tenant_set", "started"),
            ("globex", "tenant_set", "started"),
            ("acme", "tenant_set", "done"),
            ("globex", "tenant_set", "done"),
        ]
        assert [one.of_event for one in events] == [None, None, events[0].event_id, events[1].event_id]
        assert {one.author for one in events} == {command_author()}
        assert {one.database_role for one in events} == {"fairlane_operator"}
        assert events[1].details["before"] is None
        assert events[1].details["after"]["weight"] == 2.0

        assert run("tenants", "apply")[0] == 0
        assert new() == [], "nothing changed"

        (folder / "tenants.yaml").write_text("tenants:\n  - tenant: globex\n    weight: 3\n")
        assert run("tenants", "apply", "--delete")[1]["withdrawn"] == ["acme"]
        events = new()
        assert [(one.tenant, one.event, one.outcome) for one in events] == [
            ("globex", "tenant_set", "started"),
            ("acme", "tenant_removed", "started"),
            ("globex", "tenant_set", "done"),
            ("acme", "tenant_removed", "done"),
        ]
        weights = [events[0].details[when]["weight"] for when in ("before", "after")]
        assert weights == [2.0, 3.0]
        assert events[1].details["after"] is None


def test_without_postgres_tenants_change_only_if_that_is_asked_for(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, tables: PostgresServer
) -> None:
    monkeypatch.setenv("POSTGRES_DSN", "postgresql://127.0.0.1:1/nothing")
    code, printed, complaints = run("tenants", "apply")
    assert (code, printed) == (1, None)
    assert complaints.startswith("error: the audit: ")
    assert complaints.endswith(": no tenant was published (--no-audit publishes without a record)\n")
    assert run("tenants", "list")[1]["tenants"] == []
    code, applied, complaints = run("tenants", "apply", "--no-audit")
    assert (code, applied["published"]) == (0, ["acme", "globex"])
    assert complaints == "warning: the audit has no record of the changes of acme, globex\n"
    # Where nothing changes, nothing is to be recorded.
    assert run("tenants", "apply")[0] == 0


@pytest.mark.parametrize(
    ("old", "new", "line", "reason"),
    [
        ("weight: 2", "weight: 0", 4, "tenants[1].weight: must be from 0.001 to 1000000, not 0"),
        ("weight: 2", "weight: -3", 4, "tenants[1].weight: must be from 0.001 to 1000000, not -3"),
        (
            "weight: 2",
            "classes: [urgent]",
            4,
            "tenants[1].classes[0]: unknown class 'urgent'; known: high, normal, low",
        ),
        (
            "weight: 2",
            "groups: [{group: a, parent: b}, {group: b, parent: a}]",
            *(4, "tenants[1].groups[0].parent: the parents go round in a circle: a -> b -> a"),
        ),
        ("weight: 2", "groups: [{group: a, parent: b}]", 4, "unknown group 'b'; known here: a"),
        ("weight: 2", "groups: [{group: a}, {group: a}]", 4, "'a' is already defined on line 4"),
        ("weight: 2", "forbid: [magic]", 4, "tenants[1].forbid[0]: unknown degradation 'magic'; known: fewer_passages"),
        ("weight: 2", "pool: own\n  - tenant: initech\n    pool: own", 6, "already the dedicated pool of 'globex'"),
        ("tenant: globex\n    weight: 2", "weight: 2", 3, "tenants[1]: missing: tenant"),
        ("tenant: globex", "tenant: acme", 3, "tenants[1].tenant: 'acme' is already defined"),
    ],
)
def test_bad_tenants_are_refused_as_a_whole_and_what_runs_stays(
    run: Run, folder: Path, old: str, new: str, line: int, reason: str, settings: KafkaSettings, unique: str
) -> None:
    assert run("tenants", "apply")[0] == 0
    before = run("tenants", "list")[1]
    file = folder / "tenants.yaml"
    # The first tenant changes and a third one comes, both of them well: neither may be taken from a bad file.
    good = "tenants:\n  - {tenant: acme, weight: 9}\n  - tenant: globex\n    weight: 2\n  - tenant: newcomer\n"
    assert old in good
    file.write_text(good.replace(old, new))
    code, printed, complaint = run("tenants", "apply", "--delete")
    assert (code, printed) == (1, None)
    assert complaint.startswith(f"error: {file}:{line}: ")
    assert reason in complaint
    assert complaint.count("\n") == 1
    assert run("tenants", "list")[1] == before
    assert f"{unique}.requests.newcomer" not in ClusterAdmin(settings).metadata().topics
    file.write_text(good)
    assert run("tenants", "apply")[1]["published"] == ["acme", "newcomer"]


@pytest.fixture
def control(run: Run, settings: KafkaSettings, unique: str) -> ControlTopic[TenantSpec]:
    assert run("topics", "apply")[0] == 0
    return ControlTopic(settings, default_codec(), f"{unique}.control.tenants", TenantSpec, kind="tenant")


def test_control_topic_holds_the_last_word_of_each_key(control: ControlTopic[TenantSpec]) -> None:
    assert control.read() == {}
    control.publish([TenantSpec("acme"), TenantSpec("globex"), TenantSpec("initech")])
    control.publish([TenantSpec("acme", weight=2.0)], withdrawn=["globex"])
    control.publish([])
    assert control.read() == {"acme": TenantSpec("acme", weight=2.0), "initech": TenantSpec("initech")}


def test_tenants_of_the_admin_api_are_left_alone(
    run: Run, control: ControlTopic[TenantSpec], settings: KafkaSettings, unique: str
) -> None:
    assert run("tenants", "apply")[0] == 0
    adopted, own = TenantSpec("acme", weight=5.0, managed_by=API), TenantSpec("hooli", managed_by=API)
    control.publish([adopted, own])
    code, applied, _ = run("tenants", "apply", "--delete")
    assert (code, applied["published"], applied["foreign"], applied["withdrawn"]) == (0, [], ["acme"], [])
    assert (control.read()["acme"], control.read()["hooli"]) == (adopted, own)
    # Its topics are wanted, so none of them is deleted.
    assert run("topics", "apply", "--delete")[0] == 0
    assert {f"{unique}.requests.{name}" for name in ("acme", "globex", "hooli")} <= {
        *ClusterAdmin(settings).metadata().topics
    }
    assert run("topics", "plan", "--delete")[1]["changes"] == []
    code, applied, _ = run("tenants", "apply", "--delete", "--force")
    assert (code, applied["published"], applied["foreign"], applied["withdrawn"]) == (0, ["acme"], [], [])
    assert (control.read()["acme"], control.read()["hooli"]) == (TenantSpec("acme"), own)


def test_unreadable_control_record_is_shown_and_replaced(
    run: Run, control: ControlTopic[TenantSpec], settings: KafkaSettings, unique: str
) -> None:
    producer = Producer(idempotent_producer(settings))
    producer.produce(f"{unique}.control.tenants", key=b"acme", value=b"\x00garbage")
    assert producer.flush(10) == 0
    assert control.read() == {"acme": None}
    assert run("tenants", "list")[1] == {"tenants": [{"tenant": "acme"}]}
    assert run("tenants", "apply")[1]["published"] == ["acme", "globex"]
    assert control.read()["acme"] == TenantSpec("acme")


def test_control_topic_that_does_not_exist_is_named(settings: KafkaSettings, unique: str) -> None:
    control = ControlTopic(settings, default_codec(), f"{unique}.none", TenantSpec, kind="tenant")
    with pytest.raises(ClusterError, match=f"{unique}.none: no such topic"):
        control.read()


def test_tables_are_for_people(run: Run, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    files = ("--topics-file", str(folder / "topics.yaml"))
    for command, words in (
        (("topics", "plan", *files), ("create", "partitions=1")),
        (("tenants", "apply", *files), ("create", "done", "tenant globex: published")),
        (("tenants", "list"), ("globex", "high, normal, low", "shared")),
        (("models", "apply", *files), ("model tiny/1: published", "model tiny: published")),
        (("models", "list"), ("tiny", "generate", "128 tokens")),
        (("topics", "apply", *files), ("7 topics, nothing to change",)),
    ):
        with pytest.raises(SystemExit):
            cli.main(command)
        text = capsys.readouterr().out
        assert all(word in text for word in words), text
