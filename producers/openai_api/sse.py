"""Server-sent events in OpenAI's format (WHATWG HTML, "Server-sent events")."""

import json
from collections.abc import Mapping

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients ignore it, and proxies see that the connection is in use."""

HEADERS: Mapping[str, str] = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # nginx would buffer the events.
    "x-accel-buffering": "no",
}


def event(data: str) -> bytes:
    """One event; ``data`` is a line of JSON."""
    return f"data: {data}\n\n".encode()


def error_event(body: Mapping[str, object]) -> bytes:
    """Last event of a stream that failed after it began."""
    return f"event: error\ndata: {json.dumps(body)}\n\n".encode()
