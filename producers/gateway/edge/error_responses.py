"""Render errors in the shape of the API: OpenAI's below OpenAI's paths, Fairlane's own elsewhere."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from fairlane.outcomes import Code
from producers.gateway.pipeline.call_context import note_error
from producers.openai_api.errors import GatewayError, error_body, error_headers, speaks_openai

_HTTP_CODES: Mapping[int, str] = {404: "not_found", 405: "method_not_allowed"}
_NOT_FIELDS = frozenset({"body", "query", "path", "header", "cookie"})


def error_response(path: str, error: GatewayError) -> JSONResponse:
    """The complete answer; its code goes to the access log."""
    note_error(error)
    body = error_body(error) if speaks_openai(path) else native_error_body(error)
    return JSONResponse(body, error.status, error_headers(error))


def native_error_body(error: GatewayError) -> dict[str, object]:
    """``{"error": {"code", "message", "field", "retry_after_ms", "request_id"}}``, without fields that are None."""
    detail = {
        "code": error.code,
        "message": error.message,
        "field": error.field,
        "retry_after_ms": error.retry_after_ms,
        "request_id": error.request_id,
    }
    return {"error": {name: value for name, value in detail.items() if value is not None}}


def install(app: FastAPI) -> None:
    """Register the exception handler."""

    async def failed(request: Request, error: Exception) -> JSONResponse:
        headers: Mapping[str, str] = {}
        if isinstance(error, RequestValidationError):
            error = validation_error(error.errors())
        elif isinstance(error, HTTPException):
            headers = error.headers or {}
            code = _HTTP_CODES.get(error.status_code, Code.INVALID)
            error = GatewayError(error.status_code, code, str(error.detail))
        assert isinstance(error, GatewayError)  # noqa: S101 - as it was registered
        answer = error_response(request.url.path, error)
        answer.headers.update(headers)
        return answer

    for kind in (GatewayError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, failed)


def validation_error(problems: Sequence[Mapping[str, Any]]) -> GatewayError:
    """The first problem, with its field. Neither Pydantic's messages nor our validators' quote input."""
    if not problems:
        return GatewayError(400, Code.INVALID, "the call is not valid")
    problem = problems[0]
    place = [str(part) for part in problem.get("loc", ()) if part not in _NOT_FIELDS]
    return GatewayError(400, Code.INVALID, str(problem.get("msg", "is not valid")), field=".".join(place) or None)
