"""``/v1/batches``: offline jobs in OpenAI's format. `python -m producers.backfill run --all` runs them."""

import re
from collections.abc import Mapping
from functools import partial
from hashlib import blake2b
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, Field
from starlette.requests import Request

from fairlane.outcomes import Code
from fairlane_server.text import without_nul
from producers.backfill.batches import INPUT_PURPOSE, StoredBatch, new_file_id
from producers.backfill.job import DEFAULT_WINDOW_MS, Job, JobSpec, Status, Wanted
from producers.backfill.job_store import JobStore, new_job_id
from producers.gateway.idempotency import HEADER, checked_key, other_body
from producers.gateway.identity.identity import Identity, Permission, require
from producers.gateway.openai import files
from producers.gateway.openai.batch_deps import ERRORS, FILE_ID, BatchDeps, Page, StoredEntry
from producers.gateway.openai.files import found_file
from producers.gateway.openapi import CREATED_S, READ_STATUSES, ErrorDocs, answered, errors, taking
from producers.gateway.pipeline.call_context import current
from producers.gateway.sending import body_of
from producers.openai_api.body import parse
from producers.openai_api.errors import GatewayError
from producers.openai_api.request_models import ClosedBody

_STATUS: Mapping[Status, str] = dict.fromkeys((Status.QUEUED, Status.RUNNING, Status.PAUSED), "in_progress")
_ID = re.compile(r"batch_[0-9a-f]{16}")
_EXAMPLE = {"input_file_id": FILE_ID, "endpoint": "/v1/chat/completions", "completion_window": "24h"}


class BatchBody(ClosedBody):
    """Body of ``POST /v1/batches``."""

    input_file_id: Annotated[str, Field(min_length=1, max_length=64)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
    completion_window: Literal["24h"]
    metadata: Annotated[
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None, Field(max_length=16)
    ] = None


class BatchError(BaseModel):
    """Reason of a failed batch."""

    code: str
    message: str | None = None
    param: str | None = None
    line: int | None = None


class BatchErrors(BaseModel):
    """Errors of a failed batch."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(BaseModel):
    """Numbers of lines; ``failed`` includes expired and cancelled ones."""

    total: int
    completed: int
    failed: int


class BatchAnswer(StoredEntry):
    """State of a batch. Times are in seconds since the epoch, and null before the event."""

    object: Literal["batch"] = "batch"
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: Literal[
        "validating", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled", "failed"
    ]
    output_file_id: str | None = Field(
        None, description="The answers; null until the batch has ended, or if there are none"
    )
    error_file_id: str | None = Field(
        None, description="The lines without an answer; null until the batch has ended, or if there are none"
    )
    created_at: int
    in_progress_at: int | None = None
    expires_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    metadata: dict[str, str] | None = None


_BATCH = BatchAnswer(
    id="batch_0a1b2c3d4e5f6071",
    endpoint="/v1/chat/completions",
    input_file_id=FILE_ID,
    status="in_progress",
    created_at=CREATED_S,
    in_progress_at=CREATED_S + 3,
    expires_at=CREATED_S + DEFAULT_WINDOW_MS // 1000,
    request_counts=RequestCounts(total=100, completed=42, failed=0),
    metadata={"night": "1"},
)
_ERRORS: ErrorDocs = {
    **ERRORS,
    400: (Code.INVALID, "A field is invalid"),
    404: ("not_found", "No such batch, or no such file"),
    409: ("conflict", "The batch has ended"),
}


def router(deps: BatchDeps) -> APIRouter:
    """All routes of files and batches, below ``/v1``."""
    api = APIRouter(prefix="/v1", tags=["OpenAI"])
    api.include_router(files.routes(deps))
    read = errors((*READ_STATUSES, 400), _ERRORS)
    Reader = Annotated[str, deps.caller(Permission.BATCHES_READ)]  # noqa: N806 - a type
    Writer = Annotated[str, deps.caller(Permission.BATCHES_WRITE)]  # noqa: N806 - a type
    creator = require(deps.authenticate, Permission.BATCHES_WRITE)

    @api.post(
        "/batches",
        summary="Start a batch",
        responses=errors((*READ_STATUSES, 400, 413, 422), _ERRORS) | answered(_BATCH),
        openapi_extra=taking(BatchBody, {"A batch": _EXAMPLE}),
    )
    async def create(request: Request, identity: Annotated[Identity, Depends(creator)]) -> BatchAnswer:
        """Answer each line of a file like a call of its own. Calls with the same `Idempotency-Key` create one batch."""
        body = parse(BatchBody, await body_of(request))
        key = checked_key(request.headers.get(HEADER))
        return batch_answer(await deps.call(identity.tenant, partial(_created, deps, identity.tenant, body, key)))

    @api.get("/batches", summary="The batches there are", responses=read | answered(Page[BatchAnswer].of([_BATCH], 1)))
    def list_batches(
        tenant: Reader, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str | None = None
    ) -> Page[BatchAnswer]:
        """Newest first."""
        if after is not None:
            _found(deps, tenant, after)
        with deps.store(tenant) as store:
            found = store.batches(limit + 1, after)
        return Page[BatchAnswer].of(list(map(batch_answer, found)), limit)

    @api.get("/batches/{batch_id}", summary="One batch", responses=read | answered(_BATCH))
    def get_batch(batch_id: str, tenant: Reader) -> BatchAnswer:
        """Progress of a batch, and the ids of its output files."""
        return batch_answer(_found(deps, tenant, batch_id))

    @api.post(
        "/batches/{batch_id}/cancel",
        summary="Cancel a batch",
        responses=errors((*READ_STATUSES, 400, 409), _ERRORS) | answered(_BATCH),
    )
    def cancel(batch_id: str, tenant: Writer) -> BatchAnswer:
        """Lines already answered are kept. Cancelling a cancelled batch again returns it unchanged."""
        batch = _found(deps, tenant, batch_id)
        with deps.store(tenant):
            jobs = JobStore(deps.postgres_dsn, tenant)
            try:
                steered = jobs.steer(batch.job.job_id, Wanted.CANCEL, deps.clock_ms())
            finally:
                jobs.close()
        batch = _found(deps, tenant, batch_id)
        if steered is None and batch.job.status not in (Status.CANCELLING, Status.CANCELLED):
            raise GatewayError(409, "conflict", "the batch has ended", field="batch_id")
        return batch_answer(batch)

    return api


def _created(deps: BatchDeps, tenant: str, body: BatchBody, key: str | None) -> StoredBatch:
    """A new batch, or the one already created under this key. Raises GatewayError."""
    if key is None:
        return _new(deps, tenant, body, new_job_id())
    # No other key of any tenant gets this id.
    job_id = blake2b(f"{tenant}\n{key}".encode(), digest_size=8).hexdigest()
    made = _made(deps, tenant, body, job_id)
    if made is not None:
        return made
    try:
        return _new(deps, tenant, body, job_id)
    except GatewayError:
        # Another call with this key may have created it: job ids are unique. Or this call did, and the confirmation
        # was lost.
        made = _made(deps, tenant, body, job_id)
        if made is None:
            raise
        return made


def _made(deps: BatchDeps, tenant: str, body: BatchBody, job_id: str) -> StoredBatch | None:
    """The batch created under this key, or None. Raises GatewayError: 422 if it had another body; 503."""
    with deps.store(tenant) as store:
        made = store.batch(_batch_id(job_id))
    if made is None:
        return None
    asked = (body.input_file_id, body.endpoint, _storable(body.metadata))
    if (made.input_file_id, made.job.spec.openai_url, made.metadata) != asked:
        raise other_body()
    current().object_id = made.batch_id
    return made


def _new(deps: BatchDeps, tenant: str, body: BatchBody, job_id: str) -> StoredBatch:
    file = found_file(deps, tenant, body.input_file_id)
    if file.purpose != INPUT_PURPOSE:
        raise GatewayError(400, Code.INVALID, "input_file_id: its purpose is not batch", field="input_file_id")
    with deps.store(tenant) as store:
        output, error = new_file_id(), new_file_id()
        spec = JobSpec(
            deps.url_of(tenant, file.file_id),
            deps.url_of(tenant, output),
            errors=deps.url_of(tenant, error),
            openai_url=body.endpoint,
            window_ms=DEFAULT_WINDOW_MS,
            requested_by=current().requested_by,
        )
        fingerprint = deps.blob_of(tenant, file.file_id).fingerprint()
        # The runner counts the rows; until then the batch is ``validating``.
        created_at_ms = deps.clock_ms()
        job = Job(
            job_id,
            tenant,
            spec,
            fingerprint,
            0,
            deps.reply_partitions(),
            created_at_ms=created_at_ms,
            deadline_at_ms=created_at_ms + spec.window_ms,
            counted=False,
        )
        batch = StoredBatch(_batch_id(job_id), file.file_id, output, error, _storable(body.metadata), job)
        current().object_id = batch.batch_id
        if not store.add_batch(batch):
            raise GatewayError(404, "not_found", "there is no such file", field="input_file_id")
    return batch


def _batch_id(job_id: str) -> str:
    return f"batch_{job_id}"


def _storable(metadata: dict[str, str] | None) -> dict[str, str] | None:
    return None if metadata is None else {without_nul(name): without_nul(value) for name, value in metadata.items()}


def _found(deps: BatchDeps, tenant: str, batch_id: str) -> StoredBatch:
    """The batch. Raises GatewayError: 404, 503."""
    batch = None
    if _ID.fullmatch(batch_id):
        current().object_id = batch_id
        with deps.store(tenant) as store:
            batch = store.batch(batch_id)
    if batch is None:
        raise GatewayError(404, "not_found", "there is no such batch", field="batch_id")
    return batch


def status_of(job: Job) -> str:
    """OpenAI's status of a job."""
    if not job.counted and job.status in _STATUS:
        return "validating"
    return _STATUS.get(job.status, job.status.value)


def batch_answer(batch: StoredBatch) -> BatchAnswer:
    """A batch in OpenAI's format."""
    job, tally = batch.job, batch.job.tally
    failed = tally.failed + tally.expired + tally.cancelled
    ended_at = _seconds(job.ended_at_ms)
    reason = BatchError(code="job_failed", message=job.reason)
    return BatchAnswer(
        id=batch.batch_id,
        endpoint=job.spec.openai_url,
        errors=BatchErrors(data=[reason]) if job.status is Status.FAILED else None,
        input_file_id=batch.input_file_id,
        status=status_of(job),
        output_file_id=batch.output_file_id if job.status.is_final and tally.ok else None,
        error_file_id=batch.error_file_id if job.status.is_final and failed else None,
        created_at=job.created_at_ms // 1000,
        in_progress_at=_seconds(job.started_at_ms),
        expires_at=_seconds(job.deadline_at_ms),
        finalizing_at=_seconds(job.finalizing_at_ms),
        completed_at=ended_at if job.status is Status.COMPLETED else None,
        failed_at=ended_at if job.status is Status.FAILED else None,
        expired_at=ended_at if job.status is Status.EXPIRED else None,
        cancelling_at=_seconds(job.cancelling_at_ms),
        cancelled_at=ended_at if job.status is Status.CANCELLED else None,
        request_counts=RequestCounts(total=job.total_rows, completed=tally.ok, failed=failed),
        metadata=batch.metadata,
    )


def _seconds(at_ms: int | None) -> int | None:
    return None if at_ms is None else at_ms // 1000
