"""Dependencies of the routes of collections and documents, and their errors."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends

from fairlane.clock import ClockMs, now_ms
from fairlane.logs import get_logger
from fairlane.outcomes import Code
from fairlane_server.retrieval.pgvector_store import PgVectorCollections
from fairlane_server.retrieval.store import CollectionNotFoundError
from fairlane_server.store_error import StoreError
from producers.backfill.errors import JobFailedError, UnavailableError
from producers.backfill.files import Blob, blob_of, file_url
from producers.gateway.identity.identity import Authenticate, Identity, Permission, require
from producers.gateway.openapi import ErrorDocs
from producers.gateway.received_forms import LENGTH_REQUIRED
from producers.gateway.tenant_bounds import TenantSlots
from producers.ingest.upload_store import DocumentQuota, TenantDocuments, UnknownCollectionError
from producers.openai_api.errors import UNAVAILABLE, GatewayError

log = get_logger(__name__)

UNKNOWN_COLLECTION, UNKNOWN_DOCUMENT = "unknown_collection", "unknown_document"
"""The gateway's own codes: the tenant has no such collection, or no such document in it."""
QUOTA_REACHED = "insufficient_quota"
NO_EMBEDDER = "no_embedder"
"""The gateway's own code: no process that ingests documents has started yet."""
CONFLICT, UNSUPPORTED = "conflict", "unsupported_format"

_RETRY_AFTER_MS = 2_000
CALL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class DocumentDeps:
    """Dependencies of the routes.

    Attributes:
        authenticate: FastAPI dependency that returns the caller's identity; raises GatewayError.
        postgres_dsn: database of collections and documents.
        files_url: a folder, or ``s3://bucket/prefix``; a tenant's uploads are below its name until they are ingested.
        spool_folder: of incomplete uploads.
        calls: slots of short calls, shared with other routes that hold a thread.
        transfers: slots of uploads.
        quota: of each tenant.
        most_document_bytes: of one document.
        transfer_s: longest time of an upload, in seconds.
        clock_ms: milliseconds since the epoch.
    """

    authenticate: Authenticate
    postgres_dsn: str
    files_url: str
    spool_folder: Path
    calls: TenantSlots
    transfers: TenantSlots
    quota: DocumentQuota = field(default_factory=DocumentQuota)
    most_document_bytes: int = 20 * 1024**2
    transfer_s: float = 3_600.0
    clock_ms: ClockMs = now_ms

    def caller(self, permission: Permission) -> Any:
        """FastAPI dependency: the permitted caller's tenant, which holds a slot of short calls while the route runs, in
        a thread. Raises GatewayError: 401, 403, 429, 503."""

        async def called(
            identity: Annotated[Identity, Depends(self.permitted(permission))],
        ) -> AsyncIterator[str]:
            with self.calls.taken(identity.tenant):
                yield identity.tenant

        return Depends(called, scope="function")

    def permitted(self, permission: Permission) -> Authenticate:
        """FastAPI dependency: the caller, if it has the permission."""
        return require(self.authenticate, permission)

    def content_of(self, tenant: str, upload_id: str) -> Blob:
        """Stored content of an upload."""
        return blob_of(file_url(self.files_url, tenant, upload_id))

    @contextmanager
    def documents(self, tenant: str) -> Iterator[TenantDocuments]:
        """The tenant's documents, for the duration of the block. Raises GatewayError: 404 for an unknown collection,
        503."""
        store = TenantDocuments(self.postgres_dsn, tenant)
        try:
            yield store
        except UnknownCollectionError:
            raise unknown_collection() from None
        except (UnavailableError, JobFailedError) as error:
            log.warning("documents_unavailable", reason=str(error))
            raise unavailable() from None
        finally:
            store.close()

    @contextmanager
    def collections(self) -> Iterator[PgVectorCollections]:
        """All collections, for the duration of the block. Raises GatewayError: 404 for an unknown collection, 503."""
        store = PgVectorCollections(self.postgres_dsn, CALL_TIMEOUT_S)
        try:
            yield store
        except CollectionNotFoundError:
            raise unknown_collection() from None
        except StoreError as error:
            log.warning("documents_unavailable", reason=str(error))
            raise unavailable() from None
        finally:
            store.close()


def unknown_collection() -> GatewayError:
    """404: no such collection, or another tenant's; the error does not say which."""
    return GatewayError(404, UNKNOWN_COLLECTION, "there is no collection of this name", field="collection")


def unknown_document() -> GatewayError:
    """404: no such document in this collection."""
    return GatewayError(404, UNKNOWN_DOCUMENT, "there is no such document in this collection", field="document_id")


def unavailable() -> GatewayError:
    """503: Postgres or the storage is unavailable."""
    message = "collections and documents cannot be reached now"
    return GatewayError(503, UNAVAILABLE, message, retry_after_ms=_RETRY_AFTER_MS)


def invalid(field: str, reason: str) -> GatewayError:
    """400: a field is invalid."""
    return GatewayError(400, Code.INVALID, f"{field}: {reason}", field=field)


ERRORS: ErrorDocs = {
    400: (Code.INVALID, "A field is invalid; `field` names it"),
    404: (UNKNOWN_COLLECTION, "No such collection, or no such document in it"),
    408: (Code.INVALID, "The body did not arrive in time"),
    409: (CONFLICT, "There is a collection of this name"),
    411: (LENGTH_REQUIRED, "The call has no Content-Length"),
    413: (Code.INVALID, "The document is larger than one may be"),
    415: (UNSUPPORTED, "The document is neither a PDF nor text"),
    429: (QUOTA_REACHED, "A quota or a limit is reached; the message names it"),
    503: (UNAVAILABLE, "Collections and documents are unavailable; retry after `retry-after`"),
}
"""Documented errors of all routes."""
