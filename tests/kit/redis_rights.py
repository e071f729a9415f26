"""Who may read and write which keys of Redis, written down a second time: the table of the code is held against it."""

from collections.abc import Mapping

from fairlane_server.redis.keys import KeyFamily
from fairlane_server.redis.rights import RedisRole, RedisServer

User = tuple[RedisServer, RedisRole]

_STATE_OF_DISPATCHER: User = (RedisServer.STATE, RedisRole.DISPATCHER)
_STATE_OF_GATEWAY: User = (RedisServer.STATE, RedisRole.GATEWAY)
_STATE_OF_SESSIONS: User = (RedisServer.STATE, RedisRole.SESSIONS)
_STATE_OF_ADMIN: User = (RedisServer.STATE, RedisRole.ADMIN)
_STATE_OF_OPERATOR: User = (RedisServer.STATE, RedisRole.OPERATOR)
_CACHE_OF_DISPATCHER: User = (RedisServer.CACHE, RedisRole.DISPATCHER)
_CACHE_OF_GATEWAY: User = (RedisServer.CACHE, RedisRole.GATEWAY)
_CACHE_OF_CONSUMER: User = (RedisServer.CACHE, RedisRole.CONSUMER)
_CACHE_OF_OPERATOR: User = (RedisServer.CACHE, RedisRole.OPERATOR)


def _families(*names: str) -> frozenset[KeyFamily]:
    return frozenset(map(KeyFamily, names))


WRITES: Mapping[User, frozenset[KeyFamily]] = {
    _STATE_OF_DISPATCHER: _families("seen", "seen-count", "quota", "granted"),
    _STATE_OF_GATEWAY: _families(
        *("idempotency", "idempotency-count", "calls", "session", "session-user", "session-tenant"),
        *("login", "login-index"),
    ),
    _STATE_OF_SESSIONS: _families("session", "session-user", "session-tenant"),
    _STATE_OF_ADMIN: _families("session", "session-user", "session-tenant"),
    _STATE_OF_OPERATOR: _families(),
    _CACHE_OF_DISPATCHER: _families("cache:embedding", "cache:retrieval", "cache:semantic"),
    _CACHE_OF_GATEWAY: _families("cache:result", "cache:accepted"),
    _CACHE_OF_CONSUMER: _families("cache:response"),
    _CACHE_OF_OPERATOR: _families(),
}
READS: Mapping[User, frozenset[KeyFamily]] = {
    **WRITES,
    _CACHE_OF_DISPATCHER: WRITES[_CACHE_OF_DISPATCHER] | _families("cache:response"),
    _CACHE_OF_CONSUMER: _families(),
}
USERS: tuple[User, ...] = tuple(WRITES)

_COUNTED_KEYS = frozenset({"get", "set", "del", "hgetall", "hincrby", "hdel", "expire", "time"})
_BUCKETS = frozenset({"hmget", "hset", "hdel", "pexpire", "time", "get", "set", "del"})
_SCRIPTS = frozenset({"evalsha", "script|load"})
_INDEXES = frozenset({"zadd", "zcard", "zrange", "zrem", "zremrangebyscore"})
_OPERATION = frozenset({"ping", "info", "acl|whoami", "acl|load", "acl|log"})

COMMANDS: Mapping[User, frozenset[str]] = {
    _STATE_OF_DISPATCHER: _SCRIPTS | _COUNTED_KEYS | _BUCKETS | {"ping", "info"},
    _STATE_OF_GATEWAY: _SCRIPTS | _COUNTED_KEYS | _BUCKETS | _INDEXES | {"ping", "info"},
    _STATE_OF_SESSIONS: _SCRIPTS | {"ping", "get", "del", "zrange", "zrem"},
    _STATE_OF_ADMIN: _SCRIPTS | {"ping", "get", "set", "del", "zrange", "zrem"},
    _STATE_OF_OPERATOR: _OPERATION,
    _CACHE_OF_DISPATCHER: _SCRIPTS | {"getrange", "set", "lrange", "lpush", "ltrim", "pexpire"},
    _CACHE_OF_GATEWAY: _SCRIPTS | {"getrange", "set", "del"},
    _CACHE_OF_CONSUMER: frozenset({"set"}),
    _CACHE_OF_OPERATOR: _OPERATION,
}
