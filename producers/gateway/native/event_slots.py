"""Limit on open event streams, and the signal that ends them all."""

import asyncio

from producers.gateway.pipeline.publisher import draining
from producers.gateway.tenant_bounds import TenantSlots
from producers.openai_api.errors import GatewayError

TOO_MANY_STREAMS = "too_many_streams"
"""The gateway's own code."""

MOST_STREAMS = 10_000

_RETRY_AFTER_MS = 5_000


class EventSlots(TenantSlots):
    """Limit on all event streams; one tenant may hold half of it.

    Args:
        most: streams of all tenants.

    Attributes:
        ending: set when the gateway drains.
    """

    def __init__(self, most: int = MOST_STREAMS) -> None:
        super().__init__(most, max(1, most // 2), _full)
        self.ending = asyncio.Event()

    def check(self, tenant: str, count: int = 1) -> None:
        """Raises GatewayError: no slot is left for this tenant, or the gateway drains."""
        if self.ending.is_set():
            raise draining()
        super().check(tenant, count)


def _full() -> GatewayError:
    message = "as many event streams are open as may be"
    return GatewayError(429, TOO_MANY_STREAMS, message, retry_after_ms=_RETRY_AFTER_MS)
