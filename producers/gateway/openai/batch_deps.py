"""What the routes of files and batches need of the rest of the gateway."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fairlane.clock import ClockMs, now_ms
from producers.backfill.batches import BatchStore
from producers.backfill.files import Blob, blob_of
from producers.backfill.seams import AwayError, JobFailedError
from producers.gateway.errors import GatewayError
from producers.gateway.identity.permission import Authenticate

UNAVAILABLE = "service_unavailable"
_RETRY_AFTER_MS = 2_000


@dataclass(frozen=True, slots=True)
class BatchDeps:
    """What ``batch_router.router`` takes.

    Attributes:
        authenticate: a dependency of FastAPI: who asks; raises GatewayError.
        postgres_dsn: where files and batches are known.
        files_url: a folder, or ``s3://bucket/prefix``; each tenant's files are below its name.
        reply_partitions: of the topic of the jobs' replies. Raises AwayError.
        clock_ms: milliseconds since the epoch.
    """

    authenticate: Authenticate
    postgres_dsn: str
    files_url: str
    reply_partitions: Callable[[], int]
    clock_ms: ClockMs = now_ms

    def url_of(self, tenant: str, file_id: str) -> str:
        """Where a file is. Both are names that were checked, or made here."""
        return f"{self.files_url.rstrip('/')}/{tenant}/{file_id}"

    def blob_of(self, tenant: str, file_id: str) -> Blob:
        """The file itself."""
        return blob_of(self.url_of(tenant, file_id))

    @contextmanager
    def store(self, tenant: str) -> Iterator[BatchStore]:
        """What is known of this tenant's files and batches. Raises GatewayError: 503."""
        store = BatchStore(self.postgres_dsn, tenant)
        try:
            yield store
        except (AwayError, JobFailedError):
            raise GatewayError(
                503, UNAVAILABLE, "files and batches cannot be reached now", retry_after_ms=_RETRY_AFTER_MS
            ) from None
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
