"""What the routes of files and batches need of the rest of the gateway."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import random
from tempfile import gettempdir
from typing import TypeVar

from starlette.concurrency import run_in_threadpool

from fairlane.backoff import spread_ms
from fairlane.clock import ClockMs, now_ms
from fairlane.logs import get_logger
from fairlane.outcomes import Code
from producers.backfill.batches import BatchStore
from producers.backfill.files import Blob, blob_of, file_url
from producers.backfill.seams import AwayError, JobFailedError
from producers.gateway.errors import GatewayError
from producers.gateway.identity.permission import Authenticate
from producers.gateway.tenant_slots import TenantSlots

log = get_logger(__name__)

T = TypeVar("T")

UNAVAILABLE = "service_unavailable"
_RETRY_AFTER_MS = 2_000

# Each has a thread while it waits for Postgres or the storage: together they leave some of the 40 there are.
MOST_CALLS, MOST_CALLS_OF_TENANT = 18, 6
MOST_TRANSFERS, MOST_TRANSFERS_OF_TENANT = 16, 4


@dataclass(frozen=True, slots=True)
class FileLimits:
    """What bounds the files that are kept.

    Attributes:
        most_files: uploaded files of one tenant.
        most_bytes: of them together.
        most_file_bytes: of one that is uploaded.
        ttl_s: how long a file is kept: an upload from then on, what a batch read or wrote from its end on.
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
    """What ``batch_router.router`` takes.

    Attributes:
        authenticate: a dependency of FastAPI: who asks; raises GatewayError.
        postgres_dsn: where files and batches are known.
        files_url: a folder, or ``s3://bucket/prefix``; each tenant's files are below its name.
        reply_partitions: of the topic of the jobs' replies. Raises AwayError.
        clock_ms: milliseconds since the epoch.
        limits: of the files.
        calls: those that are answered now, each with a thread and a connection to Postgres.
        transfers: uploads and downloads under way. They may take long, so the last places are for tenants without any.
        transfer_s: seconds that an upload may take to come, and a download to be taken.
        spool_dir: where an upload is until it is whole, when ``files_url`` is no folder; None: the system's folder for
            temporary files.
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

    async def call(self, tenant: str, answer: Callable[[], T]) -> T:
        """What this gives, in a thread. Raises GatewayError: 429, and what it raises."""
        with self.calls.taken(tenant):
            return await run_in_threadpool(answer)

    def url_of(self, tenant: str, file_id: str) -> str:
        """Where a file is. Both are names that were checked, or made here."""
        return file_url(self.files_url, tenant, file_id)

    def blob_of(self, tenant: str, file_id: str) -> Blob:
        """The file itself."""
        return blob_of(self.url_of(tenant, file_id))

    @property
    def spool_folder(self) -> Path:
        """Where an upload is until it is whole: on the volume of the files, if that is one."""
        return (self.spool_dir or Path(gettempdir())) if "://" in self.files_url else Path(self.files_url)

    @contextmanager
    def store(self, tenant: str) -> Iterator[BatchStore]:
        """What is known of this tenant's files and batches. Raises GatewayError: 503."""
        store = BatchStore(self.postgres_dsn, tenant)
        try:
            yield store
        except (AwayError, JobFailedError) as error:
            log.warning("files_unavailable", reason=str(error))
            raise unavailable() from None
        finally:
            store.close()


def listed(data: list[dict[str, object]], limit: int) -> dict[str, object]:
    """A page as OpenAI's clients read it; ``data`` may have one entry more than the page, which says there are more."""
    page = data[:limit]
    ids = [entry["id"] for entry in page]
    return {
        "object": "list",
        "data": page,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
        "has_more": len(data) > limit,
    }


def unavailable() -> GatewayError:
    """Postgres or the storage is away."""
    message = "files and batches cannot be reached now"
    return GatewayError(503, UNAVAILABLE, message, retry_after_ms=_RETRY_AFTER_MS)


def _busy(most: int, what: str) -> GatewayError:
    retry_after_ms = spread_ms(_RETRY_AFTER_MS, 0.5, str(random()))  # noqa: S311 - jitter, no secret
    return GatewayError(
        429, Code.OVERLOADED, f"at most {most} {what} are under way at a time", retry_after_ms=retry_after_ms
    )
