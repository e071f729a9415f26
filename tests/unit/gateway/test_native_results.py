"""What became of requests, with Redis, without it, and with what does not belong there."""

import asyncio
import threading
from dataclasses import replace

import httpx
import pytest
from prometheus_client import REGISTRY

from fairlane.outcomes import Decision
from fairlane.records import ConversationTurn, InferenceRequest, Message, Output, RequestInput
from fairlane_server.caching.entries import CacheName, request_key, seal
from fairlane_server.postgres import pool
from fairlane_server.postgres.request_timeline import RecordedReply
from producers.gateway.results import request_store
from producers.gateway.results.cache_entries import (
    WriteQueue,
    decode_reply,
    encode_reply,
    size_of_reply,
)
from producers.gateway.results.request_status import RequestState
from producers.gateway.results.results import (
    MOST_LOOK_UPS,
    MOST_LOOK_UPS_OF_TENANT,
    MOST_PAGES,
    MOST_PAGES_OF_TENANT,
    RECENT_MS,
    Results,
)
from producers.openai_api.errors import GatewayError
from tests.kit.native_kit import ID, Bench, decided, recorded
from tests.kit.waiting import eventually_async, eventually_awaited

SEEN = recorded(1, request_id=ID)
ASKED = InferenceRequest(ID, "a-model", "generate", RequestInput(prompt="q"))
KEY = request_key(CacheName.RESULT, "acme", ID)


def wrote(result: str, cache: str = "result") -> float:
    labels = {"cache": cache, "result": result}
    return REGISTRY.get_sample_value("fairlane_cache_writes_total", labels) or 0.0


def elsewhere(bench: Bench) -> Results:
    """Another instance, with the same servers."""
    return Results(bench.results.cache, bench.store)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_reply_that_was_seen_is_found_without_postgres(bench: Bench) -> None:
    async def test(_http: httpx.AsyncClient) -> None:
        bench.results.remember([SEEN.reply])
        await eventually_async(lambda: KEY.name in bench.redis.stored)
        bench.away(postgres=True)
        assert await elsewhere(bench).find_reply("acme", ID) == SEEN.reply
        assert bench.store.questions == 0
        assert 270_000 <= bench.redis.lives_ms[KEY.name] <= 300_000

    bench.run(test)


def test_what_was_read_just_now_is_there_before_redis_has_it(bench: Bench) -> None:
    async def test(_http: httpx.AsyncClient) -> None:
        bench.away(redis=True, postgres=True)
        bench.now_ms = 1_000
        bench.results.remember([SEEN.reply])
        assert await bench.results.find_reply("acme", ID) == SEEN.reply
        bench.now_ms += RECENT_MS + 1
        with pytest.raises(GatewayError):
            await bench.results.find_reply("acme", ID)

    bench.run(test)


def test_postgres_has_what_redis_has_not(bench: Bench) -> None:
    async def test(_http: httpx.AsyncClient) -> None:
        assert await bench.results.find("acme", ID) is None
        bench.store.record(SEEN)
        assert await bench.results.find("acme", ID) == SEEN
        bench.away(redis=True)
        assert await bench.results.find("acme", ID) == SEEN

    bench.run(test)


REFUSED = recorded(2, request_id=ID, outcome="rejected", code="overloaded", output=None)


def test_what_was_run_comes_before_a_refusal_of_the_same_id(bench: Bench) -> None:
    async def test(_http: httpx.AsyncClient) -> None:
        bench.results.remember([REFUSED.reply])
        assert await bench.results.find_reply("acme", ID) == REFUSED.reply
        await eventually_async(lambda: KEY.name in bench.redis.stored)
        bench.store.record(SEEN, REFUSED)
        for results in (bench.results, elsewhere(bench)):
            assert await results.find("acme", ID) == SEEN
        bench.away(postgres=True)
        assert await bench.results.find_reply("acme", ID) == REFUSED.reply, "that much is known"

    bench.run(test)


def test_a_refusal_takes_the_place_of_nothing_that_was_run(bench: Bench) -> None:
    async def test(_http: httpx.AsyncClient) -> None:
        bench.results.remember([SEEN.reply, REFUSED.reply])
        await bench.results.close()
        bench.away(postgres=True)
        for results in (bench.results, elsewhere(bench)):
            assert await results.find_reply("acme", ID) == SEEN.reply

    bench.run(test)


def test_a_burst_of_one_tenant_stops_no_other(bench: Bench) -> None:
    async def test(_http: httpx.AsyncClient) -> None:
        gate = asyncio.Event()

        async def slowly(tenant: str, request_id: str) -> RecordedReply | None:
            await gate.wait()
            return None

        bench.store.reply = slowly  # type: ignore[method-assign]  # a Postgres that takes its time
        burst = [asyncio.ensure_future(bench.results.find("acme", ID)) for _ in range(200)]
        await eventually_async(lambda: sum(call.done() for call in burst) == 200 - MOST_LOOK_UPS_OF_TENANT)
        theirs = asyncio.ensure_future(bench.results.find("globex", ID))
        await asyncio.sleep(0)
        gate.set()
        assert await theirs is None
        answers = await asyncio.gather(*burst, return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, GatewayError)]
        assert len(refused) == 200 - MOST_LOOK_UPS_OF_TENANT
        assert {(error.status, error.code) for error in refused} == {(503, "overloaded")}
        assert all(error.retry_after_ms for error in refused)
        assert bench.results.is_store_available
        assert await bench.results.find("acme", ID) is None, "all places are free again"

    bench.run(test)


def test_as_many_look_ups_as_may_be_have_a_connection_to_wait_for() -> None:
    for most, connections in (
        (MOST_LOOK_UPS, request_store._LOOK_UP_CONNECTIONS),
        (MOST_PAGES, request_store._PAGE_CONNECTIONS),
    ):
        assert most <= connections * pool._WAITING_PER_CONNECTION
    assert 2 * MOST_LOOK_UPS_OF_TENANT < MOST_LOOK_UPS
    assert 2 * MOST_PAGES_OF_TENANT < MOST_PAGES


def test_nobody_else_finds_it(bench: Bench) -> None:
    async def test(_http: httpx.AsyncClient) -> None:
        bench.results.remember([SEEN.reply])
        bench.store.record(SEEN)
        await eventually_async(lambda: KEY.name in bench.redis.stored)
        assert await bench.results.find("globex", ID) is None
        assert await elsewhere(bench).find("globex", ID) is None
        assert await bench.results.status("globex", ID) is None
        # Not even where another's entry was put under its name.
        theirs = request_key(CacheName.RESULT, "globex", ID)
        bench.redis.stored[theirs.name] = bench.redis.stored[KEY.name]
        assert await bench.results.find("globex", ID) is None
        sealed = seal(theirs, encode_reply(SEEN))
        assert sealed is not None
        bench.redis.stored[theirs.name] = sealed
        assert await bench.results.find("globex", ID) is None

    bench.run(test)


@pytest.mark.parametrize("damage", ["cut", "flipped", "junk", "list", "another"])
def test_a_damaged_entry_is_a_miss(bench: Bench, damage: str) -> None:
    async def test(_http: httpx.AsyncClient) -> None:
        entry = seal(KEY, encode_reply(SEEN))
        assert entry is not None
        bench.redis.stored[KEY.name] = {
            "cut": entry[:-3],
            "flipped": entry[:40] + bytes([entry[40] ^ 1]) + entry[41:],
            "junk": b"\x01" + bytes(64),
            "list": [],
            "another": seal(KEY, encode_reply(recorded(1))),
        }[damage]
        assert await bench.results.find("acme", ID) is None
        bench.store.record(SEEN)
        assert await bench.results.find("acme", ID) == SEEN

    bench.run(test)


def test_postgres_is_seen_to_be_away_and_back_though_nobody_looks_anything_up(bench: Bench) -> None:
    async def is_available() -> bool:
        await bench.results.check_store()
        return bench.results.is_store_available

    async def is_away() -> bool:
        return not await is_available()

    async def test(_http: httpx.AsyncClient) -> None:
        assert await is_available()
        bench.away(postgres=True)
        await eventually_awaited(is_away, what="that it is away")
        bench.away()
        await eventually_awaited(is_available, what="that it is back")

    bench.run(test)


def test_without_either_the_caller_is_told_when_to_come_again(bench: Bench) -> None:
    async def test(_http: httpx.AsyncClient) -> None:
        bench.away(redis=True, postgres=True)
        for _ in range(20):
            with pytest.raises(GatewayError) as caught:
                await bench.results.find("acme", ID)
            assert caught.value.status == 503
            assert caught.value.retry_after_ms
        # After a few failures nobody waits for Postgres any more.
        assert bench.store.questions < 10
        assert not bench.results.is_store_available
        with pytest.raises(GatewayError):
            await bench.results.status("acme", ID)

    bench.run(test)


def test_a_reply_that_is_forgotten_is_neither_in_memory_nor_in_redis(bench: Bench) -> None:
    async def test(_http: httpx.AsyncClient) -> None:
        bench.results.accepted("acme", ASKED)
        bench.results.remember([SEEN.reply, replace(SEEN.reply, tenant="globex")])
        await eventually_async(lambda: len(bench.redis.stored) == 3)
        assert await bench.results.forget("acme", [ID, "another"])
        assert await bench.results.find_seen("acme", ID) is None
        assert await bench.results.status("acme", ID) is None
        # Of another tenant, under the same id.
        assert await bench.results.find_seen("globex", ID) is not None
        assert len(bench.redis.stored) == 1
        assert await bench.results.forget("acme", [])
        bench.away(redis=True)
        assert not await bench.results.forget("acme", [ID])

    bench.run(test)


def test_what_a_conversation_remembers_is_not_kept_in_redis() -> None:
    turn = ConversationTurn("talk", (Message("user", "a secret question"),))
    payload = encode_reply(RecordedReply(replace(SEEN.reply, turn=turn), 1))
    assert b"secret" not in payload
    assert decode_reply(KEY, ID, payload) == RecordedReply(SEEN.reply, 1)


@pytest.mark.parametrize(
    "output",
    [
        None,
        Output(text="x" * 10_000),
        Output(embeddings=((0.5,) * 384,) * 20),
        Output(scores=(0.25,) * 500),
    ],
)
def test_the_size_is_about_that_of_the_entry(output: Output | None) -> None:
    reply = replace(SEEN.reply, output=output)
    size = len(encode_reply(RecordedReply(reply, 1)))
    assert size / 2 <= size_of_reply(reply) <= 2 * size + 1_024


def test_what_is_too_much_is_dropped_and_nobody_waits(bench: Bench) -> None:
    held = asyncio.Event()

    async def test(_http: httpx.AsyncClient) -> None:
        bench.redis.before = held.wait
        queue = WriteQueue(bench.results.cache, most=10, most_bytes=1_000)
        queue.start()
        dropped = wrote("dropped")
        kept = [queue.put(KEY, 50, lambda: b"entry") for _ in range(30)]
        assert kept == [True] * 10 + [False] * 20
        assert wrote("dropped") == dropped + 20
        assert not queue.put(KEY, 1_001, lambda: b"entry")
        held.set()
        await eventually_async(lambda: KEY.name in bench.redis.stored)
        await eventually_async(lambda: queue.put(KEY, 900, lambda: b"entry"), what="room again")
        await queue.close()
        assert not queue.put(KEY, 1, lambda: b"entry")

    bench.run(test)


def test_what_was_put_before_the_end_is_written(bench: Bench) -> None:
    async def test(_http: httpx.AsyncClient) -> None:
        bench.results.remember([recorded(number).reply for number in range(1_000)])
        await bench.results.close()
        assert len(bench.redis.stored) == 1_000

    bench.run(test)


def test_who_waits_is_told_from_any_thread(bench: Bench) -> None:
    async def test(_http: httpx.AsyncClient) -> None:
        with (
            bench.results.arrivals.awaited("acme", ID) as first,
            bench.results.arrivals.awaited("acme", ID) as second,
            bench.results.arrivals.awaited("globex", ID) as theirs,
        ):
            reader = threading.Thread(target=bench.results.remember, args=([SEEN.reply],))
            reader.start()
            assert (await first).reply == (await second).reply == SEEN.reply
            reader.join()
            assert not theirs.done()
        assert len(bench.results.arrivals) == 0
        bench.results.remember([SEEN.reply])

    bench.run(test)


def test_a_request_is_known_from_its_acceptance_to_its_end(bench: Bench) -> None:
    async def status() -> RequestState | None:
        found = await bench.results.status("acme", ID)
        return None if found is None else found.status

    async def test(_http: httpx.AsyncClient) -> None:
        assert await status() is None
        bench.results.accepted("acme", ASKED)
        assert await status() is RequestState.QUEUED
        assert await bench.results.status("globex", ID) is None
        bench.store.decide(decided(Decision.ACCEPTED, 10, inputs={"submitted_at_ms": "7"}))
        found = await bench.results.status("acme", ID)
        assert found is not None
        assert (found.status, found.submitted_at_ms, found.model) == (RequestState.QUEUED, 7, "a-model")
        bench.store.decide(decided(Decision.DISPATCHED, 20))
        assert await status() is RequestState.RUNNING
        # The reply was seen; the recorder is behind.
        bench.results.remember([SEEN.reply])
        await eventually_async(lambda: KEY.name in bench.redis.stored)
        found = await bench.results.status("acme", ID)
        assert found is not None
        assert found.status is RequestState.DONE
        assert [event.event for event in found.events] == ["accepted", "dispatched", "replied"]

    bench.run(test)


def test_another_instance_knows_what_this_one_accepted(bench: Bench) -> None:
    other = elsewhere(bench)

    async def test(_http: httpx.AsyncClient) -> None:
        bench.results.accepted("acme", ASKED)
        await eventually_async(lambda: bool(bench.redis.stored))
        found = await other.status("acme", ID)
        assert found is not None
        assert (found.status, found.model) == (RequestState.QUEUED, "a-model")
        assert await other.status("globex", ID) is None

    bench.run(test)
