"""HTTP errors for final replies. Pure."""

from collections.abc import Mapping

from fairlane.outcomes import Code, Outcome
from fairlane.records import InferenceReply
from producers.openai_api.gateway_error import GatewayError

WAITED_TOO_LONG = "timeout"
"""The gateway's own code: no reply within the call's wait time. The request goes on."""

UNCERTAIN = "uncertain"
"""The gateway's own code: Kafka did not acknowledge the request in time; it may still run. The error names the request:
sent again under its id or its Idempotency-Key, it runs once."""

CLIENT_CLOSED_REQUEST = 499
CLIENT_GONE = "client_closed_request"
"""The gateway's own code, for the access log only."""

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
    """Whether the request was not run: a retry may succeed and repeats no work."""
    return reply.outcome in NOT_RUN


def error_of(reply: InferenceReply) -> GatewayError | None:
    """The HTTP error for a reply; None if its outcome is ``ok``."""
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
    """For the access log only: the client has disconnected."""
    return GatewayError(CLIENT_CLOSED_REQUEST, CLIENT_GONE, "the caller went away", request_id=request_id)


def waited_too_long(request_id: str, waited_s: float) -> GatewayError:
    """504: no reply within the call's wait time."""
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
