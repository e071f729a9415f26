"""A gateway that was taken over: what its role in Postgres lets it do, tried with its own connection."""

import psycopg
import pytest

from fairlane.settings import Settings
from fairlane_server.api_keys.key_store import ApiKeys
from fairlane_server.postgres.connection import ALL_TENANTS, act_for, connect
from fairlane_server.postgres.migrations import RIGHTS, upgrade
from tests.kit.stack import PostgresServer

pytestmark = pytest.mark.broker

ROWS = (
    (
        "INSERT INTO usage VALUES ('w', 0, %(at)s, 'l', 0, %(at)s, 'r', %(tenant)s, 'p', 'm', '1', 'high', 'ok', NULL,"
        " 1, 1, 0, 2, 5, 1, 1)"
    ),
    "INSERT INTO audit_logs VALUES ('l', 0, %(at)s, 'r', %(tenant)s, 'admitted', 'me', 1, 's', 0, 0, NULL, NULL, '{}')",
    (
        "INSERT INTO files (file_id, tenant, purpose, filename, size_bytes, created_at_ms)"
        " VALUES ('f' || %(at)s, %(tenant)s, 'batch', 'q.jsonl', 1, 1)"
    ),
)
TABLES = "SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY 1"


@pytest.fixture
def server(migrated: PostgresServer) -> PostgresServer:
    if migrated.gateway_dsn == migrated.dsn:
        pytest.skip("this Postgres has no role for the gateway")
    with connect(migrated.dsn, "tests") as connection:
        act_for(connection, ALL_TENANTS)
        for at, tenant in enumerate(("acme", "globex")):
            for row in ROWS:
                connection.execute(row.encode(), {"at": at, "tenant": tenant})
    return migrated


def gateway(server: PostgresServer, tenant: str) -> psycopg.Connection:
    connection = connect(server.gateway_dsn, "tests")
    act_for(connection, tenant)
    return connection


def refuses(server: PostgresServer, statement: str, tenant: str = "acme") -> bool:
    with gateway(server, tenant) as connection:
        try:
            connection.execute(statement.encode())
        except psycopg.errors.InsufficientPrivilege:
            connection.rollback()
            return True
    return False


@pytest.mark.parametrize("table", ["usage", "audit_logs", "files"])
def test_it_sees_one_tenant_at_a_time_and_never_all_of_them(server: PostgresServer, table: str) -> None:
    query = f"SELECT tenant FROM {table} ORDER BY 1".encode()  # noqa: S608 - our own names
    for tenant, seen in {"acme": ["acme"], "globex": ["globex"], ALL_TENANTS: [], "": [], "%": []}.items():
        with gateway(server, tenant) as connection:
            assert [row[0] for row in connection.execute(query)] == seen
    with connect(server.dsn, "tests") as trusted:
        act_for(trusted, ALL_TENANTS)
        assert [row[0] for row in trusted.execute(query)] == ["acme", "globex"], "the services' role may"


def test_it_reads_nothing_but_what_it_answers_with(server: PostgresServer) -> None:
    with connect(server.owner_dsn, "tests") as owner:
        tables = {str(row[0]) for row in owner.execute(TABLES)}
    assert set(RIGHTS) < tables
    assert {table for table in tables if refuses(server, f"SELECT 1 FROM {table}")} == tables - set(RIGHTS)  # noqa: S608 - our own names


@pytest.mark.parametrize("table", ["results", "usage", "audit_logs"])
@pytest.mark.parametrize("change", ["DELETE FROM {}", "UPDATE {} SET tenant = tenant", "TRUNCATE {}", "DROP TABLE {}"])
def test_it_changes_nothing_that_was_recorded(server: PostgresServer, table: str, change: str) -> None:
    assert refuses(server, change.format(table))


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO results SELECT * FROM results",
        "INSERT INTO audit_logs SELECT * FROM audit_logs",
        "UPDATE files SET tenant = 'globex'",
        "UPDATE backfill_jobs SET tenant = 'globex'",
        "UPDATE backfill_jobs SET token = 0",
        "DELETE FROM backfill_jobs",
        "DELETE FROM batches",
        "SET ROLE fairlane",
        "SET ROLE fairlane_owner",
        "SET SESSION AUTHORIZATION fairlane",
        "ALTER ROLE fairlane_gateway BYPASSRLS",
        "ALTER TABLE files DISABLE ROW LEVEL SECURITY",
        "CREATE TABLE mine (n int)",
    ],
)
def test_it_becomes_nobody_else_and_moves_nothing_to_another_tenant(server: PostgresServer, statement: str) -> None:
    assert refuses(server, statement)


def test_it_gives_no_tenant_a_file_of_another(server: PostgresServer) -> None:
    insert = "INSERT INTO files (file_id, tenant, purpose, filename, created_at_ms) VALUES ('x', 'globex', 'b', 'q', 1)"
    assert refuses(server, insert)


def test_it_finds_a_key_by_its_id_and_lists_none(server: PostgresServer) -> None:
    with ApiKeys(server.owner_dsn) as keys:
        key = keys.create("acme", "tests").key
    with gateway(server, "") as connection:
        query = "SELECT tenant FROM find_api_key(%s, %s)"
        assert connection.execute(query, (key.key_id, b"\0" * 32)).fetchall() == [("acme",)]
        assert connection.execute(query, ("%", b"\0" * 32)).fetchall() == []
        assert connection.execute("SELECT current_setting('fairlane.tenant')").fetchone() == ("",)
    assert refuses(server, "SELECT 1 FROM api_keys", ALL_TENANTS)
    assert refuses(server, "SELECT 1 FROM users", ALL_TENANTS)


def test_it_removes_no_old_rows(server: PostgresServer) -> None:
    assert refuses(server, "SELECT remove_old_rows('results', 0, 10)")


def test_rights_that_it_had_before_are_taken_away(server: PostgresServer) -> None:
    with connect(server.owner_dsn, "tests") as owner:
        owner.execute("GRANT ALL ON ALL TABLES IN SCHEMA public TO fairlane_gateway")
    assert not refuses(server, "DELETE FROM results")
    upgrade(Settings(postgres_dsn=server.dsn, postgres_owner_dsn=server.owner_dsn))
    assert refuses(server, "DELETE FROM results")
