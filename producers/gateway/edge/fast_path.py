"""Fast path for calls so frequent that FastAPI's overhead exceeds their own work."""

from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from producers.gateway.edge.error_responses import error_response
from producers.openai_api.errors import GatewayError

ShortAnswer = Callable[[Request], Awaitable[Response]]


class ShortPath:
    """Innermost ASGI middleware: answers POST without a query on some paths, and passes all else to FastAPI.

    Args:
        answers: handlers by path, without path parameters. Each must answer as the path's route does without a query,
            and may raise the same GatewayErrors.
    """

    def __init__(self, app: ASGIApp, answers: Mapping[str, ShortAnswer]) -> None:
        self._app = app
        # The access log reads the path of the route.
        self._answers = {path: (SimpleNamespace(path=path), answer) for path, answer in answers.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._answers.get(scope["path"]) if scope["type"] == "http" else None
        if found is None or scope["query_string"] or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        scope["route"], answer = found
        try:
            response = await answer(Request(scope, receive, send))
        except GatewayError as error:
            response = error_response(scope["path"], error)
        await response(scope, receive, send)
