"""What each Redis user may do, as ACL rules: least rights by service, server and family of keys. Pure.

Redis checks commands within a script like all others, and a script itself for reading and writing its keys.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256

from fairlane import names
from fairlane_server.redis.keys import KeyFamily


class RedisServer(StrEnum):
    """The two servers."""

    STATE = "state"
    CACHE = "cache"

    @property
    def setting(self) -> str:
        """The setting with its URL."""
        return _SETTINGS[self]


_SETTINGS = {RedisServer.STATE: "REDIS_URL", RedisServer.CACHE: "REDIS_CACHE_URL"}


class RedisRole(StrEnum):
    """Whoever uses Redis. The other services do not."""

    DISPATCHER = "dispatcher"
    GATEWAY = "gateway"
    CONSUMER = "consumer"
    SESSIONS = "sessions"
    """`fairlane sessions`: lists and ends sessions of browsers."""
    ADMIN = "admin"
    """The admin API: looks up sessions of browsers and records their use."""
    OPERATOR = "operator"
    """Checks that a server answers, loads its users anew, and reads what was refused. May not touch keys."""


def redis_user(role: RedisRole) -> str:
    """Name of the user: TOPIC_PREFIX, the product and the role, as that of the Kafka user."""
    return f"{names.TOPIC_PREFIX}fairlane_{role}"


@dataclass(frozen=True, slots=True)
class Rights:
    """What one user may do on one server.

    Attributes:
        commands: in the notation of ACLs: ``container|subcommand``.
        reads: families whose keys it may read.
        writes: families whose keys it may write.
    """

    commands: tuple[str, ...]
    reads: tuple[KeyFamily, ...] = ()
    writes: tuple[KeyFamily, ...] = ()


_SCRIPTS = ("evalsha", "script|load")
_WATCH = ("ping", "info")
"""Of ``RedisAvailability`` and ``report_state``."""
_COUNTED_KEYS = ("get", "set", "del", "hgetall", "hincrby", "hdel", "expire", "time")
"""Of the scripts with ``TENANT_COUNTER_FUNCTIONS``."""
_BUCKETS = ("hmget", "hset", "pexpire", "time")
"""Of the scripts with ``BUCKET_FUNCTIONS``."""
_INDEXES = ("zadd", "zcard", "zrange", "zrem", "zremrangebyscore")
"""Of the scripts that create sessions and logins."""
_ENDING = ("get", "del", "zrange", "zrem")
"""Of the scripts that list and end sessions."""
_OPERATION = ("ping", "info", "acl|whoami", "acl|load", "acl|log")

_IDS = (KeyFamily.SEEN_IDS, KeyFamily.SEEN_COUNTS, KeyFamily.QUOTAS, KeyFamily.GRANTS)
_CALLS = (KeyFamily.IDEMPOTENCY_CLAIMS, KeyFamily.IDEMPOTENCY_COUNTS, KeyFamily.CALLS)
_SESSIONS = (KeyFamily.SESSIONS, KeyFamily.USER_SESSIONS, KeyFamily.TENANT_SESSIONS)
_LOGINS = (KeyFamily.LOGINS, KeyFamily.LOGIN_INDEX)
_SEARCHES = (KeyFamily.CACHED_EMBEDDINGS, KeyFamily.CACHED_PASSAGES, KeyFamily.CACHED_QUESTIONS)
_REQUESTS = (KeyFamily.CACHED_RESULTS, KeyFamily.CACHED_ACCEPTANCES)
_ANSWERS = (KeyFamily.CACHED_ANSWERS,)

RIGHTS: Mapping[RedisServer, Mapping[RedisRole, Rights]] = {
    RedisServer.STATE: {
        RedisRole.DISPATCHER: Rights((*_WATCH, *_SCRIPTS, *_COUNTED_KEYS, *_BUCKETS), _IDS, _IDS),
        RedisRole.GATEWAY: Rights(
            (*_WATCH, *_SCRIPTS, *_COUNTED_KEYS, *_BUCKETS, *_INDEXES),
            (*_CALLS, *_SESSIONS, *_LOGINS),
            (*_CALLS, *_SESSIONS, *_LOGINS),
        ),
        RedisRole.SESSIONS: Rights(("ping", *_SCRIPTS, *_ENDING), _SESSIONS, _SESSIONS),
        RedisRole.ADMIN: Rights(("ping", *_SCRIPTS, *_ENDING, "set"), _SESSIONS, _SESSIONS),
        RedisRole.OPERATOR: Rights(_OPERATION),
    },
    RedisServer.CACHE: {
        RedisRole.DISPATCHER: Rights(
            (*_SCRIPTS, "getrange", "set", "lrange", "lpush", "ltrim", "pexpire"), (*_SEARCHES, *_ANSWERS), _SEARCHES
        ),
        RedisRole.GATEWAY: Rights((*_SCRIPTS, "getrange", "set", "del"), _REQUESTS, _REQUESTS),
        RedisRole.CONSUMER: Rights(("set",), writes=_ANSWERS),
        RedisRole.OPERATOR: Rights(_OPERATION),
    },
}
"""Everything that anybody may do. Which keys and commands a service uses follows from its code: without a right it runs
as without Redis, and says so in its log."""

DEFAULT_USER_OFF = "user default off resetpass resetkeys resetchannels -@all"
"""Without this line, whoever comes without a name may do everything."""


def hashed(password: str) -> str:
    """A password as ACLs hold it. Passwords are long and random, so a hash without salt tells nothing."""
    return f"#{sha256(password.encode()).hexdigest()}"


def acl_line(server: RedisServer, role: RedisRole, passwords: Sequence[str], *, reads_apart: bool = True) -> str:
    """The line of an ACL file that defines a user.

    Args:
        server: where the user is defined; it may do something else on the other server.
        role: one with rights on this server.
        passwords: valid ones, in the notation of ACLs: ``hashed``, or after ``>`` as they are.
        reads_apart: rights to read keys and to write them are given apart, which needs Redis 7 or Valkey. Without,
            each right is for both.
    """
    rights = RIGHTS[server][role]
    return " ".join(
        (
            *("user", redis_user(role), "reset", "on", *passwords),
            # Redis 6.2 opens all channels to a new user.
            *("resetchannels", "-@all"),
            *(_key_rule(family, rights, reads_apart=reads_apart) for family in KeyFamily if _concerns(family, rights)),
            *(f"+{command}" for command in sorted({*rights.commands})),
        )
    )


def _concerns(family: KeyFamily, rights: Rights) -> bool:
    return family in rights.reads or family in rights.writes


def _key_rule(family: KeyFamily, rights: Rights, *, reads_apart: bool) -> str:
    both = family in rights.reads and family in rights.writes
    kind = "~" if both or not reads_apart else "%R~" if family in rights.reads else "%W~"
    return f"{kind}{family.prefix}*"
