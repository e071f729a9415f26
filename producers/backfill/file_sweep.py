"""Removes expired files, periodically, on a thread of every job runner."""

from dataclasses import dataclass
from random import random
from threading import Event, Thread

from fairlane.clock import ClockMs, now_ms
from fairlane.logs import get_logger
from fairlane_server.postgres.connection import ALL_TENANTS
from producers.backfill.batches import OUTPUT_PURPOSE, BatchStore, StoredFile
from producers.backfill.files import blob_of, delete_folder, file_url
from producers.backfill.outputs import parts_folder
from producers.backfill.ports import AwayError, JobFailedError

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
    """Remove what has expired, page by page, until there is none or it is stopped; how many files that were.

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
