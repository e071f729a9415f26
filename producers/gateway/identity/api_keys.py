"""Verify API keys: the presented text in, an identity out."""

from hmac import compare_digest

from fairlane.clock import ClockMs
from fairlane_server.api_keys.api_key import PresentedKey, parse_key
from fairlane_server.circuit_breaker import CircuitBreaker
from producers.gateway.identity.identity import Identity
from producers.gateway.identity.key_store import IdentityStore, StoredKey, StoreUnavailableError
from producers.gateway.identity.lookups import TIMEOUT_S, Lookups
from producers.gateway.identity.refusals import AuthRefusal, RefusedError
from producers.gateway.limits.rate_buckets import FailedKeys

_NO_SECRET = bytes(32)


class KeyVerifier:
    """Verifies API keys against the store.

    The cache is keyed by key id and hash of the presented secret: a wrong secret never hits it, so timing does not
    reveal whether a key id exists.

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
        failed: FailedKeys,
    ) -> None:
        self._store = store
        self._clock = clock
        self._monotonic_clock = monotonic_clock
        self._failed = failed
        self._lookups: Lookups[StoredKey] = Lookups(grace_ms, monotonic_clock, breaker, lambda _shown, key: key.tenant)

    async def verify(self, text: str, address: str | None = None) -> Identity:
        """The identity of the key. Raises RefusedError."""
        shown = parse_key(text)
        if shown is None:
            raise RefusedError(AuthRefusal.MALFORMED)
        # Known keys bypass the limit: it counts only guesses, which are never cached.
        is_known = address is None or self._lookups.knows(shown)
        if not (is_known or self._failed.may_try(str(address), self._monotonic_clock())):
            raise RefusedError(AuthRefusal.TOO_MANY_FAILURES)
        try:
            key = await self._lookups.find(shown, lambda: self._proven(shown), address)
        except StoreUnavailableError:
            raise RefusedError(AuthRefusal.UNAVAILABLE, shown.key_id) from None
        if key is None:
            if address is not None:
                self._failed.failed(address, self._monotonic_clock())
            raise RefusedError(AuthRefusal.WRONG_KEY, shown.key_id)
        if key.is_revoked:
            raise RefusedError(AuthRefusal.KEY_REVOKED, key.key_id)
        if key.expires_at_ms is not None and key.expires_at_ms <= self._clock():
            raise RefusedError(AuthRefusal.KEY_EXPIRED, key.key_id)
        if key.is_user_disabled:
            raise RefusedError(AuthRefusal.USER_DISABLED, key.key_id)
        return Identity(key.tenant, key.key_id, key.role, key.scopes, key.user)

    async def close(self) -> None:
        """Cancel lookups in flight."""
        await self._lookups.close()

    async def _proven(self, shown: PresentedKey) -> StoredKey | None:
        """The key, if the presented secret matches."""
        key = await self._store.key(shown.key_id, shown.secret_sha256, TIMEOUT_S)
        # Compare for a missing key too: it must take the same time.
        kept = _NO_SECRET if key is None else key.secret_sha256
        return key if compare_digest(shown.secret_sha256, kept) else None
