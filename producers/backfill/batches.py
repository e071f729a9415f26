"""OpenAI's batches and their files in Postgres, and the removal of expired files."""

import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass, replace
from random import random
from threading import Event, Thread
from typing import Any

from psycopg.rows import class_row, dict_row

from fairlane.clock import ClockMs, now_ms
from fairlane.logs import get_logger
from producers.backfill.errors import JobFailedError, UnavailableError
from producers.backfill.files import blob_of, delete_folder, file_url
from producers.backfill.job import Job
from producers.backfill.job_store import COLUMNS, INSERT, Database, inserted, job_of
from producers.backfill.outputs import parts_folder

INPUT_PURPOSE = "batch"
OUTPUT_PURPOSE = "batch_output"

_COMING = "upload"
"""Purpose of an incomplete upload: it counts toward the quota and is invisible."""

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
# A failed job can be resumed until its files expire.
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
    """A file of a tenant. ``size_bytes`` is None while a job has yet to write it; ``expires_at_ms`` is None until the
    sweep sees that its job has ended."""

    file_id: str
    tenant: str
    purpose: str
    filename: str
    size_bytes: int | None
    created_at_ms: int
    expires_at_ms: int | None = None


class QuotaReachedError(Exception):
    """The quota of uploaded files is reached. The message names the limit."""


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch and its job."""

    batch_id: str
    input_file_id: str
    output_file_id: str
    error_file_id: str
    metadata: Mapping[str, str] | None
    job: Job


def new_file_id() -> str:
    """A random id, safe in a path."""
    return f"file-{secrets.token_hex(12)}"


def _check_bytes(kept_bytes: int, size_bytes: int, most_bytes: int) -> None:
    if kept_bytes + size_bytes > most_bytes:
        raise QuotaReachedError(
            f"a tenant keeps at most {most_bytes} bytes of uploaded files: {kept_bytes} are there, and this one has "
            f"{size_bytes}"
        )


class BatchStore(Database):
    """The files and batches of one tenant."""

    def reserve_file(self, file: StoredFile, until_ms: int, most_files: int, most_bytes: int) -> None:
        """Reserve an upload before it is written; it stays invisible until ``settle_upload``. An upload that never
        completes is removed like an expired file, at ``until_ms``. Raises QuotaReachedError."""
        size_bytes = file.size_bytes or 0
        with self._transaction() as connection:
            connection.execute(_LOCK_QUOTA, (file.tenant,))
            kept = connection.execute(_KEPT.encode(), (file.tenant,)).fetchone()
            files, kept_bytes = kept or (0, 0)
            if files >= most_files:
                raise QuotaReachedError(f"a tenant keeps at most {most_files} uploaded files, and {files} are there")
            _check_bytes(kept_bytes, size_bytes, most_bytes)
            coming = replace(file, purpose=_COMING, expires_at_ms=until_ms)
            connection.execute(_ADD_FILE.encode(), astuple(coming))

    def resize_upload(self, file: StoredFile, most_bytes: int) -> bool:
        """Record the name and size of a complete upload. False: its reservation was removed meanwhile.

        Raises QuotaReachedError: with this size the files of its tenant would exceed ``most_bytes``.
        """
        size_bytes = file.size_bytes or 0
        with self._transaction() as connection:
            connection.execute(_LOCK_QUOTA, (file.tenant,))
            reserved = connection.execute(_COMING_BYTES.encode(), (file.file_id,)).fetchone()
            kept = connection.execute(_KEPT.encode(), (file.tenant,)).fetchone()
            if reserved is None or kept is None:
                return False
            _check_bytes(kept[1] - reserved[0], size_bytes, most_bytes)
            connection.execute(_RESIZE_UPLOAD, (size_bytes, file.filename, file.file_id))
            return True

    def settle_upload(self, file: StoredFile) -> bool:
        """Make a complete upload visible. False: its reservation was removed meanwhile."""
        return self._execute(_SETTLE_UPLOAD, (file.expires_at_ms, file.file_id)) == 1

    def file(self, file_id: str, now_ms: int) -> StoredFile | None:
        """The file, if visible."""
        found = self._rows(_FILE, {"file_id": file_id, "now_ms": now_ms}, class_row(StoredFile))
        return found[0] if found else None

    def files(self, now_ms: int, limit: int, after: str | None, purpose: str | None) -> list[StoredFile]:
        """The latest complete files, newest first, after the one with this id."""
        values = {"now_ms": now_ms, "limit": limit, "after": after, "purpose": purpose}
        return self._rows(_FILES, values, class_row(StoredFile))

    def date_files(self, expires_at_ms: int, limit: int) -> None:
        """Set the expiry of at most ``limit`` files that have none and that no unfinished batch reads or writes."""
        self._execute(_DATE, (expires_at_ms, limit))

    def expired_files(
        self, now_ms: int, failed_until_ms: int, limit: int, behind: StoredFile | None
    ) -> list[StoredFile]:
        """Expired files, the longest expired first, after ``behind``; none of a batch that is unfinished, or that
        failed after ``failed_until_ms`` and can be resumed."""
        values: dict[str, Any] = {"now_ms": now_ms, "limit": limit, "failed_until_ms": failed_until_ms}
        values["behind_ms"], values["behind_id"] = (
            (-1, "") if behind is None else (behind.expires_at_ms, behind.file_id)
        )
        return self._rows(_EXPIRED, values, class_row(StoredFile))

    @contextmanager
    def expiring(self, file_id: str, now_ms: int, failed_until_ms: int) -> Iterator[bool]:
        """Remove the entry of an expired file when the block ends without an exception. Yields False if the file is not
        one of ``expired_files`` any more."""
        values = {"file_id": file_id, "now_ms": now_ms, "failed_until_ms": failed_until_ms}
        with self._transaction() as connection:
            # Locked first: the next statement then sees what the previous holder of the lock wrote.
            connection.execute(_LOCK_FILE, (file_id,))
            yield connection.execute(_REMOVE_EXPIRED.encode(), values).rowcount == 1

    def writer(self, file_id: str) -> str | None:
        """Id of the job that writes this file, if any."""
        rows = self._rows(_WRITER, (file_id,), dict_row)
        return str(rows[0]["job_id"]) if rows else None

    def settle_file(self, file_id: str, size_bytes: int) -> None:
        """Record the size of a file that a job has written."""
        self._execute("UPDATE files SET size_bytes = %s WHERE file_id = %s", (size_bytes, file_id))

    def remove_file(self, file_id: str) -> None:
        """Remove the entry of a file."""
        self._execute("DELETE FROM files WHERE file_id = %s", (file_id,))

    def add_batch(self, batch: StoredBatch) -> bool:
        """Queue the job of a batch, with its output files. False: its input is missing, or its job exists already."""
        job = batch.job
        with self._transaction() as connection:
            # Locked: it is not removed before the batch exists.
            values = {"file_id": batch.input_file_id, "now_ms": job.created_at_ms}
            if connection.execute(_HOLD_FILE.encode(), values).fetchone() is None:
                return False
            if not connection.execute(INSERT, inserted(job, 0.0)).rowcount:
                return False
            for file_id, what in ((batch.output_file_id, "output"), (batch.error_file_id, "errors")):
                name = f"{batch.batch_id}_{what}.jsonl"
                file = StoredFile(file_id, job.tenant, OUTPUT_PURPOSE, name, None, job.created_at_ms)
                connection.execute(_ADD_FILE.encode(), astuple(file))
            metadata = None if batch.metadata is None else json.dumps(dict(batch.metadata))
            files = (batch.input_file_id, batch.output_file_id, batch.error_file_id)
            connection.execute(
                _ADD_BATCH, (batch.batch_id, job.tenant, job.job_id, *files, metadata, job.created_at_ms)
            )
            return True

    def batch(self, batch_id: str) -> StoredBatch | None:
        """The batch, if visible."""
        rows = self._rows(_BATCH, (batch_id,), dict_row)
        return _batch(rows[0]) if rows else None

    def batches(self, limit: int, after: str | None) -> list[StoredBatch]:
        """The latest batches, newest first, after the one with this id."""
        return [_batch(row) for row in self._rows(_BATCHES, {"limit": limit, "after": after}, dict_row)]


def _batch(row: Mapping[str, Any]) -> StoredBatch:
    names = (row["batch_id"], row["input_file_id"], row["output_file_id"], row["error_file_id"])
    return StoredBatch(*names, row["metadata"], job_of(row))


log = get_logger(__name__)

SWEEP_S = 60.0
_STOP_TIMEOUT_S = 10.0
_PAGE = 500


class FileSweep:
    """Removes the expired files of all tenants once a minute, on a thread of its own.

    Args:
        postgres_dsn: database of files and batches; of a role that may act for all tenants.
        files_url: a folder, or ``s3://bucket/prefix``; each tenant's files are below its name.
        ttl_s: retention of a file, in seconds.
        clock_ms: milliseconds since the epoch.
    """

    def __init__(self, postgres_dsn: str, files_url: str, ttl_s: int, clock_ms: ClockMs = now_ms) -> None:
        self._postgres_dsn = postgres_dsn
        self._files_url = files_url
        self._ttl_ms = ttl_s * 1_000
        self._clock_ms = clock_ms
        self._stopping = Event()
        self._thread = Thread(target=self._run, name="file-sweep", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, after the file that it is removing."""
        self._stopping.set()
        self._thread.join(_STOP_TIMEOUT_S)

    def _run(self) -> None:
        # With jitter: runners that were started together do not sweep together, though it would do no harm.
        while not self._stopping.wait(SWEEP_S * (0.5 + random())):  # noqa: S311 - jitter, no secret
            try:
                removed = self.sweep()
            except (UnavailableError, JobFailedError) as error:
                log.warning("files_not_swept", reason=str(error))
            except Exception as error:  # noqa: BLE001 - a failed sweep must not end the runner's thread
                log.error("files_not_swept", error=type(error).__name__)
            else:
                if removed:
                    log.info("files_expired", files=removed)

    def sweep(self) -> int:
        """Remove expired files, page by page, until none are left or it is stopped. Returns their number.

        A file that the storage does not delete is left for the next sweep. Raises UnavailableError, JobFailedError.
        """
        now_ms, removed = self._clock_ms(), 0
        failed_until_ms = now_ms - self._ttl_ms
        with closing(BatchStore(self._postgres_dsn)) as store:
            store.date_files(now_ms + self._ttl_ms, _PAGE)
            behind: StoredFile | None = None
            while page := store.expired_files(now_ms, failed_until_ms, _PAGE, behind):
                for file in page:
                    if self._stopping.is_set():
                        return removed
                    removed += self._removed(store, file, now_ms, failed_until_ms)
                behind = page[-1]
        return removed

    def _removed(self, store: BatchStore, file: StoredFile, now_ms: int, failed_until_ms: int) -> bool:
        url = file_url(self._files_url, file.tenant, file.file_id)
        job_id = store.writer(file.file_id) if file.purpose == OUTPUT_PURPOSE else None
        try:
            # The entry goes only after its content: no content is stored without an entry that names it.
            with store.expiring(file.file_id, now_ms, failed_until_ms) as is_expired:
                if not is_expired:
                    return False
                blob_of(url).delete()
                if job_id is not None:
                    # A failed job, or a runner that was killed at the end, leaves its parts behind.
                    delete_folder(parts_folder(url, job_id), None)
        except JobFailedError as error:
            log.warning("file_not_removed", tenant=file.tenant, file_id=file.file_id, reason=str(error))
            return False
        return True
