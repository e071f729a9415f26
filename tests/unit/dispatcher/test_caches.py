"""The four caches, each with what it keeps: vectors, passages, answers, and answers to what means the same."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from math import inf, nan
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.outcomes import RetrievalMode
from fairlane.records import Output
from fairlane_server.caching.entries import CacheKey, embedding_key, seal
from fairlane_server.caching.responses import CachedAnswer, answer_of, encode_answer, response_key, semantic_group
from fairlane_server.redis.cache import RedisCache
from fairlane_server.retrieval.embedder import EmbedderError, FloatArray
from fairlane_server.retrieval.store import Collection
from stream_processors.dispatcher.response_cache.caches import (
    HOT,
    QueryEmbeddings,
    decode_hits,
    decode_vector,
    encode_hits,
    encode_vector,
)
from stream_processors.dispatcher.response_cache.semantic_match import encode_row
from tests.kit.cache_kit import COLLECTION, HITS, MODEL_VERSION, Caches, DictRedis, caches_over, reply, request, work
from tests.kit.metric_counts import counted

WANTED = (RetrievalMode.HYBRID, 10)
QUERY = "Which wire goes left?"


def make(redis: DictRedis | None, now_ms: int = 0, threshold: float = 0.9) -> Caches:
    cache = RedisCache(redis, 300, timeout_s=5.0)  # type: ignore[arg-type]  # the part that is used
    return caches_over(cache, threshold=threshold, now_ms=now_ms)


def run(test: Coroutine[Any, Any, None]) -> None:
    async def within() -> None:
        async with asyncio.timeout(20):
            await test

    asyncio.run(within())


# --- passages


def test_passages_come_from_memory_and_from_redis_in_another_process() -> None:
    async def test() -> None:
        redis = DictRedis()
        here, there = make(redis), make(redis)
        assert await here.passages.get(COLLECTION, *WANTED, QUERY) is None
        await here.passages.put(COLLECTION, *WANTED, QUERY, list(HITS))
        await here.redis.settle()
        redis.calls = 0
        assert await here.passages.get(COLLECTION, *WANTED, QUERY) == HITS
        assert redis.calls == 0, "in memory"
        before = counted(HOT, "hit")
        assert await there.passages.get(COLLECTION, *WANTED, QUERY) == HITS
        assert await there.passages.get(COLLECTION, *WANTED, QUERY) == HITS
        assert redis.calls == 1, "in memory from then on"
        assert counted(HOT, "hit") == before + 1

    run(test())


def test_without_redis_the_memory_remains_for_its_time() -> None:
    async def test() -> None:
        now_ms = 0
        caches = make(None)
        caches.passages.clock = lambda: now_ms
        await caches.passages.put(COLLECTION, *WANTED, QUERY, HITS)
        now_ms = 299_999
        assert await caches.passages.get(COLLECTION, *WANTED, QUERY) == HITS
        now_ms = 300_000
        assert await caches.passages.get(COLLECTION, *WANTED, QUERY) is None

    run(test())


@pytest.mark.parametrize(
    ("collection", "mode", "width", "query"),
    [
        (replace(COLLECTION, version=8), *WANTED, QUERY),
        (replace(COLLECTION, tenant="globex"), *WANTED, QUERY),
        (replace(COLLECTION, name="other"), *WANTED, QUERY),
        (replace(COLLECTION, embedder="pool"), *WANTED, QUERY),
        (COLLECTION, RetrievalMode.HYBRID, 11, QUERY),
        (COLLECTION, RetrievalMode.VECTOR, 10, QUERY),
        (COLLECTION, *WANTED, QUERY + " "),
    ],
)
def test_another_question_is_not_answered_by_it(collection: Collection, mode: str, width: int, query: str) -> None:
    """A collection that was changed, or deleted and made anew, has another version."""

    async def test() -> None:
        caches = make(DictRedis())
        await caches.passages.put(COLLECTION, *WANTED, QUERY, HITS)
        await caches.redis.settle()
        assert await caches.passages.get(collection, mode, width, query) is None

    run(test())


def test_that_nothing_was_found_is_worth_remembering() -> None:
    async def test() -> None:
        redis = DictRedis()
        await (here := make(redis)).passages.put(COLLECTION, *WANTED, QUERY, ())
        await here.redis.settle()
        assert await make(redis).passages.get(COLLECTION, *WANTED, QUERY) == ()

    run(test())


@given(st.binary(max_size=100))
def test_other_bytes_are_no_passages(payload: bytes) -> None:
    assert decode_hits(payload) in (None, ())


def test_passages_are_read_back_and_scores_that_are_none_are_not() -> None:
    assert decode_hits(encode_hits(HITS)) == HITS
    for poison in (nan, inf):
        assert decode_hits(encode_hits([replace(HITS[0], score=poison)])) is None
    assert decode_hits(encode_hits([replace(HITS[0], tokens=-1)])) is None
    assert decode_hits(msgspec.msgpack.encode([{"passage_id": "p"}])) is None


# --- vectors


class Embedder:
    """Slow, until the test lets it end."""

    name, dimensions = "pool", 3

    def __init__(self) -> None:
        self.runs = 0
        self.error: EmbedderError | None = None

    async def embed_query(self, text: str) -> FloatArray:
        self.runs += 1
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return np.array([len(text), 0.5, -1], dtype=np.float32)

    async def aclose(self) -> None: ...


def test_a_text_is_embedded_once() -> None:
    async def test() -> None:
        redis, embedder = DictRedis(), Embedder()
        cache = make(redis).redis
        embeddings = QueryEmbeddings(embedder, cache)
        together = await asyncio.gather(*(embeddings.embed("acme", "abc") for _ in range(4)))
        assert embedder.runs == 1
        await cache.settle()
        later = await QueryEmbeddings(embedder, make(redis).redis).embed("acme", "abc")
        assert embedder.runs == 1
        for vector in (*together, later):
            assert vector.tolist() == [3.0, 0.5, -1.0]
            assert vector.dtype == np.float32
        await embeddings.embed("globex", "abc")
        assert embedder.runs == 2, "another tenant's text is embedded again"

    run(test())


def test_an_embedder_that_fails_fails_for_all_and_is_asked_again() -> None:
    async def test() -> None:
        embedder = Embedder()
        embeddings = QueryEmbeddings(embedder, make(DictRedis()).redis)
        embedder.error = EmbedderError("away")
        asking = (embeddings.embed("acme", "abc") for _ in range(3))
        found = await asyncio.gather(*asking, return_exceptions=True)
        assert [type(one) for one in found] == [EmbedderError] * 3
        embedder.error = None
        assert (await embeddings.embed("acme", "abc")).size == 3

    run(test())


def test_a_poisoned_vector_is_embedded_again() -> None:
    async def test() -> None:
        redis, embedder = DictRedis(), Embedder()
        caches = make(redis)
        key = embedding_key("acme", "pool", "abc")
        for poison in (
            encode_vector(np.array([nan, 1, 2], dtype=np.float32)),
            encode_vector(np.array([1, 2], dtype=np.float32)),
            b"",
        ):
            redis.stored[key.name] = seal(key, poison)
            assert (await QueryEmbeddings(embedder, caches.redis).embed("acme", "abc")).tolist() == [3.0, 0.5, -1.0]
            await caches.redis.settle()
        assert embedder.runs == 3

    run(test())


@given(st.lists(st.floats(width=32), max_size=5), st.integers(1, 5))
def test_a_vector_is_read_back_if_it_is_one(numbers: list[float], dimensions: int) -> None:
    vector = np.array(numbers, dtype=np.float32)
    found = decode_vector(encode_vector(vector), dimensions)
    if len(numbers) == dimensions and np.isfinite(vector).all():
        assert found is not None
        assert found.tobytes() == vector.tobytes()
    else:
        assert found is None


# --- answers


def stored_answer(
    question: str = QUERY, text: str = "The red one.", tenant: str = "acme"
) -> tuple[CacheKey, CachedAnswer]:
    done = work(request(question), tenant)
    kept = answer_of(done, reply(done, text))
    assert kept is not None
    return kept


def test_an_answer_that_a_consumer_stored_is_found() -> None:
    async def test() -> None:
        redis = DictRedis()
        caches = make(redis)
        key, answer = stored_answer()
        asked = response_key("acme", request(QUERY, request_id="id-2"), MODEL_VERSION, None)
        assert asked is not None
        assert await caches.answer(asked) is None
        # What a consumer does.
        redis.stored[key.name] = seal(key, encode_answer(answer))
        assert await caches.answer(asked) == answer
        other = response_key("globex", request(QUERY), MODEL_VERSION, None)
        assert other is not None
        redis.stored[other.name] = redis.stored[key.name]
        before = counted("response", "poisoned")
        assert await caches.answer(other) is None
        assert counted("response", "poisoned") == before + 1

    run(test())


def group(tenant: str = "acme") -> CacheKey:
    made = semantic_group(tenant, request(QUERY), MODEL_VERSION, None, "static")
    assert made is not None
    return made


def vector(*numbers: float) -> FloatArray:
    return np.array(numbers, dtype=np.float32)


def test_the_answer_to_what_means_the_same_is_found() -> None:
    async def test() -> None:
        caches = make(DictRedis())
        key, answer = stored_answer()
        assert await caches.semantic.find(group(), vector(1, 0)) is None
        caches.semantic.remember(group(), vector(1, 0), key)
        await caches.redis.settle()
        assert await caches.semantic.find(group(), vector(1, 0)) is None, "not answered yet"
        assert await caches.redis.put(key, encode_answer(answer))
        found = await caches.semantic.find(group(), vector(1, 0.1))
        assert found is not None
        assert found[0] == answer
        assert found[1] == pytest.approx(0.995, abs=1e-3)
        assert await caches.semantic.find(group(), vector(1, 1)) is None, "not similar enough"

    run(test())


def test_an_answer_that_is_gone_leaves_the_next_similar_one() -> None:
    async def test() -> None:
        caches = make(DictRedis())
        gone, _ = stored_answer("Which wire is left?")
        key, answer = stored_answer()
        assert await caches.redis.put(key, encode_answer(answer))
        caches.semantic.remember(group(), vector(1, 0), gone)
        caches.semantic.remember(group(), vector(1, 0.1), key)
        await caches.redis.settle()
        found = await caches.semantic.find(group(), vector(1, 0))
        assert found is not None
        assert found[0] == answer

    run(test())


def test_the_list_of_a_group_is_bounded() -> None:
    async def test() -> None:
        redis = DictRedis()
        caches = make(redis)
        caches.semantic.group_rows = 3
        for number in range(5):
            key, _ = stored_answer(f"{number}?")
            caches.semantic.remember(group(), vector(1, number), key)
            await caches.redis.settle()
        (rows,) = (one for one in redis.stored.values() if isinstance(one, list))
        assert len(rows) == 3

    run(test())


def test_nothing_similar_of_another_tenant_is_found() -> None:
    async def test() -> None:
        redis = DictRedis()
        caches = make(redis)
        key, answer = stored_answer()
        assert await caches.redis.put(key, encode_answer(answer))
        caches.semantic.remember(group(), vector(1, 0), key)
        await caches.redis.settle()
        assert await caches.semantic.find(group("globex"), vector(1, 0)) is None
        # With the rows of the one under the key of the other, and the answer as well.
        redis.stored[group("globex").name] = redis.stored[group().name]
        assert await caches.semantic.find(group("globex"), vector(1, 0)) is None
        theirs = replace(key, tenant="globex")
        redis.stored[theirs.name] = redis.stored[key.name]
        assert await caches.semantic.find(group("globex"), vector(1, 0)) is None
        # With a row of their own that names the owner's answer, where that stands.
        forged = encode_row(vector(1, 0), key.digest)
        assert forged is not None
        assert await caches.redis.add_row(group("globex"), forged, 4)
        assert await caches.semantic.find(group("globex"), vector(1, 0)) is None
        del redis.stored[theirs.name]
        assert await caches.semantic.find(group("globex"), vector(1, 0)) is None
        with pytest.raises(ValueError, match="another tenant"):
            caches.semantic.remember(group("globex"), vector(1, 0), key)

    run(test())


def test_a_poisoned_group_is_a_miss_and_counted() -> None:
    async def test() -> None:
        redis = DictRedis()
        caches = make(redis)
        key, answer = stored_answer()
        for poison in ([b"garbage"], [seal(group(), b"garbage")], b"no list"):
            redis.stored[group().name] = poison
            before = counted("semantic", "poisoned")
            assert await caches.semantic.find(group(), vector(1, 0)) is None
            assert counted("semantic", "poisoned") == before + 1
        del redis.stored[group().name]
        caches.semantic.remember(group(), vector(1, 0), key)
        await caches.redis.settle()
        broken = replace(answer, output=Output(scores=(nan,)))
        redis.stored[key.name] = seal(key, encode_answer(broken))
        before = counted("semantic", "poisoned")
        assert await caches.semantic.find(group(), vector(1, 0)) is None
        assert counted("semantic", "poisoned") == before + 1

    run(test())


def test_a_vector_like_no_other_is_not_remembered() -> None:
    async def test() -> None:
        redis = DictRedis()
        caches = make(redis)
        caches.semantic.remember(group(), vector(0, 0), stored_answer()[0])
        await caches.redis.settle()
        assert not redis.stored

    run(test())
