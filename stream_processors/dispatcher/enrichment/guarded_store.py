"""Passage store with a deadline per call and a circuit breaker per tenant."""

import asyncio
from dataclasses import dataclass, field

from fairlane.clock import ClockMs
from fairlane_server.retrieval.embedder import FloatArray
from fairlane_server.retrieval.store import Collection, Found, VectorStore
from stream_processors.dispatcher.enrichment.tenant_breakers import GRACE_S, TenantBreakers


@dataclass(slots=True)
class GuardedStore:
    """A collection whose searches are always late does not stop other tenants' retrieval.

    Only a successful search closes the breaker; a look-up of the collection proves little. ``clock`` is monotonic.
    """

    store: VectorStore
    clock: ClockMs
    _breakers: TenantBreakers = field(init=False)

    def __post_init__(self) -> None:
        self._breakers = TenantBreakers(self.clock)

    async def look_up(self, tenant: str, name: str, deadline_s: float) -> Collection:
        """Raises CollectionNotFoundError, TimeoutError, StoreError."""
        return await self._breakers.ask(tenant, self.store.collection(tenant, name), deadline_s, proves=False)

    async def search(
        self, collection: Collection, vector: FloatArray, text: str | None, limit: int, deadline_s: float
    ) -> Found:
        """Raises CollectionNotFoundError, TimeoutError, StoreError."""
        left_s = max(0.001, deadline_s - asyncio.get_running_loop().time())
        found = self.store.search(collection, vector, text, limit, left_s)
        return await self._breakers.ask(collection.tenant, found, deadline_s + GRACE_S)
