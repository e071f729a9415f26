"""Answers that a consumer keeps in a real Redis: the dispatcher finds them, no other tenant does, and a Redis that is
gone or hangs costs no answer its time."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import monotonic
from typing import Any

import pytest
from prometheus_client import REGISTRY
from pydantic import SecretStr
from redis.asyncio import Redis

from fairlane.outcomes import Outcome
from fairlane.records import InferenceRequest, Message, RequestInput, WorkItem
from fairlane.settings import Settings
from fairlane_server.caching.entries import CacheKey
from fairlane_server.caching.responses import CachedAnswer, decode_answer, response_key
from fairlane_server.redis.cache import LookUpResult, RedisCache
from inference_consumers.results.cache_writer import TIMEOUT_S, CacheWriter, cache_writer_for
from tests.kit.cache_kit import MODEL_VERSION, reply, request, work
from tests.kit.own_redis import OwnRedis
from tests.kit.pipeline import Pipeline
from tests.kit.waiting import eventually
from tests.kit.work_items import work_item, write_work

pytestmark = pytest.mark.broker

TTL_S = 60
PATIENT_S = 10.0


@contextmanager
def keeping(redis_url: str) -> Iterator[CacheWriter]:
    """A consumer's part of it, as the consumer makes it."""
    kept = cache_writer_for(Settings(redis_cache_url=SecretStr(redis_url), cache_ttl_s=TTL_S))
    assert kept is not None
    kept.start()
    try:
        yield kept
    finally:
        kept.close(PATIENT_S)


def look_up(redis_url: str, *keys: CacheKey) -> list[CachedAnswer | None]:
    """What the dispatcher finds."""

    async def find() -> list[CachedAnswer | None]:
        async with asyncio.timeout(30), Redis.from_url(redis_url) as redis:
            cache = RedisCache(redis, TTL_S, PATIENT_S)
            return [await cache.get(key, decode_answer) for key in keys]

    return asyncio.run(find())


def key_of(asked: InferenceRequest, tenant: str, model_version: str = MODEL_VERSION) -> CacheKey:
    """Where the dispatcher looks."""
    key = response_key(tenant, asked, model_version, None)
    assert key is not None
    return key


def counted(result: str) -> float:
    return REGISTRY.get_sample_value("fairlane_cache_writes_total", {"cache": "response", "result": result}) or 0.0


def test_what_is_kept_answers_the_same_question_of_the_same_tenant_alone(redis_url: str, unique: str) -> None:
    done = [work(request(f"question {number}"), unique, cache_answer=True) for number in range(100)]
    with keeping(redis_url) as kept:
        for one in done:
            kept.keep(one, reply(one, one.request.input.messages[-1].content if one.request.input.messages else ""))
    found = look_up(redis_url, *(key_of(one.request, unique) for one in done))
    assert [one.output.text for one in found if one is not None] == [f"question {number}" for number in range(100)]
    assert look_up(redis_url, *(key_of(one.request, f"{unique}-other") for one in done)) == [None] * 100
    assert look_up(redis_url, key_of(done[0].request, unique, "4"), key_of(request("question"), unique)) == [None] * 2

    async def steal() -> list[LookUpResult]:
        """Another tenant's entry, copied to where one looks."""
        async with asyncio.timeout(30), Redis.from_url(redis_url) as redis:
            mine = key_of(done[0].request, unique).name
            entry = await redis.get(mine)
            assert isinstance(entry, bytes)
            assert 0 < await redis.pttl(mine) <= 1_000 * TTL_S
            results = []
            for key in (key_of(done[0].request, f"{unique}-other"), key_of(done[1].request, unique)):
                await redis.set(key.name, entry, px=10_000)
                results.append((await RedisCache(redis, TTL_S, PATIENT_S).look_up(key, bytes)).result)
            return results

    assert asyncio.run(steal()) == [LookUpResult.POISONED] * 2


@pytest.mark.alone
@pytest.mark.parametrize("fault", ["gone", "hung"])
def test_a_redis_that_stops_holds_nobody_up(own_redis: OwnRedis, unique: str, fault: str) -> None:
    with keeping(own_redis.url) as kept:

        def keep(number: int) -> WorkItem:
            done = work(request(f"question {number}"), unique, cache_answer=True)
            begun = monotonic()
            kept.keep(done, reply(done, "x" * 100_000))
            assert monotonic() - begun < 0.1
            return done

        before = counted("stored")
        keep(0)
        eventually(lambda: counted("stored") == before + 1, what="an answer in Redis")
        own_redis.kill() if fault == "gone" else own_redis.hang()
        given_up = counted("unavailable") + counted("dropped")
        for number in range(1, 400):
            keep(number)
        eventually(lambda: counted("unavailable") + counted("dropped") == given_up + 399, what="nothing that waits")
        assert counted("stored") == before + 1
        own_redis.start() if fault == "gone" else own_redis.go_on()
        numbers = iter(range(400, 10_000))
        later: list[WorkItem] = []

        def kept_again() -> bool:
            later.append(keep(next(numbers)))
            return counted("stored") > before + 1

        eventually(kept_again, 20, "answers that are kept again")
    answers = look_up(own_redis.url, *(key_of(one.request, unique) for one in later))
    assert any(answers)


@pytest.mark.alone
def test_a_redis_that_hangs_at_the_end_is_not_waited_for(own_redis: OwnRedis, unique: str) -> None:
    with keeping(own_redis.url) as kept:
        own_redis.hang()
        for number in range(50):
            done = work(request(f"question {number}"), unique, cache_answer=True)
            kept.keep(done, reply(done))
        begun = monotonic()
        kept.close(TIMEOUT_S / 5)
        assert monotonic() - begun < TIMEOUT_S
        own_redis.go_on()


def asking(pipeline: Pipeline, number: int, **fields: Any) -> WorkItem:
    """Work whose answer is to be kept."""
    return work_item(pipeline, f"question {number}", cache_answer=True, **fields)


@pytest.mark.alone
@pytest.mark.parametrize("fault", ["gone", "hung"])
def test_the_consumer_keeps_what_it_answers_and_answers_when_it_cannot_keep(
    broker: str, own_redis: OwnRedis, unique: str, tmp_path: Any, fault: str
) -> None:
    with Pipeline(broker, tmp_path, unique, tenants=("a",), redis_url=own_redis.url) as pipeline:
        consumer = pipeline.consumer().wait_ready()
        pipeline.wait_all_own()
        replies, tenant = pipeline.replies(), pipeline.tenant("a")

        def answered(*items: WorkItem) -> float:
            """How long it took until all were committed."""
            begun = monotonic()
            write_work(pipeline, *items)
            found = replies.wait([one.request.request_id for one in items], 30)
            assert {one.outcome for one in found.values()} == {Outcome.OK}
            return monotonic() - begun

        done = [asking(pipeline, number) for number in range(20)]
        talk = replace(
            done[0].request,
            request_id=pipeline.request().request_id,
            conversation_id="c-1",
            input=RequestInput(messages=(Message("user", "what nobody else may read"),)),
        )
        answered(*done, work_item(pipeline, request=talk, cache_answer=True, history=(Message("user", "before"),)))
        turn = replies.by_id[talk.request_id][0].turn
        assert turn is not None
        assert [message.content for message in turn.messages] == ["what nobody else may read"]
        eventually(lambda: consumer.metric("fairlane_cache_writes_total", result="stored") == 20, what="20 entries")
        found = look_up(own_redis.url, *(key_of(one.request, tenant, one.model_version) for one in done))
        assert [one.request_id for one in found if one is not None] == [one.request.request_id for one in done]
        elsewhere = (key_of(one.request, f"{tenant}2", one.model_version) for one in done)
        assert look_up(own_redis.url, *elsewhere) == [None] * 20

        own_redis.kill() if fault == "gone" else own_redis.hang()
        took_s = [answered(asking(pipeline, number)) for number in range(20, 40)]
        assert max(took_s) < 2
        answered(*(asking(pipeline, number) for number in range(40, 200)))
        assert consumer.metric("fairlane_cache_writes_total", result="stored") == 20
        begun = monotonic()
        assert consumer.stop() == 0
        assert monotonic() - begun < 10
        own_redis.go_on() if fault == "hung" else own_redis.start()
        replies.read_to_end()
        replies.exactly_once([*replies.by_id])
