"""A tenant's collections and documents, as the gateway sees them: uploads, status, pages, removal."""

import secrets
from dataclasses import dataclass
from typing import Any

import psycopg

from fairlane_server.retrieval.parsers import DocumentFormat
from producers.backfill.errors import JobFailedError
from producers.backfill.job_store import Database
from producers.ingest.document import Document, DocumentStatus

UPLOAD_LEASE_S = 7_200
"""How long the content of an upload may take to arrive: longer than a transfer."""

_LOCK_QUOTA = "SELECT pg_advisory_xact_lock(hashtextextended('fairlane.documents.' || %s, 0))"
_COLLECTION = "SELECT collection_id FROM collections WHERE tenant = %s AND name = %s"
_EMBEDDER = "SELECT name, dimensions FROM embedders"
_KEPT = """
SELECT
    (SELECT coalesce(sum(documents), 0) FROM collections WHERE tenant = %(tenant)s)
        + (SELECT count(*) FROM document_uploads WHERE tenant = %(tenant)s AND collection_id IS NOT NULL
            AND state IN ('receiving', 'pending', 'running', 'failed')),
    (SELECT coalesce(sum(d.size_bytes), 0) FROM collections AS c JOIN documents AS d USING (collection_id)
        WHERE c.tenant = %(tenant)s)
        + (SELECT coalesce(sum(size_bytes), 0) FROM document_uploads WHERE tenant = %(tenant)s
            AND collection_id IS NOT NULL AND state IN ('receiving', 'pending', 'running')),
    (SELECT coalesce(sum(passages), 0) FROM collections WHERE tenant = %(tenant)s)
"""
_RESERVE = """
INSERT INTO document_uploads (upload_id, tenant, collection_id, source, format, size_bytes, created_at_ms, lease_until)
VALUES (%s, %s, %s, '', '', %s, %s, clock_timestamp() + make_interval(secs => %s))
"""
_SUPERSEDE = """
UPDATE document_uploads SET state = 'gone', source = '', reason = NULL, lease_until = NULL
WHERE collection_id = %s AND source = %s AND state IN ('pending', 'running', 'failed')
"""
_SETTLE = """
UPDATE document_uploads SET state = 'pending', source = %s, format = %s, size_bytes = %s, lease_until = NULL
WHERE upload_id = %s AND state = 'receiving' AND collection_id = %s
RETURNING document_id, created_at_ms
"""
_LEAVE = "UPDATE document_uploads SET state = 'gone', lease_until = NULL WHERE upload_id = %s AND state = 'receiving'"
# Each side is cut to a page of its own first: what a page behind the cursor holds is among both.
_PAGE = """
SELECT coalesce(u.document_id, d.document_id), source, coalesce(u.state, 'done'), coalesce(u.size_bytes, d.size_bytes),
    coalesce(d.passages, 0), u.reason, u.created_at_ms, (extract(epoch FROM d.stored_at) * 1000)::bigint
FROM (
    SELECT source, document_id, size_bytes, passages, stored_at FROM documents
    WHERE collection_id = %(collection)s AND {of_document} ORDER BY source LIMIT %(most)s
) AS d FULL JOIN (
    SELECT source, document_id, size_bytes, state, reason, created_at_ms FROM document_uploads
    WHERE collection_id = %(collection)s AND state IN ('pending', 'running', 'failed') AND {of_document}
    ORDER BY source LIMIT %(most)s
) AS u USING (source)
ORDER BY source LIMIT %(most)s
"""
_PAGE_BEHIND = _PAGE.format(of_document="source > %(behind)s").encode()
_BY_ID = _PAGE.format(of_document="document_id = %(document_id)s").encode()


@dataclass(frozen=True, slots=True)
class DocumentQuota:
    """Most documents, bytes of them and passages of one tenant."""

    most_documents: int = 10_000
    most_bytes: int = 2 * 1024**3
    most_passages: int = 1_000_000


class QuotaReachedError(Exception):
    """A quota of the tenant is reached. The message names the bound."""


class UnknownCollectionError(Exception):
    """The tenant has no collection of this name."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room for an upload in a collection; its content is named by its id."""

    upload_id: str
    collection_id: int


class TenantDocuments(Database):
    """The documents of one tenant. Every call raises UnavailableError and JobFailedError as ``Database`` does."""

    def __init__(self, dsn: str, tenant: str) -> None:
        super().__init__(dsn, tenant)
        self._of = tenant

    def embedder(self) -> tuple[str, int] | None:
        """Name and dimensions of the deployment's embedder; None before an ingest process has started once."""
        with self._transaction() as connection:
            found = connection.execute(_EMBEDDER).fetchone()
        return None if found is None else (str(found[0]), int(found[1]))

    def reserve(self, collection: str, size_bytes: int, now_ms: int, quota: DocumentQuota) -> Reservation:
        """Reserve room before the content arrives. Raises UnknownCollectionError, QuotaReachedError."""
        made = f"upload-{secrets.token_hex(12)}"
        with self._transaction() as connection:
            connection.execute(_LOCK_QUOTA, (self._of,))
            number = self._number(connection, collection)
            _check(connection.execute(_KEPT, {"tenant": self._of}).fetchone(), size_bytes, quota)
            connection.execute(_RESERVE, (made, self._of, number, size_bytes, now_ms, UPLOAD_LEASE_S))
        return Reservation(made, number)

    def settle(self, reserved: Reservation, name: str, kind: DocumentFormat, size_bytes: int) -> Document | None:
        """Queue an upload whose content is stored; an unfinished version of the document is given up. Returns the
        document without what is stored of an older version; None: the collection was deleted meanwhile."""
        with self._transaction() as connection:
            # One after another: of two versions that arrive at once, one gives way.
            connection.execute(_LOCK_QUOTA, (self._of,))
            connection.execute(_SUPERSEDE, (reserved.collection_id, name))
            values = (name, kind.value, size_bytes, reserved.upload_id, reserved.collection_id)
            found = connection.execute(_SETTLE, values).fetchone()
        if found is None:
            return None
        return Document(found[0], name, DocumentStatus.PENDING, size_bytes, 0, uploaded_at_ms=found[1])

    def leave(self, reserved: Reservation) -> None:
        """Give up an upload; what is stored of its content is removed later."""
        self._execute(_LEAVE, (reserved.upload_id,))

    def page(self, collection: str, behind: str, most: int) -> list[Document]:
        """Documents by name, behind that name. Raises UnknownCollectionError."""
        with self._transaction() as connection:
            values = {"collection": self._number(connection, collection), "behind": behind, "most": most}
            rows = connection.execute(_PAGE_BEHIND, values).fetchall()
        return [_document(row) for row in rows]

    def document(self, collection: str, document_id: str) -> Document | None:
        """Raises UnknownCollectionError."""
        with self._transaction() as connection:
            values = {"collection": self._number(connection, collection), "document_id": document_id, "most": 1}
            row = connection.execute(_BY_ID, values).fetchone()
        return None if row is None else _document(row)

    def remove(self, collection: str, document_id: str) -> bool:
        """Remove a document with its passages, and end its ingestion. False: there is none, or no such collection."""
        with self._transaction() as connection:
            row = connection.execute("SELECT remove_document(%s, %s)", (collection, document_id)).fetchone()
        return row is not None and bool(row[0])

    def _number(self, connection: psycopg.Connection, collection: str) -> int:
        found = connection.execute(_COLLECTION, (self._of, collection)).fetchone()
        if found is None:
            raise UnknownCollectionError
        return int(found[0])


def _check(kept: tuple[Any, ...] | None, size_bytes: int, quota: DocumentQuota) -> None:
    if kept is None:
        raise JobFailedError("the documents of a tenant could not be counted")
    documents, kept_bytes, passages = map(int, kept)
    if documents >= quota.most_documents:
        raise QuotaReachedError(f"a tenant has at most {quota.most_documents} documents, and {documents} are there")
    if kept_bytes + size_bytes > quota.most_bytes:
        raise QuotaReachedError(
            f"the documents of a tenant have at most {quota.most_bytes} bytes: {kept_bytes} are there, and this body "
            f"has {size_bytes}"
        )
    if passages >= quota.most_passages:
        raise QuotaReachedError(f"a tenant has at most {quota.most_passages} passages, and {passages} are there")


def _document(row: tuple[Any, ...]) -> Document:
    document_id, name, state, size_bytes, passages, reason, uploaded_at_ms, stored_at_ms = row
    return Document(
        document_id, name, DocumentStatus(state), size_bytes, passages, reason, uploaded_at_ms, stored_at_ms
    )
