"""Migrations of the projection's tables and rights of the services' roles: upgrade, or report the revision.

The migrations are in ``deploy/migrations``. Alembic, SQLAlchemy and psycopg come with the extra ``db``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fairlane.schema_files import data_path
from fairlane.settings import Settings
from fairlane_server.postgres.connection import connect, describe, explain
from fairlane_server.store_error import ReportableError

_CONNECT_TIMEOUT_S = 10
_APPLICATION = "fairlane-db"


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
    """Result of ``upgrade``.

    Attributes:
        before: the revision, None without tables; ``after`` likewise.
        applied: revisions, in order.
        roles: those that exist and have their rights now.
        missing_roles: the services' roles that do not exist.
        rights_changed: number of statements that it took.
    """

    database: str
    before: str | None
    after: str | None
    applied: tuple[str, ...]
    roles: tuple[str, ...]
    missing_roles: tuple[str, ...]
    rights_changed: int


def upgrade(settings: Settings) -> Upgrade:
    """Bring the tables to the newest revision, and the services' roles to the rights in ``rights.py``, in one
    transaction, as POSTGRES_OWNER_DSN (else POSTGRES_DSN).

    Only roles that exist get rights. May be called twice and at the same time: the second waits for the first and finds
    nothing to do. Raises DatabaseError, also for an owner or a role that policies do not bind: functions that act for
    one tenant run with the rights of their owner.
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
        rights = config.attributes["rights"]
        # What was applied is known inside the lock alone; another process may have been faster.
        done = tuple(dict.fromkeys(applied))
        after = _revision(connection)
        script = ScriptDirectory.from_config(config)
        before = script.get_revision(done[0]).down_revision if done else after
        known = before if isinstance(before, str) else None
        return Upgrade(database, known, after, done, rights.roles, rights.missing, rights.changes)


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
        database = describe(dsn)
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
            config.attributes.update(connection=connection, role_prefix=settings.postgres_role_prefix)
            yield config, connection, database
    except sqlalchemy.exc.DBAPIError as error:
        cause = error.orig
        reason = explain(cause) if isinstance(cause, psycopg.Error) else type(error).__name__
        raise DatabaseError(f"{database}: {reason}") from None
    except psycopg.Error as error:
        raise DatabaseError(f"{database}: {explain(error)}") from None
    except (CommandError, sqlalchemy.exc.SQLAlchemyError) as error:
        raise DatabaseError(f"{database}: {' '.join(str(error).split())}") from None


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
