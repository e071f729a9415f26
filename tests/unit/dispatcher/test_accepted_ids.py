"""The duplicate index over a Redis that is there, that fails, and that somebody else writes to."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from fairlane.backoff import Backoff
from fairlane.records import SourceCoordinate
from fairlane_server.redis.availability import RedisAvailability
from fairlane_server.redis.state import TENANT_COUNTER_FUNCTIONS
from stream_processors.dispatcher.deduplication.accepted_ids import NoAcceptedIds, RedisAcceptedIds
from tests.kit.waiting import eventually_async

HERE = SourceCoordinate("requests.acme", 0, 7)
THERE = SourceCoordinate("requests.acme", 0, 3)
ENTRY = ("acme", "id-1", HERE)
MOST = 1_000
SOON = Backoff(first_s=0.001, longest_s=0.001)


class Answering:
    """A PING alone."""

    async def ping(self) -> bool:
        return True


class ScriptedRedis(Answering):
    """Answers the index's script with what the test says."""

    def __init__(self, *answers: list[bytes | None] | Exception) -> None:
        self._answers = list(answers)
        self.asked = 0

    def register_script(self, _script: str) -> Any:
        async def run(keys: list[str], args: list[object]) -> list[bytes | int | None]:
            self.asked += 1
            answer = self._answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return [*answer, 0, 0]

        return run


class Watched:
    """An index, and the watch of its Redis. Within one event loop."""

    def __init__(self, redis: Answering, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now_s = 100.0
        monkeypatch.setattr("fairlane_server.redis.availability.monotonic", lambda: self._now_s)
        self._watch = RedisAvailability(redis, again=SOON)  # type: ignore[arg-type]  # the part that is used
        self.index = RedisAcceptedIds(redis, 60, self._watch, MOST)  # type: ignore[arg-type]  # the part that is used

    async def look_up(self, *entries: tuple[str, str, SourceCoordinate]) -> Sequence[SourceCoordinate | None]:
        return await self.index.first_seen(entries or [ENTRY])

    async def rested(self) -> None:
        """Wait until Redis may be asked again."""
        self._now_s += 60
        await eventually_async(lambda: self._watch.is_up)


def first_seen(answer: bytes | None) -> SourceCoordinate | None:
    redis = ScriptedRedis([answer])
    index = RedisAcceptedIds(redis, 60, RedisAvailability(redis), MOST)  # type: ignore[arg-type]  # the part that is used
    (found,) = asyncio.run(index.first_seen([ENTRY]))
    return found


def test_only_another_coordinate_is_a_duplicate() -> None:
    assert first_seen(b"requests.acme|0|7") is None
    assert first_seen(b"requests.acme|0|3") == THERE
    assert first_seen(None) is None


@pytest.mark.parametrize("answer", [b"", b"somebody else's", b"a|b|c", b"\xff\xfe", b"a|1|2|3"])
def test_an_answer_that_is_none_of_ours_lets_the_request_pass(answer: bytes) -> None:
    assert first_seen(answer) is None


@pytest.mark.parametrize(
    "error",
    [RedisConnectionError("gone"), RedisTimeoutError("slow"), ResponseError("WRONGTYPE"), OSError(), TimeoutError()],
    ids=lambda error: type(error).__name__,
)
def test_a_redis_that_fails_lets_requests_pass_and_is_left_alone_for_a_while(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    redis = ScriptedRedis(error, error, [b"requests.acme|0|3"], error)

    async def run() -> None:
        watched = Watched(redis, monkeypatch)
        assert await watched.look_up() == await watched.look_up() == [None]
        assert redis.asked == 1
        for answer in ([None], [THERE], [None]):
            await watched.rested()
            assert await watched.look_up() == answer
        assert redis.asked == 4

    asyncio.run(run())
    # Said once while it lasts.
    assert "".join(capsys.readouterr()).count("duplicate_index_unavailable") == 2


def test_without_redis_everything_passes() -> None:
    assert asyncio.run(NoAcceptedIds().first_seen([ENTRY, ENTRY])) == [None, None]


@pytest.mark.parametrize("error", [RedisConnectionError("gone"), RedisTimeoutError("slow"), TimeoutError()])
def test_a_redis_that_cannot_forget_is_left_alone_for_a_while(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    redis = ScriptedRedis(error, [], [None])

    async def run() -> None:
        watched = Watched(redis, monkeypatch)
        await watched.index.forget([])
        assert redis.asked == 0
        await watched.index.forget([ENTRY])
        await watched.index.forget([ENTRY])
        assert await watched.look_up() == [None]
        assert redis.asked == 1
        await watched.rested()
        await watched.index.forget([ENTRY])
        assert await watched.look_up() == [None]
        assert redis.asked == 3

    asyncio.run(run())
    assert "".join(capsys.readouterr()).count("duplicate_index_unavailable") == 1


def test_without_redis_nothing_is_forgotten() -> None:
    asyncio.run(NoAcceptedIds().forget([ENTRY]))


@pytest.mark.broker
def test_what_is_forgotten_may_try_again_elsewhere(redis_url: str, unique: str) -> None:
    async def run() -> None:
        async with Redis.from_url(redis_url) as redis:
            index = RedisAcceptedIds(redis, 60, RedisAvailability(redis), MOST)
            here, there = (unique, "id-1", HERE), (unique, "id-1", THERE)
            other = (unique, "id-2", HERE)
            assert await index.first_seen([here, other]) == [None, None]
            await index.forget([there])
            assert await index.first_seen([there]) == [HERE], "only the one that stood there is forgotten"
            await index.forget([here, (unique, "id-3", HERE)])
            assert await index.first_seen([there, other]) == [None, None]
            assert await index.first_seen([here]) == [THERE]

    asyncio.run(run())


@pytest.mark.broker
def test_the_first_coordinate_stays(redis_url: str, unique: str) -> None:
    async def run() -> list[list[SourceCoordinate | None]]:
        async with Redis.from_url(redis_url) as redis:
            index = RedisAcceptedIds(redis, 60, RedisAvailability(redis), MOST)
            here, there = (unique, "id-1", HERE), (unique, "id-1", THERE)
            other_tenant = (f"{unique}-2", "id-1", THERE)
            found = [await index.first_seen([here, there, other_tenant]), await index.first_seen([there, here])]
            assert 0 < await redis.ttl(f"seen:{unique}:id-1") <= 60
        return found

    assert asyncio.run(run()) == [[None, HERE, None], [HERE, None]]


class FailingRedis(Answering):
    """A dictionary that answers the index's scripts, while it is there."""

    def __init__(self) -> None:
        self.stored: dict[str, object] = {}
        self.is_away = False

    def register_script(self, script: str) -> Any:
        async def run(keys: list[str], args: list[Any]) -> list[bytes | int]:
            if self.is_away:
                raise RedisConnectionError("gone")
            ids = args[2]
            places = list(zip(keys[:ids], args[3 : 3 + ids], strict=True))
            if "DEL" in script.removeprefix(TENANT_COUNTER_FUNCTIONS):
                for key, value in places:
                    if self.stored.get(key) == value:
                        del self.stored[key]
                return []
            return [*(str(self.stored.setdefault(key, value)).encode() for key, value in places), 0, 0]

        return run


def test_what_could_not_be_forgotten_is_forgotten_before_the_next_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatcher's refusal invites a retry with the same id, which must not look like a duplicate."""
    redis = FailingRedis()
    retry = ("acme", "id-1", THERE)

    async def run() -> None:
        watched = Watched(redis, monkeypatch)
        assert await watched.look_up() == [None]
        redis.is_away = True
        await watched.index.forget([ENTRY])
        redis.is_away = False
        await watched.rested()
        assert await watched.look_up(retry) == [None]
        assert await watched.look_up() == [THERE], "the retry is the first now"

    asyncio.run(run())


def test_what_is_to_be_forgotten_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stream_processors.dispatcher.deduplication.accepted_ids._MAX_OWED", 2)
    redis = FailingRedis()
    entries = [("acme", f"id-{number}", HERE) for number in range(3)]

    async def run() -> None:
        watched = Watched(redis, monkeypatch)
        await watched.look_up(*entries)
        redis.is_away = True
        await watched.index.forget(entries)
        redis.is_away = False
        await watched.rested()
        await watched.index.forget([])

    asyncio.run(run())
    assert list(redis.stored) == ["seen:acme:id-0"]


@pytest.mark.broker
def test_a_tenant_keeps_no_more_ids_than_it_may(redis_url: str, unique: str) -> None:
    async def run() -> None:
        async with Redis.from_url(redis_url) as redis:
            index = RedisAcceptedIds(redis, 60, RedisAvailability(redis), 3)
            entries = [(unique, f"id-{number}", HERE) for number in range(5)]
            again = [(unique, f"id-{number}", THERE) for number in range(5)]
            other = (f"{unique}-2", "id-1", HERE)
            assert await index.first_seen([*entries, other]) == [None] * 6
            assert await index.first_seen(again) == [HERE, HERE, HERE, None, None], "what is beyond passes"
            assert await index.first_seen([(other[0], "id-1", THERE)]) == [HERE], "another tenant has its own room"
            # What is forgotten makes room.
            await index.forget(entries[:2])
            assert await index.first_seen([entries[3]]) == [None]
            assert await index.first_seen([again[3]]) == [HERE]
            assert 60 <= await redis.ttl(f"seen-count:{unique}") <= 63

    asyncio.run(run())
