"""Retrieval of one request's passages within its budget, with the mode reached and the reason if it was reduced."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cachetools import TTLCache

from fairlane import metrics
from fairlane.clock import ClockMs
from fairlane.logs import get_logger
from fairlane.outcomes import RetrievalMode, RetrievalReason
from fairlane.records import Retrieval, RetrievalUse
from fairlane_server.retrieval.embedder import EmbedderError
from fairlane_server.retrieval.rank_fusion import fuse
from fairlane_server.retrieval.store import Collection, CollectionNotFoundError, Hit, VectorStore
from fairlane_server.store_error import StoreError
from stream_processors.dispatcher.enrichment.context import Retrieved, nothing
from stream_processors.dispatcher.enrichment.tenant_breakers import GRACE_S, BreakerOpenError, TenantBreakers
from stream_processors.dispatcher.response_cache.caches import PassageCache, QueryEmbeddings
from stream_processors.dispatcher.response_cache.singleflight import Singleflight

log = get_logger(__name__)

_LEAST_WIDTH = 10
_MAX_COLLECTIONS = 4_096

_FRESH_MS = 1_000
"""Longest time a change of a collection may go unnoticed."""

_Search = tuple[str, str, int, str, int, str]
"""Tenant, collection and its version, mode, width and query."""

LEAST_BUDGET_S = 0.01
"""Below this time no query is made: it would be late."""


@dataclass(slots=True)
class Retriever:
    """Never raises because of store or embedder: ``RetrievalUse`` says what was late, unavailable or empty.

    ``clock`` is monotonic. ``known_ms``: how long a collection and its cached results may be used while the store
    is unavailable.
    """

    store: VectorStore
    vectors: QueryEmbeddings
    clock: ClockMs
    cache: PassageCache | None = None
    known_ms: int = 300_000
    _breakers: TenantBreakers = field(init=False)
    _collections: TTLCache[tuple[str, str], tuple[Collection, int]] = field(init=False)
    """Recently looked up, by tenant and name, with the time. Missing ones are not cached: one may be created at any
    moment, and a tenant could fill the cache with names."""
    _searches: Singleflight[_Search, Retrieved] = field(default_factory=Singleflight)

    def __post_init__(self) -> None:
        self._breakers = TenantBreakers(self.clock)
        self._collections = TTLCache(_MAX_COLLECTIONS, self.known_ms, timer=self.clock)

    async def retrieve(self, tenant: str, wanted: Retrieval, query: str, budget_s: float) -> Retrieved:
        """At most ``wanted.top_k`` passages, within the budget."""
        started_ms = self.clock()
        deadline_s = asyncio.get_running_loop().time() + budget_s
        found = await self._within(tenant, wanted, query, deadline_s)
        took_ms = max(0, self.clock() - started_ms)
        metrics.RETRIEVAL_SECONDS.observe(took_ms / 1_000)
        return replace(found, use=replace(found.use, took_ms=took_ms))

    async def collection_version(self, tenant: str, name: str, budget_s: float) -> int | None:
        """The present version of a collection; None if it is missing or cannot be looked up within the budget."""
        collection = self._fresh(tenant, name)
        if collection is None:
            try:
                collection = await self._look_up(tenant, name, asyncio.get_running_loop().time() + budget_s)
            except (StoreError, TimeoutError):
                return None
        return collection.version

    async def _within(self, tenant: str, wanted: Retrieval, query: str, deadline_s: float) -> Retrieved:
        if not query:
            return nothing(wanted.collection, RetrievalReason.NOTHING_FOUND)
        before: Retrieved | None = None
        try:
            # Everything inside ends by the deadline itself.
            async with asyncio.timeout_at(deadline_s + 2 * GRACE_S):
                before = await self._known_before(tenant, wanted, query)
                return await self._now(tenant, wanted, query, deadline_s, before)
        except CollectionNotFoundError:
            return nothing(wanted.collection, RetrievalReason.NO_SUCH_COLLECTION)
        except EmbedderError as error:
            log.warning("query_not_embedded", tenant=tenant, error=str(error))
            return _fallback(before, wanted, RetrievalReason.EMBEDDER_FAILED)
        except TimeoutError:
            return _fallback(before, wanted, RetrievalReason.LATE)
        except BreakerOpenError:
            return _fallback(before, wanted, RetrievalReason.UNAVAILABLE)
        except StoreError as error:
            log.warning("retrieval_failed", tenant=tenant, error=str(error))
            return _fallback(before, wanted, RetrievalReason.UNAVAILABLE)

    async def _now(
        self, tenant: str, wanted: Retrieval, query: str, deadline_s: float, before: Retrieved | None
    ) -> Retrieved:
        collection = self._fresh(tenant, wanted.collection)
        if collection is not None:
            try:
                return await self._in(collection, wanted, query, deadline_s, before)
            except CollectionNotFoundError:
                # Deleted since, and perhaps created again.
                self._collections.pop((tenant, wanted.collection), None)
        collection = await self._look_up(tenant, wanted.collection, deadline_s)
        try:
            return await self._in(collection, wanted, query, deadline_s, before)
        except CollectionNotFoundError as error:
            self._collections.pop((tenant, wanted.collection), None)
            raise StoreError("the collection is there, and its passages are not") from error

    async def _look_up(self, tenant: str, name: str, deadline_s: float) -> Collection:
        try:
            # Only a successful search closes the breaker; a look-up of the collection proves little.
            collection = await self._breakers.ask(tenant, self.store.collection(tenant, name), deadline_s, proves=False)
        except CollectionNotFoundError:
            self._collections.pop((tenant, name), None)
            raise
        self._collections[tenant, name] = collection, self.clock()
        return collection

    def _fresh(self, tenant: str, name: str) -> Collection | None:
        """The collection, as of at most ``_FRESH_MS`` ago."""
        known = self._collections.get((tenant, name))
        return known[0] if known is not None and self.clock() - known[1] < _FRESH_MS else None

    async def _in(
        self, collection: Collection, wanted: Retrieval, query: str, deadline_s: float, before: Retrieved | None
    ) -> Retrieved:
        if collection.embedder != self.vectors.name:
            return nothing(collection.name, RetrievalReason.EMBEDDER_MISMATCH, collection.version)
        if before is not None and before.use.collection_version == collection.version:
            # The collection has not changed: a search would find the same.
            return _narrowed(before, wanted, None)
        if wanted.mode == RetrievalMode.CACHED:
            return nothing(collection.name, RetrievalReason.NOT_CACHED, collection.version)
        # Concurrent equal queries share one search.
        key = (collection.tenant, collection.name, collection.version, wanted.mode, _width(wanted), query)
        while True:
            try:
                found = await self._searches.run(key, lambda: self._search(collection, wanted, query, deadline_s))
            except TimeoutError:
                # The shared search had the deadline of its first caller; this one may have time left.
                if deadline_s - asyncio.get_running_loop().time() < LEAST_BUDGET_S:
                    raise
            else:
                return replace(found, hits=found.hits[: wanted.top_k])

    async def _search(self, collection: Collection, wanted: Retrieval, query: str, deadline_s: float) -> Retrieved:
        """Search, not cut to ``top_k``."""
        hybrid = wanted.mode == RetrievalMode.HYBRID
        try:
            async with asyncio.timeout_at(deadline_s):
                vector = await self.vectors.embed(collection.tenant, query)
        except TimeoutError:
            raise EmbedderError("the query was not embedded within the budget") from None
        width = _width(wanted)
        left_s = max(0.001, deadline_s - asyncio.get_running_loop().time())
        search = self.store.search(collection, vector, query if hybrid else None, 2 * width, left_s)
        found = await self._breakers.ask(collection.tenant, search, deadline_s + GRACE_S)
        hits = fuse(found, width)
        if hybrid and found.matching is None:
            return _of(hits, collection, RetrievalMode.VECTOR, RetrievalReason.LATE)
        if hits and self.cache is not None:
            await self.cache.put(collection, wanted.mode, width, query, hits)
        return _of(hits, collection, wanted.mode, None)

    async def _known_before(self, tenant: str, wanted: Retrieval, query: str) -> Retrieved | None:
        """Cached hits in the last known version of the collection, for use if that is current or the store is
        unavailable. Raises EmbedderError."""
        embedder = self.vectors.name
        collection, _ = self._collections.get((tenant, wanted.collection), (None, 0))
        if self.cache is None or collection is None or collection.embedder != embedder:
            return None
        mode = RetrievalMode.VECTOR if wanted.mode == RetrievalMode.VECTOR else RetrievalMode.HYBRID
        hits = await self.cache.get(collection, mode, _width(wanted), query)
        return None if hits is None else _of(hits, collection, mode, None)


def _width(wanted: Retrieval) -> int:
    """Number of passages searched and cached: requests for few share the result."""
    return max(_LEAST_WIDTH, wanted.top_k)


def _fallback(before: Retrieved | None, wanted: Retrieval, reason: RetrievalReason) -> Retrieved:
    if before is None:
        return nothing(wanted.collection, reason)
    return _narrowed(before, wanted, reason)


def _narrowed(before: Retrieved, wanted: Retrieval, reason: RetrievalReason | None) -> Retrieved:
    """The first ``top_k``; mode ``cached`` if that was requested or is the fallback."""
    mode: str
    if wanted.mode == RetrievalMode.CACHED:
        mode, reason = RetrievalMode.CACHED, None
    else:
        mode = before.use.mode if reason is None else RetrievalMode.CACHED
    return Retrieved(before.hits[: wanted.top_k], replace(before.use, mode=mode, reason=reason))


def _of(hits: Sequence[Hit], collection: Collection, mode: str, reason: RetrievalReason | None) -> Retrieved:
    if not hits:
        return nothing(collection.name, reason or RetrievalReason.NOTHING_FOUND, collection.version)
    return Retrieved(tuple(hits), RetrievalUse(collection.name, mode, reason, collection.version))
