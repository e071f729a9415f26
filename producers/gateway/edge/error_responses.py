"""Render errors in the shape of the API: OpenAI's below OpenAI's paths, Fairlane's own elsewhere."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from fairlane.outcomes import Code
from producers.gateway.native.response_bodies import ErrorAnswer
from producers.gateway.pipeline.call_context import note_error
from producers.openai_api.errors import GatewayError, error_body, error_headers, speaks_openai

_HTTP_CODES: Mapping[int, str] = {404: "not_found", 405: "method_not_allowed"}
_NOT_FIELDS = frozenset({"body", "query", "path", "header", "cookie"})


def error_response(path: str, error: GatewayError) -> Response:
    """The complete answer; its code goes to the access log."""
    note_error(error)
    if speaks_openai(path):
        return JSONResponse(error_body(error), error.status, error_headers(error))
    return Response(ErrorAnswer.of(error).as_json(), error.status, error_headers(error), "application/json")


def install(app: FastAPI) -> None:

    async def failed(request: Request, error: Exception) -> Response:
        headers: Mapping[str, str] = {}
        if isinstance(error, RequestValidationError):
            # The first problem. Neither Pydantic's messages nor our validators' quote input.
            problem: Mapping[str, Any] = next(iter(error.errors()), {})
            place = [str(part) for part in problem.get("loc", ()) if part not in _NOT_FIELDS]
            message = str(problem.get("msg", "the call is not valid"))
            error = GatewayError(400, Code.INVALID, message, field=".".join(place) or None)
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
