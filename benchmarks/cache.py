"""cache: hit ratio of the dispatcher's caches, the time of a hit beside a search, and look-ups by other tenants.

Questions are drawn by popularity (Zipf, exponent 0.9, over all tenants) and answered from memory, from Redis, or by
embedding and a hybrid search in Postgres; a tenth of all results fits in memory. Then each kind of answer is timed by
itself: a miss is the look-up, the embedding, the search and the hand-over to the cache. Last, other tenants look up
what one tenant has stored in all four caches, every other time with the owner's entry copied to where they look.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from random import Random
from statistics import median
from time import perf_counter

import numpy as np
from cachetools import LRUCache
from prometheus_client import REGISTRY
from redis.asyncio import Redis

from benchmarks.cluster import stores
from benchmarks.result import Figure, Result, median_of, repeated
from benchmarks.retrieval import make_corpus, questions
from fairlane.clock import now_ms
from fairlane.outcomes import RetrievalMode, Task
from fairlane.records import InferenceRequest, Message, Output, RequestInput, Retrieval, TokenUsage
from fairlane.settings import Settings
from fairlane_server.caching.entries import CacheKey, embedding_key, retrieval_key
from fairlane_server.caching.responses import CachedAnswer, decode_answer, encode_answer, response_key, semantic_group
from fairlane_server.postgres.rights import PostgresRole
from fairlane_server.redis.cache import RedisCache
from fairlane_server.retrieval.embedder import FloatArray
from fairlane_server.retrieval.pgvector_search import PgVectorSearch
from fairlane_server.retrieval.pgvector_store import PgVectorCollections
from fairlane_server.retrieval.rank_fusion import fuse
from fairlane_server.retrieval.static_embedder import StaticEmbedder
from fairlane_server.retrieval.store import Collection, Hit
from stream_processors.dispatcher.response_cache.caches import (
    HOT,
    ITEM_OVERHEAD_BYTES,
    PassageCache,
    decode_vector,
    encode_hits,
    encode_vector,
)
from stream_processors.dispatcher.response_cache.hot_cache import HotCache
from stream_processors.dispatcher.response_cache.lookup import SemanticCache

NAME = "cache"
HOW = "3 runs, the median of each figure; the look-ups of other tenants once"

TENANTS = 8
PASSAGES = 2_000
QUESTIONS = 500
"""Of each tenant, as the passages."""
ASKED = 10_000
TIMED = 300
INTRUSIONS = 100_000
EXPONENT = 0.9
MEMORY_PART = 0.1
WIDTH = 10
"""Passages that are looked for, as the dispatcher does."""
AIM_LATENCY_RATIO = 0.5

_TTL_S = 3_600
# What is measured is the time of an answer, not how soon the dispatcher would do without.
_PATIENT_S = 30.0
_COLLECTION = "manuals"
_AT_ONCE = 16
OWNER = "acme"
DIMENSIONS = 384
_MODE = RetrievalMode.HYBRID


_EMBEDDER, _VERSION = "static", "1"
_WANTED, _SEARCH = Retrieval("manuals"), ("hybrid", 10)
_SYSTEM = Message("system", "Answer from the passages.")
# What somebody would try who thinks that keys are texts joined together.
_TEXTS = (
    "What is the code of the vault?",
    f"{OWNER}:",
    f"cache:response:{OWNER}:",
    f"{OWNER}\0",
    "",
    "{" + OWNER + "}",
    "\u202eWhat is it?",
    "../" + OWNER,
    "*",
    "\ud800",
)
_INTRUDERS = ("globex", "acme-", "acme2", "acm", "acme-acme", "a", "acme-0", "initech", "cache", "umbrella")


@dataclass(frozen=True, slots=True)
class CollectionQuestion:
    """A question about a collection of its tenant."""

    collection: Collection
    text: str


def run() -> Result:
    """Measure three streams of questions, then the intruders, on one Postgres and one Redis."""
    settings = Settings()
    embedder = StaticEmbedder(settings.models_dir / settings.retrieval_embedder_path)
    with stores("redis") as stack:
        dsn, redis_url = stack.endpoints.postgres_dsn(PostgresRole.DISPATCHER), stack.endpoints.redis_url
        asked = _fill(stack.endpoints.postgres_dsn(PostgresRole.OPERATOR), embedder)
        runs = repeated(lambda number: asyncio.run(_measure(dsn, redis_url, embedder, asked, number)))
        intruders = asyncio.run(cross_tenant_hits(redis_url, INTRUSIONS))
    figures = (
        Figure("questions answered from memory or Redis", median_of(runs, "hit_ratio"), "ratio"),
        Figure("questions that were asked before", median_of(runs, "asked_before"), "ratio"),
        Figure("questions answered from memory", median_of(runs, "memory_hit_ratio"), "ratio"),
        Figure(
            "memory hits, divided by those of least recently used",
            median_of(runs, "memory_ratio"),
            "ratio",
            "at least",
            1.0,
        ),
        Figure("miss: look-up, embedding, hybrid search, hand-over, p50", median_of(runs, "miss_ms"), "ms"),
        Figure("hit in Redis, p50", median_of(runs, "redis_ms"), "ms"),
        Figure("hit in memory, p50", median_of(runs, "memory_ms"), "ms"),
        Figure("hit in Redis divided by a miss", median_of(runs, "redis_ratio"), "ratio", "at most", AIM_LATENCY_RATIO),
        Figure("hit in memory divided by a miss", median_of(runs, "memory_latency_ratio"), "ratio"),
        Figure("look-ups by other tenants", intruders["look_ups"], "look-ups", "at least", INTRUSIONS),
        Figure("of these with the owner's entry in place", intruders["planted"], "look-ups"),
        Figure("hits across tenants", intruders["hits"], "hits", "at most", 0),
        Figure("the owner's own look-ups that hit", intruders["own_hits"] / intruders["own"], "ratio", "at least", 1.0),
    )
    return Result(NAME, figures, runs)


def _fill(dsn: str, embedder: StaticEmbedder) -> list[CollectionQuestion]:
    """A collection for each tenant, and the questions about it; the most popular question comes first."""
    corpus = make_corpus(embedder, TENANTS * PASSAGES)
    asked = []
    with PgVectorCollections(dsn) as store:
        for number in range(TENANTS):
            tenant, first = f"tenant-{number}", number * PASSAGES
            store.create(tenant, _COLLECTION, embedder.name, embedder.dimensions)
            store.put(tenant, _COLLECTION, list(corpus.documents(first, PASSAGES)))
            store.build_index(tenant, _COLLECTION)
            collection = store.get(tenant, _COLLECTION)
            about = Random(number).sample(range(first, first + PASSAGES), QUESTIONS)
            asked += [CollectionQuestion(collection, text) for text in questions(corpus, about, seed=number)]
    Random(0).shuffle(asked)
    return asked


async def _measure(
    dsn: str, redis_url: str, embedder: StaticEmbedder, asked: Sequence[CollectionQuestion], number: int
) -> dict[str, float]:
    async with PgVectorSearch(dsn) as search, Redis.from_url(redis_url) as redis:
        await redis.flushall()

        def cache(most_bytes: int) -> PassageCache:
            entries = RedisCache(redis, _TTL_S, _PATIENT_S)
            return PassageCache(entries, now_ms, _TTL_S, HotCache(most_bytes, most_tenant_share=1.0))

        async def find(one: CollectionQuestion) -> tuple[Hit, ...]:
            vector = await embedder.embed_query(one.text)
            found = await search.search(one.collection, vector, one.text, 2 * WIDTH, _PATIENT_S)
            if found.matching is None:
                raise RuntimeError("full text was late")
            return fuse(found, WIDTH)

        ratios = await _stream(cache, find, asked, Random(number))
        await redis.flushall()
        return ratios | await _latencies(cache, find, asked[:TIMED])


async def _stream(
    cache: Callable[[int], PassageCache],
    find: Callable[[CollectionQuestion], Awaitable[tuple[Hit, ...]]],
    asked: Sequence[CollectionQuestion],
    random: Random,
) -> dict[str, float]:
    """Parts of a stream of questions that were found in each place."""
    sizes = [_size(await find(one)) for one in asked[:TIMED]]
    room = int(MEMORY_PART * len(asked) * sum(sizes) / len(sizes))
    passages = cache(room)
    # What is usual, for comparison: everything is kept, and the least recently used goes for it.
    lru: LRUCache[CollectionQuestion, int] = LRUCache(room, getsizeof=lambda size_bytes: size_bytes)
    before = _memory_hits()
    weights = [1 / rank**EXPONENT for rank in range(1, len(asked) + 1)]
    drawn = random.choices(asked, weights, k=ASKED)
    hits = lru_hits = 0
    for one in drawn:
        known = await passages.get(one.collection, _MODE, WIDTH, one.text)
        if known is None:
            known = await find(one)
            await passages.put(one.collection, _MODE, WIDTH, one.text, known)
            await passages.redis.settle()
        else:
            hits += 1
        if lru.get(one) is None:
            lru[one] = _size(known)
        else:
            lru_hits += 1
    in_memory = _memory_hits() - before
    return {
        "hit_ratio": hits / ASKED,
        "asked_before": 1 - len(set(drawn)) / ASKED,
        "memory_hit_ratio": in_memory / ASKED,
        "memory_ratio": in_memory / lru_hits,
    }


async def _latencies(
    cache: Callable[[int], PassageCache],
    find: Callable[[CollectionQuestion], Awaitable[tuple[Hit, ...]]],
    asked: Sequence[CollectionQuestion],
) -> dict[str, float]:
    """Median milliseconds of each kind of answer."""
    here, there = cache(2**30), cache(2**30)
    for one in asked:
        # Connections, and Postgres's own caches, are warm for all three.
        await find(one)
    spent: dict[str, list[float]] = {"miss": [], "redis": [], "memory": []}
    for one in asked:
        begun = perf_counter()
        if await here.get(one.collection, _MODE, WIDTH, one.text) is not None:
            raise RuntimeError("a miss was wanted")
        await here.put(one.collection, _MODE, WIDTH, one.text, await find(one))
        spent["miss"].append(perf_counter() - begun)
        await here.redis.settle()
    for kind in ("redis", "memory"):
        for one in asked:
            begun = perf_counter()
            if await there.get(one.collection, _MODE, WIDTH, one.text) is None:
                raise RuntimeError("a hit was wanted")
            spent[kind].append(perf_counter() - begun)
    milliseconds = {kind: 1_000 * median(times) for kind, times in spent.items()}
    return {
        **{f"{kind}_ms": value for kind, value in milliseconds.items()},
        "redis_ratio": milliseconds["redis"] / milliseconds["miss"],
        "memory_latency_ratio": milliseconds["memory"] / milliseconds["miss"],
    }


def _size(hits: Sequence[Hit]) -> int:
    return len(encode_hits(hits)) + ITEM_OVERHEAD_BYTES


def _memory_hits() -> float:
    return REGISTRY.get_sample_value("fairlane_cache_lookups_total", {"cache": HOT, "result": "hit"}) or 0.0


@dataclass(frozen=True, slots=True)
class _Caches:
    redis: RedisCache
    passages: PassageCache
    semantic: SemanticCache


def _caches(redis: Redis) -> _Caches:
    cache = RedisCache(redis, _TTL_S, _PATIENT_S)
    return _Caches(cache, PassageCache(cache, now_ms, _TTL_S), SemanticCache(cache, threshold=0.95))


@dataclass(frozen=True, slots=True)
class _Question:
    text: str
    vector: FloatArray


async def cross_tenant_hits(redis_url: str, look_ups: int, texts: int = 200) -> dict[str, int]:
    """Look-ups by other tenants, after the owner stored everything about so many texts: ``look_ups``, ``planted`` (of
    these with the owner's entry in place), ``hits``, and the owner's ``own`` and ``own_hits``."""
    async with Redis.from_url(redis_url) as redis:
        random = np.random.default_rng(1)
        made = [
            _Question(f"{_TEXTS[number % len(_TEXTS)]}{number}", random.normal(size=DIMENSIONS).astype(np.float32))
            for number in range(texts)
        ]
        caches = _caches(redis)
        for one in made:
            await _store(caches, one)
        own = [hit for one in made for hit in await _found(_caches(redis), one, OWNER)]
        hits = planted = done = 0
        # Without what is in memory: each look-up goes to Redis.
        while done < look_ups:
            number = done // (4 * _AT_ONCE)
            one, intruder = made[number % texts], _INTRUDERS[number // texts % len(_INTRUDERS)]
            is_planted = number % 2 == 1
            if is_planted:
                await _plant(redis, one, intruder)
            at_once = await asyncio.gather(*(_found(_caches(redis), one, intruder) for _ in range(_AT_ONCE)))
            found = list(chain.from_iterable(at_once))
            done += len(found)
            hits += sum(found)
            planted += is_planted * len(found)
    return {"look_ups": done, "planted": planted, "hits": hits, "own": len(own), "own_hits": sum(own)}


async def _found(caches: _Caches, one: _Question, tenant: str) -> list[bool]:
    """Whether a look-up by this tenant hits, for each of the caches."""
    embedding = embedding_key(tenant, _EMBEDDER, one.text)
    return [
        await caches.redis.get(embedding, lambda payload: decode_vector(payload, DIMENSIONS)) is not None,
        await caches.passages.get(_collection(tenant), *_SEARCH, one.text) is not None,
        await caches.redis.get(_response(one, tenant), decode_answer) is not None,
        await caches.semantic.find(_group(one, tenant), one.vector) is not None,
    ]


async def _store(caches: _Caches, one: _Question) -> None:
    hits = (Hit("manuals/vault#0", "vault", "", f"{OWNER}: {len(one.text)}", 4, 0.5),)
    answer = CachedAnswer(
        "id", "smol", _VERSION, Task.GENERATE, "torch", Output(text=OWNER), "stop", TokenUsage(1, 1), (), now_ms()
    )
    await caches.redis.put(embedding_key(OWNER, _EMBEDDER, one.text), encode_vector(one.vector))
    await caches.passages.put(_collection(OWNER), *_SEARCH, one.text, hits)
    await caches.redis.put(_response(one, OWNER), encode_answer(answer))
    caches.semantic.remember(_group(one, OWNER), one.vector, _response(one, OWNER))
    await caches.redis.settle()


async def _plant(redis: Redis, one: _Question, intruder: str) -> None:
    """Copy the owner's entries to where the intruder looks, the answer to where its similar questions point as well."""

    def passages(tenant: str) -> CacheKey:
        one_of = _collection(tenant)
        return retrieval_key(tenant, one_of.name, one_of.version, one_of.embedder, *_SEARCH, one.text)

    answer = _response(one, OWNER)
    pairs = [
        (embedding_key(OWNER, _EMBEDDER, one.text), embedding_key(intruder, _EMBEDDER, one.text)),
        (passages(OWNER), passages(intruder)),
        (answer, _response(one, intruder)),
        (answer, CacheKey(answer.cache, intruder, answer.digest)),
    ]
    for mine, other in pairs:
        entry = await redis.get(mine.name)
        assert entry is not None, "the owner's entry is gone"
        await redis.set(other.name, entry, ex=_TTL_S)
    rows = await redis.lrange(_group(one, OWNER).name, 0, -1)
    name = _group(one, intruder).name
    await redis.delete(name)
    await redis.rpush(name, *rows)


def _collection(tenant: str) -> Collection:
    return Collection(tenant, _WANTED.collection, _EMBEDDER, DIMENSIONS, version=1)


def _request(one: _Question) -> InferenceRequest:
    messages = (_SYSTEM, Message("user", one.text or "?"))
    return InferenceRequest("id", "smol", Task.GENERATE, RequestInput(messages), retrieval=_WANTED)


def _response(one: _Question, tenant: str) -> CacheKey:
    key = response_key(tenant, _request(one), _VERSION, 1)
    assert key is not None, "a request without a key"
    return key


def _group(one: _Question, tenant: str) -> CacheKey:
    key = semantic_group(tenant, _request(one), _VERSION, 1, _EMBEDDER)
    assert key is not None, "a request without a group"
    return key
