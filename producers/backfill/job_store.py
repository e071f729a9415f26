"""Jobs in Postgres: register, find, control, lease, and record progress; writes need the lease."""

import json
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple
from typing import Any, TypeVar

import psycopg
from psycopg.rows import RowFactory, class_row, dict_row

from fairlane.clock import ClockMs
from fairlane_server.postgres.connection import ALL_TENANTS, ReconnectingConnection, explain
from producers.backfill.errors import JobFailedError, LeaseLostError, UnavailableError
from producers.backfill.job import ChunkPlan, Fingerprint, InputPosition, Job, JobSpec, RowTally, Status, Wanted
from producers.backfill.job_turns import WaitingJob

RowT = TypeVar("RowT")

CALL_TIMEOUT_S = 10.0
_APPLICATION = "fairlane-backfill"
# The server ends what we no longer wait for.
_SERVER_TIMEOUTS_S = {"idle_in_transaction_session_timeout": 10, "statement_timeout": 8}


class Database:
    """Transactions on one connection, opened when needed and again after a failure; ``close`` it. For one thread.

    Every call raises UnavailableError, and whether it was committed is then unknown; and JobFailedError if Postgres
    rejects the values for good.
    """

    def __init__(self, dsn: str, tenant: str = ALL_TENANTS) -> None:
        """``tenant``: whose rows are visible; ALL_TENANTS for a trusted service."""
        self._tenant = tenant
        self._kept = ReconnectingConnection(dsn, _APPLICATION, CALL_TIMEOUT_S, server_timeouts_s=_SERVER_TIMEOUTS_S)

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        self._kept.close()

    @contextmanager
    def _transaction(self) -> Iterator[psycopg.Connection]:
        try:
            with self._kept.transaction(self._tenant) as connection:
                yield connection
        except (psycopg.DataError, psycopg.IntegrityError) as error:
            # Its text may quote a row.
            raise JobFailedError(f"Postgres refused it: {type(error).__name__} ({error.sqlstate})") from None
        except psycopg.errors.UndefinedTable:
            raise JobFailedError("Postgres has no tables for jobs; `fairlane db upgrade` makes them") from None
        except psycopg.Error as error:
            raise UnavailableError(f"Postgres: {explain(error)}") from None

    def _execute(self, query: str, values: Sequence[Any] | Mapping[str, Any]) -> int:
        """Run one statement in a transaction of its own. Returns the number of rows it changed."""
        with self._transaction() as connection:
            return connection.execute(query.encode(), values).rowcount

    def _rows(self, query: str, values: Sequence[Any] | Mapping[str, Any], factory: RowFactory[RowT]) -> list[RowT]:
        with self._transaction() as connection, connection.cursor(row_factory=factory) as cursor:
            return cursor.execute(query.encode(), values).fetchall()


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
SELECT job_id, %s, tenant, %s, %s, %s, %s, %s, %s, %s FROM backfill_jobs WHERE job_id = %s ON CONFLICT DO NOTHING
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
_PARTS = """
SELECT part, {order} FROM backfill_chunks
WHERE job_id = %s AND part IS NOT NULL AND {order} > %s ORDER BY {order} LIMIT %s
"""
# A pause or a cancel comes too late for a job that is being ended; a resume or a cancel comes in time for one that is
# being paused. A final status never changes.
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
UPDATE backfill_jobs SET lease_until = clock_timestamp() + make_interval(secs => %s),
    answered_rows = greatest(answered_rows, %s)
WHERE job_id = %s AND token = %s RETURNING wanted, max_cost_tokens
"""
_RELEASE = "UPDATE backfill_jobs SET lease_until = NULL WHERE job_id = %s AND token = %s"


class PostgresJobLog(Database):
    """Durable state of one job. Every write needs the lease.

    All raise UnavailableError (it is then unknown whether the write was done; it may be repeated) and LeaseLostError.
    """

    def __init__(self, dsn: str, job_id: str, token: int, clock: ClockMs) -> None:
        super().__init__(dsn)
        self._job_id = job_id
        self._token = token
        self._clock = clock

    def open_chunks(self) -> list[ChunkPlan]:
        """Planned chunks that are not finished, in order."""
        with self._fenced() as connection:
            return [_plan(row) for row in connection.execute(_OPEN, (self._job_id,))]

    def plan(self, chunk: ChunkPlan) -> None:
        """Record the next chunk."""
        begin, end = chunk.begin, chunk.end
        place = (begin.group, begin.offset, end.group, end.offset, chunk.reply_offset)
        following = (chunk.first_row + chunk.rows, chunk.number + 1, end.group, end.offset)
        with self._fenced() as connection:
            connection.execute(_PLAN, (chunk.number, chunk.first_row, chunk.rows, *place, self._job_id))
            connection.execute(_PLANNED, (*following, self._job_id, chunk.number))

    def finish(self, chunk: ChunkPlan, part: str, tally: RowTally) -> None:
        """Record that the chunk's results are in this part. A finished chunk stays unchanged."""
        with self._fenced() as connection:
            done = connection.execute(_DONE, {"part": part, "job_id": self._job_id, "chunk": chunk.number})
            if done.rowcount:
                connection.execute(_COUNT, (*astuple(tally), self._job_id))

    def parts(self, *, ordered: bool) -> Iterator[str]:
        """Parts of finished chunks, in the order of the input or in the order in which they were finished."""
        query = _PARTS.format(order="chunk" if ordered else "done_number")
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
        """Record the job's new status."""
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
        """Record the number of rows of the input, and the estimated cost of one."""
        with self._fenced() as connection:
            connection.execute(_COUNTED, (total_rows, row_cost, self._clock(), self._job_id))

    def keep(self, lease_s: float, answered_rows: int) -> tuple[str, int | None]:
        """Renew the lease, and record how many rows have a result: a runner that has just begun may know of fewer than
        the one before. Returns the owner's command and the cost limit of the job."""
        with self._transaction() as connection:
            found = connection.execute(_KEEP, (lease_s, answered_rows, self._job_id, self._token)).fetchone()
        if found is None:
            raise LeaseLostError
        wanted, max_cost_tokens = found
        return str(wanted), max_cost_tokens

    def release(self) -> None:
        """Give the lease back: another runner may take the job at once."""
        self._execute(_RELEASE, (self._job_id, self._token))

    @contextmanager
    def _fenced(self) -> Iterator[psycopg.Connection]:
        """A transaction that holds the job exclusively. Raises LeaseLostError."""
        with self._transaction() as connection:
            if connection.execute(_FENCE, (self._job_id, self._token)).fetchone() is None:
                raise LeaseLostError
            yield connection


def _plan(row: tuple[Any, ...]) -> ChunkPlan:
    number, first_row, rows, begin_group, begin_offset, end_group, end_offset, reply_offset = row
    begin, end = InputPosition(begin_group, begin_offset), InputPosition(end_group, end_offset)
    return ChunkPlan(number, first_row, rows, begin, end, reply_offset)


COLUMNS = """
job_id, tenant, spec, input_bytes, input_version, total_rows, partitions, status, wanted, reason, ok_rows, failed_rows,
expired_rows, cancelled_rows, prompt_tokens, completion_tokens, cost_tokens, planned_rows, next_chunk, next_group,
next_offset, created_at_ms, started_at_ms, deadline_at_ms, cancelling_at_ms, finalizing_at_ms, ended_at_ms, runner,
token, max_cost_tokens, answered_rows, reserved_nanos
"""
INSERT = """
INSERT INTO backfill_jobs (job_id, tenant, spec, input_bytes, input_version, total_rows, partitions, max_cost_tokens,
                           estimated_row_cost, created_at_ms, deadline_at_ms)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
"""
_BY_ID = f"SELECT {COLUMNS} FROM backfill_jobs WHERE job_id = %s"  # noqa: S608 - our own names
_LIST = f"""
SELECT {COLUMNS} FROM backfill_jobs
WHERE (%(before_ms)s::bigint IS NULL OR (created_at_ms, job_id) < (%(before_ms)s, %(before_id)s))
ORDER BY created_at_ms DESC, job_id DESC LIMIT %(limit)s
"""  # noqa: S608 - our own names
# A job without any planned chunk needs no runner to be cancelled. One that was paused had nothing reserved meanwhile.
_STEER = f"""
UPDATE backfill_jobs SET
    wanted = %(wanted)s,
    max_cost_tokens = coalesce(%(max_cost)s, max_cost_tokens),
    reason = CASE WHEN %(wanted)s = 'run' THEN NULL ELSE reason END,
    status = CASE
        WHEN %(wanted)s = 'run' AND status IN ('paused', 'failed') THEN 'queued'
        WHEN %(wanted)s = 'pause' AND lease_is_free AND status IN ('queued', 'running') THEN 'paused'
        WHEN %(wanted)s = 'cancel' AND lease_is_free AND next_chunk = 0 THEN 'cancelled'
        WHEN %(wanted)s = 'cancel' THEN 'cancelling'
        ELSE status END,
    ended_at_ms = CASE
        WHEN %(wanted)s = 'cancel' AND lease_is_free AND next_chunk = 0 THEN %(now_ms)s
        WHEN %(wanted)s = 'run' THEN NULL
        ELSE ended_at_ms END,
    cancelling_at_ms = CASE WHEN %(wanted)s = 'cancel' THEN coalesce(cancelling_at_ms, %(now_ms)s)
        ELSE cancelling_at_ms END,
    reserved_nanos = CASE WHEN %(wanted)s = 'run' AND status IN ('paused', 'failed') THEN NULL
        ELSE reserved_nanos END,
    finalizing_at_ms = CASE WHEN %(wanted)s = 'run' AND status IN ('paused', 'failed') THEN NULL
        ELSE finalizing_at_ms END
FROM (
    SELECT job_id AS found, coalesce(lease_until < clock_timestamp(), true) AS lease_is_free
    FROM backfill_jobs WHERE job_id = %(job_id)s FOR UPDATE
) AS lease
WHERE job_id = found AND status NOT IN ('completed', 'expired', 'cancelled')
    AND NOT (wanted = 'cancel' AND %(wanted)s <> 'cancel')
RETURNING {COLUMNS}
"""  # noqa: S608 - our own names
# The output files of a failed job have an expiry date; a resumed job keeps them.
_UNDATE = """
UPDATE files SET expires_at_ms = NULL FROM batches JOIN backfill_jobs USING (job_id)
WHERE job_id = %(job_id)s AND file_id IN (output_file_id, error_file_id) AND expires_at_ms IS NOT NULL
    AND status NOT IN ('completed', 'expired', 'cancelled', 'failed')
"""
_RUNNABLE = "wanted <> 'pause' AND status NOT IN ('completed', 'expired', 'cancelled', 'failed', 'paused')"
_TAKE = f"""
UPDATE backfill_jobs SET
    token = token + 1,
    runner = %(runner)s,
    lease_until = clock_timestamp() + make_interval(secs => %(lease_s)s),
    status = CASE WHEN wanted = 'cancel' THEN 'cancelling' ELSE 'running' END,
    started_at_ms = CASE WHEN total_rows IS NULL THEN NULL ELSE coalesce(started_at_ms, %(now_ms)s) END,
    finalizing_at_ms = NULL
WHERE job_id = %(job_id)s AND {_RUNNABLE} AND coalesce(lease_until < clock_timestamp(), true)
RETURNING {COLUMNS}, estimated_row_cost
"""  # noqa: S608 - our own names
_MOST_WAITING = 1_000
_WAITING = f"""
SELECT job_id, tenant, created_at_ms FROM (
    SELECT job_id, tenant, created_at_ms,
        row_number() OVER (PARTITION BY tenant ORDER BY created_at_ms, job_id) AS place
    FROM backfill_jobs
    WHERE {_RUNNABLE} AND coalesce(lease_until < clock_timestamp(), true) AND NOT job_id = ANY(%(left_out)s)
) AS line
WHERE place <= %(per_tenant)s ORDER BY place, created_at_ms, job_id LIMIT %(most)s
"""  # noqa: S608 - our own names
_UNFINISHED = """
SELECT status, count(*) AS jobs,
    sum(coalesce(total_rows, 0) - ok_rows - failed_rows - expired_rows - cancelled_rows)::bigint AS rows
FROM backfill_jobs WHERE status NOT IN ('completed', 'expired', 'cancelled') GROUP BY status
"""
_UNREADABLE = """
UPDATE backfill_jobs SET status = 'failed', reason = %(reason)s, ended_at_ms = %(now_ms)s, lease_until = NULL
WHERE job_id = %(job_id)s AND token = %(token)s
"""


def new_job_id() -> str:
    """16 hexadecimal digits, at random."""
    return secrets.token_hex(8)


class JobStore(Database):
    """Every job, or those of one tenant."""

    def add(self, job: Job, *, estimated_row_cost: float) -> None:
        """Queue a job."""
        self._execute(INSERT, inserted(job, estimated_row_cost))

    def find(self, job_id: str) -> Job | None:
        """The job with this id, if visible."""
        rows = self._rows(_BY_ID, (job_id,), dict_row)
        return job_of(rows[0]) if rows else None

    def newest(self, limit: int, before: tuple[int, str] | None = None) -> list[Job]:
        """The latest jobs, newest first; ``before``: only older ones than this time of creation and id."""
        before_ms, before_id = before or (None, None)
        values = {"limit": limit, "before_ms": before_ms, "before_id": before_id}
        return [job_of(row) for row in self._rows(_LIST, values, dict_row)]

    def steer(self, job_id: str, wanted: Wanted, now_ms: int, *, max_cost_tokens: int | None = None) -> Job | None:
        """Give a job a command. None, and nothing changed, if it has ended, is being cancelled, or does not exist."""
        values = {"job_id": job_id, "wanted": wanted.value, "max_cost": max_cost_tokens, "now_ms": now_ms}
        with self._transaction() as connection:
            with connection.cursor(row_factory=dict_row) as cursor:
                rows = cursor.execute(_STEER.encode(), values).fetchall()
            if rows:
                connection.execute(_UNDATE, values)
        return job_of(rows[0]) if rows else None

    def take(self, job_id: str, runner: str, lease_s: float, now_ms: int) -> tuple[Job, float] | None:
        """Take the lease of a runnable job. Returns the job and the estimated cost of a row; None if another runner has
        it, or it is not runnable. A job that this version cannot read fails, and JobFailedError is raised."""
        rows = self._rows(_TAKE, {"job_id": job_id, "runner": runner, "lease_s": lease_s, "now_ms": now_ms}, dict_row)
        if not rows:
            return None
        try:
            return job_of(rows[0]), float(rows[0]["estimated_row_cost"])
        except (KeyError, TypeError, ValueError):
            reason = "its specification cannot be read by this version of the runner"
            self._execute(
                _UNREADABLE, {"job_id": job_id, "token": rows[0]["token"], "reason": reason, "now_ms": now_ms}
            )
            raise JobFailedError(reason) from None

    def waiting(self, per_tenant: int, left_out: Collection[str] = ()) -> list[WaitingJob]:
        """Runnable jobs without a runner: the oldest of each tenant, without those ``left_out``."""
        values = {"per_tenant": per_tenant, "left_out": list(left_out), "most": _MOST_WAITING}
        return self._rows(_WAITING, values, class_row(WaitingJob))

    def unfinished(self) -> dict[Status, tuple[int, int]]:
        """Number of unfinished jobs, and of their counted rows without a result, by status."""
        return {Status(row["status"]): (row["jobs"], row["rows"]) for row in self._rows(_UNFINISHED, (), dict_row)}


def inserted(job: Job, estimated_row_cost: float) -> tuple[Any, ...]:
    """The values of INSERT."""
    spec, fingerprint = job.spec, job.fingerprint
    return (
        job.job_id,
        job.tenant,
        json.dumps(asdict(spec)),
        fingerprint.size_bytes,
        fingerprint.version,
        job.total_rows if job.counted else None,
        job.partitions,
        spec.max_cost_tokens,
        estimated_row_cost,
        job.created_at_ms,
        job.created_at_ms + spec.window_ms,
    )


_SAME_NAMES = (
    *("job_id", "tenant", "partitions", "reason", "next_chunk", "runner", "token", "reserved_nanos"),
    *("created_at_ms", "started_at_ms", "cancelling_at_ms", "finalizing_at_ms", "ended_at_ms"),
)
_TALLY_COLUMNS = (
    *("ok_rows", "failed_rows", "expired_rows", "cancelled_rows"),
    *("prompt_tokens", "completion_tokens", "cost_tokens"),
)


def job_of(row: Mapping[str, Any]) -> Job:
    """The job of a row of COLUMNS."""
    spec = JobSpec.from_json({**row["spec"], "max_cost_tokens": row["max_cost_tokens"]})
    return Job(
        **{name: row[name] for name in _SAME_NAMES},
        spec=spec,
        fingerprint=Fingerprint(row["input_bytes"], row["input_version"]),
        total_rows=row["total_rows"] or 0,
        counted=row["total_rows"] is not None,
        status=Status(row["status"]),
        wanted=Wanted(row["wanted"]),
        tally=RowTally(*(row[name] for name in _TALLY_COLUMNS)),
        answered=row["answered_rows"],
        planned=row["planned_rows"],
        next_position=InputPosition(row["next_group"], row["next_offset"]),
        deadline_at_ms=row["deadline_at_ms"] or row["created_at_ms"] + spec.window_ms,
    )
