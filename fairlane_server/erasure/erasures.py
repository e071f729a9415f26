"""Erasures in Postgres: recorded with their tombstones, carried out step by step. Any process can continue one.

>>> from fairlane_server.erasure.erasures import Erasures, ErasureKind
>>> with Erasures(dsn, tenant="acme", kept_ms=kept_ms) as erasures:
...     erasure_id = erasures.request(ErasureKind.CONVERSATION, ["orders-17"], requested_by="key:0a1b2c3d4e5f6071")
...     while request_ids := erasures.step(erasure_id):
...         forget_cached(request_ids)
"""

import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import psycopg

from fairlane.closing import Closing
from fairlane.names import is_name
from fairlane_server.conversations.conversations import stored_name
from fairlane_server.postgres.connection import ReconnectingConnection, reason
from fairlane_server.store_error import StoreError

MOST_NAMES = 1_000
STEP = 500
"""Turns, or requests, whose rows one step deletes."""
MOST_ERASED_NAMES = 250_000
"""Conversations and requests that the kept erasures of a tenant name. Each has a tombstone."""
MOST_UNDER_WAY = 100
"""Erasures of a tenant that are not done, as while Redis is unavailable."""
ERASURE_LOCK = 4_170_120_020
"""Advisory lock of Postgres. Whoever stores what may have been erased shares it until that is committed. An erasure
takes it alone while it writes its tombstones, so that it finds the rows of everybody who did not see them."""
SHARE_ERASURE_LOCK = f"SELECT pg_advisory_xact_lock_shared({ERASURE_LOCK})".encode()
"""The statement that shares it until the end of the transaction."""

APPLICATION_NAME = "fairlane-erasures"
# Longer than a transaction of the recorder, for which an erasure waits.
CALL_TIMEOUT_S = 30.0

_ID = re.compile(r"erasure-[0-9a-f]{24}")
_REQUEST = "SELECT request_erasure(%s, %s, %s, %s, %s, %s, %s)"
_ERASED_NAMES, _UNDER_WAY = "erased_names", "erasures_under_way"
_BOUNDS = frozenset({_ERASED_NAMES, _UNDER_WAY})
"""What the function calls its bounds; its messages hold their numbers alone."""
_STEP = "SELECT erase_some(%s, %s)"
_COLUMNS = "erasure_id, kind, subject, state, turns, results, uncached, requested_by, requested_at_ms, done_at_ms"
_ONE = f"SELECT {_COLUMNS} FROM erasures WHERE tenant = %s AND erasure_id = %s"  # noqa: S608 - our own names
_PAGE = f"""
SELECT {_COLUMNS} FROM erasures
WHERE tenant = %(tenant)s AND (%(behind_ms)s::bigint IS NULL
    OR (requested_at_ms, erasure_id) < (%(behind_ms)s, %(behind_id)s))
ORDER BY requested_at_ms DESC, erasure_id DESC LIMIT %(most)s
"""  # noqa: S608 - our own names
_UNFINISHED = "SELECT tenant, erasure_id FROM unfinished_erasures(%s, %s)"


class ErasureKind(StrEnum):
    """What is erased: everything of a conversation, or single requests."""

    CONVERSATION = "conversation"
    REQUESTS = "requests"


class TooManyErasuresError(StoreError):
    """A bound of the tenant is reached: nothing was recorded. ``is_lasting``: until its older erasures expire."""

    def __init__(self, message: str, *, is_lasting: bool) -> None:
        super().__init__(message)
        self.is_lasting = is_lasting


@dataclass(frozen=True, slots=True)
class Erasure:
    """One erasure of a tenant, without what it was about.

    Attributes:
        subject: SHA-256 of the names, to be compared with.
        is_done: nothing is left but what expires.
        turns: of conversations, that were deleted so far.
        results: replies that were deleted so far.
        uncached: requests whose rows are deleted, and whose cached replies may be there.
    """

    erasure_id: str
    kind: ErasureKind
    subject: str
    is_done: bool
    turns: int
    results: int
    uncached: tuple[str, ...]
    requested_by: str
    requested_at_ms: int
    done_at_ms: int | None


def is_erasure_id(text: str) -> bool:
    """Whether an erasure can have this id."""
    return _ID.fullmatch(text) is not None


class Erasures(Closing):
    """The erasures of one tenant. Every call raises StoreError; it is then unknown whether it was done."""

    def __init__(self, dsn: str, tenant: str, kept_ms: int, most_names: int = MOST_ERASED_NAMES) -> None:
        """``kept_ms``: how long the recorder must not store what it reads of them again; ``most_names``: bound of what
        the kept erasures of the tenant name. Raises ValueError for what cannot be a tenant's name."""
        if not is_name(tenant):
            raise ValueError(f"no tenant can have the name {tenant!r}")
        self._tenant = tenant
        self._kept_ms = kept_ms
        self._most_names = most_names
        self._kept = ReconnectingConnection(dsn, APPLICATION_NAME, CALL_TIMEOUT_S)

    def close(self) -> None:
        self._kept.close()

    def request(self, kind: ErasureKind, names: Sequence[str], requested_by: str) -> str:
        """Record an erasure and its tombstones. From then on nothing of it is stored any more. Returns its id. Raises
        TooManyErasuresError."""
        if not 1 <= len(names) <= MOST_NAMES:
            raise ValueError(f"an erasure names 1 to {MOST_NAMES}")
        made = f"erasure-{secrets.token_hex(12)}"
        stored = sorted({stored_name(name) for name in names})
        about = (made, kind.value, stored, stored_name(requested_by))
        with self._transaction() as connection:
            connection.execute(_REQUEST, (*about, self._kept_ms, self._most_names, MOST_UNDER_WAY))
        return made

    def step(self, erasure_id: str) -> list[str]:
        """Delete some rows. Returns the requests they were of: their cached replies are to be deleted before the next
        step. None are left when it is done."""
        with self._transaction() as connection:
            row = connection.execute(_STEP, (erasure_id, STEP)).fetchone()
        return list(row[0]) if row else []

    def get(self, erasure_id: str) -> Erasure | None:
        """The erasure, if it is of this tenant."""
        with self._transaction() as connection:
            row = connection.execute(_ONE.encode(), (self._tenant, erasure_id)).fetchone()
        return None if row is None else _erasure(row)

    def page(self, behind: tuple[int, str] | None, most: int) -> list[Erasure]:
        """The latest erasures, newest first, behind the one of this time and id."""
        behind_ms, behind_id = behind or (None, None)
        values = {"tenant": self._tenant, "behind_ms": behind_ms, "behind_id": behind_id, "most": most}
        with self._transaction() as connection:
            return [_erasure(row) for row in connection.execute(_PAGE.encode(), values)]

    @contextmanager
    def _transaction(self) -> Iterator[psycopg.Connection]:
        with _explained(), self._kept.transaction(self._tenant) as connection:
            yield connection


def unfinished(dsn: str, idle_s: int, most: int) -> list[tuple[str, str]]:
    """Tenant and id of erasures of all tenants that nobody has gone on with for so long. Raises StoreError."""
    kept = ReconnectingConnection(dsn, APPLICATION_NAME, CALL_TIMEOUT_S)
    try:
        with _explained(), kept.transaction() as connection:
            return [(tenant, erasure_id) for tenant, erasure_id in connection.execute(_UNFINISHED, (idle_s, most))]
    finally:
        kept.close()


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except psycopg.Error as error:
        if (bound := error.diag.constraint_name) in _BOUNDS:
            raise TooManyErasuresError(str(error.diag.message_primary), is_lasting=bound == _ERASED_NAMES) from None
        raise StoreError(reason(error)) from None


def _erasure(row: tuple[Any, ...]) -> Erasure:
    erasure_id, kind, subject, state, turns, results, uncached, requested_by, requested_at_ms, done_at_ms = row
    counts = (turns, results, tuple(uncached))
    return Erasure(
        erasure_id, ErasureKind(kind), subject, state == "done", *counts, requested_by, requested_at_ms, done_at_ms
    )
