"""Store of API keys and users, and verification of keys: the presented text in, an identity out."""

from dataclasses import dataclass, field
from hmac import compare_digest
from typing import Any

from fairlane.clock import ClockMs
from fairlane_server.api_keys.api_key import PresentedKey, Role, Scope, parse_key
from fairlane_server.api_keys.permissions import Permission
from fairlane_server.circuit_breaker import CircuitBreaker
from fairlane_server.postgres.pool import DeadlinePool, rows_for
from fairlane_server.store_error import StoreError
from producers.gateway.identity.identity import AuthRefusal, Identity, RefusedError
from producers.gateway.identity.lookups import TIMEOUT_S, Lookups
from producers.gateway.limits.rate_buckets import RatePolicy, TokenBuckets

_FIND_KEY = """
SELECT tenant, role, scopes, secret_sha256, subject, expires_at_ms, is_revoked, is_user_disabled, grants
FROM find_api_key(%s, %s)
"""
_FIND_USER = "SELECT role, is_disabled, grants FROM find_user(%s, %s)"


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A stored API key. ``scopes`` restrict the role; empty means all. ``user`` is the user it was made for, if any."""

    key_id: str
    tenant: str
    role: Role
    scopes: frozenset[Scope] = frozenset()
    secret_sha256: bytes = field(default=b"", repr=False)
    user: str | None = None
    expires_at_ms: int | None = None
    is_revoked: bool = False
    is_user_disabled: bool = False
    grants: frozenset[Permission] = frozenset()


@dataclass(frozen=True, slots=True)
class UserSettings:
    """Stored settings of a token's subject; most subjects have none. ``role`` overrides the token's."""

    role: Role | None = None
    is_disabled: bool = False
    grants: frozenset[Permission] = frozenset()


class IdentityStore:
    """API keys and users, by database functions: the gateway's role may call them, but not read the tables. Answers
    within ``timeout_s`` or raises StoreError, whose message holds no secret."""

    def __init__(self, pool: DeadlinePool) -> None:
        self._pool = pool

    async def key(self, key_id: str, shown_sha256: bytes, timeout_s: float) -> StoredKey | None:
        """The key with this id and this hash of its secret; None if there is none. Its time of use is recorded, to the
        minute."""
        row = await self._row(_FIND_KEY, (key_id, shown_sha256), timeout_s)
        if row is None:
            return None
        tenant, role, scopes, secret_sha256, user, expires_at_ms, is_revoked, is_user_disabled, grants = row
        return StoredKey(
            key_id,
            tenant,
            Role(role),
            frozenset(map(Scope, scopes)),
            bytes(secret_sha256),
            user,
            expires_at_ms,
            is_revoked,
            is_user_disabled,
            frozenset(map(Permission, grants)),
        )

    async def user(self, tenant: str, subject: str, timeout_s: float) -> UserSettings:
        """The stored settings of this user."""
        row = await self._row(_FIND_USER, (tenant, subject), timeout_s)
        return UserSettings() if row is None else UserSettings(Role(row[0]), row[1], frozenset(map(Permission, row[2])))

    async def _row(self, statement: str, parameters: tuple[str | bytes, ...], timeout_s: float) -> Any:
        try:
            # For no tenant: the answer says which one it is.
            (rows,) = await rows_for(self._pool, "", [(statement.encode(), parameters)], timeout_s)
        except TimeoutError as error:
            raise StoreError(str(error)) from None
        return rows[0] if rows else None


BURST_S = 10.0
MOST_ADDRESSES = 20_000
"""Beyond it, the address that failed least recently is forgotten first."""


class KeyVerifier:
    """Verifies API keys against the store.

    The cache is keyed by key id and hash of the presented secret: a wrong secret never hits it, so timing does not
    reveal whether a key id exists.

    Failed keys are limited by address: ``failures_per_s``, with a burst of ``BURST_S`` seconds.

    Cached keys pass for ``grace_ms`` while the store is unavailable. ``clock`` is the time since the epoch, with which
    the expiry of keys is compared.
    """

    def __init__(
        self,
        store: IdentityStore,
        grace_ms: int,
        clock: ClockMs,
        monotonic_clock: ClockMs,
        breaker: CircuitBreaker,
        failures_per_s: float,
    ) -> None:
        self._store = store
        self._clock = clock
        self._monotonic_clock = monotonic_clock
        self._failures = TokenBuckets(MOST_ADDRESSES)
        self._failure_rate = RatePolicy(failures_per_s, max(1, round(BURST_S * failures_per_s)))
        self._lookups: Lookups[StoredKey] = Lookups(grace_ms, monotonic_clock, breaker, lambda _shown, key: key.tenant)

    async def verify(self, text: str, address: str | None = None) -> Identity:
        """The identity of the key. Raises RefusedError."""
        shown = parse_key(text)
        if shown is None:
            raise RefusedError(AuthRefusal.MALFORMED)
        # Known keys bypass the limit: it counts only guesses, which are never cached.
        is_known = address is None or self._lookups.knows(shown)
        if not (is_known or self._may_fail(str(address))):
            raise RefusedError(AuthRefusal.TOO_MANY_FAILURES)
        try:
            key = await self._lookups.find(shown, lambda: self._proven(shown), address)
        except StoreError:
            raise RefusedError(AuthRefusal.UNAVAILABLE, shown.key_id) from None
        if key is None:
            if address is not None:
                self._failures.take([address], self._failure_rate, self._monotonic_clock())
            raise RefusedError(AuthRefusal.WRONG_KEY, shown.key_id)
        if key.is_revoked:
            raise RefusedError(AuthRefusal.KEY_REVOKED, key.key_id)
        if key.expires_at_ms is not None and key.expires_at_ms <= self._clock():
            raise RefusedError(AuthRefusal.KEY_EXPIRED, key.key_id)
        if key.is_user_disabled:
            raise RefusedError(AuthRefusal.USER_DISABLED, key.key_id)
        return Identity(key.tenant, key.key_id, key.role, key.scopes, key.user, key.grants)

    async def close(self) -> None:
        await self._lookups.close()

    def _may_fail(self, address: str) -> bool:
        """Whether this address may present an unknown key."""
        return self._failures.peek(address, self._failure_rate, self._monotonic_clock()).is_granted

    async def _proven(self, shown: PresentedKey) -> StoredKey | None:
        """The key, if the presented secret matches. Compared here as well: before revision 0022 of the tables the store
        finds a key by its id alone."""
        key = await self._store.key(shown.key_id, shown.secret_sha256, TIMEOUT_S)
        return key if key is not None and compare_digest(shown.secret_sha256, key.secret_sha256) else None
