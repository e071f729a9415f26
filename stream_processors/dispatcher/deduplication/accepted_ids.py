"""Index of accepted request ids with their source coordinates, in optional Redis."""

from collections.abc import Sequence
from itertools import islice
from typing import Protocol

from redis.asyncio import Redis
from redis.exceptions import RedisError

from fairlane.logs import get_logger
from fairlane.records import SourceCoordinate
from fairlane_server.redis.availability import RedisAvailability, RedisCaller
from fairlane_server.redis.keys import KeyFamily, redis_key
from fairlane_server.redis.state import (
    TENANT_COUNTER_FUNCTIONS,
    RefusedWrite,
    StateKind,
    count_refusal_of,
    count_refusals,
)

log = get_logger(__name__)

_MAX_OWED = 10_000
_MAX_PAID_AT_ONCE = 512

# The first to set a key wins. Returned per id is the value stored now, or nothing where it could not be set. One script
# per batch is one command and one reply; a pipeline costs the event loop several times as much.
# ARGV: time to live, most ids per tenant, number of ids; the coordinate of each id; for each id the number of its
# tenant's counter. KEYS: the ids, then the tenants' counters. Returns: the first coordinate of each id, the number of
# ids refused for lack of memory, and the number refused by their tenant's bound.
_REMEMBER = (
    TENANT_COUNTER_FUNCTIONS
    + """
local ttl_s, most, ids = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local answers, rooms, refused, beyond = {}, {}, 0, 0
for i = 1, ids do
  local first = redis.call('GET', KEYS[i])
  if not first then
    local counter = KEYS[ids + tonumber(ARGV[3 + ids + i])]
    local room = rooms[counter] or room_in(counter, most, ttl_s)
    rooms[counter] = room
    if room.left - room.added <= 0 then
      beyond = beyond + 1
    elseif set_or_refuse(KEYS[i], ARGV[3 + i], ttl_s) then
      first, room.added = ARGV[3 + i], room.added + 1
    else
      refused = refused + 1
    end
  end
  answers[i] = first
end
for _, room in pairs(rooms) do
  take_room(room)
end
answers[ids + 1], answers[ids + 2] = refused, beyond
return answers
"""
)

# Deletes an id only if it still has this request's coordinate: it may have been accepted at another one meanwhile.
_FORGET = (
    TENANT_COUNTER_FUNCTIONS
    + """
local ttl_s, ids = tonumber(ARGV[1]), tonumber(ARGV[3])
local rooms = {}
for i = 1, ids do
  if redis.call('GET', KEYS[i]) == ARGV[3 + i] then
    local counter = KEYS[ids + tonumber(ARGV[3 + ids + i])]
    rooms[counter] = rooms[counter] or room_in(counter, 0, ttl_s)
    rooms[counter].added = rooms[counter].added - 1
    redis.call('DEL', KEYS[i])
  end
end
for _, room in pairs(rooms) do
  take_room(room)
end
"""
)


class AcceptedIds(Protocol):
    """Maps each accepted (tenant, request id) to its first source coordinate."""

    async def first_seen(self, entries: Sequence[tuple[str, str, SourceCoordinate]]) -> list[SourceCoordinate | None]:
        """For each (tenant, request id, coordinate): the first coordinate if it differs, else None.

        A record read again after a crash has the same coordinate and is no duplicate.
        """

    async def forget(self, entries: Sequence[tuple[str, str, SourceCoordinate]]) -> None:
        """Remove ids rejected for now: the same ids may be sent again, at other coordinates."""


class NoAcceptedIds:
    """Used without Redis: every duplicate passes."""

    async def first_seen(self, entries: Sequence[tuple[str, str, SourceCoordinate]]) -> list[SourceCoordinate | None]:
        return [None] * len(entries)

    async def forget(self, entries: Sequence[tuple[str, str, SourceCoordinate]]) -> None:
        """Nothing is stored."""


class RedisAcceptedIds:
    """One round trip per call (plus failed deletions to retry), none while Redis is unavailable. While Redis fails
    duplicates pass. A full Redis still recognises stored ids; new ones pass. Failed deletions are retried before the
    next query, as long as this process lives.

    Args:
        redis: the client; its own timeouts apply as well.
        ttl_s: how long each id is stored, in seconds.
        watch: availability of the same Redis.
        most: most ids stored per tenant; ids beyond it pass.
    """

    def __init__(self, redis: "Redis", ttl_s: int, watch: RedisAvailability, most: int) -> None:
        self._remember = redis.register_script(_REMEMBER)
        self._forget = redis.register_script(_FORGET)
        self._ttl_s = ttl_s
        self._most = most
        self._turns = RedisCaller(watch, "duplicate_index_unavailable")
        self._owed: dict[tuple[str, str, SourceCoordinate], None] = {}
        """Deletions still to be made, oldest first."""

    async def first_seen(self, entries: Sequence[tuple[str, str, SourceCoordinate]]) -> list[SourceCoordinate | None]:
        if not self._turns.may_ask():
            return [None] * len(entries)
        try:
            await self._pay()
            *answers, refused, beyond = await self._remember(*self._given(entries))
        except (RedisError, OSError, TimeoutError) as error:
            count_refusal_of(StateKind.SEEN_IDS, error)
            self._turns.failed(error)
            return [None] * len(entries)
        self._turns.succeeded()
        count_refusals(StateKind.SEEN_IDS, RefusedWrite.MEMORY, refused)
        count_refusals(StateKind.SEEN_IDS, RefusedWrite.TENANT_BOUND, beyond)
        return [_other(answer, coordinate) for answer, (_, _, coordinate) in zip(answers, entries, strict=True)]

    async def forget(self, entries: Sequence[tuple[str, str, SourceCoordinate]]) -> None:
        """Delete now, or before the next query. Beyond ``_MAX_OWED`` pending deletions the oldest are dropped, and
        their ids stay until they expire."""
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

    def _given(self, entries: Sequence[tuple[str, str, SourceCoordinate]]) -> tuple[list[str], list[int | str]]:
        """Keys and arguments of either script."""
        counters: dict[str, int] = {}
        numbers = [counters.setdefault(tenant, len(counters) + 1) for tenant, _, _ in entries]
        keys = [redis_key(KeyFamily.SEEN_IDS, tenant, request_id) for tenant, request_id, _ in entries]
        places = [_packed(coordinate) for _, _, coordinate in entries]
        keys += [redis_key(KeyFamily.SEEN_COUNTS, tenant) for tenant in counters]
        return keys, [self._ttl_s, self._most, len(entries), *places, *numbers]

    async def _pay(self) -> None:
        while self._owed:
            entries = list(islice(self._owed, _MAX_PAID_AT_ONCE))
            await self._forget(*self._given(entries))
            for entry in entries:
                self._owed.pop(entry, None)


def _packed(coordinate: SourceCoordinate) -> str:
    return f"{coordinate.topic}|{coordinate.partition}|{coordinate.offset}"


def _other(answer: bytes | None, coordinate: SourceCoordinate) -> SourceCoordinate | None:
    if answer is None or answer == _packed(coordinate).encode():
        return None
    try:
        topic, partition, offset = answer.decode().split("|")
        return SourceCoordinate(topic, int(partition), int(offset))
    except ValueError:
        # Not written by us: another client uses these keys too.
        log.warning("duplicate_index_unreadable", topic=coordinate.topic, offset=coordinate.offset)
        return None
