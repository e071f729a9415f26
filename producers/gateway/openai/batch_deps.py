"""Dependencies, pages and errors of the file and batch routes."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import random
from tempfile import gettempdir
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from fastapi import Depends
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from fairlane.backoff import jittered_ms
from fairlane.clock import ClockMs, now_ms
from fairlane.logs import get_logger
from fairlane.outcomes import Code
from producers.backfill.batches import BatchStore
from producers.backfill.errors import JobFailedError, UnavailableError
from producers.backfill.files import Blob, blob_of, file_url
from producers.gateway.identity.identity import Authenticate, Identity, Permission, require
from producers.gateway.openapi import ErrorDocs
from producers.gateway.tenant_bounds import TenantSlots
from producers.openai_api.errors import GatewayError

log = get_logger(__name__)

T = TypeVar("T")

UNAVAILABLE = "service_unavailable"
_RETRY_AFTER_MS = 2_000

# Each holds a thread while it waits for Postgres or storage. Together they leave some of the pool's 40 threads free.
MOST_CALLS, MOST_CALLS_OF_TENANT = 18, 6
MOST_TRANSFERS, MOST_TRANSFERS_OF_TENANT = 16, 4


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Limits on stored files: number and total size per tenant, size of one upload.

    ``ttl_s`` is the retention of an upload from its creation, at most, and of a batch's output from the batch's end.
    """

    most_files: int = 10_000
    most_bytes: int = 10 * 1024**3
    most_file_bytes: int = 512 * 1024**2
    ttl_s: int = 2_592_000


def _slots(most: int, most_of_tenant: int, what: str, *, has_reserve: bool = False) -> TenantSlots:
    return TenantSlots(
        most,
        most_of_tenant,
        partial(_busy, most, what),
        partial(_busy, most_of_tenant, f"{what} of one tenant"),
        has_reserve=has_reserve,
    )


@dataclass(frozen=True, slots=True)
class BatchDeps:
    """Dependencies of the routes.

    Attributes:
        authenticate: FastAPI dependency that returns the caller's identity; raises GatewayError.
        postgres_dsn: database of files and batches.
        files_url: a folder, or ``s3://bucket/prefix``; each tenant's files are below its name.
        reply_partitions: number of partitions of the job reply topic. Raises UnavailableError.
        clock_ms: milliseconds since the epoch.
        limits: limits on stored files.
        calls: slots of short calls; each call holds a thread and a connection to Postgres.
        transfers: slots of uploads and downloads. These may take long, so the last slots are for tenants without any.
        transfer_s: longest time of an upload or a download, in seconds.
        spool_dir: folder of incomplete uploads if ``files_url`` is not a folder; None: the system's temporary folder.
    """

    authenticate: Authenticate
    postgres_dsn: str
    files_url: str
    reply_partitions: Callable[[], int]
    clock_ms: ClockMs = now_ms
    limits: FileLimits = FileLimits()
    calls: TenantSlots = field(
        default_factory=lambda: _slots(MOST_CALLS, MOST_CALLS_OF_TENANT, "calls about files and batches")
    )
    transfers: TenantSlots = field(
        default_factory=lambda: _slots(
            MOST_TRANSFERS, MOST_TRANSFERS_OF_TENANT, "uploads and downloads of files", has_reserve=True
        )
    )
    transfer_s: float = 3_600.0
    spool_dir: Path | None = None

    def caller(self, permission: Permission) -> Any:
        """FastAPI dependency: the permitted caller's tenant, which holds a slot of short calls while the route runs. A
        route that is no coroutine runs in a thread. Raises GatewayError: 401, 403, 429, 503."""

        async def called(
            identity: Annotated[Identity, Depends(require(self.authenticate, permission))],
        ) -> AsyncIterator[str]:
            with self.calls.taken(identity.tenant):
                yield identity.tenant

        return Depends(called, scope="function")

    async def call(self, tenant: str, answer: Callable[[], T]) -> T:
        """Run ``answer`` in a thread and return its result. Raises GatewayError: 429; and what ``answer`` raises."""
        with self.calls.taken(tenant):
            return await run_in_threadpool(answer)

    def url_of(self, tenant: str, file_id: str) -> str:
        """URL of a file. Both names must be validated, or generated here: they become part of a path."""
        return file_url(self.files_url, tenant, file_id)

    def blob_of(self, tenant: str, file_id: str) -> Blob:
        """Stored content of a file."""
        return blob_of(self.url_of(tenant, file_id))

    @property
    def spool_folder(self) -> Path:
        """Folder of incomplete uploads: on the volume of the files, if ``files_url`` is a folder."""
        return (self.spool_dir or Path(gettempdir())) if "://" in self.files_url else Path(self.files_url)

    @contextmanager
    def store(self, tenant: str) -> Iterator[BatchStore]:
        """Store of the tenant's files and batches, for the duration of the block. Raises GatewayError: 503."""
        store = BatchStore(self.postgres_dsn, tenant)
        try:
            yield store
        except (UnavailableError, JobFailedError) as error:
            log.warning("files_unavailable", reason=str(error))
            raise unavailable() from None
        finally:
            store.close()


EntryT = TypeVar("EntryT", bound="StoredEntry")


class StoredEntry(BaseModel):
    """A file or a batch."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=True)

    id: str


class Page(BaseModel, Generic[EntryT]):
    """A page, newest first."""

    object: Literal["list"] = "list"
    data: list[EntryT]
    first_id: str | None
    last_id: str | None = Field(description="`after` of the next page")
    has_more: bool

    @classmethod
    def of(cls, entries: list[EntryT], limit: int) -> Self:
        """A page of at most ``limit`` entries; one more says that there are more."""
        data = entries[:limit]
        first_id, last_id = (data[0].id, data[-1].id) if data else (None, None)
        return cls(data=data, first_id=first_id, last_id=last_id, has_more=len(entries) > limit)


def unavailable() -> GatewayError:
    """503: Postgres or the storage is unavailable."""
    message = "files and batches cannot be reached now"
    return GatewayError(503, UNAVAILABLE, message, retry_after_ms=_RETRY_AFTER_MS)


def _busy(most: int, what: str) -> GatewayError:
    retry_after_ms = jittered_ms(_RETRY_AFTER_MS, 0.5, str(random()))  # noqa: S311 - jitter, no secret
    return GatewayError(
        429, Code.OVERLOADED, f"at most {most} {what} are under way at a time", retry_after_ms=retry_after_ms
    )


ERRORS: ErrorDocs = {
    429: (Code.OVERLOADED, "A limit is reached; retry after `retry-after`"),
    503: (UNAVAILABLE, "Files and batches are unavailable; retry after `retry-after`"),
}
"""Documented errors of all routes."""
FILE_ID = "file-0a1b2c3d4e5f60718293a4b5"
