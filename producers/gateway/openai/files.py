"""``/v1/files``: input and output files of batches."""

import asyncio
import re
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from fairlane.logs import get_logger
from fairlane.outcomes import Code
from fairlane_server.text import clean_text, without_nul
from producers.backfill.batches import INPUT_PURPOSE, OUTPUT_PURPOSE, QuotaReachedError, StoredFile, new_file_id
from producers.backfill.errors import JobFailedError, NoSuchInputError, UnavailableError
from producers.backfill.files import BLOCK_BYTES, Blob, blocks_of
from producers.backfill.job import Fingerprint
from producers.gateway.edge.body_limit import declared_bytes
from producers.gateway.identity.identity import Identity, Permission, require
from producers.gateway.openai.batch_deps import ERRORS, FILE_ID, BatchDeps, Page, StoredEntry, unavailable
from producers.gateway.openapi import CREATED_S, READ_STATUSES, ErrorDocs, Responses, answered, errors
from producers.gateway.pipeline.call_context import current
from producers.gateway.received_forms import LENGTH_REQUIRED, MOST_FORM_BYTES, form_of, no_form, no_length, receiving
from producers.openai_api.errors import GatewayError

log = get_logger(__name__)

QUOTA_REACHED = "insufficient_quota"
"""OpenAI's code."""

LEAST_TTL_S = 3_600
_ANCHOR = "created_at"
_UNFINISHED_UPLOAD_TTL_MS = 2 * 3_600_000
"""How long an unfinished upload counts toward the quota if its gateway died: longer than an upload may take."""

_PURPOSES = (None, INPUT_PURPOSE, OUTPUT_PURPOSE)
_ID = re.compile(r"file-[0-9a-f]{24}")
_NUMBER = re.compile(r"[0-9]{1,9}")
_MOST_NAME_CHARS = 256
Limit = Annotated[int, Query(ge=1, le=10_000)]


class File(StoredEntry):
    """A file of this tenant: an upload, or the output or errors of a batch. Times are in seconds since the epoch."""

    object: Literal["file"] = "file"
    bytes: int | None = Field(description="Null until the batch has written it")
    created_at: int
    expires_at: int | None = Field(description="Null until the batch that writes it has ended")
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"
    status_details: None = None


class DeletedFile(BaseModel):
    """Confirmation that a file was deleted."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


_FILE = File(
    id=FILE_ID,
    bytes=20_480,
    created_at=CREATED_S,
    expires_at=CREATED_S + 2_592_000,
    filename="questions.jsonl",
    purpose=INPUT_PURPOSE,
)
_LINE = (
    '{"custom_id": "1", "method": "POST", "url": "/v1/embeddings", "body": {"model": "all-minilm-l6-v2", "input": "a"}}'
)
_CONTENT: Responses = {
    200: {
        "description": "The bytes that were uploaded, or that the batch wrote",
        "content": {
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}, "example": f"{_LINE}\n"}
        },
    }
}
_ERRORS: ErrorDocs = {
    **ERRORS,
    400: (Code.INVALID, "A field is invalid; `param` names it"),
    403: (QUOTA_REACHED, "The identity lacks the permission, or the quota of stored files is used up"),
    404: ("not_found", "No such file"),
    408: (Code.INVALID, "The body did not arrive in time"),
    411: (LENGTH_REQUIRED, "The request has no Content-Length"),
}


def routes(deps: BatchDeps) -> APIRouter:
    api = APIRouter()
    read = errors((*READ_STATUSES, 400), _ERRORS)
    Reader = Annotated[str, deps.caller(Permission.FILES_READ)]  # noqa: N806 - a type
    Writer = Annotated[str, deps.caller(Permission.FILES_WRITE)]  # noqa: N806 - a type
    uploader = require(deps.authenticate, Permission.FILES_WRITE)

    @api.post(
        "/files",
        summary="Upload a file",
        responses=errors((*READ_STATUSES, 400, 408, 411, 413), _ERRORS) | answered(_FILE),
        openapi_extra=_upload_body(deps.limits.ttl_s),
    )
    async def upload(request: Request, identity: Annotated[Identity, Depends(uploader)]) -> File:
        """Upload JSON lines for a batch. Quota is reserved first; then the body is written to disk as it arrives."""
        return await _uploaded(deps, request, identity.tenant)

    @api.get("/files", summary="The files there are", responses=read | answered(Page[File].of([_FILE], 1)))
    def list_files(
        tenant: Reader, limit: Limit = 100, after: str | None = None, purpose: str | None = None
    ) -> Page[File]:
        """Newest first."""
        if after is not None:
            found_file(deps, tenant, after)
        if purpose not in _PURPOSES:
            return Page[File].of([], limit)
        with deps.store(tenant) as store:
            found = store.files(deps.clock_ms(), limit + 1, after, purpose)
        return Page[File].of(list(map(file_answer, found)), limit)

    @api.get("/files/{file_id}", summary="One file", responses=read | answered(_FILE))
    def get_file(file_id: str, tenant: Reader) -> File:
        """Metadata of a file, such as size and name."""
        return file_answer(found_file(deps, tenant, file_id))

    @api.get(
        "/files/{file_id}/content",
        summary="What is in a file",
        response_class=StreamingResponse,
        responses=read | _CONTENT,
    )
    def get_content(file_id: str, tenant: Reader) -> StreamingResponse:
        """Content of a file, streamed in blocks."""
        file = found_file(deps, tenant, file_id)
        with deps.store(tenant):
            blob = deps.blob_of(tenant, file.file_id)
            try:
                fingerprint = blob.fingerprint()
            except NoSuchInputError:
                # Deleted since it was found.
                raise _not_found() from None
        return _Download(blob, fingerprint, deps.transfers.taken(tenant), deps.transfer_s)

    @api.delete("/files/{file_id}", summary="Delete a file", responses=read | answered(DeletedFile(id=FILE_ID)))
    def delete_file(file_id: str, tenant: Writer) -> DeletedFile:
        """A batch that has yet to read the file fails."""
        file = found_file(deps, tenant, file_id)
        with deps.store(tenant) as store:
            # Content first: no content is stored without an entry that names it.
            deps.blob_of(tenant, file.file_id).delete()
            store.remove_file(file.file_id)
        return DeletedFile(id=file_id)

    return api


def _upload_body(most_ttl_s: int) -> dict[str, Any]:
    ttl = {"type": "integer", "minimum": LEAST_TTL_S, "maximum": most_ttl_s}
    asked = {"expires_after[anchor]": {"type": "string", "enum": [_ANCHOR]}, "expires_after[seconds]": ttl}
    schema = {
        "type": "object",
        "required": ["file", "purpose"],
        "properties": {
            "file": {"type": "string", "format": "binary", "description": "JSON lines, one for each call"},
            "purpose": {"type": "string", "enum": [INPUT_PURPOSE]},
            **asked,
        },
        "dependentRequired": {name: list(asked) for name in asked},
    }
    examples = {
        "a_file": {"summary": "A file", "value": {"file": _LINE, "purpose": INPUT_PURPOSE}},
        "for_an_hour": {
            "summary": "For an hour",
            "value": {"file": _LINE, "purpose": INPUT_PURPOSE} | dict(zip(asked, (_ANCHOR, LEAST_TTL_S), strict=True)),
        },
    }
    content = {"multipart/form-data": {"schema": schema, "examples": examples}}
    return {"requestBody": {"required": True, "content": content}}


class _Download(StreamingResponse):
    """Content of a file. Holds a transfer slot while it is sent, and is cut off after ``transfer_s`` seconds. Without a
    free slot, the call fails before the response starts."""

    def __init__(
        self, blob: Blob, fingerprint: Fingerprint, transfer: AbstractContextManager[None], transfer_s: float
    ) -> None:
        super().__init__(blocks_of(blob, fingerprint), media_type="application/octet-stream")
        self._transfer = transfer
        self._transfer_s = transfer_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._transfer, suppress(TimeoutError):
            async with asyncio.timeout(self._transfer_s):
                await super().__call__(scope, receive, send)


def found_file(deps: BatchDeps, tenant: str, file_id: str) -> StoredFile:
    """A complete file. Raises GatewayError: 404, 503."""
    if not _ID.fullmatch(file_id):
        raise _not_found()
    current().object_id = file_id
    with deps.store(tenant) as store:
        file = store.file(file_id, deps.clock_ms())
        if file is not None and file.size_bytes is None:
            try:
                size_bytes = deps.blob_of(tenant, file_id).fingerprint().size_bytes
            except NoSuchInputError:
                file = None
            else:
                store.settle_file(file_id, size_bytes)
                file = replace(file, size_bytes=size_bytes)
    if file is None:
        raise _not_found()
    return file


def file_answer(file: StoredFile) -> File:
    """A file in OpenAI's format."""
    return File(
        id=file.file_id,
        bytes=file.size_bytes,
        created_at=file.created_at_ms // 1000,
        expires_at=None if file.expires_at_ms is None else file.expires_at_ms // 1000,
        filename=file.filename,
        purpose=file.purpose,
    )


def stored_name(given: str | None) -> str:
    """Name of an uploaded file: the given one, cut and without characters that Postgres or JSON cannot hold."""
    return without_nul(clean_text(given or "batch.jsonl"))[:_MOST_NAME_CHARS]


def asked_ttl_s(form: FormData, most_s: int) -> int:
    """Requested retention of an upload, in seconds. Raises GatewayError: 400."""
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return most_s
    if anchor != _ANCHOR:
        raise _invalid("expires_after.anchor", f"only {_ANCHOR} is supported")
    if not (isinstance(seconds, str) and _NUMBER.fullmatch(seconds) and LEAST_TTL_S <= int(seconds) <= most_s):
        raise _invalid("expires_after.seconds", f"must be a number from {LEAST_TTL_S} to {most_s}")
    return int(seconds)


async def _uploaded(deps: BatchDeps, request: Request, tenant: str) -> File:
    declared = declared_bytes(request.scope)
    if declared is None:
        raise no_length()
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise no_form()
    with deps.transfers.taken(tenant):
        coming = await run_in_threadpool(_reserve, deps, tenant, declared)
        try:
            form = await _received(deps, request)
        except Exception:
            await run_in_threadpool(_leave, deps, coming)
            raise
        try:
            upload, file = _described(deps, coming, form)
        except GatewayError:
            await form.close()
            await run_in_threadpool(_leave, deps, coming)
            raise
        try:
            return await run_in_threadpool(_keep, deps, file, upload)
        finally:
            await form.close()


def _reserve(deps: BatchDeps, tenant: str, declared_bytes: int) -> StoredFile:
    """Reserve quota for an upload before its body is read. Raises GatewayError: 403, 503."""
    now_ms, limits = deps.clock_ms(), deps.limits
    # The size of the other form fields is not known yet. The file is measured when it is complete.
    size_bytes = max(0, declared_bytes - MOST_FORM_BYTES)
    file = StoredFile(new_file_id(), tenant, INPUT_PURPOSE, stored_name(None), size_bytes, now_ms)
    with deps.store(tenant) as store:
        try:
            store.reserve_file(file, now_ms + _UNFINISHED_UPLOAD_TTL_MS, limits.most_files, limits.most_bytes)
        except QuotaReachedError as error:
            raise _quota_reached(error) from None
    return file


def _leave(deps: BatchDeps, file: StoredFile) -> None:
    """Release the reserved quota. If Postgres is unavailable, the sweep does it later."""
    with suppress(GatewayError), deps.store(file.tenant) as store:
        store.remove_file(file.file_id)


async def _received(deps: BatchDeps, request: Request) -> FormData:
    """Receive the form, with its file on disk; the caller must close it. Raises GatewayError."""
    async with receiving(deps.transfer_s, unavailable):
        return await form_of(request, deps.spool_folder)


def _described(deps: BatchDeps, coming: StoredFile, form: FormData) -> tuple[UploadFile, StoredFile]:
    """The file of a form, and its entry. Raises GatewayError: 400, 413."""
    upload = form.get("file")
    if not isinstance(upload, UploadFile):
        raise _invalid("file", "must be given, as a file")
    if form.get("purpose") != INPUT_PURPOSE:
        raise _invalid("purpose", f"only {INPUT_PURPOSE} is supported")
    if (upload.size or 0) > deps.limits.most_file_bytes:
        raise GatewayError(413, Code.INVALID, f"file: has more than {deps.limits.most_file_bytes} bytes", field="file")
    expires_at_ms = coming.created_at_ms + asked_ttl_s(form, deps.limits.ttl_s) * 1_000
    name, size_bytes = stored_name(upload.filename), upload.size or 0
    return upload, replace(coming, filename=name, size_bytes=size_bytes, expires_at_ms=expires_at_ms)


def _keep(deps: BatchDeps, file: StoredFile, upload: UploadFile) -> File:
    current().object_id = file.file_id
    with deps.store(file.tenant) as store:
        try:
            if not store.resize_upload(file, deps.limits.most_bytes):
                raise unavailable()
        except QuotaReachedError as error:
            store.remove_file(file.file_id)
            raise _quota_reached(error) from None
        blob = deps.blob_of(file.tenant, file.file_id)
        try:
            blob.write(iter(partial(upload.file.read, BLOCK_BYTES), b""))
        except BaseException:
            # S3 may have stored it without confirming. If it cannot be deleted now, the entry stays for the sweep.
            with suppress(UnavailableError, JobFailedError):
                blob.delete()
                store.remove_file(file.file_id)
            raise
        if not store.settle_upload(file):
            blob.delete()
            raise unavailable()
    return file_answer(file)


def _quota_reached(error: QuotaReachedError) -> GatewayError:
    message = f"file: {error}; delete some, or wait until some expire"
    return GatewayError(403, QUOTA_REACHED, message, field="file")


def _not_found() -> GatewayError:
    return GatewayError(404, "not_found", "there is no such file", field="file_id")


def _invalid(field: str, reason: str) -> GatewayError:
    return GatewayError(400, Code.INVALID, f"{field}: {reason}", field=field)
