"""Removes the files that have expired: now and then, in a thread of its own, in every gateway."""

import asyncio
from random import random
from threading import Event

from fairlane.logs import get_logger
from fairlane.postgres import ALL_TENANTS
from producers.backfill.batches import OUTPUT_PURPOSE, BatchStore, StoredFile
from producers.backfill.files import delete_folder
from producers.backfill.outputs import parts_folder
from producers.backfill.seams import AwayError, JobFailedError
from producers.gateway.openai.batch_deps import BatchDeps

log = get_logger(__name__)

SWEEP_S = 60.0
_PAGE = 500


async def keep_swept(deps: BatchDeps) -> None:
    """Sweep until this is cancelled; the file that is being removed by then is removed all the same."""
    stopped = Event()
    try:
        while True:
            # Gateways that were started together do not sweep together, though it would do no harm.
            await asyncio.sleep(SWEEP_S * (0.5 + random()))  # noqa: S311 - jitter, no secret
            try:
                removed = await asyncio.to_thread(sweep, deps, stopped)
            except (AwayError, JobFailedError) as error:
                log.warning("files_not_swept", reason=str(error))
            except Exception as error:  # noqa: BLE001 - a gateway answers calls, whatever becomes of old files
                log.error("files_not_swept", error=type(error).__name__)
            else:
                if removed:
                    log.info("files_expired", files=removed)
    finally:
        stopped.set()


def sweep(deps: BatchDeps, stopped: Event) -> int:
    """Remove what has expired, page by page, until there is none or it is stopped; how many files that were.

    A file whose storage refuses to let it go is left for the next time. Raises AwayError, JobFailedError.
    """
    now_ms, removed = deps.clock_ms(), 0
    failed_until_ms = now_ms - deps.limits.ttl_s * 1_000
    store = BatchStore(deps.postgres_dsn, ALL_TENANTS)
    try:
        store.date_files(now_ms + deps.limits.ttl_s * 1_000, _PAGE)
        behind: StoredFile | None = None
        while page := store.expired_files(now_ms, failed_until_ms, _PAGE, behind):
            for file in page:
                if stopped.is_set():
                    return removed
                removed += _removed(deps, store, file, now_ms, failed_until_ms)
            behind = page[-1]
    finally:
        store.close()
    return removed


def _removed(deps: BatchDeps, store: BatchStore, file: StoredFile, now_ms: int, failed_until_ms: int) -> bool:
    url = deps.url_of(file.tenant, file.file_id)
    job_id = store.writer(file.file_id) if file.purpose == OUTPUT_PURPOSE else None
    try:
        # Only with the storage's consent is it forgotten: what it names is gone for sure.
        with store.expiring(file.file_id, now_ms, failed_until_ms) as is_expired:
            if not is_expired:
                return False
            deps.blob_of(file.tenant, file.file_id).delete()
            if job_id is not None:
                # A job that failed, or whose runner was killed in the end, leaves them behind.
                delete_folder(parts_folder(url, job_id), None)
    except JobFailedError as error:
        log.warning("file_not_removed", tenant=file.tenant, file_id=file.file_id, reason=str(error))
        return False
    return True
