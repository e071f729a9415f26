"""Errors in OpenAI's shape, with the words that its clients look for."""

from collections.abc import Mapping
from math import ceil
from typing import TYPE_CHECKING

from fairlane.outcomes import Code
from producers.gateway.errors import GatewayError
from producers.gateway.reply_errors import UNCERTAIN, WAITED_TOO_LONG

if TYPE_CHECKING:
    from starlette.responses import JSONResponse

UNSUPPORTED_PARAMETER = "unsupported_parameter"
UNKNOWN_PARAMETER = "unknown_parameter"
MISSING_PARAMETER = "missing_required_parameter"
INVALID_JSON = "invalid_json"
MODEL_NOT_FOUND = "model_not_found"
STREAM_RESTARTED = "stream_restarted"
"""The gateway's own code: a stream cannot go on, because the answer began anew with other text."""

REQUEST_ID_HEADER = "x-request-id"

_PATHS = ("/v1/chat", "/v1/completions", "/v1/embeddings", "/v1/models", "/v1/files", "/v1/batches")

_TYPES: Mapping[int, str] = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}

_CODES: Mapping[str, str] = {
    Code.UNKNOWN_MODEL: MODEL_NOT_FOUND,
    Code.CONTEXT_TOO_LONG: "context_length_exceeded",
    Code.QUOTA_EXCEEDED: "rate_limit_exceeded",
}

# A field of our records, and what it is called in a body of OpenAI's.
_PARAMS: Mapping[str, str] = {"texts": "input"}
_FAIRLANE_FIELDS = frozenset(
    {"priority", "timeout_ms", "retrieval", "cache", "conversation_id", "conversation_after", "group"}
)


def speaks_openai(path: str) -> bool:
    """Whether errors of this path are told in OpenAI's shape."""
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
    """OpenAI's kind of error for a status of HTTP."""
    return "server_error" if status >= 500 else _TYPES.get(status, "invalid_request_error")


def error_headers(error: GatewayError) -> dict[str, str]:
    """When to try again, and which request it is about. Clients of OpenAI's read ``retry-after-ms`` first."""
    headers = {}
    if error.retry_after_ms is not None:
        headers = {"retry-after": str(ceil(error.retry_after_ms / 1_000)), "retry-after-ms": str(error.retry_after_ms)}
    if error.request_id is not None:
        headers[REQUEST_ID_HEADER] = error.request_id
    if error.code in (WAITED_TOO_LONG, UNCERTAIN):
        # The work may go on; OpenAI's clients would send it again by themselves, and have it done twice.
        headers["x-should-retry"] = "false"
    return headers


def error_response(error: GatewayError) -> "JSONResponse":
    """The whole answer."""
    # Offline jobs use the other words of this module, and have no web framework.
    from starlette.responses import JSONResponse

    return JSONResponse(error_body(error), status_code=error.status, headers=error_headers(error))


def param_of(field: str) -> str:
    """What a field of ``InferenceRequest`` is called in the body that it was made from."""
    name = field.removeprefix("parameters.").removeprefix("input.")
    head = name.split(".", 1)[0].split("[", 1)[0]
    if head in _FAIRLANE_FIELDS:
        return f"fairlane.{name}"
    return _PARAMS.get(head, head) + name[len(head) :]
