"""Read-only transactions of commands, with every error in one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fairlane.settings import Settings
from fairlane_server.postgres.connection import ALL_TENANTS, act_for, connect, deadline, describe, explain
from fairlane_server.postgres.migrations import DatabaseError, missing_extra

if TYPE_CHECKING:
    import psycopg


@contextmanager
def reading(
    settings: Settings, application: str, timeout_s: float, tenant: str | None = None, *, one_snapshot: bool = False
) -> Iterator["psycopg.Connection"]:
    """A connection in a read-only transaction for one tenant or, as a trusted service, for all. With ``one_snapshot``
    all its queries see the tables at one moment.

    Raises DatabaseError with one line, also for errors of the block: Postgres cannot be used, or has no tables.
    """
    try:
        import psycopg
    except ImportError as error:
        raise missing_extra(error) from None
    dsn = settings.postgres_dsn.get_secret_value()
    try:
        database = describe(dsn)
    except ValueError as error:
        raise DatabaseError(f"POSTGRES_DSN: {error}") from None
    mode = b"ISOLATION LEVEL REPEATABLE READ, READ ONLY" if one_snapshot else b"READ ONLY"
    try:
        with connect(dsn, application) as connection, deadline(connection, timeout_s):
            connection.execute(b"SET TRANSACTION " + mode)
            act_for(connection, ALL_TENANTS if tenant is None else tenant)
            yield connection
    except psycopg.errors.UndefinedTable:
        raise DatabaseError(f"{database}: there are no tables; `fairlane db upgrade` makes them") from None
    except psycopg.Error as error:
        raise DatabaseError(f"{database}: {explain(error)}") from None
