"""Errors in Fairlane's own shape."""

from starlette.responses import JSONResponse

from producers.openai_api.errors import GatewayError, error_headers

UNKNOWN_REQUEST = "unknown_request"
"""No request of this tenant has this id; the request of another tenant is unknown too."""
RESULT_EXPIRED = "result_expired"


def unknown_request() -> GatewayError:
    """404: no such request, or another tenant's; the error does not say which."""
    return GatewayError(404, UNKNOWN_REQUEST, "there is no request with this id")


def error_body(error: GatewayError) -> dict[str, object]:
    """``{"error": {"code", "message", "field", "retry_after_ms", "request_id"}}``, without fields that are None."""
    detail = {
        "code": error.code,
        "message": error.message,
        "field": error.field,
        "retry_after_ms": error.retry_after_ms,
        "request_id": error.request_id,
    }
    return {"error": {name: value for name, value in detail.items() if value is not None}}


def error_response(error: GatewayError) -> JSONResponse:
    """The complete answer."""
    return JSONResponse(error_body(error), status_code=error.status, headers=error_headers(error))
