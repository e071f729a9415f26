"""What is known of the call that is being answered, for its line in the log and the headers of what it publishes."""

from contextvars import ContextVar
from dataclasses import dataclass

from fairlane.records import InferenceReply
from fairlane.trace_context import TraceHeaders


@dataclass(slots=True, eq=False)
class Caller:
    """One call of HTTP.

    Attributes:
        trace: what of its trace goes on with its request.
        tenant, subject: who calls, once that is known.
        request_id: of the last request that was published for it, or had been under its key.
        reply: to that request, once somebody has waited for it.
    """

    trace: TraceHeaders = ()
    tenant: str | None = None
    subject: str | None = None
    request_id: str | None = None
    reply: InferenceReply | None = None


present: ContextVar[Caller | None] = ContextVar("caller", default=None)
"""The call that is being answered; None outside of any."""
