"""OpenAPI models and examples of the file and batch routes."""

from collections.abc import Mapping
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, Field

from producers.gateway.openapi import CREATED_S, Responses, answered

JobStatus = Literal[
    "validating", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled", "failed"
]
EntryT = TypeVar("EntryT")


class Page(BaseModel, Generic[EntryT]):
    """A page, newest first."""

    object: Literal["list"] = "list"
    data: list[EntryT]
    first_id: str | None
    last_id: str | None = Field(description="`after` of the next page")
    has_more: bool


class File(BaseModel):
    """A file of this tenant: an upload, or the output or errors of a batch. Times are in seconds since the epoch."""

    id: str
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


class BatchError(BaseModel):
    """Reason of a failed batch."""

    code: str
    message: str | None
    param: str | None
    line: int | None


class BatchErrors(BaseModel):
    """Errors of a failed batch."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(BaseModel):
    """Numbers of lines; ``failed`` includes expired and cancelled ones."""

    total: int
    completed: int
    failed: int


class BatchAnswer(BaseModel):
    """State of a batch. Times are in seconds since the epoch, and null before the event."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
    errors: BatchErrors | None
    input_file_id: str
    completion_window: Literal["24h"]
    status: JobStatus
    output_file_id: str | None = Field(description="The answers; null until the batch has ended, or if there are none")
    error_file_id: str | None = Field(
        description="The lines without an answer; null until the batch has ended, or if there are none"
    )
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


FILE_ID = "file-0a1b2c3d4e5f60718293a4b5"
BATCH_ID = "batch_0a1b2c3d4e5f6071"
_FILE = {
    "id": FILE_ID,
    "object": "file",
    "bytes": 20_480,
    "created_at": CREATED_S,
    "expires_at": CREATED_S + 2_592_000,
    "filename": "questions.jsonl",
    "purpose": "batch",
    "status": "processed",
    "status_details": None,
}
_BATCH = dict.fromkeys(BatchAnswer.model_fields) | {
    "id": BATCH_ID,
    "object": "batch",
    "endpoint": "/v1/chat/completions",
    "input_file_id": FILE_ID,
    "completion_window": "24h",
    "status": "in_progress",
    "created_at": CREATED_S,
    "in_progress_at": CREATED_S + 3,
    "expires_at": CREATED_S + 86_400,
    "request_counts": {"total": 100, "completed": 42, "failed": 0},
    "metadata": {"night": "1"},
}
_LINE = (
    '{"custom_id": "1", "method": "POST", "url": "/v1/embeddings", "body": {"model": "all-minilm-l6-v2", "input": "a"}}'
)


def _page(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {"object": "list", "data": [entry], "first_id": entry["id"], "last_id": entry["id"], "has_more": False}


FILE = answered(File, _FILE)
FILES = answered(Page[File], _page(_FILE))
DELETED = answered(DeletedFile, {"id": FILE_ID, "object": "file", "deleted": True})
BATCH = answered(BatchAnswer, _BATCH)
BATCHES = answered(Page[BatchAnswer], _page(_BATCH))
CONTENT: Responses = {
    200: {
        "description": "The bytes that were uploaded, or that the batch wrote",
        "content": {
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}, "example": f"{_LINE}\n"}
        },
    }
}


def upload_body(purpose: str, anchor: str, least_ttl_s: int, most_ttl_s: int) -> dict[str, Any]:
    """OpenAPI request body of an upload that may be kept for ``least_ttl_s`` to ``most_ttl_s`` seconds."""
    ttl = {"type": "integer", "minimum": least_ttl_s, "maximum": most_ttl_s}
    asked = {"expires_after[anchor]": {"type": "string", "enum": [anchor]}, "expires_after[seconds]": ttl}
    schema = {
        "type": "object",
        "required": ["file", "purpose"],
        "properties": {
            "file": {"type": "string", "format": "binary", "description": "JSON lines, one for each call"},
            "purpose": {"type": "string", "enum": [purpose]},
            **asked,
        },
        "dependentRequired": {name: list(asked) for name in asked},
    }
    examples = {
        "a_file": {"summary": "A file", "value": {"file": _LINE, "purpose": purpose}},
        "for_an_hour": {
            "summary": "For an hour",
            "value": {"file": _LINE, "purpose": purpose} | dict(zip(asked, (anchor, least_ttl_s), strict=True)),
        },
    }
    content = {"multipart/form-data": {"schema": schema, "examples": examples}}
    return {"requestBody": {"required": True, "content": content}}
