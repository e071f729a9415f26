"""cache: hit ratio of the dispatcher's caches, the time of a hit beside a search, and look-ups by other tenants.

Questions are drawn by popularity (Zipf, exponent 0.9, over all tenants) and answered from memory, from Redis, or by
embedding and a hybrid search in Postgres; a tenth of all results fits in memory. Then each kind of answer is timed by
itself: a miss is the look-up, the embedding, the search and the hand-over to the cache. Last, other tenants look up
what one tenant has stored in all four caches, every other time with the owner's entry copied to where they look.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

from prometheus_client import REGISTRY
from pydantic import SecretStr
from redis.asyncio import Redis

from benchmarks.cache_intruders import cross_tenant_hits
from benchmarks.result import Figure, Result, median_of, repeated
from benchmarks.retrieval_questions import make_corpus, questions
from deploy.local.stack import LocalStack
from fairlane.clock import now_ms
from fairlane.outcomes import RetrievalMode
from fairlane.settings import Settings
from fairlane_server.postgres.migrations import upgrade
from fairlane_server.redis.cache import RedisCache
from fairlane_server.retrieval.pgvector_search import PgVectorSearch
from fairlane_server.retrieval.pgvector_store import PgVectorCollections
from fairlane_server.retrieval.rank_fusion import fuse
from fairlane_server.retrieval.static_embedder import StaticEmbedder
from fairlane_server.retrieval.store import Collection, Hit
from stream_processors.dispatcher.response_cache.caches import (
    HOT,
    ITEM_OVERHEAD_BYTES,
    PassageCache,
    encode_hits,
)
from stream_processors.dispatcher.response_cache.hot_cache import HotCache

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

_TTL_S = 600
# What is measured is the time of an answer, not how soon the dispatcher would do without.
_PATIENT_S = 5.0
_COLLECTION = "manuals"
_MODE = RetrievalMode.HYBRID


@dataclass(frozen=True, slots=True)
class Asked:
    """A question about a collection of its tenant."""

    collection: Collection
    text: str


def run() -> Result:
    """Measure three streams of questions, then the intruders, on one Postgres and one Redis."""
    settings = Settings()
    embedder = StaticEmbedder(settings.models_dir / settings.retrieval_embedder_path)
    with (
        TemporaryDirectory(prefix="fairlane-bench-") as folder,
        LocalStack(data_dir=Path(folder) / "stack", parts=("postgres", "redis"), environ={}) as stack,
    ):
        dsn, owner_dsn = stack.endpoints.postgres_dsn, stack.endpoints.postgres_owner_dsn
        redis_url = stack.endpoints.redis_url
        upgrade(Settings(postgres_dsn=SecretStr(dsn), postgres_owner_dsn=SecretStr(owner_dsn)))
        asked = _fill(dsn, embedder)
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
        Figure("look-ups by other tenants", intruders.look_ups, "look-ups", "at least", INTRUSIONS),
        Figure("of these with the owner's entry in place", intruders.planted, "look-ups"),
        Figure("hits across tenants", intruders.hits, "hits", "at most", 0),
        Figure("the owner's own look-ups that hit", intruders.own_hits / intruders.own, "ratio", "at least", 1.0),
    )
    return Result(NAME, figures, runs)


def _fill(dsn: str, embedder: StaticEmbedder) -> list[Asked]:
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
            asked += [Asked(collection, text) for text in questions(corpus, about, seed=number)]
    Random(0).shuffle(asked)
    return asked


async def _measure(
    dsn: str, redis_url: str, embedder: StaticEmbedder, asked: Sequence[Asked], number: int
) -> dict[str, float]:
    async with PgVectorSearch(dsn) as search, Redis.from_url(redis_url) as redis:
        await redis.flushall()

        def cache(most_bytes: int) -> PassageCache:
            entries = RedisCache(redis, _TTL_S, _PATIENT_S)
            return PassageCache(entries, now_ms, _TTL_S, HotCache(most_bytes, most_tenant_share=1.0))

        async def find(one: Asked) -> tuple[Hit, ...]:
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
    find: Callable[[Asked], Awaitable[tuple[Hit, ...]]],
    asked: Sequence[Asked],
    random: Random,
) -> dict[str, float]:
    """Parts of a stream of questions that were found in each place."""
    sizes = [_size(await find(one)) for one in asked[:TIMED]]
    room = int(MEMORY_PART * len(asked) * sum(sizes) / len(sizes))
    passages, lru = cache(room), _LeastRecentlyUsed(room)
    before = _memory_hits()
    weights = [1 / rank**EXPONENT for rank in range(1, len(asked) + 1)]
    drawn = random.choices(asked, weights, k=ASKED)
    hits = 0
    for one in drawn:
        known = await passages.get(one.collection, _MODE, WIDTH, one.text)
        if known is None:
            known = await find(one)
            await passages.put(one.collection, _MODE, WIDTH, one.text, known)
            await passages.redis.settle()
        else:
            hits += 1
        lru.ask(one, _size(known))
    in_memory = _memory_hits() - before
    return {
        "hit_ratio": hits / ASKED,
        "asked_before": 1 - len(set(drawn)) / ASKED,
        "memory_hit_ratio": in_memory / ASKED,
        "memory_ratio": in_memory / lru.hits,
    }


async def _latencies(
    cache: Callable[[int], PassageCache],
    find: Callable[[Asked], Awaitable[tuple[Hit, ...]]],
    asked: Sequence[Asked],
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


class _LeastRecentlyUsed:
    """What is usual, for comparison: everything is kept, and the least recently used goes for it."""

    def __init__(self, most_bytes: int) -> None:
        self._room = most_bytes
        self._sizes: OrderedDict[Asked, int] = OrderedDict()
        self.hits = 0

    def ask(self, question: Asked, size_bytes: int) -> None:
        if question in self._sizes:
            self.hits += 1
            self._sizes.move_to_end(question)
            return
        self._sizes[question] = size_bytes
        self._room -= size_bytes
        while self._room < 0:
            self._room += self._sizes.popitem(last=False)[1]


def _size(hits: Sequence[Hit]) -> int:
    return len(encode_hits(hits)) + ITEM_OVERHEAD_BYTES


def _memory_hits() -> float:
    return REGISTRY.get_sample_value("fairlane_cache_lookups_total", {"cache": HOT, "result": "hit"}) or 0.0
