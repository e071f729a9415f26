"""The sums of usage by day in a real Postgres: each record counts once, whatever is written, read again or removed."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from alembic import command
from pydantic import SecretStr

from fairlane.clock import now_ms
from fairlane.names import LEDGER_USAGE
from fairlane.records import Cost, UsageEvent
from fairlane.schema_files import default_codec
from fairlane.settings import Settings
from fairlane_server.costs.daily_sums import KEYS, SUMS, Group, SumQuery
from fairlane_server.postgres import migrations
from fairlane_server.postgres.connection import ALL_TENANTS, act_for, connect
from fairlane_server.postgres.migrations import upgrade
from fairlane_server.postgres.rights import PostgresRole
from fairlane_server.postgres.usage_sums import read_sums
from stream_processors.recorder.positions import Move, Partition, Stored
from stream_processors.recorder.projection import LogRecord, project
from stream_processors.recorder.retention import OldRows, rules_of
from stream_processors.recorder.store import RecorderStore, SupersededError
from stream_processors.recorder.tables import DAILY_SUMS
from tests.kit.native_kit import used
from tests.kit.recorder_kit import Tables
from tests.kit.stack import PostgresServer

pytestmark = pytest.mark.broker

DAY_MS = 86_400_000
PARTITION = Partition(LEDGER_USAGE, 0)
_SPENT = "tenant, occurred_at_ms / 86400000, model, model_version, pool, priority_class, coalesce(currency, '')"

Record = Callable[[Sequence[UsageEvent]], None]


@pytest.fixture
def tables(migrated: PostgresServer) -> Tables:
    return Tables(migrated)


@pytest.fixture
def store(migrated: PostgresServer) -> Iterator[RecorderStore]:
    made = RecorderStore(migrated.recorder_dsn)
    made.start_at({PARTITION: Stored(0)})
    yield made
    made.close()


def write(store: RecorderStore, events: Sequence[UsageEvent], first: int = 0, moves: Any = None) -> None:
    """As the recorder does, in one transaction; ``first`` is the place of the first event in the log."""
    records = [
        LogRecord(*PARTITION, first + number, event.occurred_at_ms, None, default_codec().encode(event))
        for number, event in enumerate(events)
    ]
    store.write(project(records, default_codec()), moves or {})


def mixed(count: int) -> list[UsageEvent]:
    """Of two tenants, two models, three days, three callers, some cached, some without a price."""
    return [
        used(
            number,
            f"2026-01-{1 + number % 3:02}",
            None if number % 5 == 0 else number,
            tenant=("acme", "globex")[number % 2],
            model=("words", "letters")[number % 4 // 2],
            cached=number % 7 == 0,
            requested_by=(None, "key:1", "user:2")[number % 3],
            images=number % 2,
        )
        for number in range(count)
    ]


def assert_sums_equal_rows(tables: Tables) -> None:
    """Both tables say what a query of all rows says."""
    for group, table in ((_SPENT, "usage_daily"), (_SPENT.partition(", model")[0], "usage_daily_callers")):
        keys = group if table == "usage_daily" else f"{group}, coalesce(requested_by, ''), coalesce(currency, '')"
        expected = tables.rows(
            f"SELECT {keys}, count(*), count(*) FILTER (WHERE cached), sum(prompt_tokens), sum(completion_tokens), "  # noqa: S608 - our own
            f"sum(cached_tokens), sum(images), sum(engine_ms), coalesce(sum(cost_nanos), 0) FROM usage GROUP BY {keys} "
            f"ORDER BY {keys}"
        )
        stored = ", ".join(KEYS[table]).replace("day", "(day - date '1970-01-01')::bigint")
        found = tables.rows(f"SELECT {stored}, {', '.join(SUMS)} FROM {table} ORDER BY {stored}")  # noqa: S608 - our own
        assert found == expected
        assert found, "there are some"


def test_every_record_counts_once_however_often_it_is_read(store: RecorderStore, tables: Tables) -> None:
    events = mixed(60)
    write(store, events[:40], moves={PARTITION: Move(0, 40)})
    assert_sums_equal_rows(tables)
    write(store, events[20:], first=20)
    assert_sums_equal_rows(tables)
    # The same work once more, at another place: the promise of one event is broken, and the bill is not.
    write(store, events[:10], first=1_000)
    assert tables.rows("SELECT sum(requests) FROM usage_daily") == [(60,)]
    assert_sums_equal_rows(tables)
    with pytest.raises(SupersededError):
        write(store, mixed(90)[60:], first=60, moves={PARTITION: Move(0, 90)})
    assert_sums_equal_rows(tables)


def test_what_no_number_can_hold_refuses_no_row(store: RecorderStore, tables: Tables) -> None:
    most = 2**63 - 1
    events = [
        replace(used(number), cost=Cost(most, "XTS"), engine_ms=most, occurred_at_ms=at_ms)
        for number, at_ms in enumerate((0, 0, most, -most))
    ]
    write(store, events)
    assert tables.rows("SELECT day::text, requests, cost_nanos, engine_ms FROM usage_daily ORDER BY day") == [
        ("1970-01-01", 3, 3 * most, 3 * most),
        ("9999-12-31", 1, most, most),
    ]


def test_writers_at_the_same_time_lose_nothing_and_never_wait_for_one_another_in_a_circle(
    migrated: PostgresServer, tables: Tables
) -> None:
    events = mixed(400)

    def record(part: int) -> None:
        store = RecorderStore(migrated.recorder_dsn)
        # Each its own rows, of the same groups, in another order.
        mine = events[part::4] if part % 2 else events[part::4][::-1]
        for start in range(0, len(mine), 10):
            write(store, mine[start : start + 10], first=1_000 * part + start)
        store.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(record, range(4)))
    assert tables.rows("SELECT count(*) FROM usage") == [(400,)]
    assert_sums_equal_rows(tables)


def test_retention_keeps_the_sums_and_a_rebuild_counts_nothing_twice(
    migrated: PostgresServer, store: RecorderStore, tables: Tables
) -> None:
    today = now_ms() // DAY_MS * DAY_MS
    old = [replace(used(number), occurred_at_ms=today - 100 * DAY_MS + number) for number in range(5)]
    young = [replace(used(10 + number), occurred_at_ms=today - 2 * DAY_MS + number) for number in range(7)]
    write(store, [*old, *young])
    rules = {rule.name: rule for rule in rules_of(Settings())}
    rows = OldRows(migrated.recorder_dsn)
    usage = rules["usage"]
    assert rows.remove(usage, usage.before_ms(now_ms()), 100)[0] == 5
    assert tables.rows("SELECT sum(requests), sum(cost_nanos) FROM usage_daily") == [(12, 1_200)]
    with psycopg.connect(migrated.owner_dsn) as owner:
        owner.execute("TRUNCATE usage, results")
    assert tables.rows("SELECT sum(requests), sum(cost_nanos) FROM usage_daily") == [(5, 500)]
    assert tables.rows("SELECT sum(requests) FROM usage_daily_callers") == [(5,)]
    # The log is read again; what retention removed is not stored again, and is in the sums.
    write(store, young)
    assert tables.rows("SELECT sum(requests), sum(cost_nanos) FROM usage_daily") == [(12, 1_200)]
    for rule in rules_of(Settings(usage_ttl_s=86_400, usage_daily_ttl_s=30 * 86_400)):
        if rule.table in DAILY_SUMS:
            assert rows.remove(rule, rule.before_ms(now_ms()), 100) == (1, None)
    assert tables.rows("SELECT sum(requests) FROM usage_daily") == [(7,)]
    rows.close()


def test_rows_that_were_there_before_are_counted_by_the_migration(database: PostgresServer) -> None:
    settings = Settings(postgres_owner_dsn=SecretStr(database.owner_dsn))
    with migrations._alembic(settings) as (config, _connection, _):
        config.attributes["applied"] = []
        command.upgrade(config, "0016")
    insert = (
        "INSERT INTO usage VALUES ('w', 0, %s, 'l', 0, %s, 'r', %s, 'p', 'm', '1', 'high', 'ok', NULL, "
        "1, 2, 0, 2, 5, %s, 1)"
    )
    with connect(database.owner_dsn, "test") as connection:
        act_for(connection, ALL_TENANTS)
        for number, tenant in enumerate(("acme", "acme", "globex")):
            connection.execute(insert.encode(), (number, number, tenant, 10 * DAY_MS))
    upgrade(settings)
    tables = Tables(database)
    rows = tables.rows("SELECT tenant, day::text, currency, requests, completion_tokens FROM usage_daily ORDER BY 1")
    assert rows == [("acme", "1970-01-11", "", 2, 4), ("globex", "1970-01-11", "", 1, 2)]
    assert tables.rows("SELECT requested_by, sum(requests) FROM usage_daily_callers GROUP BY 1") == [("", 3)]
    # An older recorder, which knows nothing of costs, goes on.
    with connect(database.recorder_dsn, "test") as connection:
        act_for(connection, ALL_TENANTS)
        connection.execute(insert.encode(), (9, 9, "acme", 10 * DAY_MS))
    assert tables.rows("SELECT requests FROM usage_daily WHERE tenant = 'acme'") == [(3,)]


@pytest.mark.parametrize("table", KEYS)
@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE {} SET cost_nanos = 0",
        "DELETE FROM {}",
        "TRUNCATE {}",
        "INSERT INTO {} SELECT * FROM {}",
        "SELECT count_usage()",
        "SELECT uncount_usage()",
    ],
)
def test_no_service_can_write_a_sum(migrated: PostgresServer, table: str, statement: str) -> None:
    for role in PostgresRole:
        with connect(migrated.dsn(role), "test") as connection:
            act_for(connection, ALL_TENANTS)
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement.format(table, table).encode())
            connection.rollback()


def test_a_tenant_sees_its_own_sums(store: RecorderStore, migrated: PostgresServer, tables: Tables) -> None:
    write(store, mixed(20))
    for table in KEYS:
        for dsn in (migrated.gateway_dsn, migrated.operator_dsn):
            with connect(dsn, "test") as connection:
                act_for(connection, "acme")
                seen = connection.execute(f"SELECT DISTINCT tenant FROM {table}".encode()).fetchall()  # noqa: S608 - our own
                assert seen == [("acme",)]
        assert {row[0] for row in tables.rows(f"SELECT tenant FROM {table}")} == {"acme", "globex"}  # noqa: S608 - our own


def test_the_sums_of_a_command_are_those_of_the_rows(store: RecorderStore, migrated: PostgresServer) -> None:
    events = mixed(60)
    write(store, events)
    settings = Settings(postgres_dsn=SecretStr(migrated.operator_dsn))
    found = read_sums(settings, SumQuery((Group.TENANT, Group.MONTH)))
    assert sum(one.requests for one in found) == 60
    assert sum(one.cost_nanos or 0 for one in found) == sum(event.cost.nanos for event in events if event.cost)
    of_acme = read_sums(settings, SumQuery((Group.CALLER,)), "acme")
    assert sum(one.requests for one in of_acme) == 30


def test_a_page_of_a_tenants_sums_is_read_by_its_key(migrated: PostgresServer) -> None:
    with connect(migrated.owner_dsn, "test") as connection:
        act_for(connection, ALL_TENANTS)
        connection.execute("SET LOCAL enable_seqscan = off")
        for table in KEYS:
            plan = connection.execute(
                f"EXPLAIN SELECT sum(cost_nanos) FROM {table} WHERE tenant = 'acme' AND day >= '2026-01-01'".encode()  # noqa: S608 - our own
            ).fetchall()
            assert f"{table}_pkey" in str(plan)
