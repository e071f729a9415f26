"""Costs by the hour in a real Postgres: each record counts once, and who spends unusually much is seen."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from prometheus_client import REGISTRY

from fairlane.clock import now_ms
from fairlane.names import LEDGER_USAGE
from fairlane.records import Cost, UsageEvent
from fairlane.schema_files import default_codec
from fairlane.settings import Settings
from fairlane_server.costs.anomalies import HourlySpending
from fairlane_server.postgres.hourly_costs import HOUR_MS, hourly_spending
from stream_processors.dispatcher.budgets.accounts import Spending
from stream_processors.dispatcher.budgets.loader import base_of, question_of
from stream_processors.recorder.positions import Partition, Stored
from stream_processors.recorder.projection import LogRecord, project
from stream_processors.recorder.retention import OldRows, rules_of
from stream_processors.recorder.spend_watch import SpendWatch
from stream_processors.recorder.store import RecorderStore
from tests.kit.native_kit import used
from tests.kit.recorder_kit import Tables
from tests.kit.stack import PostgresServer
from tests.kit.waiting import eventually

pytestmark = pytest.mark.broker

PARTITION = Partition(LEDGER_USAGE, 0)
UNIT = 10**9


@pytest.fixture
def store(migrated: PostgresServer) -> Iterator[RecorderStore]:
    made = RecorderStore(migrated.recorder_dsn)
    made.start_at({PARTITION: Stored(7)})
    yield made
    made.close()


def write(store: RecorderStore, events: Sequence[UsageEvent]) -> None:
    records = [
        LogRecord(*PARTITION, number, event.occurred_at_ms, None, default_codec().encode(event))
        for number, event in enumerate(events)
    ]
    store.write(project(records, default_codec()), {})


def spent(number: int, hours_ago: int, nanos: int | None, **fields: Any) -> UsageEvent:
    hour_ms = now_ms() // HOUR_MS * HOUR_MS
    cost = None if nanos is None else Cost(nanos, "XTS")
    event = replace(used(number), **fields)
    return replace(event, occurred_at_ms=hour_ms - hours_ago * HOUR_MS + number, cost=cost)


def test_every_record_counts_once_whatever_is_written_again_or_removed(
    migrated: PostgresServer, store: RecorderStore
) -> None:
    tables = Tables(migrated)
    events = [spent(1, 0, 5), spent(2, 0, 6), spent(3, 1, 7), spent(4, 0, None), spent(5, 0, 9, tenant="globex")]
    write(store, events)
    write(store, events)
    query = "SELECT tenant, requests, cost_nanos FROM usage_hourly ORDER BY tenant, hour"
    assert tables.rows(query) == [("acme", 1, 7), ("acme", 2, 11), ("globex", 1, 9)]
    with psycopg.connect(migrated.owner_dsn) as owner:
        owner.execute("TRUNCATE usage, results")
    assert tables.rows(query) == []
    write(store, [*events, spent(6, 24 * 40, 3)])
    rows = OldRows(migrated.recorder_dsn)
    (rule,) = (rule for rule in rules_of(Settings(usage_ttl_s=86_400 * 30)) if rule.name == "usage_hourly")
    assert rows.remove(rule, rule.before_ms(now_ms()), 100) == (1, None)
    rows.close()
    assert len(tables.rows(query)) == 3


def test_unusual_spending_is_seen_by_the_recorder_and_by_the_command(
    migrated: PostgresServer, store: RecorderStore
) -> None:
    history = [spent(day, 24 * day, UNIT) for day in range(1, 15)]
    write(store, [*history, spent(20, 0, 3 * UNIT), spent(21, 0, 3 * UNIT, tenant="globex")])
    settings = Settings(postgres_dsn=migrated.operator_dsn)
    hour = now_ms() // HOUR_MS
    acme, globex = hourly_spending(settings, now_ms())
    # Two of three hours of each day were silent: the median is nothing, and the limit what may be spent in any case.
    assert acme == HourlySpending("acme", "XTS", hour, 3 * UNIT, 0, UNIT)
    assert globex.limit_nanos is None

    failures: list[BaseException] = []
    watch = SpendWatch(migrated.recorder_dsn, UNIT, failures.append)
    watch.start()
    acme_labels = {"tenant": "acme", "currency": "XTS"}
    eventually(
        lambda: REGISTRY.get_sample_value("fairlane_spend_anomaly_ratio", acme_labels) == 3.0, what="the first look"
    )
    watch.stop()
    assert REGISTRY.get_sample_value("fairlane_spend_anomaly_ratio", {"tenant": "globex", "currency": "XTS"}) == 0.0
    assert failures == []


def test_a_dispatcher_reads_offsets_and_sums_with_its_own_rights(
    migrated: PostgresServer, store: RecorderStore
) -> None:
    today = now_ms()
    day = today // 86_400_000
    callers = {"user:a": 5, "user:b": 6, "key:1": 7, "": 8, "whoever": 9}
    events = [
        replace(used(number), occurred_at_ms=today, cost=Cost(nanos, "XTS"), requested_by=name or None)
        for number, (name, nanos) in enumerate(callers.items())
    ]
    write(store, [*events, replace(used(50, tenant="globex"), occurred_at_ms=today, cost=Cost(99, "XTS"))])
    statement, parameters = question_of("acme", "XTS", today, by_caller=True)
    with psycopg.connect(migrated.dispatcher_dsn) as connection:
        connection.execute("SELECT set_config('fairlane.tenant', 'acme', true)")
        base = base_of(connection.execute(statement, parameters).fetchall())
        few = base_of(connection.execute(statement, (*parameters[:4], 1, *parameters[5:])).fetchall())
    assert base.offsets == {0: 7}
    assert {row for row in base.rows if row.nanos} == {
        Spending(None, day, 35),
        Spending("user:a", day, 5),
        Spending("user:b", day, 6),
        Spending("key:1", day, 7),
    }
    assert {row for row in few.rows if row.nanos} == {
        Spending(None, day, 35),
        Spending("key:1", day, 7),
        Spending("", day, 11),
    }
