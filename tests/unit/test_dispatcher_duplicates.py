"""The duplicate index over a Redis that is there, that fails, and that somebody else writes to."""

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from fairlane.records import SourceCoordinate
from stream_processors.dispatcher.duplicates import NoDuplicateIndex, RedisDuplicateIndex

HERE = SourceCoordinate("requests.acme", 0, 7)
THERE = SourceCoordinate("requests.acme", 0, 3)
ENTRY = ("acme", "id-1", HERE)


class ScriptedRedis:
    """Answers the index's script with what the test says."""

    def __init__(self, *answers: list[bytes | None] | Exception) -> None:
        self._answers = list(answers)
        self.asked = 0

    def register_script(self, _script: str) -> Any:
        async def run(keys: list[str], args: list[object]) -> list[bytes | None]:
            self.asked += 1
            answer = self._answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return run


def first_seen(answer: bytes | None) -> SourceCoordinate | None:
    index = RedisDuplicateIndex(ScriptedRedis([answer]), 60)  # type: ignore[arg-type]  # the part that is used
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
    now_s = 100.0
    monkeypatch.setattr("stream_processors.dispatcher.duplicates.monotonic", lambda: now_s)
    redis = ScriptedRedis(error, error, [b"requests.acme|0|3"], error)
    index = RedisDuplicateIndex(redis, 60)  # type: ignore[arg-type]  # the part that is used

    def look_up() -> list[SourceCoordinate | None]:
        return asyncio.run(index.first_seen([ENTRY]))

    assert look_up() == look_up() == [None]
    assert redis.asked == 1
    for answer in ([None], [THERE], [None]):
        now_s += 60
        assert look_up() == answer
    assert redis.asked == 4
    # Said once while it lasts.
    assert "".join(capsys.readouterr()).count("duplicate_index_unavailable") == 2


def test_without_redis_everything_passes() -> None:
    assert asyncio.run(NoDuplicateIndex().first_seen([ENTRY, ENTRY])) == [None, None]


@pytest.mark.broker
def test_the_first_coordinate_stays(redis_url: str, unique: str) -> None:
    async def run() -> list[list[SourceCoordinate | None]]:
        async with Redis.from_url(redis_url) as redis:
            index = RedisDuplicateIndex(redis, 60)
            here, there = (unique, "id-1", HERE), (unique, "id-1", THERE)
            other_tenant = (f"{unique}-2", "id-1", THERE)
            found = [await index.first_seen([here, there, other_tenant]), await index.first_seen([there, here])]
            assert 0 < await redis.ttl(f"seen:{unique}:id-1") <= 60
        return found

    assert asyncio.run(run()) == [[None, HERE, None], [HERE, None]]
