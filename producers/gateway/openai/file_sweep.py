"""Removes the files that have expired: now and then, in a thread of its own, in every gateway."""

import asyncio
from random import random
from threading import Event

from fairlane.logs import get_logger
from fairlane.postgres import ALL_TENANTS
from producers.backfill.batches import BatchStore, StoredFile
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
    store = BatchStore(deps.postgres_dsn, ALL_TENANTS)
    try:
        store.date_files(now_ms + deps.limits.ttl_s * 1_000, _PAGE)
        behind: StoredFile | None = None
        while page := store.expired_files(now_ms, _PAGE, behind):
            for file in page:
                if stopped.is_set():
                    return removed
                removed += _removed(deps, store, file)
            behind = page[-1]
    finally:
        store.close()
    return removed


def _removed(deps: BatchDeps, store: BatchStore, file: StoredFile) -> bool:
    try:
        deps.blob_of(file.tenant, file.file_id).delete()
    except JobFailedError as error:
        log.warning("file_not_removed", tenant=file.tenant, file_id=file.file_id, reason=str(error))
        return False
    # Last: what it names is gone for sure.
    store.remove_file(file.file_id)
    return True
