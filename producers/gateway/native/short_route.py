"""A route that is called so often that what FastAPI does for any route costs more than its own work."""

from collections.abc import Awaitable, Callable

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send


def short_route(answer: Callable[[Request], Awaitable[Response]]) -> type[APIRoute]:
    """A class for a route whose calls without a query are answered by this, and all others as FastAPI does.

    Args:
        answer: comes to the same as the route's own function without a query. What it raises is answered by the
            handlers of the application, as everywhere.
    """

    class ShortRoute(APIRoute):
        async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
            if scope["query_string"] or scope["method"] not in (self.methods or ()):
                await super().handle(scope, receive, send)
                return
            response = await answer(Request(scope, receive, send))
            await response(scope, receive, send)

    return ShortRoute
