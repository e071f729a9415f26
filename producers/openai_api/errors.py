"""The gateway's error type, its form in OpenAI's API, and the errors of final replies. Pure."""

from collections.abc import Mapping
from math import ceil

from fairlane.money import nanos_text
from fairlane.outcomes import BudgetScope, Code, FinishReason, Outcome
from fairlane.records import BudgetNotice, InferenceReply
from fairlane_server.budgets.budgets import utc_text

UNAVAILABLE = "unavailable"
"""The gateway's own code: Kafka or Postgres is unavailable; nothing was accepted, or nothing can be looked up now."""


class GatewayError(Exception):
    """An HTTP error answer. Its texts are for the caller and quote no input.

    Attributes:
        status: HTTP status.
        code: one word for programs: a ``fairlane.outcomes.Code`` or a code of the gateway's own.
        message: one sentence.
        field: the invalid field, if any.
        retry_after_ms: delay after which a retry makes sense.
        request_id: the request concerned, if any; the caller can ask for its result.
        budget: the budget that it was refused for, or that it has reached.
    """

    def __init__(
        self,
        status: int,
        code: Code | str,
        message: str,
        *,
        field: str | None = None,
        retry_after_ms: int | None = None,
        request_id: str | None = None,
        budget: BudgetNotice | None = None,
    ) -> None:
        super().__init__(status, str(code), message)
        self.status = status
        self.code = str(code)
        self.message = message
        self.field = field
        self.retry_after_ms = retry_after_ms
        self.request_id = request_id
        self.budget = budget

    def __str__(self) -> str:
        return f"{self.status} {self.code}: {self.message}"


UNSUPPORTED_PARAMETER = "unsupported_parameter"
UNKNOWN_PARAMETER = "unknown_parameter"
MISSING_PARAMETER = "missing_required_parameter"
INVALID_JSON = "invalid_json"
MODEL_NOT_FOUND = "model_not_found"
STREAM_RESTARTED = "stream_restarted"
"""The gateway's own code: the answer restarted with other text, so the stream cannot continue."""

REQUEST_ID_HEADER = "x-request-id"
BUDGET_HEADER = "x-fairlane-budget"

_LONGEST_RETRY_MS = 60_000
"""OpenAI's clients ignore a retry time of more than a minute, and retry sooner."""

_PATHS = ("/v1/chat", "/v1/completions", "/v1/embeddings", "/v1/models", "/v1/files", "/v1/batches")

_TYPES: Mapping[int, str] = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}

_CODES: Mapping[str, str] = {
    Code.UNKNOWN_MODEL: MODEL_NOT_FOUND,
    Code.CONTEXT_TOO_LONG: "context_length_exceeded",
    Code.QUOTA_EXCEEDED: "rate_limit_exceeded",
    Code.GUARDRAIL_BLOCKED: FinishReason.CONTENT_FILTER,
}

# OpenAI's name of a record field.
_PARAMS: Mapping[str, str] = {"texts": "input"}
_FAIRLANE_FIELDS = frozenset(
    {"priority", "timeout_ms", "retrieval", "cache", "conversation_id", "conversation_after", "group"}
)


def speaks_openai(path: str) -> bool:
    """Whether errors of this path use OpenAI's format."""
    return any(path == known or path.startswith(known + "/") for known in _PATHS)


def error_body(error: GatewayError) -> dict[str, object]:
    """``{"error": {"message", "type", "param", "code"}}``."""
    return {
        "error": {
            "message": error.message,
            "type": error_type(error.status),
            "param": None if error.field is None else param_of(error.field),
            "code": _CODES.get(error.code, error.code),
        }
    }


def error_type(status: int) -> str:
    """OpenAI's error type for an HTTP status."""
    return "server_error" if status >= 500 else _TYPES.get(status, "invalid_request_error")


def error_headers(error: GatewayError) -> dict[str, str]:
    """Retry and request id headers. OpenAI's clients read ``retry-after-ms`` first."""
    headers = {}
    if error.retry_after_ms is not None:
        headers = {"retry-after": str(ceil(error.retry_after_ms / 1_000)), "retry-after-ms": str(error.retry_after_ms)}
    if error.request_id is not None:
        headers[REQUEST_ID_HEADER] = error.request_id
    headers |= budget_headers(error.budget)
    if error.code in (WAITED_TOO_LONG, UNCERTAIN) or _is_spent(error):
        # The request may still run, and OpenAI's clients would run it twice; or retrying within minutes is in vain.
        headers["x-should-retry"] = "false"
    return headers


def _is_spent(error: GatewayError) -> bool:
    wait_ms = error.retry_after_ms
    return error.code == Code.INSUFFICIENT_QUOTA and (wait_ms is None or wait_ms > _LONGEST_RETRY_MS)


def budget_headers(notice: BudgetNotice | None) -> dict[str, str]:
    """The header about a budget that is reached: ``month; limit=soft; amount=80; spent=81.5; reserved=0.2; ...``."""
    if notice is None:
        return {}
    parts = {
        "limit": notice.limit,
        "of": notice.of if notice.of in tuple(BudgetScope) else "caller",
        "amount": nanos_text(notice.limit_nanos),
        "spent": nanos_text(notice.spent_nanos),
        "reserved": nanos_text(notice.reserved_nanos),
        "currency": notice.currency,
        "renews": utc_text(notice.renews_at_ms),
    }
    return {BUDGET_HEADER: "; ".join((notice.period, *(f"{name}={value}" for name, value in parts.items())))}


def param_of(field: str) -> str:
    """Name in an OpenAI body of a field of ``InferenceRequest``."""
    name = field.removeprefix("parameters.").removeprefix("input.")
    head = name.split(".", 1)[0].split("[", 1)[0]
    if head in _FAIRLANE_FIELDS:
        return f"fairlane.{name}"
    return _PARAMS.get(head, head) + name[len(head) :]


WAITED_TOO_LONG = "timeout"
"""The gateway's own code: no reply within the call's wait time. The request goes on."""

UNCERTAIN = "uncertain"
"""The gateway's own code: Kafka did not acknowledge the request in time; it may still run. The error names the request:
sent again under its id or its Idempotency-Key, it runs once."""

CLIENT_CLOSED_REQUEST = 499
CLIENT_GONE = "client_closed_request"
"""The gateway's own code, for the access log only."""

_REJECTED_STATUS: Mapping[str, int] = {
    Code.UNKNOWN_MODEL: 404,
    Code.FORBIDDEN: 403,
    Code.OVERLOADED: 429,
    Code.QUOTA_EXCEEDED: 429,
    Code.INSUFFICIENT_QUOTA: 429,
    Code.BUDGET_UNKNOWN: 503,
    Code.DEADLINE_UNMEETABLE: 429,
    Code.DRAINING: 503,
    Code.GUARDRAIL_UNAVAILABLE: 503,
}
_FAILED_STATUS: Mapping[str, int] = {
    Code.CONTEXT_TOO_LONG: 400,
    Code.FORMAT_NOT_MET: 400,
    Code.GUARDRAIL_BLOCKED: 400,
    Code.GUARDRAIL_UNAVAILABLE: 503,
}
_DEFAULT_MESSAGE: Mapping[str, str] = {
    Outcome.REJECTED: "the request was refused",
    Outcome.EXPIRED: "the deadline passed before the request was run",
    Outcome.CANCELLED: "the request was cancelled",
}

NOT_RUN = (Outcome.REJECTED, Outcome.EXPIRED)


def was_not_run(reply: InferenceReply) -> bool:
    """Whether the request was not run: a retry may succeed and repeats no work."""
    return reply.outcome in NOT_RUN


def error_of(reply: InferenceReply) -> GatewayError | None:
    """The HTTP error for a reply; None if its outcome is ``ok``, and for an answer that guardrails withheld: OpenAI's
    clients expect a response with that finish reason, and no text."""
    if reply.outcome == Outcome.OK or reply.finish_reason == FinishReason.CONTENT_FILTER:
        return None
    code = reply.code or reply.outcome
    return GatewayError(
        _status(reply.outcome, code),
        code,
        reply.message or _DEFAULT_MESSAGE.get(reply.outcome, "the request failed"),
        field=reply.field,
        retry_after_ms=reply.retry_after_ms,
        request_id=reply.request_id,
        budget=reply.budget,
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


def _status(outcome: str, code: str) -> int:
    if outcome == Outcome.REJECTED:
        return _REJECTED_STATUS.get(code, 400)
    if outcome == Outcome.EXPIRED:
        return 504
    if outcome == Outcome.CANCELLED:
        return CLIENT_CLOSED_REQUEST
    return _FAILED_STATUS.get(code, 500)
