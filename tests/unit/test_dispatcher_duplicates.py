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

    def register_script(self, _script: str) -> Any:
        async def run(keys: list[str], args: list[object]) -> list[bytes | None]:
            answer = self._answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return run


def first_seen(*answers: list[bytes | None] | Exception, times: int = 1) -> list[list[SourceCoordinate | None]]:
    index = RedisDuplicateIndex(ScriptedRedis(*answers), 60)  # type: ignore[arg-type]  # the part that is used

    async def run() -> list[list[SourceCoordinate | None]]:
        return [await index.first_seen([ENTRY]) for _ in range(times)]

    return asyncio.run(run())


def test_only_another_coordinate_is_a_duplicate() -> None:
    assert first_seen([b"requests.acme|0|7"]) == [[None]]
    assert first_seen([b"requests.acme|0|3"]) == [[THERE]]
    assert first_seen([None]) == [[None]]


@pytest.mark.parametrize("answer", [b"", b"somebody else's", b"a|b|c", b"\xff\xfe", b"a|1|2|3"])
def test_an_answer_that_is_none_of_ours_lets_the_request_pass(answer: bytes) -> None:
    assert first_seen([answer]) == [[None]]


@pytest.mark.parametrize(
    "error",
    [RedisConnectionError("gone"), RedisTimeoutError("slow"), ResponseError("WRONGTYPE"), OSError(), TimeoutError()],
    ids=lambda error: type(error).__name__,
)
def test_a_redis_that_fails_lets_requests_pass_and_is_said_once(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    assert first_seen(error, error, [b"requests.acme|0|3"], error, times=4) == [[None], [None], [THERE], [None]]
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
