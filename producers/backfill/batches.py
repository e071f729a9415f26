"""OpenAI's batches and their files, as they stand in Postgres: a batch is a job with names for its files."""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from psycopg.rows import dict_row

from producers.backfill.database import Database
from producers.backfill.job import Job
from producers.backfill.job_store import COLUMNS, INSERT, inserted, job_of

OUTPUT_PURPOSE = "batch_output"
"""Of what a batch is answered with."""

_FILE_COLUMNS = "file_id, tenant, purpose, filename, size_bytes, created_at_ms"
_ADD_FILE = f"INSERT INTO files ({_FILE_COLUMNS}) VALUES (%s, %s, %s, %s, %s, %s)"  # noqa: S608 - our own names
_FILE = f"SELECT {_FILE_COLUMNS} FROM files WHERE file_id = %s"  # noqa: S608 - our own names
_FILES = f"""
SELECT {_FILE_COLUMNS} FROM files
WHERE size_bytes IS NOT NULL AND (%(purpose)s::text IS NULL OR purpose = %(purpose)s)
    AND (%(after)s::text IS NULL OR (created_at_ms, file_id) <
        (SELECT created_at_ms, file_id FROM files WHERE file_id = %(after)s))
ORDER BY created_at_ms DESC, file_id DESC LIMIT %(limit)s
"""  # noqa: S608 - our own names
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
    """A file of a tenant. ``size_bytes`` is None while a job has yet to write it."""

    file_id: str
    tenant: str
    purpose: str
    filename: str
    size_bytes: int | None
    created_at_ms: int


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


class BatchStore:
    """The files and batches of one tenant; ``close`` it. Raises AwayError and JobFailedError as ``Database`` does."""

    def __init__(self, dsn: str, tenant: str) -> None:
        self._database = Database(dsn, tenant)

    def close(self) -> None:
        self._database.close()

    def add_file(self, file: StoredFile) -> None:
        """Register a file that is stored already."""
        with self._database.transaction() as connection:
            connection.execute(_ADD_FILE.encode(), _values(file))

    def file(self, file_id: str) -> StoredFile | None:
        """The file, if it is there to be seen."""
        rows = self._rows(_FILE, (file_id,))
        return StoredFile(**rows[0]) if rows else None

    def files(self, limit: int, after: str | None, purpose: str | None) -> list[StoredFile]:
        """The latest files that are whole, newest first, after the one of this id."""
        rows = self._rows(_FILES, {"limit": limit, "after": after, "purpose": purpose})
        return [StoredFile(**row) for row in rows]

    def settle_file(self, file_id: str, size_bytes: int) -> None:
        """A job has written this file."""
        with self._database.transaction() as connection:
            connection.execute("UPDATE files SET size_bytes = %s WHERE file_id = %s", (size_bytes, file_id))

    def remove_file(self, file_id: str) -> None:
        """Nobody finds it any more."""
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM files WHERE file_id = %s", (file_id,))

    def add_batch(self, batch: Batch) -> None:
        """Queue the job of a batch; its outputs are files that are not there yet."""
        job = batch.job
        with self._database.transaction() as connection:
            connection.execute(INSERT, inserted(job, 0.0))
            for file_id, what in ((batch.output_file_id, "output"), (batch.error_file_id, "errors")):
                name = f"{batch.batch_id}_{what}.jsonl"
                file = StoredFile(file_id, job.tenant, OUTPUT_PURPOSE, name, None, job.created_at_ms)
                connection.execute(_ADD_FILE.encode(), _values(file))
            metadata = None if batch.metadata is None else json.dumps(dict(batch.metadata))
            files = (batch.input_file_id, batch.output_file_id, batch.error_file_id)
            connection.execute(
                _ADD_BATCH, (batch.batch_id, job.tenant, job.job_id, *files, metadata, job.created_at_ms)
            )

    def batch(self, batch_id: str) -> Batch | None:
        """The batch, if it is there to be seen."""
        rows = self._rows(_BATCH, (batch_id,))
        return _batch(rows[0]) if rows else None

    def batches(self, limit: int, after: str | None) -> list[Batch]:
        """The latest batches, newest first, after the one of this id."""
        return [_batch(row) for row in self._rows(_BATCHES, {"limit": limit, "after": after})]

    def _rows(self, query: str, values: Any) -> list[dict[str, Any]]:
        with self._database.transaction() as connection, connection.cursor(row_factory=dict_row) as cursor:
            return cursor.execute(query.encode(), values).fetchall()


def _values(file: StoredFile) -> tuple[Any, ...]:
    return (file.file_id, file.tenant, file.purpose, file.filename, file.size_bytes, file.created_at_ms)


def _batch(row: Mapping[str, Any]) -> Batch:
    names = (row["batch_id"], row["input_file_id"], row["output_file_id"], row["error_file_id"])
    return Batch(*names, row["metadata"], job_of(row))
