"""W3C trace context in Kafka headers: what is copied from a record to the records made from it. Pure.

Only `traceparent` and `tracestate`, validated and bounded (https://www.w3.org/TR/trace-context/). Baggage is not
copied: applications put anything into it, including user names and keys, which would appear in logs that others read.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from fairlane import headers

TraceHeaders = tuple[tuple[str, bytes], ...]
"""At most two headers, ready to be written."""

_MOST_STATE_BYTES = 512
_MOST_STATE_MEMBERS = 32
_PARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_KEY = rb"[a-z0-9][a-z0-9_\-*/@]{0,255}"
_VALUE = rb"[\x20-\x2b\x2d-\x3c\x3e-\x7e]{1,256}"
_MEMBER = re.compile(_KEY + rb"=" + _VALUE)


def trace_headers(given: Mapping[str, object] | Iterable[tuple[str, object]] | None) -> TraceHeaders:
    """The trace context among a record's headers; empty when it is missing or malformed. Of a repeated name the last
    counts. A `tracestate` that is malformed or longer than 512 bytes is left out."""
    parent: object = None
    state: object = None
    for name, value in given.items() if isinstance(given, Mapping) else given or ():
        if name == headers.TRACE_PARENT:
            parent = value
        elif name == headers.TRACE_STATE:
            state = value
    if not isinstance(parent, bytes) or _PARENT.fullmatch(parent) is None:
        return ()
    found = (headers.TRACE_PARENT, parent)
    if not isinstance(state, bytes) or not _is_state(state):
        return (found,)
    return found, (headers.TRACE_STATE, state)


def _is_state(state: bytes) -> bool:
    if not 0 < len(state) <= _MOST_STATE_BYTES:
        return False
    # White space around members is not left to the expression, which would divide it in every way.
    members = [member.strip(b" \t") for member in state.split(b",")]
    return len(members) <= _MOST_STATE_MEMBERS and all(
        _MEMBER.fullmatch(member) is not None for member in members if member
    )


_API = "opentelemetry.trace"


def current_trace() -> TraceHeaders:
    """The headers of the span that this thread or task is in; none outside of one."""
    # Without an import of the API there is no span, so it need not be installed.
    if _API not in sys.modules:
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return trace_headers((name, value.encode()) for name, value in carrier.items()) if carrier else ()


@contextmanager
def continued(trace: Mapping[str, str]) -> Iterator[None]:
    """Context in which spans belong to the trace of these headers, if the caller uses OpenTelemetry."""
    if not trace or _API not in sys.modules:
        yield
        return
    from opentelemetry import context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    token = context.attach(TraceContextTextMapPropagator().extract(trace, context.get_current()))
    try:
        yield
    finally:
        context.detach(token)
