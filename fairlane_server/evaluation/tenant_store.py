"""One tenant's rows in Postgres, for the stores of evaluation."""

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from fairlane.clock import ClockMs, now_ms
from fairlane.closing import Closing
from fairlane.names import is_name
from fairlane_server.postgres.connection import ReconnectingConnection, reason
from fairlane_server.store_error import StoreError

APPLICATION_NAME = "fairlane-evaluation"
CALL_TIMEOUT_S = 60.0


class TenantStore(Closing):
    """Every call raises StoreError: Postgres cannot be used, and it is unknown whether it was done."""

    def __init__(self, dsn: str, tenant: str, wall_clock: ClockMs = now_ms) -> None:
        """Raises ValueError for what cannot be a tenant's name."""
        if not is_name(tenant):
            raise ValueError(f"no tenant can have the name {tenant!r}")
        self._tenant = tenant
        self._wall_clock = wall_clock
        self._kept = ReconnectingConnection(dsn, APPLICATION_NAME, CALL_TIMEOUT_S)

    def close(self) -> None:
        self._kept.close()

    @contextmanager
    def _transaction(self, tenant: str | None = None) -> Iterator[psycopg.Connection]:
        """A transaction that acts for the tenant, or for another."""
        try:
            with self._kept.transaction(tenant or self._tenant) as connection:
                yield connection
        except psycopg.Error as error:
            raise StoreError(reason(error)) from None
