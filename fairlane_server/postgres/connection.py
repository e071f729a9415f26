"""Connecting to Postgres: connection strings, the tenant a transaction acts for, and a bound on every call.

``KeptConnection`` is for code that waits; for an event loop there is ``fairlane_server.postgres.pool``.

TLS is part of the connection string (``sslmode``, ``sslrootcert``). psycopg is imported where it is used: the client
SDK does not need it.
"""

import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from fairlane_server.processes.watchdog import called_if_late

if TYPE_CHECKING:
    import psycopg

ALL_TENANTS = "*"
"""What a trusted service acts for. No tenant can have this name."""

CONNECT_TIMEOUT_S = 3

# Data exception, integrity violation, program limit exceeded: what was given is at fault, and no connection is.
_OF_VALUES = frozenset({"22", "23", "54"})


class DsnError(ValueError):
    """No connection string. The message quotes nothing of it."""


def connect(dsn: str, application_name: str, **options: Any) -> "psycopg.Connection":
    """A connection that gives up after ``connect_timeout`` (3 s unless the string says otherwise).

    Raises psycopg.Error: it cannot be had; DsnError: ``dsn`` is no connection string.
    """
    import psycopg

    return psycopg.connect(dsn, **{**defaults(dsn, application_name), **options})


def defaults(dsn: str, application_name: str) -> dict[str, Any]:
    """What every connection of ours is opened with, unless its string says otherwise. Raises DsnError as above."""
    given = _parsed(dsn)
    ours = {"connect_timeout": CONNECT_TIMEOUT_S, "application_name": application_name}
    return {name: value for name, value in ours.items() if name not in given}


def act_for(connection: "psycopg.Connection", tenant: str) -> None:
    """Let the current transaction see and write the rows of this tenant only; ``ALL_TENANTS`` is for trusted services.

    Row-level security shows nothing at all to a transaction that did not call this.
    """
    connection.execute("SELECT set_config('fairlane.tenant', %s, true)", (tenant,))


@contextmanager
def deadline(connection: "psycopg.Connection", timeout_s: float) -> Iterator[None]:
    """Cut the connection when the block takes longer: the call in progress raises psycopg.errors.QueryCanceled.

    A server that hangs would not obey ``statement_timeout``, and one that is stopped still acknowledges TCP.
    """
    import psycopg

    # A descriptor of our own: libpq may close its own, and the number may then mean another file.
    line = socket.socket(fileno=os.dup(connection.fileno()))
    is_late = threading.Event()

    def cut() -> None:
        is_late.set()
        with suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)

    # The line is closed last: until then it may be cut.
    with line, called_if_late(timeout_s, cut):
        try:
            yield
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            if not is_late.is_set():
                raise
            raise psycopg.errors.QueryCanceled(f"no answer within {timeout_s:g} s") from error


class KeptConnection:
    """One connection: opened when it is first needed, used again, and replaced after whatever went wrong with it.

    For one thread at a time. A psycopg pool of one would connect on a thread of its own, tell the caller that time is
    up instead of what is wrong, and bound no call.

    Args:
        application_name: that the server shows for it.
        call_timeout_s: most that a transaction takes, to connect (``CONNECT_TIMEOUT_S``) not included.
        server_timeouts_s: settings of the server, by name, with which it ends what nobody waits for any more.
        prepare: is given every new connection, in a transaction.
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
        """Give the connection back; the next transaction opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextmanager
    def transaction(self, tenant: str | None = None, timeout_s: float | None = None) -> "Iterator[psycopg.Connection]":
        """A transaction that acts for this tenant, if for any; committed at the end of the block.

        ``timeout_s`` stands in for the usual time, and for the server's ``statement_timeout`` as well. Raises
        psycopg.Error: whether it was committed is then unknown, unless what was given is at fault (a DataError or an
        IntegrityError, say), and it is a psycopg.errors.QueryCanceled when time was up; DsnError: ``dsn`` is no
        connection string.
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
                    connection.execute("SELECT set_config('statement_timeout', %s, true)", (_ms(timeout_s),))
                if tenant is not None:
                    act_for(connection, tenant)
                yield connection
        except psycopg.Error as error:
            # Of a server that now only reads, or a statement that no longer fits its table, a new one knows nothing.
            is_sound = is_of_values(error)
            raise
        finally:
            # Also when it was left in the middle of something.
            if not is_sound or connection.info.transaction_status is not psycopg.pq.TransactionStatus.IDLE:
                self.close()

    def _connect(self) -> "psycopg.Connection":
        import psycopg

        connection = connect(self._dsn, self._application_name)
        try:
            with deadline(connection, self._call_timeout_s), connection.transaction():
                for name, limit_s in self._server_timeouts_s.items():
                    connection.execute("SELECT set_config(%s, %s, false)", (name, _ms(limit_s)))
                if self._prepare is not None:
                    self._prepare(connection)
        except psycopg.errors.QueryCanceled as error:
            connection.close()
            raise psycopg.errors.ConnectionTimeout(str(error)) from error
        except BaseException:
            connection.close()
            raise
        return connection


def is_of_values(error: "psycopg.Error") -> bool:
    """Whether what was given is at fault and will be refused however often it is tried; its text may quote it."""
    import psycopg

    # psycopg itself may refuse a value, without a state.
    return isinstance(error, psycopg.DataError) or (error.sqlstate or "")[:2] in _OF_VALUES


def role_of(dsn: str) -> str | None:
    """The role that a connection string names. Raises DsnError when it is no connection string."""
    user = _parsed(dsn).get("user")
    return None if user is None else str(user)


def describe(dsn: str) -> str:
    """The connection as it may be printed: ``role@host:port/database``. Raises DsnError as ``role_of``."""
    given = _parsed(dsn)
    host, port = given.get("host", "localhost"), given.get("port", "5432")
    return f"{given.get('user', '')}@{host}:{port}/{given.get('dbname', '')}"


def explain(error: "psycopg.Error") -> str:
    """Why Postgres refused, in one line and without the values of any row."""
    text = error.diag.message_primary or str(error)
    return f"{type(error).__name__}: {' '.join(text.split())}"


def reason(error: "psycopg.Error") -> str:
    """Why Postgres refused, in one line that quotes no value: the messages of some classes do."""
    return f"{type(error).__name__} ({error.sqlstate})" if is_of_values(error) else explain(error)


def _ms(seconds: float) -> str:
    return f"{max(1, round(seconds * 1000))}ms"


def _parsed(dsn: str) -> dict[str, Any]:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    try:
        return dict(conninfo_to_dict(dsn))
    except psycopg.ProgrammingError:
        # libpq's own message would quote the string, password included.
        raise DsnError("not a Postgres connection string (postgresql://role@host:port/database)") from None
