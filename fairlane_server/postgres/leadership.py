"""Leadership of one process among several: an advisory lock of a session of Postgres."""

import psycopg

from fairlane_server.postgres.connection import connect, deadline

_CALL_TIMEOUT_S = 5.0
_TAKE = "SELECT pg_try_advisory_lock(%s)"
_IS_ALIVE = "SELECT 1"


class Leadership:
    """Held by one session at a time, and free when that ends. For one thread.

    It keeps two processes from doing the same work in turn. It proves nothing: a session may end unnoticed, so what two
    leaders must not both do needs a fence of its own.
    """

    def __init__(self, dsn: str, application_name: str, lock: int) -> None:
        self._dsn = dsn
        self._application_name = application_name
        self._lock = lock
        self._connection: psycopg.Connection | None = None
        self._is_held = False

    def holds(self) -> bool:
        """Whether this process leads; tries to take the lead. Raises psycopg.Error, DsnError."""
        try:
            if self._connection is None:
                self._connection = connect(self._dsn, self._application_name, autocommit=True)
            with deadline(self._connection, _CALL_TIMEOUT_S):
                if self._is_held:
                    self._connection.execute(_IS_ALIVE)
                else:
                    row = self._connection.execute(_TAKE, (self._lock,)).fetchone()
                    self._is_held = bool(row and row[0])
        except psycopg.Error:
            self.release()
            raise
        return self._is_held

    def release(self) -> None:
        """Give the lead up, and disconnect."""
        self._is_held = False
        if self._connection is not None:
            self._connection.close()
            self._connection = None
