"""The audit of what is administered: who changed what, in the table ``admin_events``, to which rows are only added."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from fairlane.closing import Closing
from fairlane_server.postgres.connection import ALL_TENANTS, ReconnectingConnection, reason
from fairlane_server.store_error import ReportableError

_APPLICATION_NAME = "fairlane-audit"
_CALL_TIMEOUT_S = 10.0

_NOTE = """
INSERT INTO admin_events (tenant, event, key_id, subject, author, details, outcome, of_event)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s) RETURNING event_id
"""
_LIST = """
SELECT event_id, occurred_at, tenant, event, key_id, subject, database_role, author, details, outcome, of_event
FROM admin_events
WHERE (%(before)s::bigint IS NULL OR event_id < %(before)s)
    AND (%(tenant)s::text IS NULL OR tenant = %(tenant)s) AND (%(event)s::text IS NULL OR event = %(event)s)
    AND (%(author)s::text IS NULL OR author = %(author)s)
    AND (%(since)s::timestamptz IS NULL OR occurred_at >= %(since)s)
    AND (%(until)s::timestamptz IS NULL OR occurred_at < %(until)s)
ORDER BY event_id DESC LIMIT %(most)s
"""


class AdminEventKind(StrEnum):
    """What can be done."""

    KEY_CREATED = "api_key_created"
    KEY_ROTATED = "api_key_rotated"
    KEY_REVOKED = "api_key_revoked"
    USER_SET = "user_set"
    TENANT_SET = "tenant_set"
    TENANT_REMOVED = "tenant_removed"
    TENANT_BARRED = "tenant_barred"
    TENANT_READMITTED = "tenant_readmitted"
    DEAD_LETTERS_REPLAYED = "dead_letters_replayed"
    DEAD_LETTERS_PURGED = "dead_letters_purged"
    DEAD_LETTER_PAYLOAD_READ = "dead_letter_payload_read"
    LOG_REPLAY_CREATED = "log_replay_created"
    LOG_REPLAY_PAUSED = "log_replay_paused"
    LOG_REPLAY_RESUMED = "log_replay_resumed"
    LOG_REPLAY_CANCELLED = "log_replay_cancelled"
    EVALUATION_SET_ADDED = "evaluation_set_added"
    EVALUATION_SET_REMOVED = "evaluation_set_removed"
    EVALUATION_SET_READ = "evaluation_set_read"
    EVALUATION_SCHEDULE_SET = "evaluation_schedule_set"
    EVALUATION_SCHEDULE_REMOVED = "evaluation_schedule_removed"
    LABEL_ITEM_READ = "label_item_read"
    LABEL_ITEM_GOLD_SET = "label_item_gold_set"
    LABELS_EXPORTED = "labels_exported"


class AdminEventOutcome(StrEnum):
    """``started`` is recorded before a change outside of Postgres, and ended by an event of its own."""

    STARTED = "started"
    DONE = "done"
    FAILED = "failed"


class AuditError(ReportableError):
    """The audit cannot be read or written."""


@dataclass(frozen=True, slots=True)
class AdminEvent:
    """An administrative action. ``details`` hold no secret; ``of_event`` is the id of the event that this one ends."""

    name: AdminEventKind
    tenant: str
    author: str
    key_id: str | None = None
    subject: str | None = None
    details: Mapping[str, object] = field(default_factory=dict)
    outcome: AdminEventOutcome = AdminEventOutcome.DONE
    of_event: int | None = None

    def note(self, connection: psycopg.Connection) -> int:
        """Record it in the transaction of the action: both are committed, or neither. Returns its id."""
        values = (self.tenant, self.name, self.key_id, self.subject, self.author, Jsonb(dict(self.details)))
        row = connection.execute(_NOTE, (*values, self.outcome, self.of_event)).fetchone()
        return int((row or (0,))[0])


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """A row of the audit; ``database_role`` is what Postgres knows of the author."""

    event_id: int
    occurred_at_ms: int
    tenant: str
    event: str
    key_id: str | None
    subject: str | None
    database_role: str
    author: str
    details: Mapping[str, Any]
    outcome: str
    of_event: int | None


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Which events; None accepts any. Times are milliseconds since the epoch: ``since_ms`` counts, ``until_ms`` not."""

    tenant: str | None = None
    event: str | None = None
    author: str | None = None
    since_ms: int | None = None
    until_ms: int | None = None


class AdminAudit(Closing):
    """The audit of all tenants, as the owner of the tables or the role of the admin API; that of operators may only add
    to it. For one thread at a time."""

    def __init__(self, dsn: str) -> None:
        self._kept = ReconnectingConnection(dsn, _APPLICATION_NAME, _CALL_TIMEOUT_S)

    def close(self) -> None:
        self._kept.close()

    def note(self, event: AdminEvent) -> int:
        """Record an event on its own. Returns its id. Raises AuditError."""
        return self.note_all([event])[0]

    def note_all(self, events: Iterable[AdminEvent]) -> Sequence[int]:
        """Record events, all or none. Returns their ids. Raises AuditError."""
        with self._transaction() as connection:
            return [event.note(connection) for event in events]

    def list(self, wanted: EventFilter, before: int | None, most: int) -> Sequence[RecordedEvent]:
        """Events with ids below ``before``, the latest first. Raises AuditError."""
        values = {
            "before": before,
            "tenant": wanted.tenant,
            "event": wanted.event,
            "author": wanted.author,
            "since": _at(wanted.since_ms),
            "until": _at(wanted.until_ms),
            "most": most,
        }
        with self._transaction() as connection:
            rows = connection.execute(_LIST, values).fetchall()
        return [RecordedEvent(number, round(at.timestamp() * 1_000), *rest) for number, at, *rest in rows]

    @contextmanager
    def _transaction(self) -> Iterator[psycopg.Connection]:
        try:
            with self._kept.transaction(ALL_TENANTS, _CALL_TIMEOUT_S) as connection:
                yield connection
        except psycopg.Error as error:
            raise AuditError(f"the audit: {reason(error)}") from None
        except ValueError as error:
            raise AuditError(str(error)) from None


def _at(at_ms: int | None) -> datetime | None:
    return None if at_ms is None else datetime.fromtimestamp(at_ms / 1_000, UTC)
