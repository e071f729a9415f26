"""Whether a request id was accepted before, at another place in the log. Kept in Redis, which may be missing."""

from collections.abc import Sequence
from time import monotonic
from typing import Protocol

from redis.asyncio import Redis
from redis.exceptions import RedisError

from fairlane.logs import get_logger
from fairlane.records import SourceCoordinate

log = get_logger(__name__)

_RETRY_AFTER_S = 2.0

# Whoever sets a key first stays; the answer is what stands there now. One script for a whole batch: one command to
# write and one reply to parse, where a pipeline costs the event loop several times as much.
_REMEMBER = """
local first = {}
for i, key in ipairs(KEYS) do
  redis.call('SET', key, ARGV[i + 1], 'NX', 'EX', ARGV[1])
  first[i] = redis.call('GET', key)
end
return first
"""


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
    """One round trip per call. A Redis that fails lets duplicates pass."""

    def __init__(self, redis: "Redis", ttl_s: int) -> None:
        self._remember = redis.register_script(_REMEMBER)
        self._ttl_s = ttl_s
        self._available = True
        self._retry_at = 0.0

    async def first_seen(self, entries: Sequence[tuple[str, str, SourceCoordinate]]) -> list[SourceCoordinate | None]:
        if monotonic() < self._retry_at:
            return [None] * len(entries)
        try:
            keys = [f"seen:{tenant}:{request_id}" for tenant, request_id, _ in entries]
            places = [_packed(coordinate) for _, _, coordinate in entries]
            answers = await self._remember(keys=keys, args=[self._ttl_s, *places])
        except (RedisError, OSError, TimeoutError) as error:
            if self._available:
                log.warning("duplicate_index_unavailable", error=type(error).__name__)
            self._available = False
            # A Redis that hangs must not cost every batch its time-out.
            self._retry_at = monotonic() + _RETRY_AFTER_S
            return [None] * len(entries)
        self._available = True
        return [_other(answer, coordinate) for answer, (_, _, coordinate) in zip(answers, entries, strict=True)]


def _packed(coordinate: SourceCoordinate) -> str:
    return f"{coordinate.topic}|{coordinate.partition}|{coordinate.offset}"


def _other(answer: bytes | None, coordinate: SourceCoordinate) -> SourceCoordinate | None:
    if answer is None or answer == _packed(coordinate).encode():
        return None
    try:
        topic, partition, offset = answer.decode().split("|")
        return SourceCoordinate(topic, int(partition), int(offset))
    except ValueError:
        # Not ours: somebody else writes these keys as well.
        log.warning("duplicate_index_unreadable", topic=coordinate.topic, offset=coordinate.offset)
        return None
