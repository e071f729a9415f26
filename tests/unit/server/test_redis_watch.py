"""A Redis that failed is asked by its watch alone, until it answers; those who share the watch wait for it once."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis.exceptions import BusyLoadingError, NoPermissionError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from fairlane.backoff import Backoff
from fairlane.records import SourceCoordinate, TenantSpec
from fairlane_server.redis import availability
from fairlane_server.redis.availability import RedisAvailability
from stream_processors.dispatcher.admission.quotas import Charge, LocalQuotas
from stream_processors.dispatcher.admission.redis_quotas import RedisQuotas
from stream_processors.dispatcher.deduplication.accepted_ids import RedisAcceptedIds
from tests.kit.waiting import eventually_async

SOON = Backoff(first_s=0.001, longest_s=0.002)
NEVER = Backoff(first_s=3_600, longest_s=3_600)
HERE = SourceCoordinate("requests.acme", 0, 7)
THERE = SourceCoordinate("requests.acme", 0, 3)
SPEC = TenantSpec("acme", tokens_per_day=100)
ASK = Charge("acme", SPEC, 10)


class FakeRedis:
    """Answers a PING, the index's scripts and the quotas', or fails as the test says."""

    def __init__(self) -> None:
        self.pings = 0
        self.calls: list[str] = []
        self.error: Exception | None = None
        self.ping_error: Exception | None = None
        self.hangs = False

    async def ping(self) -> bool:
        self.pings += 1
        if self.hangs:
            await asyncio.Event().wait()
        if self.ping_error is not None:
            raise self.ping_error
        return True

    def fails(self, error: Exception | None) -> None:
        self.error = self.ping_error = error

    def register_script(self, script: str) -> Any:
        name = "quotas" if "HMGET" in script else "forget" if "'DEL'" in script else "remember"

        async def run(keys: list[str], args: list[object]) -> list[Any]:
            self.calls.append(name)
            if self.error is not None:
                raise self.error
            if name == "remember":
                _, _, ids, *_ = args
                # The last two: what was refused for want of memory, and beyond the tenant's bound.
                return [None] * int(str(ids)) + [0, 0]
            return [0, 0] if name == "quotas" else []

        return run


def watch_of(redis: FakeRedis, again: Backoff = SOON, timeout_s: float = 3_600.0) -> RedisAvailability:
    return RedisAvailability(redis, timeout_s, again)  # type: ignore[arg-type]  # the part that is used


def index_of(redis: FakeRedis, watch: RedisAvailability) -> RedisAcceptedIds:
    return RedisAcceptedIds(redis, 60, watch, 1_000)  # type: ignore[arg-type]  # the part that is used


def quotas_of(redis: FakeRedis, watch: RedisAvailability) -> RedisQuotas:
    return RedisQuotas(redis, LocalQuotas(lambda: 0), watch)  # type: ignore[arg-type]  # the part that is used


def is_up(watch: RedisAvailability) -> bool:
    """Not narrowed by the type checker: it changes meanwhile."""
    return watch.is_up


def watching() -> list["asyncio.Task[Any]"]:
    return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


def run(story: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await story()

    asyncio.run(bounded())


def test_what_failed_is_asked_until_it_answers() -> None:
    async def story() -> None:
        redis = FakeRedis()
        watch = watch_of(redis)
        assert is_up(watch)
        redis.fails(RedisConnectionError("gone"))
        watch.failed(RedisConnectionError("gone"))
        watch.failed(TimeoutError())
        assert not is_up(watch)
        assert watch.error == "ConnectionError"
        assert len(watching()) == 1, "one who asks, however many found out"
        await eventually_async(lambda: redis.pings >= 5)
        assert not is_up(watch)
        redis.fails(None)
        await eventually_async(lambda: is_up(watch))
        asked = redis.pings
        await eventually_async(lambda: not watching())
        assert redis.pings == asked, "one that answers is not asked"
        watch.failed(TimeoutError())
        assert not is_up(watch)
        await eventually_async(lambda: is_up(watch))

    run(story)


def test_a_ping_that_hangs_is_given_up() -> None:
    async def story() -> None:
        redis = FakeRedis()
        redis.hangs = True
        watch = watch_of(redis, timeout_s=0.001)
        watch.failed(TimeoutError())
        await eventually_async(lambda: redis.pings >= 3)
        assert not is_up(watch)
        redis.hangs = False
        await eventually_async(lambda: is_up(watch))

    run(story)


def test_a_refusal_is_an_answer_and_loading_is_none() -> None:
    async def story() -> None:
        redis = FakeRedis()
        watch = watch_of(redis)
        watch.failed(ResponseError("WRONGTYPE"))
        assert is_up(watch)
        redis.fails(BusyLoadingError("loading"))
        watch.failed(BusyLoadingError("loading"))
        await eventually_async(lambda: redis.pings >= 3)
        assert not is_up(watch)
        redis.fails(NoPermissionError("this user has no permissions to run the 'ping' command"))
        await eventually_async(lambda: is_up(watch))

    run(story)


def test_who_fails_again_soon_is_asked_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a PING is answered and scripts are not, the backoff still holds."""
    now_s = 100.0
    monkeypatch.setattr(availability, "monotonic", lambda: now_s)
    waited: list[int] = []

    class Noted(Backoff):
        def delay_s(self, failures: int, chance: float) -> float:
            waited.append(failures)
            assert 0 <= chance < 1
            return 0.0

    async def story() -> None:
        nonlocal now_s
        watch = watch_of(FakeRedis(), again=Noted())
        for passed_s in (60, 1, 1, 60):
            now_s += passed_s
            watch.failed(TimeoutError())
            await eventually_async(lambda: is_up(watch))
        assert waited == [1, 2, 3, 1]

    run(story)


@pytest.mark.parametrize("where", ["between two", "in a ping"])
def test_nothing_runs_after_it_was_closed(where: str) -> None:
    async def story() -> None:
        redis = FakeRedis()
        redis.hangs = True
        watch = watch_of(redis, again=NEVER if where == "between two" else SOON)
        await watch.close()
        watch = watch_of(redis, again=NEVER if where == "between two" else SOON)
        watch.failed(TimeoutError())
        await asyncio.sleep(0)
        await eventually_async(lambda: redis.pings == (0 if where == "between two" else 1))
        await watch.close()
        assert not watching()
        watch.failed(TimeoutError())
        assert not watching()

    run(story)


def test_a_cancellation_that_a_reply_swallows_still_ends_it() -> None:
    class Swallows(FakeRedis):
        async def ping(self) -> bool:
            self.pings += 1
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise RedisConnectionError("gone") from None
            return True

    async def story() -> None:
        redis = Swallows()
        watch = watch_of(redis)
        watch.failed(TimeoutError())
        await eventually_async(lambda: redis.pings == 1)
        await watch.close()
        assert not watching()
        assert redis.pings == 1

    run(story)


def test_a_watch_that_breaks_leaves_nobody_without_redis(capsys: pytest.CaptureFixture[str]) -> None:
    async def story() -> None:
        redis = FakeRedis()
        redis.fails(ValueError("a mistake"))
        watch = watch_of(redis)
        watch.failed(TimeoutError())
        await eventually_async(lambda: is_up(watch))

    run(story)
    assert "".join(capsys.readouterr()).count("redis_watch_failed") == 1


# --- Those who share it


@pytest.mark.parametrize("first", ["duplicates", "quotas"])
def test_one_of_them_waits_for_all(first: str, capsys: pytest.CaptureFixture[str]) -> None:
    async def story() -> None:
        redis = FakeRedis()
        watch = watch_of(redis)
        index, quotas = index_of(redis, watch), quotas_of(redis, watch)

        async def ask() -> None:
            if first == "duplicates":
                assert await index.first_seen([("acme", "id-1", HERE)]) == [None]
            assert await quotas.take([ASK]) == [None]
            if first == "quotas":
                assert await index.first_seen([("acme", "id-1", HERE)]) == [None]

        redis.fails(TimeoutError())
        for _ in range(10):
            await ask()
        assert redis.calls == ["remember" if first == "duplicates" else "quotas"]
        assert await quotas.take([ASK]) != [None], "the local ones, which are used up"
        redis.fails(None)
        await eventually_async(lambda: is_up(watch))
        redis.calls.clear()
        await ask()
        assert sorted(redis.calls) == ["quotas", "remember"]
        assert quotas.available

    run(story)
    said = "".join(capsys.readouterr())
    assert said.count("duplicate_index_unavailable") == said.count("quotas_unavailable") == 1


def test_what_one_of_them_is_refused_is_no_matter_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(availability, "monotonic", lambda: now_s)

    async def story() -> None:
        nonlocal now_s
        redis = FakeRedis()
        watch = watch_of(redis)
        index, quotas = index_of(redis, watch), quotas_of(redis, watch)
        redis.error = ResponseError("WRONGTYPE")
        assert await quotas.take([ASK]) == [None]
        redis.error = None
        assert await quotas.take([ASK]) == [None]
        assert redis.calls == ["quotas"], "it is left alone for a while"
        await index.first_seen([("acme", "id-1", HERE)])
        assert redis.calls == ["quotas", "remember"]
        now_s += 60
        await quotas.take([ASK])
        assert redis.calls == ["quotas", "remember", "quotas"]
        assert not watching()

    run(story)


def test_nothing_that_redis_granted_is_given_back_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    async def story() -> None:
        redis = FakeRedis()
        watch = watch_of(redis, again=NEVER)
        quotas = quotas_of(redis, watch)
        assert await quotas.take([ASK]) == [None]
        redis.fails(TimeoutError())
        await quotas.give_back([ASK])
        assert not is_up(watch)
        await quotas.give_back([ASK])
        assert redis.calls == ["quotas", "quotas"], "who waited for the first told the others"
        assert [await quotas.take([ASK]) for _ in range(11)].count([None]) == 10
        await quotas.give_back([ASK])
        assert await quotas.take([ASK]) == [None], "what the local ones granted they get back"
        await quotas.hand_over([ASK])
        assert await quotas.take([ASK]) == [None]
        assert redis.calls == ["quotas", "quotas"]
        await watch.close()

    run(story)
    said = "".join(capsys.readouterr())
    assert said.count("quotas_not_given_back") == 2
    assert said.count("quotas_unavailable") == 1


def test_what_is_owed_is_paid_before_the_next_question() -> None:
    async def story() -> None:
        redis = FakeRedis()
        watch = watch_of(redis)
        index, quotas = index_of(redis, watch), quotas_of(redis, watch)
        redis.fails(TimeoutError())
        await quotas.take([ASK])
        await index.forget([("acme", "id-1", HERE)])
        assert redis.calls == ["quotas"]
        redis.fails(None)
        await eventually_async(lambda: is_up(watch))
        await index.first_seen([("acme", "id-1", THERE)])
        assert redis.calls == ["quotas", "forget", "remember"]

    run(story)
