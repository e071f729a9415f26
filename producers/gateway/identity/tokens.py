"""Verify JSON Web Tokens (RFC 7519, checked as RFC 8725 advises): the presented text in, an identity out."""

from collections.abc import Mapping
from typing import Any

import jwt

from fairlane.clock import ClockMs
from fairlane.names import is_name
from fairlane_server.api_keys.api_key import DEPLOYMENT, Role
from fairlane_server.circuit_breaker import CircuitBreaker
from fairlane_server.store_error import StoreError
from producers.gateway.identity.api_keys import IdentityStore, UserSettings
from producers.gateway.identity.identity import AuthRefusal, Identity, RefusedError
from producers.gateway.identity.jwks import KeySet
from producers.gateway.identity.lookups import TIMEOUT_S, Lookups
from producers.gateway.identity.signing_keys import ALGORITHMS, MOST_KEY_ID_CHARACTERS, KeySetError

MOST_CHARACTERS = 8_192
MOST_SUBJECT_CHARACTERS = 255
_MOST_ROLES = 64
_REQUIRED = ["exp", "iss", "aud", "sub"]
_TYPES = {None, "jwt", "at+jwt", "application/at+jwt"}
# What decoding may raise: a token may be any text.
_UNREADABLE = (jwt.PyJWTError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
_STRONGEST_FIRST = (Role.ADMIN, Role.OPERATOR, Role.TENANT, Role.VIEWER)


class TokenVerifier:
    """Verifies tokens of one issuer and audience, each by the algorithm of the key that signed it. ``leeway_s`` is the
    tolerated clock skew of the issuer.

    The store knows users that were disabled or given another role; its answers count for ``grace_ms`` while it is
    unavailable. The times in a token are compared with the system clock.
    """

    def __init__(
        self,
        issuer: str,
        audience: str,
        leeway_s: float,
        keys: KeySet,
        store: IdentityStore,
        grace_ms: int,
        monotonic_clock: ClockMs,
        breaker: CircuitBreaker,
    ) -> None:
        self._issuer = issuer
        self._audience = audience
        self._leeway_s = leeway_s
        self._keys = keys
        self._store = store
        self._users: Lookups[UserSettings] = Lookups(
            grace_ms,
            monotonic_clock,
            breaker,
            lambda name, _user: str(name[0]),  # type: ignore[index]  # as below
        )

    async def verify(self, token: str) -> Identity:
        """The identity of the token. Raises RefusedError."""
        claims = await self._claims(token)
        subject = claims["sub"]
        if not 1 <= len(subject) <= MOST_SUBJECT_CHARACTERS or not subject.isprintable():
            raise RefusedError(AuthRefusal.WRONG_TOKEN)
        tenant, claimed = claims.get("tenant"), _strongest(claims)
        if not isinstance(tenant, str) or not (is_name(tenant) or tenant == DEPLOYMENT):
            raise RefusedError(AuthRefusal.NO_TENANT, subject)
        if tenant == DEPLOYMENT:
            # A claim alone makes nobody an operator: `fairlane users` must know the user.
            claimed = None
        try:
            user = await self._users.find(
                (tenant, subject), lambda: self._store.user(tenant, subject, TIMEOUT_S), tenant
            )
        except StoreError:
            raise RefusedError(AuthRefusal.UNAVAILABLE, subject) from None
        if user is not None and user.is_disabled:
            raise RefusedError(AuthRefusal.USER_DISABLED, subject)
        role = claimed if user is None or user.role is None else user.role
        if role is None:
            raise RefusedError(AuthRefusal.NO_ROLE, subject)
        return Identity(tenant, subject, role, user=subject, grants=frozenset() if user is None else user.grants)

    async def close(self) -> None:
        """Cancel lookups and fetches in flight."""
        await self._users.close()
        await self._keys.close()

    async def _claims(self, token: str) -> Mapping[str, Any]:
        key = await self._key_of(token)
        try:
            return jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                audience=self._audience,
                issuer=self._issuer,
                leeway=self._leeway_s,
                options={"require": _REQUIRED, "enforce_minimum_key_length": True},
            )
        except jwt.ExpiredSignatureError:
            raise RefusedError(AuthRefusal.TOKEN_EXPIRED) from None
        except _UNREADABLE:
            raise RefusedError(AuthRefusal.WRONG_TOKEN) from None

    async def _key_of(self, token: str) -> jwt.PyJWK:
        """The issuer's key that the header names. Its other key parameters (jku, jwk, x5u, x5c) are not read."""
        if len(token) > MOST_CHARACTERS or not token.isascii() or token.count(".") != 2:
            raise RefusedError(AuthRefusal.MALFORMED)
        try:
            header = jwt.get_unverified_header(token)
            kind = header.get("typ")
            kind = kind.lower() if isinstance(kind, str) else kind
            is_acceptable = header.get("alg") in ALGORITHMS and kind in _TYPES and "crit" not in header
            is_acceptable = is_acceptable and header.get("b64", True) is True
        except _UNREADABLE:
            raise RefusedError(AuthRefusal.MALFORMED) from None
        key_id = header.get("kid")
        if not is_acceptable or not isinstance(key_id, str) or not 1 <= len(key_id) <= MOST_KEY_ID_CHARACTERS:
            raise RefusedError(AuthRefusal.WRONG_TOKEN)
        try:
            key = await self._keys.key(key_id)
        except KeySetError:
            raise RefusedError(AuthRefusal.UNAVAILABLE) from None
        if key is None:
            raise RefusedError(AuthRefusal.UNKNOWN_SIGNER)
        if key.algorithm_name != header["alg"]:
            raise RefusedError(AuthRefusal.WRONG_TOKEN)
        return key


def _strongest(claims: Mapping[str, Any]) -> Role | None:
    """The strongest known role in ``role`` and ``roles``; unknown names are ignored."""
    roles = claims.get("roles", [])
    named = [claims.get("role"), *(roles[:_MOST_ROLES] if isinstance(roles, list) else [])]
    return next((role for role in _STRONGEST_FIRST if role in named), None)
