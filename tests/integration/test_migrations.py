"""The migrations and what they promise: repeatable, safe side by side, rows of one tenant hidden from another."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from fairlane.settings import Settings
from fairlane_server.postgres.connection import ALL_TENANTS, act_for, connect, deadline, describe
from fairlane_server.postgres.migrations import DatabaseError, status, upgrade
from stream_processors.recorder.positions import Partition
from stream_processors.recorder.projection import Projection
from stream_processors.recorder.store import PostgresUnavailableError, RecorderStore
from stream_processors.recorder.tables import ALL_TABLES
from tests.kit.stack import PostgresServer

TENANT_TABLES = (
    *("results", "usage", "audit_logs", "tenants"),
    *("collections", "documents", "passages", "conversation_turns"),
    *("users", "api_keys", "backfill_jobs", "backfill_chunks", "files", "batches"),
    *("admin_events", "usage_daily", "usage_daily_callers", "usage_hourly"),
    *("document_uploads", "erasures", "erased", "barred_tenants"),
    *("feedback", "label_items", "labels", "evaluation_results", "log_replay_requests"),
    *("drift_streams", "drift_findings", "drift_samples"),
    *("evaluation_sets", "evaluation_examples", "evaluation_runs", "evaluation_scores"),
    *("evaluation_schedules", "judge_calibrations"),
)
REVISIONS = (
    "0001",
    "0002",
    "0003",
    "0004",
    "0005",
    "0006",
    "0007",
    "0008",
    "0009",
    "0010",
    "0011",
    "0012",
    "0013",
    "0014",
    "0015",
    "0016",
    "0017",
    "0018",
    "0019",
    "0020",
    "0021",
    "0022",
    "0023",
    "0024",
    "0025",
    "0026",
    "0027",
    "0028",
    "0029",
    "0030",
    "0031",
    "0032",
    "0033",
    "0034",
    "0036",
)
AUDIT = (
    "INSERT INTO audit_logs VALUES ('ledger.audit', 0, %s, 'id', %s, 'accepted', 'me', 1, 's', 0, 0, NULL, NULL, '{}')"
)


@pytest.fixture
def settings(database: PostgresServer) -> Settings:
    """Settings for an empty database."""
    return Settings(postgres_owner_dsn=database.owner_dsn)


@pytest.fixture
def migrated(settings: Settings, database: PostgresServer) -> PostgresServer:
    """A database with the tables."""
    upgrade(settings)
    return database


def test_upgrade_says_what_it_did_and_may_be_repeated(settings: Settings, database: PostgresServer) -> None:
    assert status(settings).pending == REVISIONS
    first, second = upgrade(settings), upgrade(settings)
    assert (first.before, first.after, first.applied) == (None, REVISIONS[-1], REVISIONS)
    assert (second.before, second.after, second.applied) == (REVISIONS[-1], REVISIONS[-1], ())
    assert status(settings).pending == ()
    assert first.database == describe(database.owner_dsn)


def test_upgrades_at_the_same_time_wait_for_one_another(database: PostgresServer) -> None:
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(lambda _: fairlane(database, "upgrade", "--json"), range(3)))
    assert [entry.returncode for entry in done] == [0, 0, 0]
    assert sorted(json.loads(entry.stdout)["applied"] for entry in done) == [[], [], list(REVISIONS)]


def test_the_recorder_knows_every_column(migrated: PostgresServer) -> None:
    query = """
        SELECT column_name, data_type, is_nullable = 'NO' AND column_default IS NULL FROM information_schema.columns
        WHERE table_schema = 'public' AND table_name = %s ORDER BY ordinal_position
    """
    key_query = """
        SELECT a.attname FROM pg_index i, unnest(i.indkey) WITH ORDINALITY AS k (attnum, position), pg_attribute a
        WHERE i.indisprimary AND i.indrelid = %s::regclass AND a.attrelid = i.indrelid AND a.attnum = k.attnum
        ORDER BY k.position
    """
    with psycopg.connect(migrated.owner_dsn, connect_timeout=5) as connection:
        for table in ALL_TABLES:
            stored = {name: kind for name, kind, _ in connection.execute(query, (table.name,))}
            assert stored.pop("recorded_at") == "timestamp with time zone"
            assert stored == dict(table.columns)
            assert tuple(name for (name,) in connection.execute(key_query, (table.name,))) == table.key


def test_a_tenant_sees_and_writes_its_own_rows_only(migrated: PostgresServer) -> None:
    with connect(migrated.owner_dsn, "test") as connection:
        with connection.transaction():
            act_for(connection, ALL_TENANTS)
            connection.execute(AUDIT, (1, "a"))
            connection.execute(AUDIT, (2, "b"))
        assert tenants_seen(connection, None) == []
        assert tenants_seen(connection, "a") == ["a"]
        assert tenants_seen(connection, "b") == ["b"]
        assert tenants_seen(connection, ALL_TENANTS) == ["a", "b"]
        act_for(connection, "a")
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="row-level security"):
            connection.execute(AUDIT, (3, "b"))
        connection.rollback()
        # What a transaction acts for ends with it.
        assert tenants_seen(connection, None) == []


def test_every_table_with_a_tenant_is_protected_even_from_its_owner(migrated: PostgresServer) -> None:
    query = """
        SELECT c.relname FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
        WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p') AND a.attname = 'tenant'
        AND (c.relrowsecurity, c.relforcerowsecurity) = %s ORDER BY 1
    """
    with psycopg.connect(migrated.owner_dsn, connect_timeout=5) as connection:
        protected = connection.execute(query.replace("%s", "(true, true)").encode()).fetchall()
        others = connection.execute(query.replace("= %s", "<> (true, true)").encode()).fetchall()
    assert sorted(name for (name,) in protected) == sorted(TENANT_TABLES)
    assert others == []


def test_a_store_without_tables_says_so_and_works_once_they_are_there(
    settings: Settings, database: PostgresServer
) -> None:
    store = RecorderStore(database.recorder_dsn)
    with pytest.raises(PostgresUnavailableError, match='UndefinedTable: relation "source_offsets" does not exist'):
        store.next_offsets([])
    upgrade(settings)
    assert store.next_offsets([Partition("replies.a", 0)]) == {}
    assert store.write(Projection(), {}) == []
    store.close()


def test_a_call_that_takes_too_long_is_cut(database: PostgresServer) -> None:
    with connect(database.recorder_dsn, "test") as connection:
        with deadline(connection, 5):
            connection.execute("SELECT 1")
        with pytest.raises(psycopg.OperationalError), deadline(connection, 0.1):
            connection.execute("SELECT pg_sleep(2)")
        assert connection.closed


def test_connection_strings_are_shown_without_their_password() -> None:
    dsn = "postgresql://fairlane:hush@db.internal:6432/fairlane?sslmode=verify-full"
    assert describe(dsn) == "fairlane@db.internal:6432/fairlane"
    assert describe("user=fairlane password=hush dbname=f") == "fairlane@localhost:5432/f"
    with pytest.raises(ValueError, match="not a Postgres connection string") as caught:
        describe("postgresql://fairlane:hush@[")
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("owner_dsn", "said"),
    [
        ("nonsense hush", "not a Postgres connection string"),
        ("postgresql://fairlane_owner:hush@127.0.0.1:1/fairlane", "fairlane_owner@127.0.0.1:1/fairlane: "),
    ],
)
def test_what_is_wrong_is_one_line_without_a_secret(owner_dsn: str, said: str) -> None:
    with pytest.raises(DatabaseError) as caught:
        upgrade(Settings(postgres_owner_dsn=owner_dsn))
    message = str(caught.value)
    assert said in message
    assert "hush" not in message
    assert "\n" not in message


def test_the_command_line(database: PostgresServer) -> None:
    before = fairlane(database, "status")
    assert before.returncode == 2
    assert f"to be applied: {', '.join(REVISIONS)}" in before.stdout
    assert f"applied {', '.join(REVISIONS)}" in fairlane(database, "upgrade").stdout
    state = fairlane(database, "status", "--json")
    assert (state.returncode, json.loads(state.stdout)["pending"]) == (0, [])


def test_without_the_extra_the_command_says_what_to_install(database: PostgresServer) -> None:
    script = "import sys; sys.modules['alembic'] = None; from fairlane_server.cli import main; main(['db', 'upgrade'])"
    done = subprocess.run((sys.executable, "-c", script), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == "error: this needs the extra `db`: pip install 'fairlane[db]' (alembic is missing)"


def fairlane(database: PostgresServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``fairlane db``."""
    return subprocess.run(
        (sys.executable, "-m", "fairlane_server.cli", "db", *arguments),
        env={"POSTGRES_OWNER_DSN": database.owner_dsn},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def tenants_seen(connection: "psycopg.Connection[Any]", acting_for: str | None) -> list[str]:
    """The tenants whose audit a transaction can read."""
    with connection.transaction():
        if acting_for is not None:
            act_for(connection, acting_for)
        return [tenant for (tenant,) in connection.execute("SELECT tenant FROM audit_logs ORDER BY tenant")]
