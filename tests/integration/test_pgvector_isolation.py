"""No tenant sees another's passages: not without a filter, not by naming a partition, not by way of a function."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from fairlane_server.postgres.connection import ALL_TENANTS, act_for, connect
from fairlane_server.retrieval.pgvector_search import matching_statement
from fairlane_server.retrieval.pgvector_store import PgVectorCollections
from tests.kit.pgvector_kit import DIMENSIONS, document, number_of, unit_vectors
from tests.kit.stack import PostgresServer

READABLE = {
    "dispatcher": ("collections", "passages"),
    "operator": ("collections", "documents"),
    "owner": ("collections", "documents", "passages"),
}


@pytest.fixture
def tables(migrated: PostgresServer) -> PostgresServer:
    """A database in which acme and globex have a collection of the same name."""
    with PgVectorCollections(migrated.operator_dsn) as store:
        for tenant in ("acme", "globex"):
            store.create(tenant, "handbook", "e", DIMENSIONS)
            texts = [f"The secret of {tenant} is in vault {number}." for number in range(3)]
            store.put(tenant, "handbook", [document("a.md", texts, unit_vectors(3))])
    return migrated


@contextmanager
def acting(dsn: str, tenant: str | None) -> "Iterator[psycopg.Connection[Any]]":
    with connect(dsn, "test") as connection:
        if tenant is not None:
            act_for(connection, tenant)
        yield connection
        connection.rollback()


def tenants_in(connection: "psycopg.Connection[Any]", table: str) -> list[str]:
    """Whose rows a transaction reads with no filter at all."""
    return [tenant for (tenant,) in connection.execute(f"SELECT DISTINCT tenant FROM {table} ORDER BY 1".encode())]  # noqa: S608 - names of ours


@pytest.mark.parametrize("role", READABLE)
def test_without_a_filter_a_tenant_reads_its_own_rows(tables: PostgresServer, role: str) -> None:
    dsn = getattr(tables, f"{role}_dsn")
    for table in READABLE[role]:
        with acting(dsn, "acme") as connection:
            assert tenants_in(connection, table) == ["acme"]
        with acting(dsn, None) as connection:
            assert tenants_in(connection, table) == []
        with acting(dsn, ALL_TENANTS) as connection:
            assert tenants_in(connection, table) == (["acme", "globex"] if role == "owner" else [])
    query = f"SELECT source FROM passages_{number_of(tables, 'globex')}".encode()  # noqa: S608 - as above
    with acting(dsn, "acme") as connection:
        assert connection.execute(query).fetchall() == []
    with acting(dsn, "globex") as connection:
        assert len(connection.execute(query).fetchall()) == 3


def test_a_filter_that_tells_what_it_sees_is_asked_about_own_rows_only(tables: PostgresServer) -> None:
    with acting(tables.dispatcher_dsn, "acme") as connection:
        noisy = "CREATE FUNCTION pg_temp.tell(text) RETURNS boolean COST 0.0001 LANGUAGE plpgsql"
        connection.execute(f"{noisy} AS 'BEGIN RAISE NOTICE ''%'', $1; RETURN true; END'".encode())
        told: list[str] = []
        connection.add_notice_handler(lambda notice: told.append(notice.message_primary or ""))
        for table in ("passages", f"passages_{number_of(tables, 'globex')}"):
            connection.execute(f"SELECT 1 FROM {table} WHERE pg_temp.tell(text)".encode())  # noqa: S608 - as above
        assert len(told) == 3
        assert all("acme" in text for text in told)


def test_words_are_read_by_nobody_and_matched_for_their_tenant_only(tables: PostgresServer) -> None:
    theirs = number_of(tables, "globex")
    query = matching_statement(theirs, 10)
    match = "SELECT count(*) FROM match_passages(%s, 'secret', 10)"
    with acting(tables.dispatcher_dsn, "acme") as connection:
        assert connection.execute(query, ("secret vault",)).fetchall() == []
        assert connection.execute(match, (theirs,)).fetchone() == (0,)
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute(f"SELECT * FROM passage_terms_{theirs}".encode())  # noqa: S608 - as above
    with acting(tables.dispatcher_dsn, None) as connection:
        assert connection.execute(match, (theirs,)).fetchone() == (0,)
    with acting(tables.dispatcher_dsn, "globex") as connection:
        assert len(connection.execute(query, ("secret vault",)).fetchall()) == 3
        assert connection.execute(match, (theirs,)).fetchone() == (3,)


def test_words_are_matched_for_their_tenant_only_even_by_an_owner_without_policies(tables: PostgresServer) -> None:
    theirs = number_of(tables, "globex")
    with psycopg.connect(tables.owner_dsn, connect_timeout=5) as owner:
        owner.execute("ALTER TABLE collections NO FORCE ROW LEVEL SECURITY")
    match = "SELECT count(*) FROM match_passages(%s, 'secret', 10)"
    for tenant, count in (("acme", 0), (None, 0), ("globex", 3)):
        with acting(tables.dispatcher_dsn, tenant) as connection:
            assert connection.execute(match, (theirs,)).fetchone() == (count,)


def test_nothing_can_be_put_into_or_taken_from_another_tenant(tables: PostgresServer) -> None:
    theirs = number_of(tables, "globex")
    insert = (
        f"INSERT INTO passages_{theirs} (collection_id, tenant, source, ordinal, heading, text, tokens, embedding) "  # noqa: S608 - as above
        f"VALUES ({theirs}, '%s', 'x', 0, '', 'planted', 1, '[1,0,0,0,0,0,0,0]')"
    )
    document_row = f"INSERT INTO documents VALUES ({theirs}, '%s', 'x', 'h', 't', 0)"  # noqa: S608 - as above
    refused = (psycopg.errors.InsufficientPrivilege, psycopg.errors.CheckViolation)
    for statement in (insert, document_row):
        with acting(tables.operator_dsn, "acme") as connection, pytest.raises(refused):
            connection.execute((statement % "globex").encode())
    with acting(tables.operator_dsn, "acme") as connection, pytest.raises(refused):
        connection.execute((insert % "acme").encode())
    with acting(tables.operator_dsn, "acme") as connection, pytest.raises(psycopg.errors.ForeignKeyViolation):
        connection.execute((document_row % "acme").encode())
    with acting(tables.operator_dsn, "acme") as connection:
        for table in (f"passages_{theirs}", "documents WHERE tenant = 'globex' AND source"):
            where = "" if " WHERE" not in table else " = 'a.md'"
            assert connection.execute(f"DELETE FROM {table}{where}".encode()).rowcount == 0  # noqa: S608 - as above
        changed = connection.execute("UPDATE collections SET version = 0 WHERE collection_id = %s", (theirs,))
        assert changed.rowcount == 0


def test_functions_that_run_as_the_owner_act_for_the_tenant_of_the_transaction(tables: PostgresServer) -> None:
    with acting(tables.operator_dsn, "initech") as connection:
        assert connection.execute("SELECT delete_collection('handbook')").fetchone() == (False,)
        assert connection.execute("SELECT index_collection('handbook', 0)").fetchone() == (False,)
    for tenant in (None, ALL_TENANTS, "", "acme'; DROP TABLE passages; --"):
        for call in ("create_collection('x', 'e', 3)", "delete_collection('handbook')", "index_collection('x', 0)"):
            with acting(tables.operator_dsn, tenant) as connection, pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(f"SELECT {call}".encode())


def test_a_table_of_the_callers_own_is_not_mistaken_for_ours(tables: PostgresServer) -> None:
    theirs = number_of(tables, "globex")
    with acting(tables.dispatcher_dsn, "acme") as connection:
        connection.execute(
            "CREATE TEMP TABLE collections AS SELECT %s::bigint AS collection_id, 3 AS passages", (theirs,)
        )
        connection.execute("SET LOCAL search_path = pg_temp, public")
        found = connection.execute("SELECT count(*) FROM match_passages(%s, 'secret', 10)", (theirs,)).fetchone()
        assert found == (0,)


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO collections (tenant, name, embedder, dimensions) VALUES ('acme', 'x', 'e', 3)",
        "DELETE FROM collections",
        "UPDATE collections SET tenant = 'globex'",
        "UPDATE collections SET dimensions = 3",
        "UPDATE documents SET tenant = 'globex'",
        "UPDATE {part} SET tenant = 'globex'",
        "TRUNCATE {part}",
        "DROP TABLE {part}",
        "ALTER TABLE {part} DISABLE ROW LEVEL SECURITY",
        "ALTER TABLE passages DETACH PARTITION {part}",
        "CREATE INDEX ON {part} (text)",
        "SELECT setval('collection_versions', 1)",
        "SELECT acting_tenant()",
    ],
)
def test_neither_who_fills_collections_nor_who_searches_them_may_do_more(
    tables: PostgresServer, statement: str
) -> None:
    part = f"passages_{number_of(tables, 'acme')}"
    for dsn in (tables.operator_dsn, tables.dispatcher_dsn):
        with acting(dsn, "acme") as connection, pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute(statement.replace("{part}", part).encode())


def test_every_table_with_a_tenant_is_protected_partitions_too(tables: PostgresServer) -> None:
    query = """
        SELECT c.relname FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
        WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p') AND a.attname = 'tenant'
        AND NOT (c.relrowsecurity AND c.relforcerowsecurity)
    """
    with psycopg.connect(tables.owner_dsn, connect_timeout=5) as connection:
        assert connection.execute(query).fetchall() == []
        ours = connection.execute("SELECT count(*) FROM pg_policies WHERE tablename ~ '^passages'").fetchone()
    assert ours == (2 * 3,)
