"""OpenAI's batches and their files in Postgres, and the removal of expired files."""

import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import random
from threading import Event, Thread
from typing import Any

from psycopg.rows import dict_row

from fairlane.clock import ClockMs, now_ms
from fairlane.logs import get_logger
from fairlane_server.postgres.connection import ALL_TENANTS
from producers.backfill.files import blob_of, delete_folder, file_url
from producers.backfill.job import Job
from producers.backfill.job_store import COLUMNS, INSERT, Database, inserted, job_of
from producers.backfill.outputs import parts_folder
from producers.backfill.ports import AwayError, JobFailedError

INPUT_PURPOSE = "batch"
"""Of what was uploaded."""
OUTPUT_PURPOSE = "batch_output"
"""Of what a batch is answered with."""

_COMING = "upload"
"""The purpose of a file while it is written: it has its place in the quota, and nobody finds it."""

_FILE_COLUMNS = "file_id, tenant, purpose, filename, size_bytes, created_at_ms, expires_at_ms"
_ADD_FILE = f"INSERT INTO files ({_FILE_COLUMNS}) VALUES (%s, %s, %s, %s, %s, %s, %s)"  # noqa: S608 - our own names
_FOUND = f"purpose <> '{_COMING}' AND (expires_at_ms IS NULL OR expires_at_ms > %(now_ms)s)"
_FILE = f"SELECT {_FILE_COLUMNS} FROM files WHERE file_id = %(file_id)s AND {_FOUND}"  # noqa: S608 - our own names
_HOLD_FILE = f"{_FILE} FOR SHARE"
_FILES = f"""
SELECT {_FILE_COLUMNS} FROM files
WHERE {_FOUND} AND size_bytes IS NOT NULL AND (%(purpose)s::text IS NULL OR purpose = %(purpose)s)
    AND (%(after)s::text IS NULL OR (created_at_ms, file_id) <
        (SELECT created_at_ms, file_id FROM files WHERE file_id = %(after)s))
ORDER BY created_at_ms DESC, file_id DESC LIMIT %(limit)s
"""  # noqa: S608 - our own names
_LOCK_QUOTA = "SELECT pg_advisory_xact_lock(hashtextextended('fairlane.files.' || %s, 0))"
_KEPT = f"""
SELECT count(*), coalesce(sum(size_bytes), 0)::bigint FROM files
WHERE tenant = %s AND purpose IN ('{INPUT_PURPOSE}', '{_COMING}')
"""  # noqa: S608 - our own names
_SETTLE_UPLOAD = f"""
UPDATE files SET purpose = '{INPUT_PURPOSE}', expires_at_ms = %s WHERE file_id = %s AND purpose = '{_COMING}'
"""  # noqa: S608 - our own names
_COMING_BYTES = f"SELECT size_bytes FROM files WHERE file_id = %s AND purpose = '{_COMING}'"  # noqa: S608 - our own
_RESIZE_UPLOAD = "UPDATE files SET size_bytes = %s, filename = %s WHERE file_id = %s"
_OF_BATCHES = """
SELECT unnest(ARRAY[input_file_id, output_file_id, error_file_id]) FROM batches JOIN backfill_jobs USING (job_id)
"""
_GO_ON = "status NOT IN ('completed', 'expired', 'cancelled', 'failed')"
# What failed can be resumed, for a time.
_MAY_GO_ON = f"({_GO_ON} OR status = 'failed' AND ended_at_ms > %(failed_until_ms)s)"
_DATE = f"""
UPDATE files SET expires_at_ms = %s WHERE file_id IN (
    SELECT file_id FROM files WHERE expires_at_ms IS NULL AND file_id NOT IN ({_OF_BATCHES} WHERE {_GO_ON}) LIMIT %s
)
"""  # noqa: S608 - our own names
_EXPIRED = f"""
SELECT {_FILE_COLUMNS} FROM files
WHERE expires_at_ms <= %(now_ms)s AND (expires_at_ms, file_id) > (%(behind_ms)s, %(behind_id)s)
    AND file_id NOT IN ({_OF_BATCHES} WHERE {_MAY_GO_ON})
ORDER BY expires_at_ms, file_id LIMIT %(limit)s
"""  # noqa: S608 - our own names
_LOCK_FILE = "SELECT 1 FROM files WHERE file_id = %s FOR UPDATE"
_REMOVE_EXPIRED = f"""
DELETE FROM files WHERE file_id = %(file_id)s AND expires_at_ms <= %(now_ms)s AND NOT EXISTS (
    SELECT 1 FROM batches JOIN backfill_jobs USING (job_id)
    WHERE file_id IN (input_file_id, output_file_id, error_file_id) AND {_MAY_GO_ON}
)
"""  # noqa: S608 - our own names
_WRITER = "SELECT job_id FROM batches WHERE %s IN (output_file_id, error_file_id)"
_ADD_BATCH = """
INSERT INTO batches (batch_id, tenant, job_id, input_file_id, output_file_id, error_file_id, metadata, created_at_ms)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s)
"""
_BATCH_COLUMNS = "batch_id, input_file_id, output_file_id, error_file_id, metadata"
_JOINED = f"""
SELECT {_BATCH_COLUMNS}, job.* FROM batches JOIN LATERAL (
    SELECT {COLUMNS} FROM backfill_jobs WHERE backfill_jobs.job_id = batches.job_id
) AS job ON true
"""  # noqa: S608 - our own names
_BATCH = f"{_JOINED} WHERE batch_id = %s"
_BATCHES = f"""{_JOINED}
WHERE (%(after)s::text IS NULL OR (batches.created_at_ms, batch_id) <
    (SELECT created_at_ms, batch_id FROM batches WHERE batch_id = %(after)s))
ORDER BY batches.created_at_ms DESC, batch_id DESC LIMIT %(limit)s
"""  # noqa: S608 - our own names


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a tenant. ``size_bytes`` is None while a job has yet to write it, ``expires_at_ms`` until the end of
    that job, or of an older file, was noticed."""

    file_id: str
    tenant: str
    purpose: str
    filename: str
    size_bytes: int | None
    created_at_ms: int
    expires_at_ms: int | None = None


class QuotaReachedError(Exception):
    """A tenant has as many uploaded files as it may. The message names the limit."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch and the job that it is."""

    batch_id: str
    input_file_id: str
    output_file_id: str
    error_file_id: str
    metadata: Mapping[str, str] | None
    job: Job


def new_file_id() -> str:
    """At random, and fit for a path."""
    return f"file-{secrets.token_hex(12)}"


def _check_bytes(kept_bytes: int, size_bytes: int, most_bytes: int) -> None:
    if kept_bytes + size_bytes > most_bytes:
        raise QuotaReachedError(
            f"a tenant keeps at most {most_bytes} bytes of uploaded files: {kept_bytes} are there, and this one has "
            f"{size_bytes}"
        )


class BatchStore:
    """The files and batches of one tenant; ``close`` it. Raises AwayError and JobFailedError as ``Database`` does."""

    def __init__(self, dsn: str, tenant: str) -> None:
        self._database = Database(dsn, tenant)

    def close(self) -> None:
        self._database.close()

    def reserve_file(self, file: StoredFile, until_ms: int, most_files: int, most_bytes: int) -> None:
        """Reserve an upload before it is written; it stays invisible until ``settle_upload``. An upload that never
        completes is removed like an expired file, at ``until_ms``.

        Raises QuotaReachedError: the uploaded files of its tenant would be more, or have more bytes, than that.
        """
        size_bytes = file.size_bytes or 0
        with self._database.transaction() as connection:
            connection.execute(_LOCK_QUOTA, (file.tenant,))
            kept = connection.execute(_KEPT.encode(), (file.tenant,)).fetchone()
            files, kept_bytes = kept or (0, 0)
            if files >= most_files:
                raise QuotaReachedError(f"a tenant keeps at most {most_files} uploaded files, and {files} are there")
            _check_bytes(kept_bytes, size_bytes, most_bytes)
            coming = replace(file, purpose=_COMING, expires_at_ms=until_ms)
            connection.execute(_ADD_FILE.encode(), _values(coming))

    def resize_upload(self, file: StoredFile, most_bytes: int) -> bool:
        """An upload has come whole, and has the name and the size of ``file``; False: its place was removed meanwhile.

        Raises QuotaReachedError: with this size the files of its tenant would have more bytes than that.
        """
        size_bytes = file.size_bytes or 0
        with self._database.transaction() as connection:
            connection.execute(_LOCK_QUOTA, (file.tenant,))
            reserved = connection.execute(_COMING_BYTES.encode(), (file.file_id,)).fetchone()
            kept = connection.execute(_KEPT.encode(), (file.tenant,)).fetchone()
            if reserved is None or kept is None:
                return False
            _check_bytes(kept[1] - reserved[0], size_bytes, most_bytes)
            connection.execute(_RESIZE_UPLOAD, (size_bytes, file.filename, file.file_id))
            return True

    def settle_upload(self, file: StoredFile) -> bool:
        """An upload is written, and is found from now on; False: its place was removed meanwhile."""
        with self._database.transaction() as connection:
            done = connection.execute(_SETTLE_UPLOAD.encode(), (file.expires_at_ms, file.file_id))
            return done.rowcount == 1

    def file(self, file_id: str, now_ms: int) -> StoredFile | None:
        """The file, if visible."""
        rows = self._rows(_FILE, {"file_id": file_id, "now_ms": now_ms})
        return StoredFile(**rows[0]) if rows else None

    def files(self, now_ms: int, limit: int, after: str | None, purpose: str | None) -> list[StoredFile]:
        """The latest files that are whole, newest first, after the one of this id."""
        rows = self._rows(_FILES, {"now_ms": now_ms, "limit": limit, "after": after, "purpose": purpose})
        return [StoredFile(**row) for row in rows]

    def date_files(self, expires_at_ms: int, limit: int) -> None:
        """Let so many files end then that nothing says the end of, and that no batch which goes on reads or writes."""
        with self._database.transaction() as connection:
            connection.execute(_DATE.encode(), (expires_at_ms, limit))

    def expired_files(
        self, now_ms: int, failed_until_ms: int, limit: int, behind: StoredFile | None
    ) -> list[StoredFile]:
        """Files that nobody finds any more, the longest expired first, after this one; none of a batch which goes on,
        or failed later than ``failed_until_ms`` and may be gone on with."""
        behind_ms, behind_id = (-1, "") if behind is None else (behind.expires_at_ms, behind.file_id)
        values = {"now_ms": now_ms, "limit": limit, "behind_ms": behind_ms, "behind_id": behind_id}
        return [StoredFile(**row) for row in self._rows(_EXPIRED, {**values, "failed_until_ms": failed_until_ms})]

    @contextmanager
    def expiring(self, file_id: str, now_ms: int, failed_until_ms: int) -> Iterator[bool]:
        """Whether the file is still one of those; it is nobody's any more when the block ends, unless that raises."""
        values = {"file_id": file_id, "now_ms": now_ms, "failed_until_ms": failed_until_ms}
        with self._database.transaction() as connection:
            # First, so that what is looked at next is from after whoever had it locked.
            connection.execute(_LOCK_FILE, (file_id,))
            yield connection.execute(_REMOVE_EXPIRED.encode(), values).rowcount == 1

    def writer(self, file_id: str) -> str | None:
        """The job that writes this file, if any does."""
        rows = self._rows(_WRITER, (file_id,))
        return str(rows[0]["job_id"]) if rows else None

    def settle_file(self, file_id: str, size_bytes: int) -> None:
        """A job has written this file."""
        with self._database.transaction() as connection:
            connection.execute("UPDATE files SET size_bytes = %s WHERE file_id = %s", (size_bytes, file_id))

    def remove_file(self, file_id: str) -> None:
        """Make the file invisible."""
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM files WHERE file_id = %s", (file_id,))

    def add_batch(self, batch: Batch) -> bool:
        """Queue the job of a batch, with its output files. False: its input is gone, or its job exists already."""
        job = batch.job
        with self._database.transaction() as connection:
            # Nobody removes it until the batch is there.
            values = {"file_id": batch.input_file_id, "now_ms": job.created_at_ms}
            if connection.execute(_HOLD_FILE.encode(), values).fetchone() is None:
                return False
            if not connection.execute(INSERT, inserted(job, 0.0)).rowcount:
                return False
            for file_id, what in ((batch.output_file_id, "output"), (batch.error_file_id, "errors")):
                name = f"{batch.batch_id}_{what}.jsonl"
                file = StoredFile(file_id, job.tenant, OUTPUT_PURPOSE, name, None, job.created_at_ms)
                connection.execute(_ADD_FILE.encode(), _values(file))
            metadata = None if batch.metadata is None else json.dumps(dict(batch.metadata))
            files = (batch.input_file_id, batch.output_file_id, batch.error_file_id)
            connection.execute(
                _ADD_BATCH, (batch.batch_id, job.tenant, job.job_id, *files, metadata, job.created_at_ms)
            )
            return True

    def batch(self, batch_id: str) -> Batch | None:
        """The batch, if visible."""
        rows = self._rows(_BATCH, (batch_id,))
        return _batch(rows[0]) if rows else None

    def batches(self, limit: int, after: str | None) -> list[Batch]:
        """The latest batches, newest first, after the one of this id."""
        return [_batch(row) for row in self._rows(_BATCHES, {"limit": limit, "after": after})]

    def _rows(self, query: str, values: Any) -> list[dict[str, Any]]:
        with self._database.transaction() as connection, connection.cursor(row_factory=dict_row) as cursor:
            return cursor.execute(query.encode(), values).fetchall()


def _values(file: StoredFile) -> tuple[Any, ...]:
    name = (file.file_id, file.tenant, file.purpose, file.filename)
    return (*name, file.size_bytes, file.created_at_ms, file.expires_at_ms)


def _batch(row: Mapping[str, Any]) -> Batch:
    names = (row["batch_id"], row["input_file_id"], row["output_file_id"], row["error_file_id"])
    return Batch(*names, row["metadata"], job_of(row))


log = get_logger(__name__)

SWEEP_S = 60.0
_STOP_TIMEOUT_S = 10.0
_PAGE = 500


@dataclass(frozen=True, slots=True)
class KeptFiles:
    """The files of all tenants.

    Attributes:
        postgres_dsn: where files and batches are known; of a role that acts for all tenants.
        files_url: a folder, or ``s3://bucket/prefix``; each tenant's files are below its name.
        ttl_s: how long a file is kept.
        clock_ms: milliseconds since the epoch.
    """

    postgres_dsn: str
    files_url: str
    ttl_s: int
    clock_ms: ClockMs = now_ms


class FileSweep:
    """The thread."""

    def __init__(self, kept: KeptFiles) -> None:
        self._kept = kept
        self._stopping = Event()
        self._thread = Thread(target=self._run, name="file-sweep", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End it; the file that is being removed by then is removed all the same."""
        self._stopping.set()
        self._thread.join(_STOP_TIMEOUT_S)

    def _run(self) -> None:
        # Runners that were started together do not sweep together, though it would do no harm.
        while not self._stopping.wait(SWEEP_S * (0.5 + random())):  # noqa: S311 - jitter, no secret
            try:
                removed = sweep(self._kept, self._stopping)
            except (AwayError, JobFailedError) as error:
                log.warning("files_not_swept", reason=str(error))
            except Exception as error:  # noqa: BLE001 - a runner runs jobs, whatever becomes of old files
                log.error("files_not_swept", error=type(error).__name__)
            else:
                if removed:
                    log.info("files_expired", files=removed)


def sweep(kept: KeptFiles, stopped: Event) -> int:
    """Remove expired files, page by page, until there are none or it is stopped; returns their number.

    A file whose storage refuses to let it go is left for the next time. Raises AwayError, JobFailedError.
    """
    now_ms, removed = kept.clock_ms(), 0
    failed_until_ms = now_ms - kept.ttl_s * 1_000
    store = BatchStore(kept.postgres_dsn, ALL_TENANTS)
    try:
        store.date_files(now_ms + kept.ttl_s * 1_000, _PAGE)
        behind: StoredFile | None = None
        while page := store.expired_files(now_ms, failed_until_ms, _PAGE, behind):
            for file in page:
                if stopped.is_set():
                    return removed
                removed += _removed(kept, store, file, now_ms, failed_until_ms)
            behind = page[-1]
    finally:
        store.close()
    return removed


def _removed(kept: KeptFiles, store: BatchStore, file: StoredFile, now_ms: int, failed_until_ms: int) -> bool:
    url = file_url(kept.files_url, file.tenant, file.file_id)
    job_id = store.writer(file.file_id) if file.purpose == OUTPUT_PURPOSE else None
    try:
        # Only with the storage's consent is it forgotten: what it names is gone for sure.
        with store.expiring(file.file_id, now_ms, failed_until_ms) as is_expired:
            if not is_expired:
                return False
            blob_of(url).delete()
            if job_id is not None:
                # A job that failed, or whose runner was killed in the end, leaves them behind.
                delete_folder(parts_folder(url, job_id), None)
    except JobFailedError as error:
        log.warning("file_not_removed", tenant=file.tenant, file_id=file.file_id, reason=str(error))
        return False
    return True
