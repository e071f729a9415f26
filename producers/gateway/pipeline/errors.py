"""Errors of requests that were not published, or possibly not."""

from fairlane.outcomes import Code
from producers.openai_api.gateway_error import UNAVAILABLE, GatewayError
from producers.openai_api.reply_errors import UNCERTAIN

TOO_MANY_CALLS = "too_many_calls"
"""The gateway's own code: the tenant is at its limit at this instance; others have room."""

_RETRY_AFTER_MS = 1_000
_BUSY_RETRY_AFTER_MS = 250


def away() -> GatewayError:
    """503: Kafka does not take records."""
    return GatewayError(
        503,
        UNAVAILABLE,
        "the log does not take requests at present; nothing was accepted",
        retry_after_ms=_RETRY_AFTER_MS,
    )


def draining() -> GatewayError:
    """503: this instance is shutting down; others go on."""
    return GatewayError(503, Code.DRAINING, "this gateway is about to end", retry_after_ms=_RETRY_AFTER_MS)


def busy() -> GatewayError:
    """503: this instance is at its limit."""
    return GatewayError(
        503,
        Code.OVERLOADED,
        "too much is under way at this gateway; nothing was accepted",
        retry_after_ms=_BUSY_RETRY_AFTER_MS,
    )


def busy_with_tenant() -> GatewayError:
    """429: this tenant is at its limit at this instance."""
    return GatewayError(
        429,
        TOO_MANY_CALLS,
        "too much of this tenant is under way at this gateway; nothing was accepted",
        retry_after_ms=_BUSY_RETRY_AFTER_MS,
    )


def not_confirmed(request_id: str) -> GatewayError:
    """503: the publish was not acknowledged; the request may be in Kafka."""
    return GatewayError(
        503,
        UNCERTAIN,
        f"it is not known whether the request was accepted: ask for /v1/results/{request_id}, or send it again with "
        "the same Idempotency-Key",
        retry_after_ms=_RETRY_AFTER_MS,
        request_id=request_id,
    )
