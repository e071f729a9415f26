"""What each service's role may do in Postgres: exactly what ``rights.py`` says, by the server's word and by trying."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import psycopg
import pytest
from psycopg import sql

from fairlane.settings import Settings
from fairlane_server.api_keys.api_key import parse_key
from fairlane_server.api_keys.key_store import ApiKeys
from fairlane_server.postgres.connection import ALL_TENANTS, act_for, connect
from fairlane_server.postgres.migrations import upgrade
from fairlane_server.postgres.rights import RIGHTS, PostgresRole, Privileges
from tests.kit.pgvector_kit import DIMENSIONS, TEXTS, VECTORS, document, stored_handbook
from tests.kit.pipeline import unique_name
from tests.kit.stack import PostgresServer, migrated_database

TENANTS = ("acme", "globex")
REPLAY = """
INSERT INTO log_replays (replay, model, candidate, against, tenants, from_ms, until_ms, sample, most_outstanding,
    created_by, reason, created_at_ms)
VALUES ('y', 'm', '2', '1', '{}', 0, 1, 1, 2, 'me', '', 1)
"""
ROWS = {
    "results": "(request_id, tenant, source_topic, source_partition, source_offset, reply_topic, reply_partition, "
    "reply_offset, replied_at_ms, outcome, prompt_tokens, completion_tokens, cached_tokens, batch_size, degradations, "
    "passages, replies_seen, replays_seen) VALUES ('r', %(tenant)s, 's', 0, 0, 'r', 0, 0, 1, 'ok', 1, 1, 0, 1, '[]', "
    "'[]', 1, 0)",
    "usage": "(work_topic, work_partition, work_offset, log_topic, log_partition, log_offset, request_id, tenant, "
    "pool, model, model_version, priority_class, outcome, prompt_tokens, completion_tokens, cached_tokens, "
    "cost_tokens, engine_ms, occurred_at_ms, events_seen, cost_nanos, currency) VALUES (%(tenant)s, 0, 0, 'l', 0, 0, "
    "'r', %(tenant)s, 'p', 'm', '1', 'high', 'ok', 1, 1, 0, 2, 5, 1, 1, 7, 'XTS')",
    "audit_logs": "VALUES (%(tenant)s, 0, 0, 'r', %(tenant)s, 'admitted', 'me', 1, 's', 0, 0, NULL, NULL, '{}')",
    "conversation_turns": "VALUES (%(tenant)s, 'talk', 'r', 's', 0, 0, 1, 1, '[]', 'an answer', 1)",
    "tenants": "(tenant, weight, classes, models, services, max_queue_requests, max_queue_bytes) VALUES (%(tenant)s, "
    "1, '[]', '[]', '[]', 1, 1)",
    "backfill_jobs": "(job_id, tenant, spec, input_bytes, input_version, partitions, created_at_ms) VALUES ('j' || "
    "%(tenant)s, %(tenant)s, '{}', 1, '1', 1, 1)",
    "backfill_chunks": "VALUES ('j' || %(tenant)s, 0, %(tenant)s, 0, 1, 0, 0, 0, 0, 0)",
    "files": "(file_id, tenant, purpose, filename, created_at_ms) VALUES (%(tenant)s, %(tenant)s, 'batch', 'q', 1)",
    "document_uploads": "(upload_id, tenant, source, format, size_bytes, created_at_ms) VALUES ('u' || %(tenant)s, "
    "%(tenant)s, 'a.md', 'markdown', 1, 1)",
    "erasures": "(erasure_id, tenant, kind, subject, names, requested_by, requested_at_ms) VALUES ('e' || %(tenant)s, "
    "%(tenant)s, 'requests', 's', '{}', 'key', 1)",
    "erased": "VALUES (%(tenant)s, 'request', 'd', 1, 1)",
    "users": "(tenant, subject, role) VALUES (%(tenant)s, 'me', 'viewer')",
    "api_keys": "(key_id, tenant, name, role, scopes, secret_sha256) VALUES (left(md5(%(tenant)s), 16), %(tenant)s, "
    "'mine', 'viewer', '{}', sha256('x'))",
    "admin_events": "(tenant, event, author, details) VALUES (%(tenant)s, 'user_set', 'me', '{}')",
    "barred_tenants": "(tenant) VALUES (%(tenant)s)",
    "feedback": "(tenant, request_id, given_by, rating, tags, given_at_ms, log_topic, log_partition, log_offset) "
    "VALUES (%(tenant)s, 'r', 'me', 1, '[]', 1, 'l', 0, 0)",
    "label_items": "(tenant, request_id, origin, model, model_version, task, input, output, answered_at_ms, "
    "queued_at_ms) VALUES (%(tenant)s, 'r', 'feedback', 'm', '1', 'generate', '{}', '{}', 1, 1)",
    "labels": "(tenant, request_id, reviewer, given_at_ms) VALUES (%(tenant)s, 'r', 'me', 1)",
    "evaluation_results": "(run, tenant, request_id, arm, kind, source_topic, source_partition, source_offset, ended, "
    "outcome, prompt_tokens, completion_tokens, cached_tokens, batch_size, finished_at_ms, log_topic, log_partition, "
    "log_offset, replies_seen) VALUES ('run', %(tenant)s, 'r', 'candidate', 'shadow', 's', 0, 0, 'completed', 'ok', 1, "
    "1, 0, 1, 1, 'l', 0, 0, 1)",
    "log_replay_requests": "(replay, tenant, request_id, work_topic, work_partition, work_offset) VALUES ('y', "
    "%(tenant)s, 'r', 'w', 0, 0)",
    "drift_streams": "(tenant, model, task, version, block_requests, block, not_before_ms, monitors, statistics, "
    "watched, has_payload, seen_at_ms) VALUES (%(tenant)s, 'm', 'generate', '', 1, '{}', 0, '{}', '{}', 0, false, 1)",
    "drift_findings": "(tenant, finding_id, model, task, version, statistic, needs_consent, effect, log_evidence, "
    "log_needed, since_ms, until_ms, blocks, before, now, found_at_ms) VALUES (%(tenant)s, 'f' || %(tenant)s, 'm', "
    "'generate', '', 'prompt_tokens', false, 0, 0, 0, 0, 0, 1, '{}', '{}', 1)",
    "drift_samples": "VALUES (%(tenant)s, 'f' || %(tenant)s, 'r', 1, 1, 1)",
    "evaluation_sets": "(tenant, name, version, digest, examples, size_bytes, created_at_ms, created_by) VALUES "
    "(%(tenant)s, 'n', 1, 'd', 1, 1, 1, 'me')",
    "evaluation_examples": "(tenant, name, version, place, request_id, content) VALUES (%(tenant)s, 'n', 1, 0, 'r', "
    "'{}')",
    "evaluation_runs": "(tenant, run_id, set_name, set_version, set_digest, examples, reference, model, scorer, "
    "parameters, is_scheduled, started_at_ms, started_by) VALUES (%(tenant)s, 'r', 'n', 1, 'd', 1, 'm/1', 'm', "
    "'exact', '{}', true, 1, 'me')",
    "evaluation_scores": "(tenant, run_id, place, score, reason, request_id, prompt_tokens, completion_tokens) VALUES "
    "(%(tenant)s, 'r', 0, 1, '', 'r', 1, 1)",
    "evaluation_schedules": "(tenant, model, set_name, scorer, parameters, every_hours, created_at_ms, created_by) "
    "VALUES (%(tenant)s, 'm', 'n', 'exact', '{}', 1, 1, 'me')",
    "judge_calibrations": "VALUES (%(tenant)s, 'c', 'j', '1', 'd', 'r', 'n', 1, 'd', '{}', false, 1, 'me')",
    "batches": "VALUES ('b' || %(tenant)s, %(tenant)s, 'j' || %(tenant)s, 'i', 'o', 'e', NULL, 1)",
}
"""A row of a tenant in each table that a service writes to, but for those of collections."""

RELATIONS = """
SELECT c.oid::regclass::text, relkind = 'S', ARRAY(
    SELECT attname::text FROM pg_attribute WHERE attrelid = c.oid AND attnum > 0 AND NOT attisdropped ORDER BY attnum
) FROM pg_class AS c
WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p', 'S', 'v', 'm') AND pg_get_userbyid(relowner) = %s
"""
FUNCTIONS = """
SELECT p.oid::regprocedure::text, p.proname::text, ARRAY(SELECT type::regtype::text FROM unnest(p.proargtypes) AS type)
FROM pg_proc AS p WHERE pronamespace = 'public'::regnamespace AND pg_get_userbyid(proowner) = %s
"""
OWNER = "fairlane_owner"
OF_TABLES = ("SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "REFERENCES", "TRIGGER", "MAINTAIN")
OF_COLUMNS = ("SELECT", "INSERT", "UPDATE", "REFERENCES")
OF_SEQUENCES = ("USAGE", "SELECT", "UPDATE")

each_role = pytest.mark.parametrize("role", PostgresRole)


@dataclass(frozen=True)
class Database:
    """A database with every table, a partition and a row of each tenant in each of them."""

    server: PostgresServer

    @cached_property
    def relations(self) -> Mapping[str, tuple[bool, list[str]]]:
        """By name: whether it is a sequence, and its columns."""
        with psycopg.connect(self.server.owner_dsn) as owner:
            found = owner.execute(RELATIONS, (OWNER,)).fetchall()
        return {name: (is_sequence, columns) for name, is_sequence, columns in found}

    @cached_property
    def functions(self) -> Mapping[str, tuple[str, list[str]]]:
        """By name and types: the name, and the types."""
        with psycopg.connect(self.server.owner_dsn) as owner:
            found = owner.execute(FUNCTIONS, (OWNER,)).fetchall()
        return {signature: (name, types) for signature, name, types in found}

    @property
    def partitions(self) -> list[str]:
        return [name for name in self.relations if name.startswith("passages_")]

    def wanted(self, role: PostgresRole) -> Mapping[str, Privileges]:
        return RIGHTS[role].by_object(self.partitions)


@pytest.fixture(scope="module")
def database(postgres: PostgresServer) -> Iterator[Database]:
    with migrated_database(postgres, unique_name()) as server:
        if len({server.dsn(role) for role in PostgresRole}) < len(PostgresRole):
            pytest.skip("this Postgres has no roles for the services")
        with stored_handbook(server) as store:
            store.create("globex", "handbook", "e", DIMENSIONS)
            store.put("globex", "handbook", [document("a.md", TEXTS, VECTORS)])
        with ApiKeys(server.owner_dsn) as keys:
            keys.create("acme", "tests")
        with connect(server.owner_dsn, "tests") as owner:
            act_for(owner, ALL_TENANTS)
            owner.execute(REPLAY)
            for table, row in ROWS.items():
                for tenant in TENANTS:
                    owner.execute(f"INSERT INTO {table} {row}".encode(), {"tenant": tenant})
        yield Database(server)


def refusal(connection: psycopg.Connection, statement: str, acting_for: str = "acme", **values: str) -> str | None:
    """Why the role may not do it; None if it may, whatever else comes of it. Nothing is changed."""
    act_for(connection, acting_for)
    try:
        connection.execute(statement.encode(), values or None)
    except psycopg.errors.InsufficientPrivilege as error:
        return error.diag.message_primary
    except psycopg.Error:
        return None
    finally:
        connection.rollback()
    return None


def may(granted: Privileges, verb: str, column: str = "") -> bool:
    return (verb, "") in granted or (verb, column) in granted


def assert_granted(database: Database, role: PostgresRole) -> None:
    """Every privilege on every object is as the table says, by the server's word."""
    wanted, name = database.wanted(role), role.name_in()
    asked: list[tuple[sql.Composable, bool, str]] = []

    def ask(function: str, target: str, verb: str, column: str, expected: bool) -> None:
        parts = [name, target, *([column] if column else []), verb]
        call = sql.SQL("{}({})").format(sql.SQL(function), sql.SQL(", ").join(map(sql.Literal, parts)))
        asked.append((call, expected, f"{verb} {target} {column}"))

    for relation, (is_sequence, columns) in database.relations.items():
        if is_sequence:
            granted = wanted.get(f"SEQUENCE {relation}", frozenset())
            for verb in OF_SEQUENCES:
                ask("has_sequence_privilege", relation, verb, "", may(granted, verb))
            continue
        granted = wanted.get(f"TABLE {relation}", frozenset())
        for verb in OF_TABLES:
            ask("has_table_privilege", relation, verb, "", may(granted, verb))
        for verb in OF_COLUMNS:
            for column in columns:
                ask("has_column_privilege", relation, verb, column, may(granted, verb, column))
    for signature in database.functions:
        granted = wanted.get(f"FUNCTION {signature}", frozenset())
        ask("has_function_privilege", signature, "EXECUTE", "", may(granted, "EXECUTE"))
    with psycopg.connect(database.server.owner_dsn) as owner:
        answers = owner.execute(
            sql.SQL("SELECT unnest(ARRAY[{}])").format(sql.SQL(", ").join(call for call, _, _ in asked))
        ).fetchall()
    wrong = [
        f"{'lacks' if expected else 'has'} {what}"
        for (_, expected, what), (answer,) in zip(asked, answers, strict=True)
        if answer is not expected
    ]
    assert not wrong, wrong
    assert len(asked) > 500


@each_role
def test_the_server_grants_what_the_table_says_and_nothing_else(database: Database, role: PostgresRole) -> None:
    known = {f"TABLE {name}" for name in database.relations} | {f"FUNCTION {name}" for name in database.functions}
    known |= {f"SEQUENCE {name}" for name, (is_sequence, _) in database.relations.items() if is_sequence}
    assert database.wanted(role).keys() <= known
    assert len(database.partitions) == 2
    assert_granted(database, role)


@each_role
def test_every_statement_is_let_through_or_refused_as_the_table_says(database: Database, role: PostgresRole) -> None:
    wanted, dsn = database.wanted(role), database.server.dsn(role)
    expected: dict[str, bool] = {}
    for relation, (is_sequence, columns) in database.relations.items():
        if is_sequence:
            granted = wanted.get(f"SEQUENCE {relation}", frozenset())
            expected[f"SELECT nextval('{relation}')"] = may(granted, "USAGE")
            expected[f"SELECT setval('{relation}', 1)"] = False
            continue
        granted = wanted.get(f"TABLE {relation}", frozenset())
        for column in columns:
            expected[f'SELECT "{column}" FROM {relation} WHERE false'] = may(granted, "SELECT", column)  # noqa: S608 - our own names
            expected[f'UPDATE {relation} SET "{column}" = DEFAULT WHERE false'] = may(granted, "UPDATE", column)  # noqa: S608 - as above
        # It names no column: the right to one is enough.
        expected[f"INSERT INTO {relation} SELECT WHERE false"] = any(verb == "INSERT" for verb, _ in granted)
        expected[f"DELETE FROM {relation} WHERE false"] = may(granted, "DELETE")  # noqa: S608 - as above
        for statement in ("TRUNCATE {}", "DROP TABLE {}", "ALTER TABLE {} DISABLE ROW LEVEL SECURITY"):
            expected[statement.format(relation)] = False
    for signature, (name, types) in database.functions.items():
        nothing = ", ".join(f"NULL::{kind}" for kind in types)
        expected[f"SELECT {name}({nothing})"] = may(wanted.get(f"FUNCTION {signature}", frozenset()), "EXECUTE")
    with connect(dsn, "tests") as connection:
        said = {statement: refusal(connection, statement) for statement in expected}
    assert {statement: why is None for statement, why in said.items()} == expected
    assert {True, False} == set(expected.values())


BECOMING = (
    *(f"SET ROLE {role.name_in()}" for role in PostgresRole),
    *(f"SET ROLE {OWNER}", f"SET SESSION AUTHORIZATION {OWNER}", "ALTER ROLE CURRENT_USER BYPASSRLS"),
    *(f"GRANT {OWNER} TO CURRENT_USER", "CREATE ROLE another", "CREATE SCHEMA another"),
    *("CREATE TABLE mine (n int)", "CREATE FUNCTION mine() RETURNS int LANGUAGE sql AS 'SELECT 1'"),
    *("GRANT SELECT ON api_keys TO CURRENT_USER", "ALTER POLICY own_rows ON results USING (true)"),
    *("COPY results TO PROGRAM 'true'", "SELECT pg_read_file('PG_VERSION')"),
)


@each_role
def test_no_role_owns_anything_or_becomes_more_than_it_is(database: Database, role: PostgresRole) -> None:
    name, dsn = role.name_in(), database.server.dsn(role)
    with psycopg.connect(dsn) as connection:
        attributes = connection.execute(
            "SELECT rolsuper, rolbypassrls, rolcreaterole, rolcreatedb, rolreplication FROM pg_roles WHERE rolname = "
            "current_user"
        ).fetchone()
        assert connection.execute("SELECT current_user::text").fetchone() == (name,)
        assert attributes == (False,) * 5
        dependent = "SELECT count(*) FROM pg_shdepend WHERE deptype = 'o' AND refobjid = current_user::regrole"
        assert connection.execute(dependent).fetchone() == (0,)
        member = "SELECT count(*) FROM pg_auth_members WHERE current_user::regrole IN (member, roleid)"
        assert connection.execute(member).fetchone() == (0,)
        connection.rollback()
        for statement in BECOMING:
            # Granting what one has, without the right to, is a warning.
            if statement != f"SET ROLE {name}" and not (role is PostgresRole.ADMIN and "ON api_keys" in statement):
                assert refusal(connection, statement) is not None, statement


def with_tenant(database: Database, role: PostgresRole) -> list[str]:
    """The tables of which the role may read whose their rows are."""
    return [
        table
        for table, (_, columns) in database.relations.items()
        if "tenant" in columns and may(database.wanted(role).get(f"TABLE {table}", frozenset()), "SELECT", "tenant")
    ]


@each_role
def test_a_role_sees_one_tenant_at_a_time_and_all_of_them_where_the_table_says(
    database: Database, role: PostgresRole
) -> None:
    def seen(table: str, acting_for: str | None) -> set[str]:
        with connection.transaction():
            if acting_for is not None:
                act_for(connection, acting_for)
            return {str(tenant) for (tenant,) in connection.execute(f"SELECT tenant FROM {table}".encode())}  # noqa: S608 - our own names

    assert RIGHTS[role].all_tenants <= RIGHTS[role].tables.keys()
    tables = [name for name in with_tenant(database, role) if name not in database.partitions]
    assert tables
    with connect(database.server.dsn(role), "tests") as connection:
        for table in tables:
            assert seen(table, None) == seen(table, "") == seen(table, "%") == set(), table
            assert [seen(table, tenant) for tenant in TENANTS] == [{tenant} for tenant in TENANTS], table
            all_of_them = {*TENANTS} if table in RIGHTS[role].all_tenants else set()
            assert seen(table, ALL_TENANTS) == all_of_them, table


@each_role
def test_a_role_changes_nothing_of_another_tenant(database: Database, role: PostgresRole) -> None:
    wanted = database.wanted(role)
    with connect(database.server.dsn(role), "tests") as connection:
        for table in with_tenant(database, role):
            granted = wanted[f"TABLE {table}"]
            statements = [f"DELETE FROM {table}"] if may(granted, "DELETE") else []  # noqa: S608 - our own names
            columns = [column or "tenant" for verb, column in granted if verb == "UPDATE"]
            statements += [f'UPDATE {table} SET "{column}" = DEFAULT' for column in columns]  # noqa: S608 - as above
            for statement in statements:
                act_for(connection, "globex")
                assert connection.execute(f"{statement} WHERE tenant = 'acme'".encode()).rowcount == 0, statement
                connection.rollback()
        for table, row in ROWS.items():
            if may(wanted.get(f"TABLE {table}", frozenset()), "INSERT"):
                why = refusal(connection, f"INSERT INTO {table} {row}", "globex", tenant="acme")
                assert why is not None, table
                assert "row-level security" in why, table


def test_the_gateway_finds_a_key_by_its_id_and_lists_none(database: Database) -> None:
    with ApiKeys(database.server.owner_dsn) as keys:
        shown = parse_key(keys.create("umbrella", "tests").text)
    assert shown is not None
    with connect(database.server.gateway_dsn, "tests") as connection:
        act_for(connection, "")
        query = "SELECT tenant FROM find_api_key(%s, %s)"
        assert connection.execute(query, (shown.key_id, shown.secret_sha256)).fetchall() == [("umbrella",)]
        assert connection.execute(query, (shown.key_id, b"\0" * 32)).fetchall() == []
        assert connection.execute(query, ("%", shown.secret_sha256)).fetchall() == []
        assert connection.execute("SELECT current_setting('fairlane.tenant')").fetchone() == ("",)


def test_every_table_of_tenants_counts_for_what_is_left_of_one(database: Database) -> None:
    of_tenants = {name for name, (_, columns) in database.relations.items() if "tenant" in columns}
    uncounted = {"tenants", "admin_events", "documents", "passages", "backfill_chunks", *database.partitions}
    with connect(database.server.admin_dsn, "tests") as connection:
        act_for(connection, "")
        ((left,),) = connection.execute("SELECT tenant_remains('acme')").fetchall()
        ((nothing,),) = connection.execute("SELECT tenant_remains('initech')").fetchall()
        assert connection.execute("SELECT current_setting('fairlane.tenant')").fetchone() == ("",)
    assert sorted(left) == sorted(of_tenants - uncounted)
    assert nothing == []
    # Each question is answered by an index.
    with connect(database.server.owner_dsn, "tests") as owner:
        leading = owner.execute(
            "SELECT DISTINCT i.indrelid::regclass::text FROM pg_index AS i JOIN pg_attribute AS a "
            "ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0] WHERE a.attname = 'tenant' AND i.indpred IS NULL"
        ).fetchall()
    assert set(left) <= {name for (name,) in leading}


def test_an_upgrade_takes_back_what_was_granted_and_gives_back_what_was_revoked(migrated: PostgresServer) -> None:
    settings = Settings(postgres_owner_dsn=migrated.owner_dsn)
    with stored_handbook(migrated), connect(migrated.owner_dsn, "tests") as owner:
        for role in PostgresRole:
            name = role.name_in()
            for target in ("TABLES", "SEQUENCES", "ROUTINES"):
                # Those of the extension are not the owner's to grant.
                if target != "ROUTINES":
                    owner.execute(f"GRANT ALL ON ALL {target} IN SCHEMA public TO {name} WITH GRANT OPTION".encode())
            owner.execute(f"GRANT EXECUTE ON FUNCTION acting_tenant() TO {name}".encode())
            owner.execute(f"ALTER POLICY trusted_service ON collections TO {name}".encode())
        owner.execute("REVOKE ALL ON passages FROM fairlane_dispatcher CASCADE")
        owner.execute("ALTER POLICY trusted_service ON results TO CURRENT_USER")
    database = Database(migrated)
    with pytest.raises(AssertionError):
        assert_granted(database, PostgresRole.GATEWAY)
    done = upgrade(settings)
    assert (done.applied, done.missing_roles) == ((), ())
    assert done.roles == tuple(role.name_in() for role in PostgresRole)
    assert done.rights_changed > 0
    for role in PostgresRole:
        assert_granted(database, role)
    assert trusted(migrated, "results") == {OWNER, "fairlane_recorder", "fairlane_operator", "fairlane_admin"}
    assert trusted(migrated, "collections") == trusted(migrated, database.partitions[0]) == {OWNER}
    assert upgrade(settings).rights_changed == 0


def trusted(server: PostgresServer, table: str) -> set[str]:
    """Who may act for all tenants on a table."""
    query = "SELECT roles FROM pg_policies WHERE policyname = 'trusted_service' AND tablename = %s"
    with psycopg.connect(server.owner_dsn) as owner:
        row: tuple[Any, ...] | None = owner.execute(query, (table,)).fetchone()
    return set(row[0]) if row else set()
