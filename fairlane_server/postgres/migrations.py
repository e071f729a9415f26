"""Migrations of the projection's tables: upgrade to the newest revision, or report the current one.

The migrations are in ``deploy/migrations``. Alembic, SQLAlchemy and psycopg come with the extra ``db``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fairlane.schema_files import data_path
from fairlane.settings import Settings
from fairlane_server.postgres.connection import connect, describe, explain, role_of
from fairlane_server.store_error import ReportableError

RIGHTS = {
    "results": "SELECT",
    "usage": "SELECT",
    "audit_logs": "SELECT",
    "files": "SELECT, INSERT, DELETE, UPDATE (purpose, filename, size_bytes, expires_at_ms)",
    "batches": "SELECT, INSERT",
    "backfill_jobs": "SELECT, INSERT, UPDATE (wanted, max_cost_tokens, reason, status, ended_at_ms, cancelling_at_ms, "
    "finalizing_at_ms)",
}
"""Rights of the gateway's role. It answers callers of all tenants and acts for one at a time: unlike the services' role
it is in no policy that shows the rows of all tenants, and it cannot list keys, users or tenants."""

FUNCTIONS = ("find_api_key(text, bytea)", "find_user(text, text)")


def grant(connection: Any, role: str) -> bool:
    """Give the role RIGHTS on the tables of the newest revision, and no others. False: there is no such role.

    ``connection`` is SQLAlchemy's, of the owner of the tables; its transaction is the caller's.
    """
    found = connection.exec_driver_sql("SELECT 1 FROM pg_roles WHERE rolname = %s", (role,)).scalar()
    if not found:
        return False
    name = connection.dialect.identifier_preparer.quote(role)
    connection.exec_driver_sql(f"REVOKE ALL ON ALL TABLES IN SCHEMA public FROM {name}")
    for table, rights in RIGHTS.items():
        connection.exec_driver_sql(f"GRANT {rights} ON {table} TO {name}")
    for function in FUNCTIONS:
        connection.exec_driver_sql(f"GRANT EXECUTE ON FUNCTION {function} TO {name}")
    return True


_CONNECT_TIMEOUT_S = 10
_APPLICATION = "fairlane-db"
# Any number that no other program on the same database takes.
_GRANT_LOCK = 4_602_678_820


class DatabaseError(ReportableError):
    """The tables could not be looked at or changed. The message is one line and holds no secret."""


def missing_extra(error: ImportError) -> DatabaseError:
    """The error for a missing library of the extra ``db``."""
    missing = (error.name or "").partition(".")[0]
    return DatabaseError(f"this needs the extra `db`: pip install 'fairlane[db]' ({missing} is missing)")


@dataclass(frozen=True, slots=True)
class SchemaState:
    """Revision of the tables of a database (``role@host:port/database``), None without tables; ``pending`` ones are
    still to be applied, in order."""

    database: str
    revision: str | None
    pending: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Upgrade:
    """Result of ``upgrade``: the revision before (None without tables) and after, and the applied ones in order."""

    database: str
    before: str | None
    after: str | None
    applied: tuple[str, ...]


def upgrade(settings: Settings) -> Upgrade:
    """Bring the tables to the newest revision, in one transaction, as POSTGRES_OWNER_DSN (else POSTGRES_DSN).

    The role of POSTGRES_DSN is granted what the services need, and POSTGRES_GATEWAY_ROLE, where there is one, what the
    gateway needs. May be called twice and at the same time: the second waits for the first and finds nothing to do.
    Raises DatabaseError, also for a role that policies do not bind: functions that act for one tenant run with the
    rights of their owner.
    """
    with _alembic(settings) as (config, connection, database):
        from alembic import command
        from alembic.script import ScriptDirectory

        if _is_above_policies(connection):
            raise DatabaseError(
                f"{database}: this role bypasses row-level security, which would then not part the tenants: "
                "POSTGRES_OWNER_DSN must name one with NOSUPERUSER and NOBYPASSRLS"
            )
        applied: list[str] = []
        config.attributes["applied"] = applied
        command.upgrade(config, "head")
        _grant_gateway(connection, settings)
        # What was applied is known inside the lock alone; another process may have been faster.
        done = tuple(dict.fromkeys(applied))
        after = _revision(connection)
        script = ScriptDirectory.from_config(config)
        before = script.get_revision(done[0]).down_revision if done else after
        return Upgrade(database, before if isinstance(before, str) else None, after, done)


def status(settings: Settings) -> SchemaState:
    """The current revision; changes nothing. Raises DatabaseError."""
    with _alembic(settings) as (config, connection, database):
        from alembic.script import ScriptDirectory

        script = ScriptDirectory.from_config(config)
        revision = _revision(connection)
        pending = [entry.revision for entry in script.iterate_revisions("head", revision or "base")]
        return SchemaState(database, revision, tuple(reversed(pending)))


@contextmanager
def _alembic(settings: Settings) -> Iterator[tuple[Any, Any, str]]:
    """Alembic's configuration with an open connection, and the name of the database; errors become DatabaseError."""
    try:
        import psycopg
        import sqlalchemy
        from alembic.config import Config
        from alembic.util.exc import CommandError
    except ImportError as error:
        raise missing_extra(error) from None
    dsn = (settings.postgres_owner_dsn or settings.postgres_dsn).get_secret_value()
    try:
        scripts = data_path("deploy/migrations")
        database, service_role = describe(dsn), role_of(settings.postgres_dsn.get_secret_value())
    except FileNotFoundError:
        raise DatabaseError("the migrations (deploy/migrations) are not in the wheel: run this in a checkout") from None
    except ValueError as error:
        raise DatabaseError(f"POSTGRES_OWNER_DSN or POSTGRES_DSN: {error}") from None
    config = Config()
    config.set_main_option("script_location", str(scripts).replace("%", "%%"))
    # libpq reads the connection string itself, so that everything it may hold (TLS, services) keeps its meaning.
    engine = sqlalchemy.create_engine(
        "postgresql+psycopg://",
        creator=lambda: connect(dsn, _APPLICATION, connect_timeout=_CONNECT_TIMEOUT_S),
        poolclass=sqlalchemy.NullPool,
    )
    try:
        with engine.connect() as connection:
            config.attributes.update(connection=connection, service_role=service_role)
            yield config, connection, database
    except sqlalchemy.exc.DBAPIError as error:
        cause = error.orig
        reason = explain(cause) if isinstance(cause, psycopg.Error) else type(error).__name__
        raise DatabaseError(f"{database}: {reason}") from None
    except psycopg.Error as error:
        raise DatabaseError(f"{database}: {explain(error)}") from None
    except (CommandError, sqlalchemy.exc.SQLAlchemyError) as error:
        raise DatabaseError(f"{database}: {' '.join(str(error).split())}") from None


def _grant_gateway(connection: Any, settings: Settings) -> None:
    role = settings.postgres_gateway_role
    # Deployments without a role for it run the gateway as the services' role.
    if role != role_of(settings.postgres_dsn.get_secret_value()):
        with connection.begin():
            # As with revisions: one process at a time.
            connection.exec_driver_sql("SELECT pg_advisory_xact_lock(%s)", (_GRANT_LOCK,))
            grant(connection, role)


def _is_above_policies(connection: Any) -> bool:
    query = "SELECT rolsuper OR rolbypassrls FROM pg_roles WHERE rolname = current_user"
    found = connection.exec_driver_sql(query).scalar()
    # The migrations begin a transaction of their own.
    connection.rollback()
    return bool(found)


def _revision(connection: Any) -> str | None:
    from alembic.migration import MigrationContext

    revision: str | None = MigrationContext.configure(connection).get_current_revision()
    return revision
