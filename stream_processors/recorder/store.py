"""Postgres store of the recorder: rows and offsets in one transaction. The only module of it that talks to Postgres."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg

from fairlane_server.erasure.erasures import SHARE_ERASURE_LOCK
from fairlane_server.postgres.connection import ALL_TENANTS, ReconnectingConnection, act_for, explain, is_value_error
from stream_processors.recorder.erased import (
    OF_REQUESTS,
    REQUEST,
    Subject,
    drop_erased,
    erased_with_conversation,
    requests_of,
    subjects,
)
from stream_processors.recorder.feedback_watch import add_model_versions
from stream_processors.recorder.positions import Move, Partition, Stored
from stream_processors.recorder.projection import Projection
from stream_processors.recorder.tables import ALL_TABLES, FEEDBACK, RESULTS, Table

APPLICATION_NAME = "fairlane-recorder"
CALL_TIMEOUT_S = 15.0

# The server ends what we no longer wait for: a recorder that was stopped in a transaction must not keep its locks.
_SERVER_TIMEOUTS_S = {"idle_in_transaction_session_timeout": 10, "statement_timeout": 12}

_LOAD = """
SELECT topic, partition, next_offset, topic_id FROM source_offsets
WHERE (topic, partition) IN (SELECT * FROM unnest(%s::text[], %s::bigint[]))
"""
_START = """
INSERT INTO source_offsets (topic, partition, next_offset, topic_id)
SELECT topic, partition, next_offset, nullif(topic_id, '')
FROM unnest(%s::text[], %s::bigint[], %s::bigint[], %s::text[]) AS start (topic, partition, next_offset, topic_id)
ON CONFLICT (topic, partition) DO NOTHING
"""
# Locked in one order, so that two recorders wait for one another instead of deadlocking.
_MOVE = """
WITH move AS (
    SELECT * FROM unnest(%s::text[], %s::bigint[], %s::bigint[], %s::bigint[])
        AS move (topic, partition, expected, next_offset)
), locked AS (
    SELECT stored.topic, stored.partition, move.expected, move.next_offset
    FROM source_offsets AS stored JOIN move USING (topic, partition)
    WHERE stored.next_offset = move.expected
    ORDER BY stored.topic, stored.partition FOR UPDATE OF stored
)
UPDATE source_offsets AS stored SET next_offset = locked.next_offset, updated_at = now()
FROM locked WHERE stored.topic = locked.topic AND stored.partition = locked.partition
AND stored.next_offset = locked.expected
"""
# Held until the rows are committed.
_ANY_ERASED = b"SELECT EXISTS (SELECT FROM erased)"
_ERASED = b"""
SELECT about.tenant, about.kind, about.name, before_ms
FROM unnest(%s::text[], %s::text[], %s::text[]) AS about (tenant, kind, name)
JOIN erased ON erased.tenant = about.tenant AND erased.kind = about.kind
    AND erased.digest = sha256(convert_to(about.name, 'UTF8'))
"""
# In one order, as rows are elsewhere.
_TOMBSTONES = b"""
INSERT INTO erased (tenant, kind, digest, before_ms, kept_until_ms)
SELECT gone.tenant, 'request', sha256(convert_to(gone.request_id, 'UTF8')), mark.before_ms, mark.kept_until_ms
FROM unnest(%s::text[], %s::text[], %s::text[]) AS gone (tenant, request_id, conversation)
JOIN erased AS mark ON mark.tenant = gone.tenant AND mark.kind = 'conversation'
    AND mark.digest = sha256(convert_to(gone.conversation, 'UTF8'))
ORDER BY 1, 3
ON CONFLICT (tenant, kind, digest) DO NOTHING
"""
# Of an erased conversation: given while its request was under way, and stored before this was known.
_DROP_FEEDBACK = b"""
DELETE FROM feedback USING unnest(%s::text[], %s::text[], %s::text[]) AS gone (tenant, request_id, conversation)
WHERE feedback.tenant = gone.tenant AND feedback.request_id = gone.request_id
"""
_DROP_COPIES = b"""
DELETE FROM evaluation_results
USING unnest(%s::text[], %s::text[], %s::text[]) AS gone (tenant, request_id, conversation)
WHERE evaluation_results.tenant = gone.tenant AND evaluation_results.request_id = gone.request_id
"""
_NAME = """
UPDATE source_offsets AS stored SET topic_id = named.topic_id
FROM unnest(%s::text[], %s::bigint[], %s::text[]) AS named (topic, partition, topic_id)
WHERE stored.topic = named.topic AND stored.partition = named.partition
AND stored.topic_id IS DISTINCT FROM named.topic_id
"""


class PostgresUnavailableError(Exception):
    """Postgres cannot be used now: try again later. The message is one line, without any row's values."""


class PostgresTimeoutError(PostgresUnavailableError):
    """It was not done in time: Postgres hangs, or it was too much at once."""


class SupersededError(Exception):
    """Another recorder moved on from an expected offset: nothing was written."""


class RowsRefusedError(Exception):
    """Postgres will never take these rows: nothing was written. The message says why without their values."""


@dataclass(frozen=True, slots=True)
class Repetition:
    """An outcome that was committed more than once, which must not happen."""

    record: str
    key: tuple[Any, ...]
    seen: int


class RecorderStore:
    """One connection, opened when it is first needed and again after every failure. Every call is bounded in time."""

    def __init__(self, dsn: str, call_timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._kept = ReconnectingConnection(dsn, APPLICATION_NAME, call_timeout_s, server_timeouts_s=_SERVER_TIMEOUTS_S)

    def close(self) -> None:
        self._kept.close()

    def next_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, Stored]:
        """Where each of these goes on, as far as it is known. Raises PostgresUnavailableError."""
        topics, numbers = _columns(partitions, 2)
        with self._transaction() as connection:
            rows = connection.execute(_LOAD, (topics, numbers)).fetchall()
        return {Partition(topic, number): Stored(offset, topic_id or "") for topic, number, offset, topic_id in rows}

    def start_at(self, offsets: Mapping[Partition, Stored]) -> None:
        """Store where partitions begin that have no stored offset yet. Raises PostgresUnavailableError."""
        rows = ((*partition, start.next_offset, start.topic_id) for partition, start in offsets.items())
        with self._transaction() as connection:
            connection.execute(_START, _columns(rows, 4))

    def move(self, moves: Mapping[Partition, Move], topic_ids: Mapping[Partition, str]) -> None:
        """Steps of the stored offsets without rows, and the ids of the topics that they are for from now on. Raises as
        ``write``."""
        with self._transaction() as connection:
            _move(connection, moves)
            connection.execute(
                _NAME, _columns(((*partition, topic_id) for partition, topic_id in topic_ids.items()), 3)
            )

    def write(self, projection: Projection, moves: Mapping[Partition, Move]) -> list[Repetition]:
        """The rows and the steps of the stored offsets, or neither. Returns what was committed more than once.

        Raises:
            SupersededError: an offset was not the expected one: another recorder wrote these records.
            RowsRefusedError: a row cannot be stored, however often it is tried.
            PostgresTimeoutError: it took too long. Whether it was written is unknown, as for
            PostgresUnavailableError: anything else. Whether it was written is then unknown; the stored offsets tell.
        """
        repetitions: list[Repetition] = []
        with self._transaction() as connection:
            # The fence comes first: a recorder that lost its partitions writes nothing and waits for no other.
            _move(connection, moves)
            if projection.layers or projection.withdrawn:
                act_for(connection, ALL_TENANTS)
                if projection.layers.keys() & {table.name for table in OF_REQUESTS}:
                    _leave_out_erased(connection, projection)
            for table in ALL_TABLES:
                for rows in projection.layers.get(table.name, ()):
                    repetitions += _insert(connection, table, rows)
                if keys := projection.withdrawn.get(table.name):
                    connection.execute(table.delete.encode(), (keys,))
            if about := sorted({*requests_of(projection, RESULTS), *requests_of(projection, FEEDBACK)}):
                add_model_versions(connection, *_columns(about, 2))
        return repetitions

    @contextmanager
    def _transaction(self) -> Iterator[psycopg.Connection]:
        """A bounded transaction; psycopg's errors become ours."""
        try:
            with self._kept.transaction() as connection:
                yield connection
        except psycopg.Error as error:
            if is_value_error(error):
                # Its text may quote the row.
                raise RowsRefusedError(f"{type(error).__name__} ({error.sqlstate})") from None
            if isinstance(error, psycopg.errors.QueryCanceled):
                raise PostgresTimeoutError(explain(error)) from None
            raise PostgresUnavailableError(explain(error)) from None


def _move(connection: psycopg.Connection, moves: Mapping[Partition, Move]) -> None:
    steps = ((*partition, move.expected, move.next_offset) for partition, move in moves.items())
    if connection.execute(_MOVE, _columns(steps, 4)).rowcount != len(moves):
        raise SupersededError


def _erased(connection: psycopg.Connection, projection: Projection) -> dict[Subject, int]:
    """Which of the batch's conversations and requests were erased, and before when. No erasure is requested from now on
    until the transaction ends."""
    connection.execute(SHARE_ERASURE_LOCK)
    row = connection.execute(_ANY_ERASED).fetchone()
    if row is None or not row[0]:
        return {}
    asked = _columns(((one.tenant, one.kind, one.name) for one in subjects(projection)), 3)
    return {Subject(*about): before_ms for *about, before_ms in connection.execute(_ERASED, asked)}


def _leave_out_erased(connection: psycopg.Connection, projection: Projection) -> None:
    erased = _erased(connection, projection)
    if requests := erased_with_conversation(projection, erased):
        connection.execute(_TOMBSTONES, _columns(requests, 3))
        connection.execute(_DROP_FEEDBACK, _columns(requests, 3))
        connection.execute(_DROP_COPIES, _columns(requests, 3))
        erased |= {Subject(tenant, REQUEST, request_id): 0 for tenant, request_id, _ in requests}
    drop_erased(projection, erased)


def _insert(connection: psycopg.Connection, table: Table, rows: list[tuple[Any, ...]]) -> list[Repetition]:
    cursor = connection.execute(table.insert.encode(), _columns(rows, len(table.columns)))
    if table.seen is None:
        return []
    return [Repetition(table.record, tuple(key), seen) for *key, seen in cursor.fetchall()]


def _columns(rows: Iterable[tuple[Any, ...]], width: int) -> list[list[Any]]:
    """Rows turned into columns, also when there are none."""
    return [list(column) for column in zip(*rows, strict=True)] or [[] for _ in range(width)]
