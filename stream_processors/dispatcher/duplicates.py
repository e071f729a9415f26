"""Whether a request id was accepted before, at another place in the log. Kept in Redis, which may be missing."""

from collections.abc import Sequence
from typing import Protocol

from redis.asyncio import Redis
from redis.exceptions import RedisError

from fairlane.logs import get_logger
from fairlane.records import SourceCoordinate

log = get_logger(__name__)


class DuplicateIndex(Protocol):
    """Remembers where each accepted (tenant, request id) first stood."""

    async def first_seen(self, entries: Sequence[tuple[str, str, SourceCoordinate]]) -> list[SourceCoordinate | None]:
        """For each (tenant, request id, coordinate): the coordinate that came first, if it is another one.

        A record that is read again after a crash stands at the same coordinate and is no duplicate.
        """


class NoDuplicateIndex:
    """Without Redis duplicates pass."""

    async def first_seen(self, entries: Sequence[tuple[str, str, SourceCoordinate]]) -> list[SourceCoordinate | None]:
        return [None] * len(entries)


class RedisDuplicateIndex:
    """``SET NX`` and ``GET`` per request, in one round trip per call. A Redis that fails lets duplicates pass."""

    def __init__(self, redis: "Redis", ttl_s: int) -> None:
        self._redis = redis
        self._ttl_s = ttl_s
        self._available = True

    async def first_seen(self, entries: Sequence[tuple[str, str, SourceCoordinate]]) -> list[SourceCoordinate | None]:
        try:
            pipeline = self._redis.pipeline(transaction=False)
            for tenant, request_id, coordinate in entries:
                key = f"seen:{tenant}:{request_id}"
                # Whoever sets first stays; reading it back afterwards needs no newer Redis than 2.6.
                pipeline.set(key, _packed(coordinate), nx=True, ex=self._ttl_s)
                pipeline.get(key)
            answers = (await pipeline.execute())[1::2]
        except (RedisError, OSError, TimeoutError) as error:
            if self._available:
                log.warning("duplicate_index_unavailable", error=type(error).__name__)
            self._available = False
            return [None] * len(entries)
        self._available = True
        return [_other(answer, coordinate) for answer, (_, _, coordinate) in zip(answers, entries, strict=True)]


def _packed(coordinate: SourceCoordinate) -> str:
    return f"{coordinate.topic}|{coordinate.partition}|{coordinate.offset}"


def _other(answer: bytes | None, coordinate: SourceCoordinate) -> SourceCoordinate | None:
    if answer is None or answer.decode() == _packed(coordinate):
        return None
    topic, partition, offset = answer.decode().split("|")
    return SourceCoordinate(topic, int(partition), int(offset))
