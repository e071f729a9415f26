"""An upload: its content to disk as it arrives, its format by its first bytes, then the queue of ingestion."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from tempfile import TemporaryFile
from typing import IO, Any

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.requests import Request

from fairlane.logs import get_logger
from fairlane.outcomes import Code
from producers.backfill.errors import JobFailedError, UnavailableError
from producers.backfill.files import BLOCK_BYTES
from producers.gateway.documents.deps import (
    QUOTA_REACHED,
    UNSUPPORTED,
    DocumentDeps,
    unavailable,
    unknown_collection,
)
from producers.gateway.edge.body_limit import declared_bytes
from producers.gateway.pipeline.call_context import current
from producers.gateway.received_forms import form_of, no_length, receiving
from producers.ingest.document import HEAD_BYTES, Document, DocumentRefusedError, checked_name, sniffed
from producers.ingest.upload_store import QuotaReachedError, Reservation
from producers.openai_api.errors import GatewayError

log = get_logger(__name__)

MOST_TYPE_CHARS = 256


class _Content:
    """What arrived: an open file, its size, name and type as the caller gave them."""

    def __init__(self, file: IO[bytes], size_bytes: int, name: str | None, media_type: str | None) -> None:
        self.file = file
        self.size_bytes = size_bytes
        self.name = name
        self.media_type = media_type


async def uploaded(deps: DocumentDeps, request: Request, tenant: str, collection: str, name: str | None) -> Document:
    """Receive a document and queue it. ``name`` goes before that of the form. Raises GatewayError."""
    declared = declared_bytes(request.scope)
    if declared is None:
        raise no_length()
    if name is not None:
        _checked(name)
    with deps.transfers.taken(tenant):
        reserved = await run_in_threadpool(_reserve, deps, tenant, collection, declared)
        try:
            async with _received(deps, request, name) as content:
                return await run_in_threadpool(_keep, deps, tenant, reserved, content)
        except BaseException:
            await asyncio.shield(run_in_threadpool(_leave, deps, tenant, reserved))
            raise


def _reserve(deps: DocumentDeps, tenant: str, collection: str, size_bytes: int) -> Reservation:
    with deps.documents(tenant) as store:
        try:
            return store.reserve(collection, size_bytes, deps.clock_ms(), deps.quota)
        except QuotaReachedError as error:
            message = f"{error}: delete some of them"
            raise GatewayError(429, QUOTA_REACHED, message, field="file") from None


def _leave(deps: DocumentDeps, tenant: str, reserved: Reservation) -> None:
    """Give up an upload. If Postgres is unavailable, its lease ends; its content is deleted by the ingest process."""
    with suppress(GatewayError), deps.documents(tenant) as store:
        store.leave(reserved)


@asynccontextmanager
async def _received(deps: DocumentDeps, request: Request, name: str | None) -> AsyncIterator[_Content]:
    """The body on disk, in a file without a name. Raises GatewayError."""
    media_type = request.headers.get("content-type", "")[:MOST_TYPE_CHARS]
    is_form = media_type.lower().startswith("multipart/form-data")
    async with receiving(deps.transfer_s, unavailable):
        file: Any = await (form_of(request, deps.spool_folder) if is_form else _raw(deps, request))
    if not is_form:
        with file:
            yield _Content(file, file.tell(), name, media_type)
        return
    try:
        part, own_name = file.get("file"), file.get("name")
        if not isinstance(part, UploadFile):
            raise GatewayError(400, Code.INVALID, "file: must be given, as a file", field="file")
        given = name or (own_name if isinstance(own_name, str) else None) or part.filename
        yield _Content(part.file, part.size or 0, given, (part.content_type or "")[:MOST_TYPE_CHARS])
    finally:
        await file.close()


async def _raw(deps: DocumentDeps, request: Request) -> IO[bytes]:
    """A body that is the document itself; the caller closes the file. Raises ClientDisconnect, OSError."""
    deps.spool_folder.mkdir(parents=True, exist_ok=True)
    file: IO[bytes] = TemporaryFile(dir=deps.spool_folder)  # noqa: SIM115 - the caller closes it
    try:
        async for piece in request.stream():
            # To the page cache: the pieces are small, and a thread for each would cost more than the write.
            file.write(piece)
    except BaseException:
        file.close()
        raise
    return file


def _keep(deps: DocumentDeps, tenant: str, reserved: Reservation, content: _Content) -> Document:
    """Store the content and queue the upload. Raises GatewayError: 400, 404, 413, 415, 503."""
    name = _checked(content.name)
    if content.size_bytes > deps.most_document_bytes:
        message = f"file: a document has at most {deps.most_document_bytes} bytes"
        raise GatewayError(413, Code.INVALID, message, field="file")
    content.file.seek(0)
    try:
        kind = sniffed(content.file.read(HEAD_BYTES), name, content.media_type)
    except DocumentRefusedError as error:
        status, code = (415, UNSUPPORTED) if error.is_format else (400, str(Code.INVALID))
        raise GatewayError(status, code, f"{error.field}: {error}", field=error.field) from None
    content.file.seek(0)
    try:
        deps.content_of(tenant, reserved.upload_id).write(iter(partial(content.file.read, BLOCK_BYTES), b""))
    except (UnavailableError, JobFailedError) as error:
        log.warning("upload_not_stored", reason=str(error))
        raise unavailable() from None
    with deps.documents(tenant) as store:
        document = store.settle(reserved, name, kind, content.size_bytes)
        if document is None:
            raise unknown_collection()
        current().object_id = document.document_id
        return document


def _checked(name: str | None) -> str:
    try:
        return checked_name(name)
    except DocumentRefusedError as error:
        raise GatewayError(400, Code.INVALID, f"{error.field}: {error}", field=error.field) from None
