"""``/v1/files``: what batches are made from, and what they are answered with."""

import re
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import IO, Annotated

from fastapi import APIRouter, Depends, Query
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.responses import StreamingResponse

from fairlane.api_keys.roles import Scope
from fairlane.outcomes import Code
from fairlane.text import clean_text, without_nul
from producers.backfill.batches import OUTPUT_PURPOSE, StoredFile, new_file_id
from producers.backfill.files import BLOCK_BYTES, blocks_of
from producers.backfill.seams import NoSuchInputError
from producers.gateway.errors import GatewayError
from producers.gateway.identity.permission import require
from producers.gateway.identity.principal import Identity
from producers.gateway.openai.batch_deps import BatchDeps, listed
from producers.gateway.openai.documented import READING, errors

PURPOSE = "batch"
_PURPOSES = (None, PURPOSE, OUTPUT_PURPOSE)
_ID = re.compile(r"file-[0-9a-f]{24}")
_MOST_NAME_CHARS = 256
_MOST_FIELDS = 8
_UPLOAD = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": [PURPOSE]},
                    },
                }
            }
        },
    }
}
Limit = Annotated[int, Query(ge=1, le=10_000)]


def routes(deps: BatchDeps) -> APIRouter:
    """The routes."""
    api = APIRouter(responses=errors((*READING, 400, 408, 413)))
    reader = require(deps.authenticate, Scope.FILES)
    writer = require(deps.authenticate, Scope.FILES, writes=True)

    @api.post("/files", summary="Upload a file", openapi_extra=_UPLOAD)
    async def upload(request: Request, identity: Annotated[Identity, Depends(writer)]) -> dict[str, object]:
        """JSON lines for a batch. The body goes to disk as it comes."""
        async with AsyncExitStack() as opened:
            try:
                form = await opened.enter_async_context(request.form(max_files=1, max_fields=_MOST_FIELDS))
            except (MultiPartException, HTTPException, ValueError):
                # ValueError: the charset that a body names may be any that Python has, also one that decodes no text.
                raise _invalid("file", "the body is no form with a file") from None
            file, purpose = form.get("file"), form.get("purpose")
            if not isinstance(file, UploadFile):
                raise _invalid("file", "must be given, as a file")
            if purpose != PURPOSE:
                raise _invalid("purpose", f"only {PURPOSE} is supported")
            return await run_in_threadpool(_keep, deps, identity.tenant, file)

    @api.get("/files", summary="The files there are")
    def list_files(
        identity: Annotated[Identity, Depends(reader)],
        limit: Limit = 100,
        after: str | None = None,
        purpose: str | None = None,
    ) -> dict[str, object]:
        """Newest first."""
        if after is not None:
            found_file(deps, identity.tenant, after)
        if purpose not in _PURPOSES:
            return listed([], limit)
        with deps.store(identity.tenant) as store:
            found = store.files(limit + 1, after, purpose)
        return listed([file_json(file) for file in found], limit)

    @api.get("/files/{file_id}", summary="One file")
    def get_file(file_id: str, identity: Annotated[Identity, Depends(reader)]) -> dict[str, object]:
        """Its size and its name."""
        return file_json(found_file(deps, identity.tenant, file_id))

    @api.get("/files/{file_id}/content", summary="What is in a file")
    def get_content(file_id: str, identity: Annotated[Identity, Depends(reader)]) -> StreamingResponse:
        """Block by block."""
        file = found_file(deps, identity.tenant, file_id)
        with deps.store(identity.tenant):
            blob = deps.blob_of(file.tenant, file.file_id)
            fingerprint = blob.fingerprint()
        return StreamingResponse(blocks_of(blob, fingerprint), media_type="application/octet-stream")

    @api.delete("/files/{file_id}", summary="Delete a file")
    def delete_file(file_id: str, identity: Annotated[Identity, Depends(writer)]) -> dict[str, object]:
        """A batch that is still to read it fails."""
        file = found_file(deps, identity.tenant, file_id)
        with deps.store(identity.tenant) as store:
            store.remove_file(file.file_id)
            deps.blob_of(file.tenant, file.file_id).delete()
        return {"id": file_id, "object": "file", "deleted": True}

    return api


def found_file(deps: BatchDeps, tenant: str, file_id: str) -> StoredFile:
    """A file that is whole. Raises GatewayError: 404, 503."""
    if not _ID.fullmatch(file_id):
        raise _not_found()
    with deps.store(tenant) as store:
        file = store.file(file_id)
        if file is not None and file.size_bytes is None:
            try:
                size_bytes = deps.blob_of(tenant, file_id).fingerprint().size_bytes
            except NoSuchInputError:
                file = None
            else:
                store.settle_file(file_id, size_bytes)
                file = store.file(file_id)
    if file is None:
        raise _not_found()
    return file


def file_json(file: StoredFile) -> dict[str, object]:
    """As OpenAI's clients read it."""
    return {
        "id": file.file_id,
        "object": "file",
        "bytes": file.size_bytes,
        "created_at": file.created_at_ms // 1000,
        "expires_at": None,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def stored_name(given: str | None) -> str:
    """What an uploaded file is called: as its owner calls it, if Postgres and JSON can say that."""
    return without_nul(clean_text(given or "batch.jsonl"))[:_MOST_NAME_CHARS]


def _keep(deps: BatchDeps, tenant: str, upload: UploadFile) -> dict[str, object]:
    file_id = new_file_id()
    name = stored_name(upload.filename)
    with deps.store(tenant) as store:
        blob = deps.blob_of(tenant, file_id)
        blob.write(_blocks(upload.file))
        size_bytes = blob.fingerprint().size_bytes
        file = StoredFile(file_id, tenant, PURPOSE, name, size_bytes, deps.clock_ms())
        store.add_file(file)
    return file_json(file)


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    while block := file.read(BLOCK_BYTES):
        yield block


def _not_found() -> GatewayError:
    return GatewayError(404, "not_found", "there is no such file", field="file_id")


def _invalid(field: str, reason: str) -> GatewayError:
    return GatewayError(400, Code.INVALID, f"{field}: {reason}", field=field)
