"""Old rows are removed from a real Postgres, a few at a time, and a log that is read again brings none back."""

import threading
from collections.abc import Iterator

import psycopg
import pytest
from prometheus_client import REGISTRY

from fairlane import metrics
from fairlane.clock import now_ms
from fairlane.names import LEDGER_AUDIT, LEDGER_USAGE
from fairlane.records import AuditEvent, InferenceReply, SourceCoordinate, UsageEvent
from fairlane.schema_files import default_codec
from fairlane.settings import Settings
from fairlane_server.postgres.connection import ALL_TENANTS, act_for
from stream_processors.recorder.positions import Move, Partition, Stored
from stream_processors.recorder.projection import LogRecord, project
from stream_processors.recorder.retention import INTERVAL_S, OldRows, Removal, Rule, rules_of
from stream_processors.recorder.store import RecorderStore
from stream_processors.recorder.tables import RESULTS
from tests.kit.recorder_kit import Tables
from tests.kit.stack import PostgresServer
from tests.kit.waiting import eventually

pytestmark = pytest.mark.broker

HOUR_MS = 3_600_000
RESULT_RULE = Rule(RESULTS, "replied_at_ms", 86_400)


@pytest.fixture
def tables(migrated: PostgresServer) -> Tables:
    return Tables(migrated)


@pytest.fixture
def old_rows(migrated: PostgresServer) -> Iterator[OldRows]:
    made = OldRows(migrated.recorder_dsn)
    yield made
    made.close()


def record(migrated: PostgresServer, ages_h: list[float], tenant: str = "acme") -> None:
    """A reply, what it cost and two decisions, for each age in hours; numbers are offsets."""
    store, codec, now = RecorderStore(migrated.recorder_dsn), default_codec(), now_ms()
    partitions = [Partition(topic, 0) for topic in (f"replies.{tenant}", LEDGER_USAGE, LEDGER_AUDIT)]
    store.start_at(dict.fromkeys(partitions, Stored(0)))
    first = {partition: place.next_offset for partition, place in store.next_offsets(partitions).items()}
    records: list[LogRecord] = []
    for number, age_h in enumerate(ages_h):
        at_ms = now - round(age_h * HOUR_MS)
        request_id, source = f"{tenant}-{number}", SourceCoordinate(f"requests.{tenant}", 0, number)
        work = SourceCoordinate(f"priority.{tenant}.high", 0, number)
        values = (
            InferenceReply(request_id, tenant, "ok", source=source),
            UsageEvent(request_id, tenant, "p", "m", "1", "high", "ok", None, 1, 1, 0, 2, 5, at_ms, work),
            AuditEvent(request_id, tenant, "admitted", "d-1", at_ms, source),
        )
        records += [
            LogRecord(*partition, first[partition] + number, at_ms, None, codec.encode(value))
            for partition, value in zip(partitions, values, strict=True)
        ]
    moves = {partition: Move(at, at + len(ages_h)) for partition, at in first.items()}
    store.write(project(records, codec), moves)
    store.close()


def ids(tables: Tables, table: str) -> list[str]:
    return [str(row[0]) for row in tables.rows(f"SELECT request_id FROM {table} ORDER BY 1")]  # noqa: S608 - our own


def metric(name: str, table: str) -> float:
    return REGISTRY.get_sample_value(name, {"table": table}) or 0.0


def test_the_oldest_go_first_and_the_young_ones_stay(
    migrated: PostgresServer, tables: Tables, old_rows: OldRows
) -> None:
    record(migrated, [23, 30, 25, 48, 1])
    record(migrated, [26], tenant="globex")
    now = now_ms()
    before_ms = RESULT_RULE.before_ms(now)
    removed, oldest_ms = old_rows.remove(RESULT_RULE, before_ms, 2)
    assert removed == 2
    assert ids(tables, "results") == ["acme-0", "acme-2", "acme-4", "globex-0"]
    assert oldest_ms == pytest.approx(now - 26 * HOUR_MS, abs=HOUR_MS / 2)
    assert old_rows.remove(RESULT_RULE, before_ms, 5) == (2, None)
    assert old_rows.remove(RESULT_RULE, before_ms, 5) == (0, None)
    assert ids(tables, "results") == ["acme-0", "acme-4"]


def test_by_default_results_go_after_a_day_and_the_rest_after_ninety(migrated: PostgresServer, tables: Tables) -> None:
    record(migrated, [1, 25, 24 * 89, 24 * 91])
    failures: list[BaseException] = []
    before = metric("fairlane_rows_removed_total", "results")
    removal = Removal(OldRows(migrated.recorder_dsn), rules_of(Settings()), failures.append)
    removal.start()
    eventually(lambda: ids(tables, "results") == ["acme-0"] and len(ids(tables, "audit_logs")) == 3)
    eventually(lambda: ids(tables, "usage") == ["acme-0", "acme-1", "acme-2"])
    eventually(lambda: metric("fairlane_rows_removed_total", "results") == before + 3)
    removal.stop()
    assert not failures


def test_the_lag_is_shown_while_nothing_can_be_removed(migrated: PostgresServer, tables: Tables) -> None:
    record(migrated, [30] * 1_500)
    # What an earlier removal of this process showed.
    metrics.RETENTION_LAG.labels("results").set(0)
    with psycopg.connect(migrated.owner_dsn) as owner:
        # Somebody holds the table: nothing is removed, and the recorder's own connection is not concerned.
        owner.execute("LOCK TABLE results IN SHARE MODE")
        removal = Removal(OldRows(migrated.recorder_dsn, call_timeout_s=1.0), (RESULT_RULE,), lambda _: None)
        removal.start()
        eventually(lambda: removal._schedule.next_due()[2] < 1_000, what="a removal that was too late")
        eventually(lambda: metric("fairlane_retention_lag_seconds", "results") > 0, what="the lag")
        shown_s = metric("fairlane_retention_lag_seconds", "results")
        eventually(lambda: metric("fairlane_retention_lag_seconds", "results") > shown_s, what="a lag that grows")
    eventually(lambda: ids(tables, "results") == [], what="the removal of all")
    # Not 0: it grows from one look to the next.
    eventually(lambda: metric("fairlane_retention_lag_seconds", "results") < INTERVAL_S)
    removal.stop()


def test_rows_that_others_hold_are_left_for_the_next_time(
    migrated: PostgresServer, tables: Tables, old_rows: OldRows
) -> None:
    record(migrated, [30, 30, 30])
    with psycopg.connect(migrated.owner_dsn) as other:
        act_for(other, ALL_TENANTS)
        other.execute("UPDATE results SET replays_seen = 1 WHERE request_id = 'acme-1'")
        removed, oldest_ms = old_rows.remove(RESULT_RULE, RESULT_RULE.before_ms(now_ms()), 10)
        assert removed == 2
        assert oldest_ms is not None, "it counts as lag"
    assert old_rows.remove(RESULT_RULE, RESULT_RULE.before_ms(now_ms()), 10) == (1, None)


@pytest.mark.parametrize("rule", rules_of(Settings()), ids=lambda rule: str(rule.name))
def test_what_is_old_is_found_by_an_index(migrated: PostgresServer, tables: Tables, rule: Rule) -> None:
    age = {
        "conversation_turns": rule.column,
        "usage_daily": "(day - date '1970-01-01') * 86400000::bigint",
        "usage_daily_callers": "(day - date '1970-01-01') * 86400000::bigint",
        "usage_hourly": "hour * 3600000",
    }.get(rule.name, f"{rule.column} + 0")
    query = f"EXPLAIN SELECT ctid FROM {rule.name} WHERE {age} < 5 ORDER BY {age} LIMIT 100"  # noqa: S608 - our own
    with psycopg.connect(migrated.owner_dsn) as connection:
        act_for(connection, ALL_TENANTS)
        # The tables are empty, where a scan would do.
        connection.execute("SET enable_seqscan = off")
        connection.execute("SET enable_sort = off")
        plan = "\n".join(str(row[0]) for row in connection.execute(query.encode()))
    assert f"using {rule.name}_by_age" in plan


@pytest.mark.parametrize(("table", "left"), [("results", 1), ("usage", 2), ("audit_logs", 2)])
def test_nobody_removes_what_is_young_however_it_asks(
    migrated: PostgresServer, tables: Tables, old_rows: OldRows, table: str, left: int
) -> None:
    record(migrated, [0.5, 20, 30])
    (rule,) = (rule for rule in rules_of(Settings()) if rule.name == table)
    assert old_rows.remove(rule, now_ms() + HOUR_MS, 10) == (3 - left, None)
    assert len(ids(tables, table)) == left
    with psycopg.connect(migrated.recorder_dsn) as connection, pytest.raises(psycopg.errors.InvalidParameterValue):
        connection.execute("SELECT remove_old_rows('tenants', 0, 10)")


def test_removing_goes_on_beside_the_writing(migrated: PostgresServer, tables: Tables) -> None:
    record(migrated, [30] * 5_000)
    finished: list[str] = []
    removal = Removal(OldRows(migrated.recorder_dsn), (RESULT_RULE,), lambda _: None)

    def write() -> None:
        for number in range(20):
            record(migrated, [1] * 50, tenant=f"new{number}")
        finished.append("written")

    removal.start()
    writer = threading.Thread(target=write)
    writer.start()
    eventually(lambda: tables.count("acme") == 0, what="the removal")
    writer.join(60)
    removal.stop()
    assert finished == ["written"]
    assert len(ids(tables, "results")) == 20 * 50
