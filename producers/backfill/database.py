"""One connection to Postgres for whoever looks after jobs: every call bounded, every failure one of ours."""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from fairlane_server.postgres.connection import ReconnectingConnection, explain
from producers.backfill.ports import AwayError, JobFailedError

CALL_TIMEOUT_S = 10.0
_APPLICATION = "fairlane-backfill"
# The server ends what we no longer wait for.
_SERVER_TIMEOUTS_S = {"idle_in_transaction_session_timeout": 10, "statement_timeout": 8}


class Database:
    """Opened when it is first needed and again after every failure. Used by one thread."""

    def __init__(self, dsn: str, tenant: str) -> None:
        """``tenant``: whose rows are seen and written; ALL_TENANTS for a trusted service."""
        self._tenant = tenant
        self._kept = ReconnectingConnection(dsn, _APPLICATION, CALL_TIMEOUT_S, server_timeouts_s=_SERVER_TIMEOUTS_S)

    def close(self) -> None:
        """Give the connection back; the next call opens another."""
        self._kept.close()

    @contextmanager
    def transaction(self) -> Iterator[psycopg.Connection]:
        """A bounded transaction.

        Raises AwayError: whether it was committed is unknown; JobFailedError: Postgres will never take this.
        """
        try:
            with self._kept.transaction(self._tenant) as connection:
                yield connection
        except (psycopg.DataError, psycopg.IntegrityError) as error:
            # Its text may quote a row.
            raise JobFailedError(f"Postgres refused it: {type(error).__name__} ({error.sqlstate})") from None
        except psycopg.errors.UndefinedTable:
            raise JobFailedError("Postgres has no tables for jobs; `fairlane db upgrade` makes them") from None
        except psycopg.Error as error:
            raise AwayError(f"Postgres: {explain(error)}") from None
