"""Connecting to Postgres: connection strings, the tenant a transaction acts for, and a bound on every call.

TLS is part of the connection string (``sslmode``, ``sslrootcert``). psycopg is imported where it is used: the client
SDK does not need it.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from fairlane.watchdog import called_if_late

if TYPE_CHECKING:
    import psycopg

ALL_TENANTS = "*"
"""What a trusted service acts for. No tenant can have this name."""

CONNECT_TIMEOUT_S = 3


def connect(dsn: str, application_name: str, **options: Any) -> "psycopg.Connection":
    """A connection that gives up after ``connect_timeout`` (3 s unless the string says otherwise).

    Raises psycopg.Error: it cannot be had; ValueError: ``dsn`` is no connection string.
    """
    import psycopg

    return psycopg.connect(dsn, **{**defaults(dsn, application_name), **options})


def defaults(dsn: str, application_name: str) -> dict[str, Any]:
    """What every connection of ours is opened with, unless its string says otherwise. Raises ValueError as above."""
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
    """Cut the connection when the block takes longer: the call in progress raises psycopg.OperationalError.

    A server that hangs would not obey ``statement_timeout``, and one that is stopped still acknowledges TCP.
    """
    # A descriptor of our own: libpq may close its own, and the number may then mean another file.
    line = socket.socket(fileno=os.dup(connection.fileno()))

    def cut() -> None:
        with suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)

    # The line is closed last: until then it may be cut.
    with line, called_if_late(timeout_s, cut):
        yield


def role_of(dsn: str) -> str | None:
    """The role that a connection string names. Raises ValueError when it is no connection string."""
    user = _parsed(dsn).get("user")
    return None if user is None else str(user)


def describe(dsn: str) -> str:
    """The connection as it may be printed: ``role@host:port/database``. Raises ValueError as ``role_of``."""
    given = _parsed(dsn)
    host, port = given.get("host", "localhost"), given.get("port", "5432")
    return f"{given.get('user', '')}@{host}:{port}/{given.get('dbname', '')}"


def explain(error: "psycopg.Error") -> str:
    """Why Postgres refused, in one line and without the values of any row."""
    text = error.diag.message_primary or str(error)
    return f"{type(error).__name__}: {' '.join(text.split())}"


def reason(error: "psycopg.Error") -> str:
    """Why Postgres refused, in one line that quotes no value: the messages of some classes do."""
    import psycopg

    quoting = (error.sqlstate or "")[:2] in {"22", "23"} or isinstance(error, psycopg.DataError)
    return f"{type(error).__name__} ({error.sqlstate})" if quoting else explain(error)


def _parsed(dsn: str) -> dict[str, Any]:
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    try:
        return dict(conninfo_to_dict(dsn))
    except psycopg.ProgrammingError:
        # libpq's own message would quote the string, password included.
        raise ValueError("not a Postgres connection string (postgresql://role@host:port/database)") from None
