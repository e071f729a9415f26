"""Whether a request id was accepted before, at another place in the log. Kept in Redis, which may be missing."""

from collections.abc import Sequence
from itertools import islice
from typing import Protocol

from redis.asyncio import Redis
from redis.exceptions import RedisError

from fairlane.logs import get_logger
from fairlane.records import SourceCoordinate
from fairlane.redis_watch import RedisTurns, RedisWatch

log = get_logger(__name__)

_MAX_OWED = 10_000
_MAX_PAID_AT_ONCE = 512

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

# Only what still stands where this request stood: the same id may have been accepted elsewhere meanwhile.
_FORGET = """
for i, key in ipairs(KEYS) do
  if redis.call('GET', key) == ARGV[i] then
    redis.call('DEL', key)
  end
end
"""


class DuplicateIndex(Protocol):
    """Remembers where each accepted (tenant, request id) first stood."""

    async def first_seen(self, entries: Sequence[tuple[str, str, SourceCoordinate]]) -> list[SourceCoordinate | None]:
        """For each (tenant, request id, coordinate): the coordinate that came first, if it is another one.

        A record that is read again after a crash stands at the same coordinate and is no duplicate.
        """

    async def forget(self, entries: Sequence[tuple[str, str, SourceCoordinate]]) -> None:
        """These were refused for now: the same ids may try again, at other coordinates."""


class NoDuplicateIndex:
    """Without Redis duplicates pass."""

    async def first_seen(self, entries: Sequence[tuple[str, str, SourceCoordinate]]) -> list[SourceCoordinate | None]:
        return [None] * len(entries)

    async def forget(self, entries: Sequence[tuple[str, str, SourceCoordinate]]) -> None:
        """Nothing was remembered."""


class RedisDuplicateIndex:
    """One round trip per call, and none while Redis does not answer. A Redis that fails lets duplicates pass; what it
    could not be told to forget is told again before anything else is asked, as long as this process lives."""

    def __init__(self, redis: "Redis", ttl_s: int, watch: RedisWatch) -> None:
        self._remember = redis.register_script(_REMEMBER)
        self._forget = redis.register_script(_FORGET)
        self._ttl_s = ttl_s
        self._turns = RedisTurns(watch, "duplicate_index_unavailable")
        self._owed: dict[tuple[str, str, SourceCoordinate], None] = {}
        """To forget, the oldest first."""

    async def first_seen(self, entries: Sequence[tuple[str, str, SourceCoordinate]]) -> list[SourceCoordinate | None]:
        if not self._turns.may_ask():
            return [None] * len(entries)
        try:
            await self._pay()
            answers = await self._remember(keys=_keys(entries), args=[self._ttl_s, *_places(entries)])
        except (RedisError, OSError, TimeoutError) as error:
            self._turns.failed(error)
            return [None] * len(entries)
        self._turns.succeeded()
        return [_other(answer, coordinate) for answer, (_, _, coordinate) in zip(answers, entries, strict=True)]

    async def forget(self, entries: Sequence[tuple[str, str, SourceCoordinate]]) -> None:
        """What cannot be forgotten now is forgotten before the next question; of too much the oldest stays until it
        expires."""
        self._owed.update(dict.fromkeys(entries))
        while len(self._owed) > _MAX_OWED:
            del self._owed[next(iter(self._owed))]
        if not self._owed or not self._turns.may_ask():
            return
        try:
            await self._pay()
        except (RedisError, OSError, TimeoutError) as error:
            self._turns.failed(error)
        else:
            self._turns.succeeded()

    async def _pay(self) -> None:
        while self._owed:
            entries = list(islice(self._owed, _MAX_PAID_AT_ONCE))
            await self._forget(keys=_keys(entries), args=_places(entries))
            for entry in entries:
                self._owed.pop(entry, None)


def _keys(entries: Sequence[tuple[str, str, SourceCoordinate]]) -> list[str]:
    return [f"seen:{tenant}:{request_id}" for tenant, request_id, _ in entries]


def _places(entries: Sequence[tuple[str, str, SourceCoordinate]]) -> list[str]:
    return [_packed(coordinate) for _, _, coordinate in entries]


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
