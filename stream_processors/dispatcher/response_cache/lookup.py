"""Response cache look-up: cache keys of a request, and the cached answer under them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from fairlane.logs import get_logger
from fairlane.outcomes import CacheMode
from fairlane.records import CacheUse
from fairlane_server.caching.entries import CacheKey, CacheName
from fairlane_server.caching.responses import (
    CachedAnswer,
    decode_answer,
    is_cacheable,
    response_key,
    semantic_group,
    semantic_query,
    word_digests,
)
from fairlane_server.redis.cache import LookUpResult, RedisCache, count
from fairlane_server.retrieval.embedder import EmbedderError, FloatArray
from stream_processors.dispatcher.enrichment.concurrency_limiter import FairConcurrencyLimiter, Urgency
from stream_processors.dispatcher.enrichment.retriever import Retriever
from stream_processors.dispatcher.queued_request import QueuedRequest
from stream_processors.dispatcher.response_cache.caches import QueryEmbeddings
from stream_processors.dispatcher.response_cache.semantic_match import NO_WORDING, Wording, encode_row, nearest
from stream_processors.dispatcher.response_cache.singleflight import Singleflight

log = get_logger(__name__)

_MOST_AT_A_TIME = 8
"""Concurrent look-ups; at most half of them for one tenant."""

_TRIED = 4
"""Most similar questions whose answers are looked up."""

WITHIN_S = 0.25
"""Timeout of a look-up, including the wait for its permit."""


@dataclass(frozen=True, slots=True)
class CacheQuery:
    """Cache keys of a request: the exact key, and with ``group`` and ``vector`` also the semantic one."""

    key: CacheKey
    group: CacheKey | None = None
    vector: FloatArray | None = None
    wording: Wording = NO_WORDING


@dataclass(frozen=True, slots=True)
class CacheHit:
    """A cached answer and how it was found."""

    answer: CachedAnswer
    use: CacheUse


class CacheLookup(Protocol):
    """Access to cached answers. No method raises because of the store, and every wait is bounded."""

    @property
    def is_available(self) -> bool:
        """Whether the cache is reachable, so that waiting for an answer to be stored makes sense."""

    async def question(self, queued: QueuedRequest) -> CacheQuery | None:
        """The cache keys; None for a request whose answer is not reproducible, or if they cannot be computed in
        time."""

    async def find(self, question: CacheQuery) -> CacheHit | None:
        """The cached answer, if any."""

    def remember(self, question: CacheQuery) -> None:
        """Add the question to its semantic group, once its request is dispatched and an answer is to come."""


@dataclass(slots=True)
class SemanticCache:
    """Answers to similar questions of otherwise equal requests (``semantic_group``).

    Each group is a list of the latest questions' vectors, each with the exact key of its answer. That answer may not be
    stored yet, or may have expired. ``threshold`` is the least cosine of two vectors.
    """

    redis: RedisCache
    threshold: float
    group_rows: int = 256

    async def find(
        self, group: CacheKey, vector: FloatArray, wording: Wording = NO_WORDING
    ) -> tuple[CachedAnswer, float] | None:
        """The answer to the most similar question that has a stored answer, and the similarity."""
        rows = await self.redis.rows(group, self.group_rows)
        found, similar = None, None
        if isinstance(rows, LookUpResult):
            result = rows
        else:
            similar = nearest(vector, rows, self.threshold, _TRIED, wording)
            result = LookUpResult.POISONED if similar is None else LookUpResult.MISS
        for similarity, digest in similar or ():
            looked = await self.redis.look_up(CacheKey(CacheName.RESPONSE, group.tenant, digest), decode_answer)
            if looked.value is not None:
                result, found = LookUpResult.HIT, (looked.value, similarity)
                break
            if looked.result != LookUpResult.MISS:
                result = looked.result
        count(group.cache, result)
        return found

    def remember(self, group: CacheKey, vector: FloatArray, response: CacheKey, wording: Wording = NO_WORDING) -> None:
        """Add a question whose answer will be stored under this key. Written asynchronously."""
        if response.tenant != group.tenant:
            raise ValueError("an answer of another tenant")
        payload = encode_row(vector, response.digest, wording)
        if payload is not None:
            self.redis.soon(group, lambda: self.redis.add_row(group, payload, self.group_rows))


@dataclass(slots=True)
class CachedAnswers:
    """Look-up of answers by exact key and by similarity, in one Redis. Consumers store them under the same keys
    (``fairlane_server.caching.responses``). ``budget_s`` bounds the computation of a question, which may query
    the collection's version and an embedder.

    Tenants take turns; a look-up without a permit and an answer within WITHIN_S is a miss.
    """

    semantic: SemanticCache
    retriever: Retriever
    vectors: QueryEmbeddings
    budget_s: float
    _gate: FairConcurrencyLimiter = field(
        default_factory=lambda: FairConcurrencyLimiter(_MOST_AT_A_TIME, per_tenant=_MOST_AT_A_TIME // 2)
    )
    _asked: Singleflight[tuple[str, str], int | None] = field(default_factory=Singleflight)

    @property
    def is_available(self) -> bool:
        return self.semantic.redis.is_available

    async def question(self, queued: QueuedRequest) -> CacheQuery | None:
        if not is_cacheable(queued.request):
            return None
        try:
            async with asyncio.timeout(self.budget_s):
                return await self._question(queued)
        except TimeoutError:
            return None

    async def find(self, question: CacheQuery) -> CacheHit | None:
        try:
            async with asyncio.timeout(WITHIN_S), self._turn(question.key.tenant):
                return await self._find(question)
        except TimeoutError:
            return None

    def remember(self, question: CacheQuery) -> None:
        if question.group is not None and question.vector is not None:
            self.semantic.remember(question.group, question.vector, question.key, question.wording)

    async def _question(self, queued: QueuedRequest) -> CacheQuery | None:
        tenant, request, version, policy = queued.tenant, queued.request, None, queued.guardrails
        if request.retrieval is not None:
            version = await self._version(tenant, request.retrieval.collection)
        key = response_key(tenant, request, queued.model.version, version, policy)
        text = semantic_query(request) if queued.cache == CacheMode.SEMANTIC else None
        if key is None or text is None:
            return None if key is None else CacheQuery(key)
        try:
            name = self.vectors.name
            group = semantic_group(tenant, request, queued.model.version, version, name, policy)
            if group is None:
                return CacheQuery(key)
            vector = await self.vectors.embed(tenant, text)
        except EmbedderError as error:
            log.warning("question_not_embedded", tenant=tenant, error=type(error).__name__)
            return CacheQuery(key)
        return CacheQuery(key, group, vector, word_digests(text))

    async def _version(self, tenant: str, name: str) -> int | None:
        async def ask() -> int | None:
            async with self._turn(tenant):
                return await self.retriever.collection_version(tenant, name, self.budget_s)

        return await self._asked.run((tenant, name), ask)

    async def _find(self, question: CacheQuery) -> CacheHit | None:
        answer, mode, similarity = await self.semantic.redis.get(question.key, decode_answer), CacheMode.EXACT, 1.0
        if answer is None and question.group is not None and question.vector is not None:
            found = await self.semantic.find(question.group, question.vector, question.wording)
            if found is not None:
                (answer, similarity), mode = found, CacheMode.SEMANTIC
        if answer is None:
            return None
        return CacheHit(answer, CacheUse(mode, answer.request_id, answer.finished_at_ms, similarity))

    @asynccontextmanager
    async def _turn(self, tenant: str) -> AsyncIterator[None]:
        permit = self._gate.permit(tenant, Urgency.WAITS)
        try:
            await permit.granted
            yield
        finally:
            self._gate.leave(permit)
