"""What a caller is told whose request does not get into the log, or perhaps does not."""

from fairlane.outcomes import Code
from producers.gateway.errors import UNAVAILABLE, GatewayError
from producers.gateway.reply_errors import UNCERTAIN

TOO_MANY_CALLS = "too_many_calls"
"""The gateway's own code: one tenant has as much under way at this instance as one may; others have room."""

_RETRY_AFTER_MS = 1_000
_BUSY_RETRY_AFTER_MS = 250


def away() -> GatewayError:
    """Kafka takes nothing."""
    return GatewayError(
        503,
        UNAVAILABLE,
        "the log does not take requests at present; nothing was accepted",
        retry_after_ms=_RETRY_AFTER_MS,
    )


def draining() -> GatewayError:
    """This instance is about to end, and others go on."""
    return GatewayError(503, Code.DRAINING, "this gateway is about to end", retry_after_ms=_RETRY_AFTER_MS)


def busy() -> GatewayError:
    """More is on its way than may be."""
    return GatewayError(
        503,
        Code.OVERLOADED,
        "too much is under way at this gateway; nothing was accepted",
        retry_after_ms=_BUSY_RETRY_AFTER_MS,
    )


def busy_with_tenant() -> GatewayError:
    """More of this tenant is on its way than may be of one."""
    return GatewayError(
        429,
        TOO_MANY_CALLS,
        "too much of this tenant is under way at this gateway; nothing was accepted",
        retry_after_ms=_BUSY_RETRY_AFTER_MS,
    )


def not_confirmed(request_id: str) -> GatewayError:
    """It may be in the log."""
    return GatewayError(
        503,
        UNCERTAIN,
        f"it is not known whether the request was accepted: ask for /v1/results/{request_id}, or send it again with "
        "the same Idempotency-Key",
        retry_after_ms=_RETRY_AFTER_MS,
        request_id=request_id,
    )
