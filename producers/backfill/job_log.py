"""Durable state of a running job; Postgres rejects writes of a runner without the lease."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from fairlane.clock import ClockMs
from fairlane_server.postgres.connection import ALL_TENANTS
from producers.backfill.database import Database
from producers.backfill.job import ChunkPlan, Position, Status, Tally
from producers.backfill.ports import LeaseLostError

_PAGE = 1_000

# Locks the job, so that a successor cannot take it between this and the end of the transaction.
_FENCE = "SELECT 1 FROM backfill_jobs WHERE job_id = %s AND token = %s FOR UPDATE"
_OPEN = """
SELECT chunk, first_row, rows, begin_group, begin_offset, end_group, end_offset, reply_offset
FROM backfill_chunks WHERE job_id = %s AND part IS NULL ORDER BY chunk
"""
_PLAN = """
INSERT INTO backfill_chunks (job_id, chunk, tenant, first_row, rows, begin_group, begin_offset, end_group, end_offset,
                             reply_offset)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s) ON CONFLICT DO NOTHING
"""
_PLANNED = """
UPDATE backfill_jobs SET planned_rows = %s, next_chunk = %s, next_group = %s, next_offset = %s
WHERE job_id = %s AND next_chunk = %s
"""
_DONE = """
UPDATE backfill_chunks SET part = %(part)s, done_number = (
    SELECT coalesce(max(done_number), -1) + 1 FROM backfill_chunks WHERE job_id = %(job_id)s AND part IS NOT NULL
)
WHERE job_id = %(job_id)s AND chunk = %(chunk)s AND part IS NULL
"""
_COUNT = """
UPDATE backfill_jobs SET ok_rows = ok_rows + %s, failed_rows = failed_rows + %s, expired_rows = expired_rows + %s,
    cancelled_rows = cancelled_rows + %s, prompt_tokens = prompt_tokens + %s,
    completion_tokens = completion_tokens + %s, cost_tokens = cost_tokens + %s
WHERE job_id = %s
"""
_PARTS_BY_CHUNK = """
SELECT part, chunk FROM backfill_chunks WHERE job_id = %s AND part IS NOT NULL AND chunk > %s ORDER BY chunk LIMIT %s
"""
_PARTS_BY_END = """
SELECT part, done_number FROM backfill_chunks
WHERE job_id = %s AND part IS NOT NULL AND done_number > %s ORDER BY done_number LIMIT %s
"""
# Whoever wants a pause or a cancel while the job ends comes too late; who resumes or cancels one that is being paused
# comes in time. What has ended has ended.
_MOVE = """
UPDATE backfill_jobs SET
    status = CASE WHEN %(status)s = 'paused' AND wanted = 'cancel' THEN 'cancelling'
                  WHEN %(status)s = 'paused' AND %(reason)s::text IS NULL AND wanted = 'run' THEN 'queued'
                  ELSE %(status)s END,
    reason = CASE WHEN %(status)s = 'paused' AND wanted = 'cancel' THEN NULL ELSE %(reason)s END,
    finalizing_at_ms = CASE WHEN %(status)s = 'finalizing' THEN %(now_ms)s ELSE finalizing_at_ms END,
    ended_at_ms = CASE WHEN %(ended)s THEN %(now_ms)s END
WHERE job_id = %(job_id)s AND status NOT IN ('completed', 'expired', 'cancelled')
"""
_COUNTED = """
UPDATE backfill_jobs SET total_rows = %s, estimated_row_cost = %s, started_at_ms = coalesce(started_at_ms, %s)
WHERE job_id = %s
"""
_KEEP = """
UPDATE backfill_jobs SET lease_until = clock_timestamp() + make_interval(secs => %s)
WHERE job_id = %s AND token = %s RETURNING wanted, max_cost_tokens
"""
_RELEASE = "UPDATE backfill_jobs SET lease_until = NULL WHERE job_id = %s AND token = %s"


class PostgresJobLog:
    """See :class:`producers.backfill.ports.JobLog`. Used by one thread; ``close`` it."""

    def __init__(self, dsn: str, job_id: str, token: int, clock: ClockMs) -> None:
        self._database = Database(dsn, ALL_TENANTS)
        self._job_id = job_id
        self._token = token
        self._clock = clock

    def close(self) -> None:
        self._database.close()

    def open_chunks(self) -> list[ChunkPlan]:
        with self._fenced() as connection:
            return [_plan(row) for row in connection.execute(_OPEN, (self._job_id,))]

    def plan(self, chunk: ChunkPlan) -> None:
        begin, end = chunk.begin, chunk.end
        with self._fenced() as connection:
            (tenant,) = connection.execute(
                "SELECT tenant FROM backfill_jobs WHERE job_id = %s", (self._job_id,)
            ).fetchall()[0]
            place = (begin.group, begin.offset, end.group, end.offset, chunk.reply_offset)
            connection.execute(_PLAN, (self._job_id, chunk.number, tenant, chunk.first_row, chunk.rows, *place))
            planned = chunk.first_row + chunk.rows
            following = (planned, chunk.number + 1, end.group, end.offset)
            connection.execute(_PLANNED, (*following, self._job_id, chunk.number))

    def finish(self, chunk: ChunkPlan, part: str, tally: Tally) -> None:
        with self._fenced() as connection:
            done = connection.execute(_DONE, {"part": part, "job_id": self._job_id, "chunk": chunk.number})
            if done.rowcount:
                rows = (tally.ok, tally.failed, tally.expired, tally.cancelled)
                spent = (tally.prompt_tokens, tally.completion_tokens, tally.cost_tokens)
                connection.execute(_COUNT, (*rows, *spent, self._job_id))

    def parts(self, *, ordered: bool) -> Iterator[str]:
        query = _PARTS_BY_CHUNK if ordered else _PARTS_BY_END
        after = -1
        while True:
            with self._fenced() as connection:
                page = connection.execute(query.encode(), (self._job_id, after, _PAGE)).fetchall()
            for part, number in page:
                yield part
                after = number
            if len(page) < _PAGE:
                return

    def move(self, status: Status, reason: str | None = None) -> None:
        values: dict[str, Any] = {
            "status": status.value,
            "reason": reason,
            "ended": status.is_final or status is Status.FAILED,
            "now_ms": self._clock(),
            "job_id": self._job_id,
        }
        with self._fenced() as connection:
            connection.execute(_MOVE, values)

    def count(self, total_rows: int, row_cost: float) -> None:
        """So many rows were counted, of so many cost tokens each. Raises AwayError and LeaseLostError."""
        with self._fenced() as connection:
            connection.execute(_COUNTED, (total_rows, row_cost, self._clock(), self._job_id))

    def keep(self, lease_s: float) -> tuple[str, int | None]:
        """Hold the lease for so long from now. Returns what is wanted of the job, and its limit in cost tokens.

        Raises AwayError and LeaseLostError.
        """
        with self._database.transaction() as connection:
            found = connection.execute(_KEEP, (lease_s, self._job_id, self._token)).fetchone()
        if found is None:
            raise LeaseLostError
        wanted, max_cost_tokens = found
        return str(wanted), max_cost_tokens

    def release(self) -> None:
        """Let another runner take the job at once. Raises AwayError."""
        with self._database.transaction() as connection:
            connection.execute(_RELEASE, (self._job_id, self._token))

    @contextmanager
    def _fenced(self) -> Iterator[psycopg.Connection]:
        """A transaction in which nobody else has the job. Raises AwayError and LeaseLostError."""
        with self._database.transaction() as connection:
            if connection.execute(_FENCE, (self._job_id, self._token)).fetchone() is None:
                raise LeaseLostError
            yield connection


def _plan(row: tuple[Any, ...]) -> ChunkPlan:
    number, first_row, rows, begin_group, begin_offset, end_group, end_offset, reply_offset = row
    begin, end = Position(begin_group, begin_offset), Position(end_group, end_offset)
    return ChunkPlan(number, first_row, rows, begin, end, reply_offset)
