"""Unfinished logins in Redis: each is taken once, and few minutes after its beginning no more."""

from redis.asyncio import Redis

from fairlane.clock import ClockMs
from fairlane_server.redis.availability import RedisAvailability
from fairlane_server.redis.keys import KeyFamily, redis_key
from fairlane_server.sessions.redis_calls import SessionCalls
from fairlane_server.sessions.session import PendingLogin, digest_of

MOST = 10_000
"""Beyond it the oldest one ends: refusing new ones would let strangers keep everybody out."""
LONGEST_MS = 600_000
"""Time to log in at the issuer."""

# Keys: the login; the digests of all by their end. Arguments: the value; its time to live; the time; when it ends; its
# digest; the prefix of logins; the bound.
_PUT = """
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', ARGV[3])
redis.call('ZADD', KEYS[2], ARGV[4], ARGV[5])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
local excess = redis.call('ZCARD', KEYS[2]) - tonumber(ARGV[7])
if excess > 0 then
  for _, oldest in ipairs(redis.call('ZRANGE', KEYS[2], 0, excess - 1)) do
    redis.call('DEL', ARGV[6] .. oldest)
    redis.call('ZREM', KEYS[2], oldest)
  end
end
return 1
"""
# Keys: as above. Argument: the digest.
_TAKE = """
local value = redis.call('GET', KEYS[1])
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[1])
return value
"""


class RedisLogins:
    """Logins of all browsers, for one event loop. ``clock`` is since the epoch. All calls raise StoreError."""

    def __init__(
        self, redis: "Redis", watch: RedisAvailability, timeout_s: float, clock: ClockMs, most: int = MOST
    ) -> None:
        self._call = SessionCalls(watch, timeout_s)
        self._clock = clock
        self._most = most
        self._put = redis.register_script(_PUT)
        self._take = redis.register_script(_TAKE)

    async def put(self, state: str, login: PendingLogin) -> None:
        """Store a login under the digest of its state."""
        digest, now_ms = digest_of(state), self._clock()
        ttl_ms = max(1, login.ends_ms - now_ms)
        args: list[str | int] = [login.packed(), ttl_ms, now_ms, login.ends_ms, digest]
        args += [KeyFamily.LOGINS.prefix, self._most]
        await self._call(lambda: self._put(keys=_keys(digest), args=args))

    async def take(self, state: str) -> PendingLogin | None:
        """The login with this state, which nobody can take again; None if there is none."""
        digest = digest_of(state)
        stored = await self._call(lambda: self._take(keys=_keys(digest), args=[digest]))
        login = PendingLogin.unpacked(stored) if isinstance(stored, bytes) else None
        return None if login is None or login.ends_ms <= self._clock() else login


def _keys(digest: str) -> list[str]:
    return [redis_key(KeyFamily.LOGINS, digest), redis_key(KeyFamily.LOGIN_INDEX, "all")]
