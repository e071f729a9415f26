"""Trace context of the caller, if OpenTelemetry is installed; no cost without it.

Trace context goes on, baggage does not: see :mod:`fairlane.trace_context`.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from fairlane.trace_context import TraceHeaders, trace_headers

_API = "opentelemetry.trace"


def current_trace() -> TraceHeaders:
    """The headers of the span that this thread or task is in; none outside of one."""
    # Where nobody imported the API nobody can be in a span, so it need not be installed, nor be looked for.
    if _API not in sys.modules:
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return trace_headers((name, value.encode()) for name, value in carrier.items()) if carrier else ()


@contextmanager
def continued(trace: Mapping[str, str]) -> Iterator[None]:
    """What is done within belongs to the trace of these headers, as far as the caller uses OpenTelemetry."""
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
