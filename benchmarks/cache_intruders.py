"""Other tenants ask for what one tenant has stored: in each cache the same text, and every other time with the owner's
own entry copied to where they look, as somebody would do who may write to Redis."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
from redis.asyncio import Redis

from fairlane.clock import now_ms
from fairlane.outcomes import Task
from fairlane.records import InferenceRequest, Message, Output, RequestInput, Retrieval, TokenUsage
from fairlane_server.caching.entries import CacheKey, embedding_key, retrieval_key
from fairlane_server.caching.responses import CachedAnswer, decode_answer, encode_answer, response_key, semantic_group
from fairlane_server.redis.cache import RedisCache
from fairlane_server.retrieval.embedder import FloatArray
from fairlane_server.retrieval.store import Collection, Hit
from stream_processors.dispatcher.response_cache.caches import PassageCache, decode_vector, encode_vector
from stream_processors.dispatcher.response_cache.lookup import SemanticCache

OWNER = "acme"
DIMENSIONS = 384

_TTL_S = 3_600
_PATIENT_S = 30.0
_AT_ONCE = 16
_EMBEDDER, _VERSION = "static", "1"
_WANTED, _SEARCH = Retrieval("manuals"), ("hybrid", 10)
_SYSTEM = Message("system", "Answer from the passages.")
# What somebody would try who thinks that keys are texts joined together.
_TEXTS = (
    "What is the code of the vault?",
    f"{OWNER}:",
    f"cache:{OWNER}:response:",
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
class Intruders:
    """Counts of look-ups: ``hits`` by other tenants, ``own_hits`` by the owner."""

    look_ups: int
    planted: int
    hits: int
    own: int
    own_hits: int


@dataclass(frozen=True, slots=True)
class _Caches:
    redis: RedisCache
    passages: PassageCache
    semantic: SemanticCache


@dataclass(frozen=True, slots=True)
class _Question:
    text: str
    vector: FloatArray


async def cross_tenant_hits(redis_url: str, look_ups: int, texts: int = 200) -> Intruders:
    """So many look-ups by other tenants, after the owner stored everything about so many texts."""
    async with Redis.from_url(redis_url) as redis:
        random = np.random.default_rng(1)
        made = [
            _Question(f"{_TEXTS[number % len(_TEXTS)]}{number}", random.normal(size=DIMENSIONS).astype(np.float32))
            for number in range(texts)
        ]
        caches = _caches(redis)
        for one in made:
            await _store(caches, one)
        own = [await look_up(one, OWNER) for one in made for look_up in _look_ups(_caches(redis))]
        hits = planted = done = 0
        # Without what is in memory: each look-up goes to Redis.
        while done < look_ups:
            number = done // (4 * _AT_ONCE)
            one, intruder = made[number % texts], _INTRUDERS[number // texts % len(_INTRUDERS)]
            is_planted = number % 2 == 1
            if is_planted:
                await _plant(redis, one, intruder)
            found = await asyncio.gather(
                *(look_up(one, intruder) for _ in range(_AT_ONCE) for look_up in _look_ups(_caches(redis)))
            )
            done += len(found)
            hits += sum(found)
            planted += is_planted * len(found)
    return Intruders(done, planted, hits, len(own), sum(own))


LookUp = Callable[[_Question, str], Awaitable[bool]]


def _look_ups(caches: _Caches) -> tuple[LookUp, LookUp, LookUp, LookUp]:
    """Whether a tenant finds anything about a question, in each of the caches."""

    async def embedding(one: _Question, tenant: str) -> bool:
        key = embedding_key(tenant, _EMBEDDER, one.text)
        return await caches.redis.get(key, lambda payload: decode_vector(payload, DIMENSIONS)) is not None

    async def passages(one: _Question, tenant: str) -> bool:
        return await caches.passages.get(_collection(tenant), *_SEARCH, one.text) is not None

    async def response(one: _Question, tenant: str) -> bool:
        return await caches.redis.get(_response(one, tenant), decode_answer) is not None

    async def similar(one: _Question, tenant: str) -> bool:
        return await caches.semantic.find(_group(one, tenant), one.vector) is not None

    return embedding, passages, response, similar


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


async def _plant(redis: "Redis", one: _Question, intruder: str) -> None:
    """Copy the owner's entries to where the intruder looks, the answer to where its similar questions point as well."""
    collection, theirs = _collection(OWNER), _collection(intruder)
    pairs = [
        (embedding_key(OWNER, _EMBEDDER, one.text), embedding_key(intruder, _EMBEDDER, one.text)),
        (_passages_key(collection, one), _passages_key(theirs, one)),
        (_response(one, OWNER), _response(one, intruder)),
        (_response(one, OWNER), CacheKey(_response(one, OWNER).cache, intruder, _response(one, OWNER).digest)),
    ]
    for mine, other in pairs:
        entry = await redis.get(mine.name)
        assert entry is not None, "the owner's entry is gone"
        await redis.set(other.name, entry, ex=_TTL_S)
    rows = await redis.lrange(_group(one, OWNER).name, 0, -1)
    name = _group(one, intruder).name
    await redis.delete(name)
    await redis.rpush(name, *rows)


def _caches(redis: "Redis") -> _Caches:
    cache = RedisCache(redis, _TTL_S, _PATIENT_S)
    return _Caches(cache, PassageCache(cache, now_ms, _TTL_S), SemanticCache(cache, threshold=0.95))


def _collection(tenant: str) -> Collection:
    return Collection(tenant, _WANTED.collection, _EMBEDDER, DIMENSIONS, version=1)


def _passages_key(collection: Collection, one: _Question) -> CacheKey:
    return retrieval_key(
        collection.tenant, collection.name, collection.version, collection.embedder, *_SEARCH, one.text
    )


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
