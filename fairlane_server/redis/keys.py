"""Names of keys in Redis: TOPIC_PREFIX, a family, and what tells its keys apart. No other module spells one. Pure.

A key is read in one way only. TOPIC_PREFIX has no colon and no family's first part ends with that of another one, so
the beginning up to the family's colon is shared with no other family, and with no pipeline of another prefix.
"""

from enum import StrEnum

from fairlane import names


class KeyFamily(StrEnum):
    """Keys of one kind; rights are given on whole families."""

    SEEN_IDS = "seen"
    SEEN_COUNTS = "seen-count"
    QUOTAS = "quota"
    GRANTS = "granted"
    IDEMPOTENCY_CLAIMS = "idempotency"
    IDEMPOTENCY_COUNTS = "idempotency-count"
    CALLS = "calls"
    SESSIONS = "session"
    USER_SESSIONS = "session-user"
    TENANT_SESSIONS = "session-tenant"
    LOGINS = "login"
    LOGIN_INDEX = "login-index"
    CACHED_EMBEDDINGS = "cache:embedding"
    CACHED_PASSAGES = "cache:retrieval"
    CACHED_ANSWERS = "cache:response"
    CACHED_QUESTIONS = "cache:semantic"
    CACHED_RESULTS = "cache:result"
    CACHED_ACCEPTANCES = "cache:accepted"

    @property
    def prefix(self) -> str:
        """What each of its keys begins with."""
        return f"{names.TOPIC_PREFIX}{self}:"


def redis_key(family: KeyFamily, *parts: str) -> str:
    """The key of these parts; each but the last must be free of colons."""
    return f"{names.TOPIC_PREFIX}{family}:{':'.join(parts)}"
