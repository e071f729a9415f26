"""The queue of uploads, as the process that ingests them sees it: leases, results, and content to delete."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg

from fairlane.clock import ClockMs, now_ms
from fairlane_server.postgres.connection import ALL_TENANTS
from fairlane_server.retrieval.embedder import Embedder
from fairlane_server.retrieval.parsers import DocumentFormat
from producers.backfill.errors import LeaseLostError
from producers.backfill.job_store import Database
from producers.ingest.turns import WaitingUpload

_MOST_TENANTS = 1_000
_IS_FREE = (
    "state IN ('pending', 'running') AND collection_id IS NOT NULL AND coalesce(lease_until < clock_timestamp(), true)"
)
_WAITING = f"""
SELECT DISTINCT ON (tenant) tenant, upload_id FROM document_uploads WHERE {_IS_FREE}
ORDER BY tenant, created_at_ms, upload_id LIMIT %s
"""  # noqa: S608 - our own names
_COUNTED = """
SELECT state, count(*) FROM document_uploads WHERE state IN ('pending', 'running') AND collection_id IS NOT NULL
GROUP BY state
"""
_TAKE = f"""
UPDATE document_uploads SET state = 'running', token = token + 1, attempts = attempts + 1,
    lease_until = clock_timestamp() + make_interval(secs => %s)
WHERE upload_id = %s AND {_IS_FREE} RETURNING collection_id, source, format, size_bytes, token, attempts, retries
"""  # noqa: S608 - our own names
_NAME = "SELECT name FROM collections WHERE collection_id = %s"
_KEEP = """
UPDATE document_uploads AS kept SET lease_until = clock_timestamp() + make_interval(secs => %s)
FROM unnest(%s::text[], %s::bigint[]) AS held (upload_id, token)
WHERE kept.upload_id = held.upload_id AND kept.token = held.token AND kept.state = 'running'
    AND kept.collection_id IS NOT NULL
RETURNING kept.upload_id
"""
_OURS = "upload_id = %(upload_id)s AND token = %(token)s AND state = 'running'"
_END = f"""
UPDATE document_uploads SET state = %(state)s, reason = %(reason)s, ended_at_ms = %(now_ms)s, lease_until = NULL
WHERE {_OURS}
"""  # noqa: S608 - our own names
_RELEASE = f"""
UPDATE document_uploads SET state = 'pending', attempts = attempts - 1, retries = retries + 1,
    lease_until = clock_timestamp() + make_interval(secs => %(after_s)s)
WHERE {_OURS}
"""  # noqa: S608 - our own names
_LOCK_PASSAGES = "SELECT pg_advisory_xact_lock(hashtextextended('fairlane.passages.' || %s, 0))"
_PASSAGES = "SELECT coalesce(sum(passages), 0)::bigint FROM collections WHERE tenant = %s"
_EMBEDDER = """
INSERT INTO embedders AS known (name, dimensions) VALUES (%(name)s, %(dimensions)s)
ON CONFLICT (singleton) DO UPDATE SET name = excluded.name, dimensions = excluded.dimensions, recorded_at = now()
WHERE (known.name, known.dimensions) <> (excluded.name, excluded.dimensions)
"""
# What its gateway may still be writing is left until its lease has ended.
_IS_OVER = """
(state IN ('done', 'gone') OR (collection_id IS NULL AND state <> 'receiving')
    OR (state = 'receiving' AND lease_until < clock_timestamp()))
"""
_LEFT = f"""
SELECT upload_id, tenant, state = 'failed' AND collection_id IS NOT NULL FROM document_uploads
WHERE {_IS_OVER} OR (state = 'failed' AND has_content) ORDER BY upload_id LIMIT %s
"""  # noqa: S608 - our own names
_FORGET = f"DELETE FROM document_uploads WHERE upload_id = %s AND {_IS_OVER}"  # noqa: S608 - our own names
_EMPTIED = "UPDATE document_uploads SET has_content = false WHERE upload_id = %s AND state = 'failed'"


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload that this process holds the lease of; ``attempts`` counts this one, ``retries`` how often it was given
    back before."""

    tenant: str
    upload_id: str
    collection: str
    collection_id: int
    source: str
    format: DocumentFormat
    size_bytes: int
    token: int
    attempts: int
    retries: int


class PassageQuotaError(Exception):
    """With this document its tenant would have more passages than it may. The message names the bound."""


class WorkStore(Database):
    """Every call raises UnavailableError and JobFailedError as ``Database`` does; one connection, for one thread."""

    def __init__(self, dsn: str, clock_ms: ClockMs = now_ms) -> None:
        super().__init__(dsn, ALL_TENANTS)
        self._clock_ms = clock_ms

    def announce(self, embedder: Embedder) -> None:
        """Record the embedder that new collections are for."""
        self._execute(_EMBEDDER, {"name": embedder.name, "dimensions": embedder.dimensions})

    def waiting(self) -> list[WaitingUpload]:
        """The oldest upload of each tenant that nobody has taken."""
        with self._transaction() as connection:
            return [WaitingUpload(*row) for row in connection.execute(_WAITING, (_MOST_TENANTS,))]

    def counted(self) -> Mapping[str, int]:
        """Number of uploads by state, those that wait and those that run."""
        with self._transaction() as connection:
            return dict(connection.execute(_COUNTED).fetchall())

    def take(self, upload: WaitingUpload, lease_s: float) -> Upload | None:
        """Take the lease of an upload; None: another process has it, or it is gone."""
        with self._transaction_of(upload.tenant) as connection:
            row = connection.execute(_TAKE.encode(), (lease_s, upload.upload_id)).fetchone()
            if row is None:
                return None
            number, source, kind, size_bytes, *counts = row
            name = connection.execute(_NAME, (number,)).fetchone()
        if name is None:
            return None
        names = (upload.tenant, upload.upload_id, str(name[0]), number, source)
        return Upload(*names, DocumentFormat(kind), size_bytes, *counts)

    def keep(self, held: Mapping[str, int], lease_s: float) -> set[str]:
        """Renew the leases of these uploads, by token. Returns those that are still ours."""
        with self._transaction() as connection:
            rows = connection.execute(_KEEP, (lease_s, list(held), list(held.values()))).fetchall()
        return {upload_id for (upload_id,) in rows}

    def fail(self, upload: Upload, reason: str) -> bool:
        """End the ingestion of this version. False: it is not ours any more."""
        with self._transaction_of(upload.tenant) as connection:
            return self._end(connection, upload, "failed", reason)

    def release(self, upload: Upload, after_s: float) -> None:
        """Give it back, to be tried again after this time; it counts as a retry, not as an attempt."""
        with self._transaction_of(upload.tenant) as connection:
            values = {"upload_id": upload.upload_id, "token": upload.token, "after_s": after_s}
            connection.execute(_RELEASE.encode(), values)

    def confirm(self, connection: psycopg.Connection, upload: Upload, most_passages: int) -> None:
        """At the end of the transaction that stores its passages: it is done. Raises LeaseLostError if it was deleted,
        replaced or taken by another process meanwhile, and PassageQuotaError; both undo the transaction."""
        connection.execute(_LOCK_PASSAGES, (upload.tenant,))
        row = connection.execute(_PASSAGES, (upload.tenant,)).fetchone()
        if row is None or row[0] > most_passages:
            raise PassageQuotaError(f"a tenant has at most {most_passages:,} passages, and this would be more")
        if not self._end(connection, upload, "done", None):
            raise LeaseLostError

    def left_content(self, most: int) -> list[tuple[str, str, bool]]:
        """Upload, tenant, and whether its row stays, of content that is of no use any more."""
        with self._transaction() as connection:
            return [(row[0], row[1], bool(row[2])) for row in connection.execute(_LEFT.encode(), (most,))]

    def content_deleted(self, upload_id: str, *, stays: bool) -> None:
        """Record it, or remove the row."""
        self._execute(_EMPTIED if stays else _FORGET, (upload_id,))

    def _end(self, connection: psycopg.Connection, upload: Upload, state: str, reason: str | None) -> bool:
        values = {"state": state, "reason": reason, "now_ms": self._clock_ms()}
        values |= {"upload_id": upload.upload_id, "token": upload.token}
        return connection.execute(_END.encode(), values).rowcount == 1

    @contextmanager
    def _transaction_of(self, tenant: str) -> Iterator[psycopg.Connection]:
        with self._transaction() as connection:
            connection.execute("SELECT set_config('fairlane.tenant', %s, true)", (tenant,))
            yield connection
