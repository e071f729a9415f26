"""The recorder as a real process, on the real broker and the real database."""

import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from deploy.local.ports import PortClaims
from deploy.local.services import Service
from fairlane.kafka_config import connection
from fairlane.names import CONTROL_MODELS, CONTROL_TENANTS, LEDGER_AUDIT, LEDGER_USAGE, replies_topic
from fairlane.records import (
    AuditEvent,
    CacheUse,
    ConversationTurn,
    HistoryUse,
    LabelScore,
    Message,
    ModelRoute,
    ModelVersion,
    Output,
    PassageReference,
    SourceCoordinate,
    TenantGroup,
    TenantSpec,
    Timings,
    TokenUsage,
    UsageEvent,
)
from fairlane.settings import KafkaSettings
from stream_processors.recorder.positions import Move, Partition, Stored
from stream_processors.recorder.projection import Projection
from stream_processors.recorder.store import (
    PostgresTimeoutError,
    PostgresUnavailableError,
    RecorderStore,
    SupersededError,
)
from tests.kit.processes import ServiceProcess
from tests.kit.recorder_kit import LogWriter, Tables, delete_reply_topics, make_topics, proxied, reply_to
from tests.kit.stack import PostgresServer, choose_stack
from tests.kit.waiting import eventually

pytestmark = pytest.mark.broker

LONG_AGO_S = "10000000000"

SMALL_BATCH = {"RECORDER_BATCH_RECORDS": "10"}
"""Many transactions, so that there is a middle to be killed in."""

StartRecorder = Callable[..., ServiceProcess]


@pytest.fixture(scope="module")
def broker() -> Iterator[str]:
    """A broker of its own: a recorder reads all that there is, and what other tests left would keep it busy."""
    stack = choose_stack()
    yield stack.kafka()
    stack.close()


@pytest.fixture
def tenant(broker: str, unique: str) -> Iterator[str]:
    """A tenant that nobody else has, with its reply topics."""
    make_topics(broker, TenantSpec(unique, services=("search",)))
    yield unique
    # The recorder of every later test would read them as well.
    delete_reply_topics(broker, unique)


@pytest.fixture
def writer(broker: str, tenant: str) -> Iterator[LogWriter]:
    """Writes to the tenant's and the shared topics."""
    writer = LogWriter(broker, tenant)
    yield writer
    writer.close()


@pytest.fixture
def tables(migrated: PostgresServer) -> Tables:
    """The migrated tables of this test."""
    return Tables(migrated)


@pytest.fixture
def start_recorder(
    broker: str, migrated: PostgresServer, tables: Tables, unique: str, tmp_path: Path
) -> Iterator[StartRecorder]:
    """Starts recorders of one group; they are killed at the end."""
    claims = PortClaims()
    started: list[ServiceProcess] = []

    def start(name: str = "recorder-1", dsn: str | None = None, **env: str) -> ServiceProcess:
        service = Service(name, ("-m", "stream_processors.recorder"), env)
        shared = {
            "KAFKA_BOOTSTRAP_SERVERS": broker,
            "POSTGRES_DSN": dsn or migrated.recorder_dsn,
            "GROUP_PREFIX": unique,
            "LOG_FORMAT": "json",
            # Records of these tests are from whenever is easy to read.
            "USAGE_TTL_S": LONG_AGO_S,
            "AUDIT_TTL_S": LONG_AGO_S,
        }
        process = ServiceProcess(service, shared, claims.take(name), tmp_path / f"{name}.log")
        started.append(process)
        return process.start()

    yield start
    for process in started:
        process.kill()
    claims.close()


def test_rows_equal_what_was_written(
    broker: str, tenant: str, writer: LogWriter, tables: Tables, start_recorder: StartRecorder
) -> None:
    reply = reply_to(
        tenant,
        1,
        model="words",
        model_version="1",
        task="classify",
        engine="simulated",
        output=Output(text="zero\x00byte", labels=(LabelScore("seven", 0.75),), scores=(float("nan"),)),
        finish_reason="stop",
        usage=TokenUsage(3, 4, 1),
        timings=Timings(10, 20, 30, 40, 50, 60),
        batch_size=8,
        degradations=("shorter-context",),
        passages=(PassageReference("p1", 0.5),),
        cache_use=CacheUse("exact", "earlier", 5),
        history_use=HistoryUse(2, "shortened", 7),
        turn=ConversationTurn("talk", (Message("user", "say \x00"),)),
    )
    refusal = reply_to(
        tenant, 2, outcome="rejected", code="invalid", field="input", message="empty", retry_after_ms=5, output=None
    )
    work = SourceCoordinate(f"priority.{tenant}.normal", 3, 1)
    usage = UsageEvent(reply.request_id, tenant, "p", "words", "1", "normal", "ok", None, 3, 4, 1, 11, 25, 70, work)
    source = SourceCoordinate("requests.a", 0, 1)
    audit = AuditEvent(reply.request_id, tenant, "accepted", "dispatcher-1", 20, source, inputs={"a": "b"})
    spec = TenantSpec(tenant, weight=2.5, classes=("low",), services=("search",), tokens_per_day=7)
    spec = replace(spec, groups=(TenantGroup("web", 2.0),), forbidden_degradations=("no_retrieval",))
    model = ModelVersion(f"{tenant}-model", "1", "p", "simulated", ("embed", "rank"), "m", 100, 0)
    model = replace(model, dedicated_pools=("own",), smaller_model="tiny")
    (first, _) = writer.write(replies_topic(tenant), [reply, refusal])
    (usage_offset,) = writer.write(LEDGER_USAGE, [usage], key=tenant)
    (audit_offset,) = writer.write(LEDGER_AUDIT, [audit], key=tenant)
    writer.write(CONTROL_TENANTS, [spec], key=tenant)
    route = ModelRoute(model.model, 2, {"champion": "1"}, {"champion": "0"}, changed_by="ops", reason="better")
    writer.write(CONTROL_MODELS, [model], key=f"{model.model}/1")
    writer.write(CONTROL_MODELS, [route], key=model.model)

    recorder = start_recorder().wait_ready()
    eventually(lambda: tables.rows("SELECT 1 FROM model_routes WHERE model = %s", model.model), what="the model")
    eventually(lambda: tables.count(tenant) == 2, what="the results")
    eventually(lambda: tables.rows("SELECT 1 FROM usage"), what="the usage")
    eventually(lambda: tables.rows("SELECT 1 FROM audit_logs WHERE tenant = %s", tenant), what="the audit")
    eventually(lambda: tables.rows("SELECT 1 FROM tenants WHERE tenant = %s", tenant), what="the tenant")

    stored = dict_row(tables, "results", tenant, "outcome = 'ok'")
    assert (
        stored
        | {
            "source_offset": 1,
            "reply_topic": replies_topic(tenant),
            "reply_offset": first,
            "model": "words",
            "task": "classify",
            "engine": "simulated",
            "output": {"text": "zero\u2400byte", "labels": [{"label": "seven", "score": 0.75}], "scores": ["NaN"]},
            "prompt_tokens": 3,
            "completion_tokens": 4,
            "cached_tokens": 1,
            "submitted_at_ms": 10,
            "engine_finished_at_ms": 60,
            "batch_size": 8,
            "degradations": ["shorter-context"],
            "passages": [{"passage_id": "p1", "score": 0.5}],
            "replies_seen": 1,
            "replays_seen": 0,
        }
        == stored
    )
    refused = dict_row(tables, "results", tenant, "outcome = 'rejected'")
    assert (refused["code"], refused["field"], refused["message"], refused["retry_after_ms"], refused["output"]) == (
        *("invalid", "input", "empty", 5),
        None,
    )
    assert stored["cache_use"] == {"mode": "exact", "request_id": "earlier", "answered_at_ms": 5, "similarity": 1.0}
    assert stored["history_use"] == {"messages": 2, "reason": "shortened", "took_ms": 7}
    said = dict_row(tables, "conversation_turns", tenant)
    assert (said["conversation_id"], said["request_id"], said["source_offset"]) == ("talk", reply.request_id, 1)
    assert said["messages"] == [{"role": "user", "content": "say \u2400"}]
    assert (said["answer"], said["tokens"]) == ("zero\u2400byte", 5)
    assert said["submitted_at_ms"] == 10 < said["replied_at_ms"]
    spent = dict_row(tables, "usage", tenant)
    assert spent["cached"] is False
    assert (spent["work_topic"], spent["work_partition"], spent["work_offset"]) == (work.topic, 3, 1)
    assert (spent["log_offset"], spent["cost_tokens"], spent["engine_ms"]) == (usage_offset, 11, 25)
    decided = dict_row(tables, "audit_logs", tenant)
    assert (decided["log_offset"], decided["decision"], decided["inputs"]) == (audit_offset, "accepted", {"a": "b"})
    told = dict_row(tables, "tenants", tenant)
    assert (told["weight"], told["classes"], told["services"], told["tokens_per_day"]) == (2.5, ["low"], ["search"], 7)
    assert told["groups"] == [{"group": "web", "weight": 2.0, "parent": None}]
    assert told["forbidden_degradations"] == ["no_retrieval"]
    served = tables.rows(
        "SELECT reference, dedicated_pools, smaller_model FROM model_versions WHERE model = %s", model.model
    )
    assert served == [(f"{model.model}/1", ["own"], "tiny")]
    routed = tables.rows("SELECT revision, aliases, previous, reason FROM model_routes WHERE model = %s", model.model)
    assert routed == [(2, {"champion": "1"}, {"champion": "0"}, "better")]

    # A tenant that is taken back goes away, and the position goes past the last transaction marker while idle.
    writer.write(CONTROL_TENANTS, [None], key=tenant)
    writer.write(CONTROL_MODELS, [None], key=f"{model.model}/1")
    eventually(lambda: not tables.rows("SELECT 1 FROM tenants WHERE tenant = %s", tenant), what="the withdrawal")
    end = 2 + 1
    eventually(lambda: stored_offset(tables, replies_topic(tenant)) == end, what="the position past the marker")
    assert recorder.metric("fairlane_recorded_total", record="reply") >= 2
    eventually(
        lambda: recorder.metric("fairlane_recorder_lag_records", topic=replies_topic(tenant)) == 0, what="no lag"
    )
    assert recorder.stop() == 0


def test_new_topics_are_read_and_what_cannot_be_stored_is_skipped_with_its_place(
    broker: str, tenant: str, writer: LogWriter, tables: Tables, start_recorder: StartRecorder
) -> None:
    recorder = start_recorder().wait_ready()
    other = f"{tenant}-new"
    make_topics(broker, TenantSpec(other))
    topic = replies_topic(other)
    writer.replies(other, range(5))
    eventually(lambda: tables.count(other) == 5, 5, what="the replies on a topic that is new")

    bad_offset, unknown_offset = writer.write(topic, [b"\xff random bytes", b"\x00\x00\x00\x7f\x00"])
    endless = replace(reply_to(other, 5), request_id=secrets.token_hex(8_000))
    mixed = [reply_to(other, 5), endless, *(reply_to(other, number) for number in range(6, 12))]
    refused_offset = writer.write(topic, mixed)[1]
    eventually(lambda: tables.count(other) == 12, what="the replies around them")
    tables.assert_exactly(other, range(12))
    events = [entry for entry in recorder.events("record_skipped") if entry["topic"] == topic]
    skipped = {(entry["offset"], entry["problem"]) for entry in events}
    assert skipped == {
        (bad_offset, "bad_magic"),
        (unknown_offset, "unknown_schema_id"),
        (refused_offset, "refused_by_postgres"),
    }
    assert recorder.metric("fairlane_recorder_skipped_total", topic=topic) == 3


def test_aborted_replies_are_never_recorded(
    tenant: str, writer: LogWriter, tables: Tables, start_recorder: StartRecorder
) -> None:
    topic = replies_topic(tenant)
    writer.write(topic, [reply_to(tenant, number) for number in range(100, 120)], commit=False)
    writer.replies(tenant, range(10))
    last = writer.write(topic, [reply_to(tenant, number) for number in range(200, 220)], commit=False)[-1]
    start_recorder()
    eventually(lambda: stored_offset(tables, topic) == last + 2, what="the end of the topic")
    tables.assert_exactly(tenant, range(10))


def test_a_second_final_reply_can_be_seen_and_copies_are_counted_apart(
    tenant: str, writer: LogWriter, tables: Tables, start_recorder: StartRecorder
) -> None:
    once, twice, copied = (reply_to(tenant, number) for number in range(3))
    writer.write(replies_topic(tenant), [once, twice, copied, replace(twice, message="the second")])
    copy_first = replace(reply_to(tenant, 3), replayed=True)
    writer.write(replies_topic(tenant, "search"), [replace(copied, replayed=True), copy_first])
    recorder = start_recorder()
    eventually(lambda: tables.count(tenant) == 4, what="the results")
    # Sent again after a refusal, under the same id: another place in the log, another row.
    again = replace(once, source=SourceCoordinate(f"requests.{tenant}", 0, 50))
    writer.write(replies_topic(tenant), [again, reply_to(tenant, 3)])
    eventually(lambda: tables.count(tenant) == 5, what="the result of the request that was sent again")
    rows = tables.rows(
        "SELECT source_offset, reply_topic, message, replies_seen, replays_seen FROM results "
        "WHERE tenant = %s ORDER BY source_offset",
        tenant,
    )
    topic = replies_topic(tenant)
    assert rows == [
        (0, topic, None, 1, 0),
        (1, topic, None, 2, 0),
        (2, topic, None, 1, 1),
        (3, topic, None, 1, 1),
        (50, topic, None, 1, 0),
    ]
    assert recorder.metric("fairlane_committed_twice_total", record="reply") == 1


def test_killed_twice_in_the_middle(
    broker: str, tenant: str, writer: LogWriter, tables: Tables, start_recorder: StartRecorder
) -> None:
    total = 4_000
    writer.replies(tenant, range(total), per_transaction=500)
    recorder = start_recorder(**SMALL_BATCH)
    for recorded in (100, 1_500):
        wait_for_more_than(tables, tenant, recorded)
        recorder.kill()
        assert recorded < tables.count(tenant) < total
        recorder.start()
    eventually(lambda: tables.count(tenant) == total, 30, "all results")
    tables.assert_exactly(tenant, range(total))


def test_a_recorder_that_was_stopped_and_wakes_up_writes_nothing_twice(
    broker: str, tenant: str, writer: LogWriter, tables: Tables, start_recorder: StartRecorder
) -> None:
    total = 3_000
    writer.replies(tenant, range(total), per_transaction=500)
    sleeper = start_recorder("recorder-1", **SMALL_BATCH)
    wait_for_more_than(tables, tenant, 100)
    sleeper.pause()
    asleep_at = tables.count(tenant)
    assert asleep_at < total
    start_recorder("recorder-2")
    eventually(lambda: tables.count(tenant) == total, 40, "the results that the second recorder stores")
    before = len(sleeper.log())
    sleeper.resume()
    eventually(lambda: len(sleeper.log()) > before, what="a word from the one that woke up")
    writer.replies(tenant, range(total, total + 50))
    eventually(lambda: tables.count(tenant) == total + 50, 30, "the results that came later")
    tables.assert_exactly(tenant, range(total + 50))
    assert sleeper.alive
    # What made it notice: the stored offset had moved on, its session was ended while it slept in a transaction, or
    # the group had given its partitions away before it wrote.
    noticed = ("superseded", "postgres_unavailable", "revoked")
    eventually(lambda: any(sleeper.events(name) for name in noticed), what="a sign that it noticed")


def test_only_one_of_two_writes_from_the_same_offset_gets_through(migrated: PostgresServer, tables: Tables) -> None:
    partition = Partition("replies.fenced", 0)
    first, second = RecorderStore(migrated.recorder_dsn), RecorderStore(migrated.recorder_dsn)
    first.start_at({partition: Stored(5, "this")})
    second.start_at({partition: Stored(0)})
    assert second.next_offsets([partition]) == {partition: Stored(5, "this")}
    first.write(Projection(), {partition: Move(5, 9)})
    with pytest.raises(SupersededError):
        second.write(Projection(), {partition: Move(5, 9)})
    assert first.next_offsets([partition, Partition("replies.fenced", 1)]) == {partition: Stored(9, "this")}
    with pytest.raises(SupersededError):
        second.move({partition: Move(5, 0)}, {partition: "that"})
    second.move({partition: Move(9, 0)}, {partition: "that"})
    assert first.next_offsets([partition]) == {partition: Stored(0, "that")}
    first.close()
    second.close()


def test_a_write_that_takes_too_long_is_told_from_a_connection_that_is_lost(
    migrated: PostgresServer, tables: Tables
) -> None:
    partition = Partition("replies.slow", 0)
    with psycopg.connect(migrated.owner_dsn, connect_timeout=5) as holder:
        slow = RecorderStore(migrated.recorder_dsn, call_timeout_s=0.5)
        slow.start_at({partition: Stored(0)})
        # Held by somebody else: a write waits.
        holder.execute(b"SELECT 1 FROM source_offsets FOR UPDATE")
        with pytest.raises(PostgresTimeoutError):
            slow.write(Projection(), {partition: Move(0, 1)})
        holder.rollback()
    slow.write(Projection(), {partition: Move(0, 1)})
    slow.close()
    with proxied(migrated.recorder_dsn) as (proxy, dsn):
        store = RecorderStore(dsn)
        assert store.next_offsets([partition]) == {partition: Stored(1)}
        proxy.cut()
        with pytest.raises(PostgresUnavailableError) as cut:
            store.write(Projection(), {partition: Move(1, 2)})
        assert not isinstance(cut.value, PostgresTimeoutError)
        store.close()


def test_large_turns_are_recorded_in_little_memory(
    tenant: str, writer: LogWriter, tables: Tables, start_recorder: StartRecorder
) -> None:
    total, per_transaction = 320, 16
    said = "\x01\u5929" * 32_000
    for start in range(0, total, per_transaction):
        replies = [
            reply_to(tenant, number, turn=ConversationTurn("talk", (Message("user", f"{number} {said}"),)))
            for number in range(start, start + per_transaction)
        ]
        writer.write(replies_topic(tenant), replies)
    recorder = start_recorder()
    eventually(lambda: tables.count(tenant) == total, 60, "all results")
    tables.assert_exactly(tenant, range(total))
    turns = "SELECT count(*), count(*) FILTER (WHERE messages->0->>'content' = request.number || ' ' || %s)"
    query = f"{turns} FROM conversation_turns, split_part(request_id, %s, 2) AS request (number) WHERE tenant = %s"
    assert tables.rows(query, said, f"{tenant}-", tenant) == [(total, total)]
    assert peak_memory_mb(recorder) < 300
    assert recorder.stop() == 0


def test_an_outage_of_the_database_loses_nothing(
    migrated: PostgresServer, tenant: str, writer: LogWriter, tables: Tables, start_recorder: StartRecorder
) -> None:
    with proxied(migrated.recorder_dsn) as (proxy, dsn):
        recorder = start_recorder(dsn=dsn, **SMALL_BATCH).wait_ready()
        writer.replies(tenant, range(300))
        wait_for_more_than(tables, tenant, 20)
        proxy.cut()
        writer.replies(tenant, range(300, 600))
        eventually(lambda: recorder.get("/health/ready")[0] == 503, what="the loss of readiness")
        assert '"postgres": "OperationalError' in recorder.get("/health/ready")[1]
        assert recorder.get("/health")[0] == 200
        outage_at = tables.count(tenant)
        assert outage_at < 600
        proxy.restore()
        recorder.wait_ready(15)
        eventually(lambda: tables.count(tenant) == 600, what="everything written before and in the outage")
        # And cut again and again in the middle of transactions and commits.
        writer.replies(tenant, range(600, 1_400))
        for recorded in range(700, 1_400, 200):
            wait_for_more_than(tables, tenant, recorded)
            proxy.cut()
            proxy.restore()
        eventually(lambda: tables.count(tenant) == 1_400, 20, "all results")
        tables.assert_exactly(tenant, range(1_400))
        # It never left the group.
        assert not recorder.events("revoked")
        assert recorder.stop() == 0


def test_a_log_truncated_under_the_stored_offset_is_an_alarm(
    broker: str, tenant: str, writer: LogWriter, tables: Tables, start_recorder: StartRecorder
) -> None:
    topic = replies_topic(tenant)
    writer.replies(tenant, range(10))
    recorder = start_recorder()
    eventually(lambda: stored_offset(tables, topic) == 11, what="the results and the marker behind them")
    assert recorder.stop() == 0
    lost = writer.write(topic, [reply_to(tenant, number) for number in range(10, 20)])
    kept = writer.write(topic, [reply_to(tenant, number) for number in range(20, 25)])
    admin = AdminClient(connection(KafkaSettings(kafka_bootstrap_servers=broker)))
    (deleted,) = admin.delete_records([TopicPartition(topic, 0, kept[0])], operation_timeout=10).values()
    deleted.result(10)
    recorder.start()
    eventually(lambda: tables.count(tenant) == 15, what="the rest of the log")
    tables.assert_exactly(tenant, [*range(10), *range(20, 25)])
    (alarm,) = recorder.events("position_not_in_log")
    assert (alarm["topic"], alarm["position"], alarm["first"]) == (topic, lost[0], kept[0])
    assert recorder.metric("fairlane_log_truncated_total", topic=topic) == 1


def test_a_stored_offset_beyond_the_end_goes_on_at_the_end(
    broker: str, tenant: str, writer: LogWriter, tables: Tables, start_recorder: StartRecorder, migrated: PostgresServer
) -> None:
    topic = replies_topic(tenant)
    writer.replies(tenant, range(10))
    recorder = start_recorder()
    eventually(lambda: stored_offset(tables, topic) == 11, what="the results and the marker behind them")
    assert recorder.stop() == 0
    with psycopg.connect(migrated.owner_dsn) as connection:
        connection.execute("UPDATE source_offsets SET next_offset = 1000 WHERE topic = %s", (topic,))
    recorder.start()
    eventually(lambda: stored_offset(tables, topic) == 11, what="the end of the log")
    writer.replies(tenant, range(10, 15))
    eventually(lambda: tables.count(tenant) == 15, what="what came after")
    tables.assert_exactly(tenant, range(15))
    assert recorder.metric("fairlane_log_replaced_total", topic=topic, finding="cut") == 1
    assert not recorder.events("committed_twice")


def test_a_topic_created_again_is_recorded_from_its_beginning(
    broker: str, tenant: str, writer: LogWriter, tables: Tables, start_recorder: StartRecorder
) -> None:
    topic = replies_topic(tenant)
    writer.replies(tenant, range(10))
    recorder = start_recorder()
    eventually(lambda: stored_offset(tables, topic) == 11, what="the results and the marker behind them")
    assert recorder.stop() == 0
    delete_reply_topics(broker, tenant)
    admin = AdminClient(connection(KafkaSettings(kafka_bootstrap_servers=broker)))
    eventually(lambda: topic not in admin.list_topics(timeout=10).topics, what="the end of the topic")
    make_topics(broker, TenantSpec(tenant, services=("search",)))
    # As long as the former one: by its length alone it could not be told from that.
    writer.write(topic, [reply_to(tenant, number) for number in range(10, 30)])
    recorder.start()
    eventually(lambda: tables.count(tenant) == 30, what="all of the new topic")
    tables.assert_exactly(tenant, range(30))
    assert recorder.metric("fairlane_log_replaced_total", topic=topic, finding="recreated") == 1


def dict_row(tables: Tables, table: str, tenant: str, where: str = "true") -> dict[str, Any]:
    """The one row of a tenant for which a condition holds, every column by its name."""
    query = f"SELECT to_jsonb(t) FROM {table} t WHERE tenant = %s AND {where}"  # noqa: S608 - names of ours
    ((row,),) = tables.rows(query, tenant)
    assert isinstance(row, dict)
    return row


def peak_memory_mb(service: ServiceProcess) -> int:
    """The most memory that a process had so far."""
    status = Path(f"/proc/{service.pid}/status").read_text()
    (peak_kb,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(peak_kb) // 1024


def wait_for_more_than(tables: Tables, tenant: str, count: int) -> None:
    """Wait until a tenant has more results than this."""
    eventually(lambda: tables.count(tenant) > count, 30, f"more than {count} results")


def stored_offset(tables: Tables, topic: str) -> int | None:
    """Where the recorder goes on in a topic of one partition."""
    rows = tables.rows("SELECT next_offset FROM source_offsets WHERE topic = %s", topic)
    return int(rows[0][0]) if rows else None
