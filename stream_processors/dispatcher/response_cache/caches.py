"""Caches of retrieval: search results and query vectors."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite

import msgspec
import numpy as np

from fairlane.clock import ClockMs
from fairlane_server.caching.entries import UNREADABLE, CacheKey, embedding_key, retrieval_key
from fairlane_server.redis.cache import LookUpResult, RedisCache, count
from fairlane_server.retrieval.embedder import FloatArray, QueryEmbedder
from fairlane_server.retrieval.store import Collection, Hit
from stream_processors.dispatcher.response_cache.hot_cache import HotCache
from stream_processors.dispatcher.response_cache.singleflight import Singleflight

HOT = "hot"
"""Metric label of the in-memory cache."""

ITEM_OVERHEAD_BYTES = 512
"""Memory overhead per entry beyond its size in Redis."""

_encoder = msgspec.msgpack.Encoder()
_hits_decoder = msgspec.msgpack.Decoder(tuple[Hit, ...])


@dataclass(slots=True)
class PassageCache:
    """Search results: recently used ones in memory, all in Redis. The key contains the version of the
    collection. Nothing here raises. ``ttl_s`` is that of the Redis cache."""

    redis: RedisCache
    clock: ClockMs
    ttl_s: float
    hot: HotCache[tuple[Hit, ...]] = field(default_factory=HotCache)

    async def get(self, collection: Collection, mode: str, width: int, query: str) -> tuple[Hit, ...] | None:
        """The hits of this query in this version of the collection; None on a miss."""
        key = _key(collection, mode, width, query)
        known = self.hot.get(key, self.clock())
        count(HOT, LookUpResult.MISS if known is None else LookUpResult.HIT)
        if known is not None:
            return known
        stored = await self.redis.get(key, _with_size)
        if stored is None:
            return None
        hits, size_bytes = stored
        self._keep(key, hits, size_bytes)
        return hits

    async def put(self, collection: Collection, mode: str, width: int, query: str, hits: Sequence[Hit]) -> None:
        """Store the hits of a complete search: in memory at once, in Redis asynchronously."""
        key = _key(collection, mode, width, query)
        payload = encode_hits(hits)
        self._keep(key, tuple(hits), len(payload))
        self.redis.soon(key, lambda: self.redis.put(key, payload))

    def _keep(self, key: CacheKey, hits: tuple[Hit, ...], size_bytes: int) -> None:
        now_ms = self.clock()
        ends_at_ms = now_ms + round(1_000 * self.ttl_s)
        self.hot.put(key, hits, size_bytes + ITEM_OVERHEAD_BYTES, ends_at_ms, now_ms)


@dataclass(slots=True)
class QueryEmbeddings:
    """Embeds queries, with the vectors in Redis for an embedder slower than that; a static one is faster."""

    embedder: QueryEmbedder
    redis: RedisCache | None = None
    _flights: Singleflight[CacheKey, FloatArray] = field(default_factory=Singleflight)

    @property
    def name(self) -> str:
        """The embedder's name. Raises EmbedderError."""
        return self.embedder.name

    async def embed(self, tenant: str, text: str) -> FloatArray:
        """A vector of shape (dimensions,). With Redis, the embedder runs at most once at a time for the same text of a
        tenant. Raises EmbedderError. The caller bounds the time."""
        embedder, redis = self.embedder, self.redis
        if redis is None:
            return await embedder.embed_query(text)
        key = embedding_key(tenant, embedder.name, text)
        known = await redis.get(key, lambda payload: decode_vector(payload, embedder.dimensions))
        if known is not None:
            return known

        async def run() -> FloatArray:
            vector = await embedder.embed_query(text)
            payload = encode_vector(vector)
            redis.soon(key, lambda: redis.put(key, payload))
            return vector

        return await self._flights.run(key, run)


def encode_hits(hits: Sequence[Hit]) -> bytes:
    return _encoder.encode(tuple(hits))


def decode_hits(payload: bytes) -> tuple[Hit, ...] | None:
    """Inverse of ``encode_hits``; None for any other payload, and for scores that are not finite."""
    try:
        hits = _hits_decoder.decode(payload)
    except UNREADABLE:
        return None
    return hits if all(isfinite(hit.score) and hit.tokens >= 0 for hit in hits) else None


def encode_vector(vector: FloatArray) -> bytes:
    """Entry payload of a vector, in single precision."""
    return np.asarray(vector, dtype="<f4").tobytes()


def decode_vector(payload: bytes, dimensions: int) -> FloatArray | None:
    """A vector of shape (dimensions,); None for any other payload, and for numbers that are not finite."""
    if len(payload) != 4 * dimensions:
        return None
    vector = np.frombuffer(payload, dtype="<f4").astype(np.float32)
    return vector if np.isfinite(vector).all() else None


def _with_size(payload: bytes) -> tuple[tuple[Hit, ...], int] | None:
    hits = decode_hits(payload)
    return None if hits is None else (hits, len(payload))


def _key(collection: Collection, mode: str, width: int, query: str) -> CacheKey:
    return retrieval_key(
        collection.tenant, collection.name, collection.version, collection.embedder, mode, width, query
    )
