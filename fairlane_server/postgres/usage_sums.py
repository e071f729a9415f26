"""Sums of usage and costs in Postgres. Read-only, under row-level security."""

from collections.abc import Sequence

from fairlane.settings import Settings
from fairlane_server.costs.daily_sums import SumQuery, UsageSum, sum_of, sum_question
from fairlane_server.postgres.connection import ALL_TENANTS, act_for, connect, deadline, describe, explain
from fairlane_server.postgres.migrations import DatabaseError, missing_extra

_APPLICATION = "fairlane-costs"
_TIMEOUT_S = 60.0


def read_sums(settings: Settings, query: SumQuery, tenant: str | None = None) -> Sequence[UsageSum]:
    """The sums of one tenant or, as a trusted service, of all, in the order of the groups. Raises DatabaseError with
    one line: Postgres cannot be used, or has no tables."""
    try:
        import psycopg
    except ImportError as error:
        raise missing_extra(error) from None
    dsn = settings.postgres_dsn.get_secret_value()
    try:
        database = describe(dsn)
    except ValueError as error:
        raise DatabaseError(f"POSTGRES_DSN: {error}") from None
    statement, parameters = sum_question(query)
    try:
        with connect(dsn, _APPLICATION) as connection, deadline(connection, _TIMEOUT_S):
            connection.execute("SET TRANSACTION READ ONLY")
            act_for(connection, ALL_TENANTS if tenant is None else tenant)
            rows = connection.execute(statement, parameters).fetchall()
    except psycopg.errors.UndefinedTable:
        raise DatabaseError(f"{database}: there are no tables; `fairlane db upgrade` makes them") from None
    except psycopg.Error as error:
        raise DatabaseError(f"{database}: {explain(error)}") from None
    return [sum_of(row, len(query.by)) for row in rows]
