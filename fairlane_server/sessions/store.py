"""Sessions in Redis. They end by the limits here, and by their time to live there."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from redis.asyncio import Redis

from fairlane.clock import ClockMs
from fairlane_server.redis.availability import RedisAvailability
from fairlane_server.redis.keys import KeyFamily, redis_key
from fairlane_server.sessions.redis_calls import SessionCalls
from fairlane_server.sessions.session import HANDLE_CHARACTERS, Session, SessionLimits, digest_of

MOST_OF_USER = 10
MOST_OF_TENANT = 10_000
"""Beyond either bound the oldest session ends."""

# Keys: the session, the user's sessions, the tenant's sessions.
# Arguments: the value; its time to live; the time; when the session ends at the latest; its digest; the prefix of
# sessions; the longest life of a session; the two bounds.
_CREATE = """
local ttl_ms, now, ends, digest, prefix, longest_ms = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]
redis.call('SET', KEYS[1], ARGV[1], 'PX', ttl_ms)
for i = 2, 3 do
  redis.call('ZREMRANGEBYSCORE', KEYS[i], '-inf', now)
  redis.call('ZADD', KEYS[i], ends, digest)
  redis.call('PEXPIRE', KEYS[i], longest_ms)
end
for i = 2, 3 do
  local excess = redis.call('ZCARD', KEYS[i]) - tonumber(ARGV[6 + i])
  if excess > 0 then
    for _, oldest in ipairs(redis.call('ZRANGE', KEYS[i], 0, excess)) do
      if oldest ~= digest and excess > 0 then
        excess = excess - 1
        redis.call('DEL', prefix .. oldest)
        redis.call('ZREM', KEYS[2], oldest)
        redis.call('ZREM', KEYS[3], oldest)
      end
    end
  end
end
return 1
"""
# Keys: as above, without the session. Argument: the prefix of sessions.
_END_ALL = """
local ended = 0
for _, digest in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  ended = ended + redis.call('DEL', ARGV[1] .. digest)
  redis.call('ZREM', KEYS[2], digest)
end
redis.call('DEL', KEYS[1])
return ended
"""
# Keys: as for the first. Argument: the digest.
_END = """
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[1])
return redis.call('DEL', KEYS[1])
"""
# Key: the tenant's sessions. Argument: the prefix of sessions.
_LIST = """
local found = {}
for _, digest in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  local value = redis.call('GET', ARGV[1] .. digest)
  if value then
    found[#found + 1] = digest
    found[#found + 1] = value
  end
end
return found
"""


@dataclass(frozen=True, slots=True)
class ListedSession:
    """A session as commands show it. ``handle`` is the beginning of its digest: enough to name it, not to use it."""

    handle: str
    session: Session
    ends_ms: int


class RedisSessions:
    """Sessions of all tenants, for one event loop. ``clock`` is since the epoch. All calls raise StoreError."""

    def __init__(
        self, redis: "Redis", watch: RedisAvailability, timeout_s: float, limits: SessionLimits, clock: ClockMs
    ) -> None:
        self._redis = redis
        self._call = SessionCalls(watch, timeout_s)
        self.limits = limits
        self._clock = clock
        self._create = redis.register_script(_CREATE)
        self._end_all = redis.register_script(_END_ALL)
        self._end = redis.register_script(_END)
        self._list = redis.register_script(_LIST)

    @property
    def answered(self) -> bool:
        """Whether Redis answered at the last opportunity."""
        return self._call.answered

    async def create(self, session_id: str, session: Session) -> None:
        """Store a new session, and end the oldest ones of its user and its tenant beyond the bounds."""
        digest, now_ms = digest_of(session_id), self._clock()
        latest_ms = session.created_ms + self.limits.absolute_ms
        ttl_ms = max(1, session.ends_ms(self.limits) - now_ms)
        args: list[str | int] = [session.packed(), ttl_ms, now_ms, latest_ms, digest, KeyFamily.SESSIONS.prefix]
        args += [self.limits.absolute_ms, MOST_OF_USER, MOST_OF_TENANT]
        keys = [redis_key(KeyFamily.SESSIONS, digest), *_indexes(session.tenant, session.subject)]
        await self._call(lambda: self._create(keys=keys, args=args))

    async def find(self, session_id: str, *, is_use: bool) -> Session | None:
        """The session, unless it has ended. With ``is_use`` it counts as used now."""
        key = redis_key(KeyFamily.SESSIONS, digest_of(session_id))
        stored = await self._call(lambda: self._redis.get(key))
        session = Session.unpacked(stored) if isinstance(stored, bytes) else None
        now_ms = self._clock()
        if session is None or session.ends_ms(self.limits) <= now_ms:
            return None
        if is_use and now_ms - session.seen_ms >= self.limits.touch_ms:
            session = replace(session, seen_ms=now_ms)
            ttl_ms, packed = max(1, session.ends_ms(self.limits) - now_ms), session.packed()
            # Only where it still is: a session that was ended meanwhile must not come back.
            await self._call(lambda: self._redis.set(key, packed, px=ttl_ms, xx=True))
        return session

    async def end(self, session_id: str, session: Session) -> None:
        """End one session."""
        await self._end_digest(digest_of(session_id), session)

    async def end_all(self, tenant: str, subject: str) -> int:
        """End all sessions of a user. Returns their number."""
        keys, args = _indexes(tenant, subject), [KeyFamily.SESSIONS.prefix]
        return int(await self._call(lambda: self._end_all(keys=keys, args=args)))

    async def list(self, tenant: str, subject: str | None = None) -> Sequence[ListedSession]:
        """The sessions of a tenant, or of one of its users, oldest first."""
        return [listed for _, listed in await self._listed(tenant) if subject in (None, listed.session.subject)]

    async def end_by_handle(self, tenant: str, handle: str) -> Sequence[ListedSession]:
        """End the sessions of a tenant whose digest begins with the handle. Returns them."""
        found = [(digest, listed) for digest, listed in await self._listed(tenant) if listed.handle == handle]
        for digest, listed in found:
            await self._end_digest(digest, listed.session)
        return [listed for _, listed in found]

    async def _end_digest(self, digest: str, session: Session) -> None:
        keys = [redis_key(KeyFamily.SESSIONS, digest), *_indexes(session.tenant, session.subject)]
        await self._call(lambda: self._end(keys=keys, args=[digest]))

    async def _listed(self, tenant: str) -> Sequence[tuple[str, ListedSession]]:
        keys, args = [redis_key(KeyFamily.TENANT_SESSIONS, tenant)], [KeyFamily.SESSIONS.prefix]
        rows = await self._call(lambda: self._list(keys=keys, args=args))
        found, now_ms = [], self._clock()
        for digest, stored in zip(rows[::2], rows[1::2], strict=True):
            session = Session.unpacked(stored)
            if session is not None and (ends_ms := session.ends_ms(self.limits)) > now_ms:
                text = digest.decode()
                found.append((text, ListedSession(text[:HANDLE_CHARACTERS], session, ends_ms)))
        return found


def _indexes(tenant: str, subject: str) -> list[str]:
    user = sha256(subject.encode()).hexdigest()
    return [redis_key(KeyFamily.USER_SESSIONS, tenant, user), redis_key(KeyFamily.TENANT_SESSIONS, tenant)]
