"""Errors in OpenAI's format, with the codes and headers that its clients read."""

from collections.abc import Mapping
from math import ceil
from typing import TYPE_CHECKING

from fairlane.outcomes import Code
from producers.openai_api.gateway_error import GatewayError
from producers.openai_api.reply_errors import UNCERTAIN, WAITED_TOO_LONG

if TYPE_CHECKING:
    from starlette.responses import JSONResponse

UNSUPPORTED_PARAMETER = "unsupported_parameter"
UNKNOWN_PARAMETER = "unknown_parameter"
MISSING_PARAMETER = "missing_required_parameter"
INVALID_JSON = "invalid_json"
MODEL_NOT_FOUND = "model_not_found"
STREAM_RESTARTED = "stream_restarted"
"""The gateway's own code: the answer restarted with other text, so the stream cannot continue."""

REQUEST_ID_HEADER = "x-request-id"

_PATHS = ("/v1/chat", "/v1/completions", "/v1/embeddings", "/v1/models", "/v1/files", "/v1/batches")

_TYPES: Mapping[int, str] = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}

_CODES: Mapping[str, str] = {
    Code.UNKNOWN_MODEL: MODEL_NOT_FOUND,
    Code.CONTEXT_TOO_LONG: "context_length_exceeded",
    Code.QUOTA_EXCEEDED: "rate_limit_exceeded",
}

# OpenAI's name of a record field.
_PARAMS: Mapping[str, str] = {"texts": "input"}
_FAIRLANE_FIELDS = frozenset(
    {"priority", "timeout_ms", "retrieval", "cache", "conversation_id", "conversation_after", "group"}
)


def speaks_openai(path: str) -> bool:
    """Whether errors of this path use OpenAI's format."""
    return any(path == known or path.startswith(known + "/") for known in _PATHS)


def error_body(error: GatewayError) -> dict[str, object]:
    """``{"error": {"message", "type", "param", "code"}}``."""
    return {
        "error": {
            "message": error.message,
            "type": error_type(error.status),
            "param": None if error.field is None else param_of(error.field),
            "code": _CODES.get(error.code, error.code),
        }
    }


def error_type(status: int) -> str:
    """OpenAI's error type for an HTTP status."""
    return "server_error" if status >= 500 else _TYPES.get(status, "invalid_request_error")


def error_headers(error: GatewayError) -> dict[str, str]:
    """Retry and request id headers. OpenAI's clients read ``retry-after-ms`` first."""
    headers = {}
    if error.retry_after_ms is not None:
        headers = {"retry-after": str(ceil(error.retry_after_ms / 1_000)), "retry-after-ms": str(error.retry_after_ms)}
    if error.request_id is not None:
        headers[REQUEST_ID_HEADER] = error.request_id
    if error.code in (WAITED_TOO_LONG, UNCERTAIN):
        # The request may still run; OpenAI's clients would retry on their own and run it twice.
        headers["x-should-retry"] = "false"
    return headers


def error_response(error: GatewayError) -> "JSONResponse":
    """The error response."""
    # Imported here: offline jobs use this module without a web framework.
    from starlette.responses import JSONResponse

    return JSONResponse(error_body(error), status_code=error.status, headers=error_headers(error))


def param_of(field: str) -> str:
    """Name in an OpenAI body of a field of ``InferenceRequest``."""
    name = field.removeprefix("parameters.").removeprefix("input.")
    head = name.split(".", 1)[0].split("[", 1)[0]
    if head in _FAIRLANE_FIELDS:
        return f"fairlane.{name}"
    return _PARAMS.get(head, head) + name[len(head) :]
