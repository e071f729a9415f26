"""Context of the current call, for the access log and the headers of records it publishes."""

from contextvars import ContextVar

from fairlane.records import InferenceReply
from fairlane.trace_context import TraceHeaders
from producers.gateway.limits.rate_buckets import Allowance
from producers.openai_api.errors import GatewayError


class CallContext:
    """One call of HTTP.

    Attributes:
        trace: trace headers to pass on with its request.
        tenant, subject: the caller, once authenticated.
        requested_by: its name in the records of its requests.
        request_id: request that the call is about: published for it, found under its key, or asked for with a valid id.
            No other input of a caller is logged.
        object_id: file, batch, collection or document that the call is about, likewise.
        reply: reply to the request, once awaited, or the earlier reply.
        is_repeat: the reply is an earlier one under the same key: this call cost nothing.
        code: error code of the response, as in ``GatewayError``.
        answer_id: ``x-request-id`` of a response that is about no request.
        allowance: the caller's rate limit, once it was counted.
    """

    # Class attributes as defaults keep the constructor cheap: every call creates one instance.
    tenant: str | None = None
    subject: str | None = None
    requested_by: str | None = None
    request_id: str | None = None
    object_id: str | None = None
    reply: InferenceReply | None = None
    is_repeat: bool = False
    code: str | None = None
    answer_id: str | None = None
    allowance: Allowance | None = None

    def __init__(self, trace: TraceHeaders = ()) -> None:
        self.trace = trace


present: ContextVar[CallContext | None] = ContextVar("caller", default=None)
"""The current call; None outside of a call."""


def current() -> CallContext:
    """The current call; outside of one, a new context that nobody reads."""
    return present.get() or CallContext()


def note_error(error: GatewayError) -> None:
    """Record the error of the response."""
    caller = current()
    caller.code = error.code
    if error.request_id is not None:
        caller.request_id = error.request_id
