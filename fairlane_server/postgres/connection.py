"""Postgres connections for blocking code: connection strings, tenant of a transaction, a time limit on every call.

``fairlane_server.postgres.pool`` is the counterpart for event loops. TLS is part of the connection string (``sslmode``,
``sslrootcert``). psycopg is an optional extra, so it is imported where it is used.
"""

import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from fairlane.file_text import present
from fairlane_server.processes.watchdog import called_if_late
from fairlane_server.store_error import ReportableError

if TYPE_CHECKING:
    import psycopg

ALL_TENANTS = "*"
"""All tenants, in transactions of trusted services. No tenant can have this name."""

CONNECT_TIMEOUT_S = 3

# Data exception, integrity violation, program limit exceeded: the values are at fault, not the connection.
_OF_VALUES = frozenset({"22", "23", "54"})


class DsnError(ValueError, ReportableError):
    """Invalid connection string. The message quotes nothing of it."""


def connect(dsn: str, application_name: str, **options: Any) -> "psycopg.Connection":
    """Open a connection; gives up after ``connect_timeout`` (3 s unless the string sets another). A string that is in a
    file is what the file holds now.

    Raises psycopg.Error when Postgres cannot be reached, DsnError when ``dsn`` is invalid.
    """
    import psycopg

    dsn = present(dsn)
    return psycopg.connect(dsn, **{**defaults(dsn, application_name), **options})


def defaults(dsn: str, application_name: str) -> dict[str, Any]:
    """Default connection parameters, without those that ``dsn`` sets itself. Raises DsnError."""
    given = _parsed(dsn)
    ours = {"connect_timeout": CONNECT_TIMEOUT_S, "application_name": application_name}
    return {name: value for name, value in ours.items() if name not in given}


def act_for(connection: "psycopg.Connection", tenant: str) -> None:
    """Restrict the current transaction to the rows of this tenant; ``ALL_TENANTS`` is for trusted services.

    Without this call row-level security hides all rows from the transaction.
    """
    connection.execute("SELECT set_config('fairlane.tenant', %s, true)", (tenant,))


@contextmanager
def deadline(connection: "psycopg.Connection", timeout_s: float) -> Iterator[None]:
    """Shut down the connection's socket when the block takes longer; the pending call raises
    psycopg.errors.QueryCanceled.

    ``statement_timeout`` is not enough: a hung server ignores it, and a stopped one still acknowledges TCP.
    """
    import psycopg

    # Duplicate the descriptor: libpq may close its own, and the number may then be reused for another file.
    line = socket.socket(fileno=os.dup(connection.fileno()))
    is_late = threading.Event()

    def cut() -> None:
        is_late.set()
        with suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)

    # The socket is closed last: until then ``cut`` may use it.
    with line, called_if_late(timeout_s, cut):
        try:
            yield
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            if not is_late.is_set():
                raise
            raise psycopg.errors.QueryCanceled(f"no answer within {timeout_s:g} s") from error


class ReconnectingConnection:
    """One connection: opened on first use, kept, and replaced after any failure of it.

    For one thread at a time. A psycopg pool of size one would connect on its own thread, report a timeout instead of
    the cause, and bound no call.

    ``call_timeout_s`` bounds a transaction, without connecting (``CONNECT_TIMEOUT_S``); with ``server_timeouts_s``,
    settings by name, the server ends abandoned work. ``prepare`` is called with every new connection, in a transaction.
    """

    def __init__(
        self,
        dsn: str,
        application_name: str,
        call_timeout_s: float,
        *,
        server_timeouts_s: Mapping[str, float] | None = None,
        prepare: "Callable[[psycopg.Connection], None] | None" = None,
    ) -> None:
        self._dsn = dsn
        self._application_name = application_name
        self._call_timeout_s = call_timeout_s
        self._server_timeouts_s = server_timeouts_s or {}
        self._prepare = prepare
        self._connection: psycopg.Connection | None = None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextmanager
    def transaction(self, tenant: str | None = None, timeout_s: float | None = None) -> "Iterator[psycopg.Connection]":
        """A transaction, for this tenant if one is given; committed at the end of the block.

        ``timeout_s`` replaces the usual limit and also sets the server's ``statement_timeout``. Raises psycopg.Error:
        whether the transaction was committed is then unknown, unless the values are at fault (such as DataError or
        IntegrityError); psycopg.errors.QueryCanceled when the time was up; DsnError when ``dsn`` is invalid.
        """
        import psycopg

        if self._connection is None:
            self._connection = self._connect()
        connection = self._connection
        is_sound = True
        try:
            limit_s = self._call_timeout_s if timeout_s is None else timeout_s
            with deadline(connection, limit_s), connection.transaction():
                if timeout_s is not None:
                    connection.execute("SELECT set_config('statement_timeout', %s, true)", (postgres_ms(timeout_s),))
                if tenant is not None:
                    act_for(connection, tenant)
                yield connection
        except psycopg.Error as error:
            # Otherwise reconnect: the server may have become read-only, or a prepared statement may no longer fit its
            # table.
            is_sound = is_value_error(error)
            raise
        finally:
            # Also close a connection that was left inside a transaction.
            if not is_sound or connection.info.transaction_status is not psycopg.pq.TransactionStatus.IDLE:
                self.close()

    def _connect(self) -> "psycopg.Connection":
        import psycopg

        connection = connect(self._dsn, self._application_name)
        try:
            with deadline(connection, self._call_timeout_s), connection.transaction():
                for name, limit_s in self._server_timeouts_s.items():
                    connection.execute("SELECT set_config(%s, %s, false)", (name, postgres_ms(limit_s)))
                if self._prepare is not None:
                    self._prepare(connection)
        except psycopg.errors.QueryCanceled as error:
            connection.close()
            raise psycopg.errors.ConnectionTimeout(str(error)) from error
        except BaseException:
            connection.close()
            raise
        return connection


def is_value_error(error: "psycopg.Error") -> bool:
    """Whether the values caused the error, so that a retry cannot help; its text may quote them."""
    import psycopg

    # psycopg itself may refuse a value; such an error has no SQLSTATE.
    return isinstance(error, psycopg.DataError) or (error.sqlstate or "")[:2] in _OF_VALUES


def describe(dsn: str) -> str:
    """The connection in printable form: ``role@host:port/database``. Raises DsnError."""
    given = _parsed(dsn)
    host, port = given.get("host", "localhost"), given.get("port", "5432")
    return f"{given.get('user', '')}@{host}:{port}/{given.get('dbname', '')}"


def explain(error: "psycopg.Error") -> str:
    """Postgres's reason in one line, without values of any row."""
    text = error.diag.message_primary or str(error)
    return f"{type(error).__name__}: {' '.join(text.split())}"


def reason(error: "psycopg.Error") -> str:
    """Postgres's reason in one line that quotes no value; only class and SQLSTATE where the message could."""
    return f"{type(error).__name__} ({error.sqlstate})" if is_value_error(error) else explain(error)


def postgres_ms(seconds: float) -> str:
    """The value of a timeout of Postgres's."""
    return f"{max(1, round(seconds * 1000))}ms"


def _parsed(dsn: str) -> dict[str, Any]:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    try:
        return dict(conninfo_to_dict(dsn))
    except psycopg.ProgrammingError:
        # libpq's own message would quote the string, password included.
        raise DsnError("not a Postgres connection string (postgresql://role@host:port/database)") from None
