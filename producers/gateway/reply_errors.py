"""What a final reply means to a caller of HTTP. Pure."""

from collections.abc import Mapping

from fairlane.outcomes import Code, Outcome
from fairlane.records import InferenceReply
from producers.gateway.errors import GatewayError

WAITED_TOO_LONG = "timeout"
"""The gateway's own code: no reply came as long as the call could wait. The request goes on."""

UNCERTAIN = "uncertain"
"""The gateway's own code: Kafka did not say in time whether it has the request, which may be run all the same. The
error names the request: sent again under its id or its Idempotency-Key, it is run once."""

CLIENT_CLOSED_REQUEST = 499
CLIENT_GONE = "client_closed_request"
"""The gateway's own code, for the log alone."""

_REJECTED_STATUS: Mapping[str, int] = {
    Code.INVALID: 400,
    Code.UNKNOWN_MODEL: 404,
    Code.FORBIDDEN: 403,
    Code.OVERLOADED: 429,
    Code.QUOTA_EXCEEDED: 429,
    Code.DEADLINE_UNMEETABLE: 429,
    Code.DRAINING: 503,
}
_FAILED_STATUS: Mapping[str, int] = {Code.CONTEXT_TOO_LONG: 400}


NOT_RUN = (Outcome.REJECTED, Outcome.EXPIRED)


def was_not_run(reply: InferenceReply) -> bool:
    """Whether sending the same again may well end better, and does nothing twice."""
    return reply.outcome in NOT_RUN


def error_of(reply: InferenceReply) -> GatewayError | None:
    """The error that a reply stands for; None for one that is ``ok``."""
    if reply.outcome == Outcome.OK:
        return None
    code = reply.code or reply.outcome
    return GatewayError(
        _status(reply.outcome, code),
        code,
        reply.message or _DEFAULT_MESSAGE.get(reply.outcome, "the request failed"),
        field=reply.field,
        retry_after_ms=reply.retry_after_ms,
        request_id=reply.request_id,
    )


def client_gone(request_id: str | None) -> GatewayError:
    """For the log alone: nobody reads it."""
    return GatewayError(CLIENT_CLOSED_REQUEST, CLIENT_GONE, "the caller went away", request_id=request_id)


def waited_too_long(request_id: str, waited_s: float) -> GatewayError:
    """No reply came in the time that a call may wait."""
    return GatewayError(
        504,
        WAITED_TOO_LONG,
        f"no answer within {waited_s:g} s; the request goes on, ask for /v1/results/{request_id}",
        request_id=request_id,
    )


_DEFAULT_MESSAGE: Mapping[str, str] = {
    Outcome.REJECTED: "the request was refused",
    Outcome.EXPIRED: "the deadline passed before the request was run",
    Outcome.CANCELLED: "the request was cancelled",
}


def _status(outcome: str, code: str) -> int:
    if outcome == Outcome.REJECTED:
        return _REJECTED_STATUS.get(code, 400)
    if outcome == Outcome.EXPIRED:
        return 504
    if outcome == Outcome.CANCELLED:
        return CLIENT_CLOSED_REQUEST
    return _FAILED_STATUS.get(code, 500)
