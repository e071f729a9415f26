"""What is known of the call that is being answered, for its line in the log and the headers of what it publishes."""

from contextvars import ContextVar

from fairlane.records import InferenceReply
from fairlane.trace_context import TraceHeaders
from producers.gateway.errors import GatewayError


class Caller:
    """One call of HTTP.

    Args:
        trace: what of its trace goes on with its request.

    Attributes:
        trace: the same.
        tenant, subject: who calls, once that is known.
        request_id: of the request that it is about: that was published for it, had been under its key, or that it asks
            for, where a request can have this id.
        object_id: of the file or batch that it is about, likewise.
        reply: to its request, once somebody has waited for it, or that was given before.
        is_repeat: it was given before, under the same key: this call cost nothing.
        code: of the error that it was answered with, as the gateway has it.
        answer_id: in ``x-request-id`` of an answer that is about no request.
    """

    # Of the class while they are not known: every call makes one of these.
    tenant: str | None = None
    subject: str | None = None
    request_id: str | None = None
    object_id: str | None = None
    reply: InferenceReply | None = None
    is_repeat: bool = False
    code: str | None = None
    answer_id: str | None = None

    def __init__(self, trace: TraceHeaders = ()) -> None:
        self.trace = trace


present: ContextVar[Caller | None] = ContextVar("caller", default=None)
"""The call that is being answered; None outside of any."""


def note_request(request_id: str) -> None:
    """The call is about this request. An id that was checked: whatever else a caller sends is in no log."""
    if (caller := present.get()) is not None:
        caller.request_id = request_id


def note_object(object_id: str) -> None:
    """The call is about this file or batch; the id was checked."""
    if (caller := present.get()) is not None:
        caller.object_id = object_id


def note_error(error: GatewayError) -> None:
    """The call is answered with this."""
    if (caller := present.get()) is not None:
        caller.code = error.code
        if error.request_id is not None:
            caller.request_id = error.request_id
