"""Roles as an administrator may have made them: missing, too strong, of an older version, or one for everything."""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import psycopg
import pytest
from alembic import command
from psycopg.conninfo import make_conninfo

from deploy.local.postgres import ADMIN_ROLE
from fairlane.settings import Settings
from fairlane_server.api_keys.api_key import parse_key
from fairlane_server.api_keys.key_store import ApiKeys
from fairlane_server.cli import main
from fairlane_server.postgres import migrations
from fairlane_server.postgres.connection import act_for, connect
from fairlane_server.postgres.migrations import DatabaseError, upgrade
from fairlane_server.postgres.rights import PostgresRole
from producers.backfill.job_store import JobStore
from stream_processors.recorder.positions import Partition
from stream_processors.recorder.store import RecorderStore
from tests.kit.own_postgres import OwnPostgres
from tests.kit.pgvector_kit import PATIENT_S, VECTORS, searching, stored_handbook
from tests.kit.pipeline import unique_name
from tests.kit.stack import PostgresServer, empty_database, migrated_database

PASSWORD = "a-password"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PostgresServer, str]]:
    """A server, and how its superuser connects to it."""
    folder = tmp_path_factory.mktemp("roles")
    with OwnPostgres(folder) as running:
        passwords = json.loads((folder / "postgres" / "passwords.json").read_text(encoding="utf-8"))
        admin = make_conninfo(running.server.owner_dsn, user=ADMIN_ROLE, password=passwords[ADMIN_ROLE])
        yield running.server, admin


@pytest.fixture
def database(own: tuple[PostgresServer, str]) -> Iterator[PostgresServer]:
    with migrated_database(own[0], unique_name()) as made:
        yield made


def as_admin(database: PostgresServer, admin: str, *statements: str) -> None:
    """Run these in a database of the server."""
    name = psycopg.conninfo.conninfo_to_dict(database.owner_dsn)["dbname"]
    with psycopg.connect(admin, dbname=str(name), autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


STRONGER = {
    "is a superuser": ("ALTER ROLE {} SUPERUSER", "ALTER ROLE {} NOSUPERUSER"),
    "bypasses row-level security": ("ALTER ROLE {} BYPASSRLS", "ALTER ROLE {} NOBYPASSRLS"),
    "is a member of the owner": ("GRANT fairlane_owner TO {}", "REVOKE fairlane_owner FROM {}"),
    "may read or write all tables": ("GRANT pg_read_all_data TO {}", "REVOKE pg_read_all_data FROM {}"),
    "is a member of the role of another": ("GRANT fairlane_recorder TO {}", "REVOKE fairlane_recorder FROM {}"),
    "may create in the schema public": ("GRANT CREATE ON SCHEMA public TO {}", "REVOKE ALL ON SCHEMA public FROM {}"),
}


@pytest.mark.parametrize("why", STRONGER)
def test_a_role_that_could_do_more_than_its_rights_is_refused(
    own: tuple[PostgresServer, str], database: PostgresServer, why: str
) -> None:
    role = PostgresRole.GATEWAY.name_in()
    begin, end = (statement.format(role) for statement in STRONGER[why])
    settings = Settings(postgres_owner_dsn=database.owner_dsn)
    as_admin(database, own[1], begin)
    try:
        with pytest.raises(DatabaseError, match=f"^{role} {why}") as refused:
            upgrade(settings)
    finally:
        as_admin(database, own[1], end)
    assert "\n" not in str(refused.value)
    assert upgrade(settings).rights_changed == 0


def test_what_others_granted_is_named(own: tuple[PostgresServer, str], database: PostgresServer) -> None:
    role = PostgresRole.GATEWAY.name_in()
    as_admin(
        database,
        own[1],
        "CREATE ROLE grantor",
        "GRANT SELECT ON api_keys TO grantor WITH GRANT OPTION",
        f"SET ROLE grantor; GRANT SELECT ON api_keys TO {role}",
    )
    try:
        with pytest.raises(DatabaseError, match="others granted it: REVOKE ALL ON TABLE api_keys"):
            upgrade(Settings(postgres_owner_dsn=database.owner_dsn))
    finally:
        as_admin(database, own[1], "DROP OWNED BY grantor CASCADE", "DROP ROLE grantor")


def test_roles_that_do_not_exist_are_named_and_change_nothing(
    database: PostgresServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POSTGRES_OWNER_DSN", database.owner_dsn)
    monkeypatch.setenv("POSTGRES_ROLE_PREFIX", "another")
    with pytest.raises(SystemExit) as ended:
        main(["db", "upgrade"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert "there is no role another_dispatcher, another_recorder, another_gateway" in said
    assert "rights of" not in said
    monkeypatch.delenv("POSTGRES_ROLE_PREFIX")
    assert upgrade(Settings(postgres_owner_dsn=database.owner_dsn)).rights_changed == 0


def test_pipelines_with_roles_of_their_own_share_a_server(
    own: tuple[PostgresServer, str], database: PostgresServer
) -> None:
    names = [role.name_in("next") for role in PostgresRole]
    as_admin(database, own[1], *(f"CREATE ROLE {name} LOGIN PASSWORD '{PASSWORD}'" for name in names))
    try:
        with migrated_database(own[0], unique_name()) as other:
            done = upgrade(Settings(postgres_owner_dsn=other.owner_dsn, postgres_role_prefix="next"))
            assert (done.roles, done.missing_roles) == (tuple(names), ())
            ours = make_conninfo(database.owner_dsn, user=names[0], password=PASSWORD)
            theirs = make_conninfo(other.owner_dsn, user=names[0], password=PASSWORD)
            with psycopg.connect(theirs) as connection:
                connection.execute("SELECT name FROM collections")
            with psycopg.connect(ours) as connection, pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute("SELECT name FROM collections")
    finally:
        as_admin(database, own[1], *(f"DROP ROLE {name}" for name in names))


def test_what_earlier_revisions_granted_is_taken_back(own: tuple[PostgresServer, str]) -> None:
    """As a database of revision 0015 has it: one role of all services, in the policies too."""
    with empty_database(own[0], unique_name()) as database:
        settings = Settings(postgres_owner_dsn=database.owner_dsn)
        with migrations._alembic(settings) as (config, _, _):
            config.attributes["applied"] = []
            command.upgrade(config, "0015")
        as_admin(
            database,
            own[1],
            "CREATE ROLE fairlane LOGIN",
            "SET ROLE fairlane_owner; "
            "GRANT SELECT, INSERT, UPDATE ON results, usage, source_offsets TO fairlane; "
            "GRANT SELECT, UPDATE (version) ON collections TO fairlane; "
            "GRANT USAGE ON SEQUENCE passage_numbers TO fairlane; "
            "GRANT EXECUTE ON FUNCTION remove_old_rows(text, bigint, integer) TO fairlane; "
            "ALTER POLICY trusted_service ON results TO fairlane_owner, fairlane",
        )
        assert upgrade(settings).applied[0] == "0016"
        # It is in nothing of this database any more.
        as_admin(database, own[1], "DROP ROLE fairlane")


def test_one_role_that_is_a_member_of_all_serves_for_every_service(
    own: tuple[PostgresServer, str], database: PostgresServer
) -> None:
    roles = ", ".join(role.name_in() for role in PostgresRole)
    as_admin(database, own[1], f"CREATE ROLE everything LOGIN PASSWORD '{PASSWORD}'", f"GRANT {roles} TO everything")
    dsn = make_conninfo(database.owner_dsn, user="everything", password=PASSWORD)
    try:
        assert upgrade(Settings(postgres_owner_dsn=database.owner_dsn)).rights_changed == 0
        use_everything(replace(database, **{f"{role}_dsn": dsn for role in PostgresRole}))
    finally:
        as_admin(database, own[1], "DROP ROLE everything")


def use_everything(database: PostgresServer) -> None:
    """As each service does; the roles of the database are one and the same."""
    with ApiKeys(database.owner_dsn) as keys:
        shown = parse_key(keys.create("acme", "tests").text)
    assert shown is not None
    with closing(RecorderStore(database.recorder_dsn)) as recorder:
        assert recorder.next_offsets([Partition("replies.a", 0)]) == {}
    with closing(JobStore(database.backfill_dsn)) as jobs:
        assert jobs.newest(10) == []
    with stored_handbook(database) as store:
        handbook = store.get("acme", "handbook")
    found = searching(database, lambda search: search.search(handbook, VECTORS[0], "warehouse", 3, PATIENT_S))
    assert len(found.nearest) == 3
    with connect(database.gateway_dsn, "tests") as connection:
        act_for(connection, "globex")
        assert connection.execute("SELECT name FROM collections").fetchall() == []
        query = "SELECT tenant FROM find_api_key(%s, %s)"
        assert connection.execute(query, (shown.key_id, shown.secret_sha256)).fetchall() == [("acme",)]
