"""Verify JSON Web Tokens (RFC 7519, checked as RFC 8725 advises): the presented text in, an identity out."""

from collections.abc import Mapping
from typing import Any

import jwt

from fairlane.names import is_name
from fairlane_server.api_keys.api_key import DEPLOYMENT, Role
from producers.gateway.identity.identity import AuthRefusal, Identity, RefusedError
from producers.gateway.identity.jwks import KeySet
from producers.gateway.identity.signing_keys import ALGORITHMS, MOST_KEY_ID_CHARACTERS, KeySetError
from producers.gateway.identity.users import ClaimedUser, Users

MOST_CHARACTERS = 8_192
MOST_SUBJECT_CHARACTERS = 255
_MOST_ROLES = 64
_REQUIRED = ["exp", "iss", "aud", "sub"]
_TYPES = {None, "jwt", "at+jwt", "application/at+jwt"}
# What decoding may raise: a token may be any text.
_UNREADABLE = (jwt.PyJWTError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
_STRONGEST_FIRST = (Role.ADMIN, Role.OPERATOR, Role.TENANT, Role.VIEWER)


class TokenVerifier:
    """Verifies the tokens that callers present. ``users`` knows those that were disabled or given another role."""

    def __init__(self, tokens: "SignedTokens", users: Users) -> None:
        self._tokens = tokens
        self._users = users

    async def verify(self, token: str) -> Identity:
        """The identity of the token. Raises RefusedError."""
        return await self._users.identity(user_of(await self._tokens.claims(token)))

    async def close(self) -> None:
        """Cancel lookups and fetches in flight."""
        await self._users.close()
        await self._tokens.close()


class SignedTokens:
    """Checks tokens of one issuer and audience, each by the algorithm of the key that signed it. ``leeway_s`` is the
    tolerated clock skew of the issuer. The times in a token are compared with the system clock."""

    def __init__(self, issuer: str, audience: str, leeway_s: float, keys: KeySet) -> None:
        self._issuer = issuer
        self._audience = audience
        self._leeway_s = leeway_s
        self._keys = keys

    async def claims(self, token: str) -> Mapping[str, Any]:
        """The claims of a genuine token that is valid now. Raises RefusedError."""
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

    async def close(self) -> None:
        """Cancel a fetch in flight."""
        await self._keys.close()

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


def user_of(claims: Mapping[str, Any]) -> ClaimedUser:
    """The user that a genuine token names. Raises RefusedError."""
    subject, tenant = claims["sub"], claims.get("tenant")
    if not 1 <= len(subject) <= MOST_SUBJECT_CHARACTERS or not subject.isprintable():
        raise RefusedError(AuthRefusal.WRONG_TOKEN)
    if not isinstance(tenant, str) or not (is_name(tenant) or tenant == DEPLOYMENT):
        raise RefusedError(AuthRefusal.NO_TENANT, subject)
    return ClaimedUser(tenant, subject, _strongest(claims))


def _strongest(claims: Mapping[str, Any]) -> Role | None:
    """The strongest known role in ``role`` and ``roles``; unknown names are ignored."""
    roles = claims.get("roles", [])
    named = [claims.get("role"), *(roles[:_MOST_ROLES] if isinstance(roles, list) else [])]
    return next((role for role in _STRONGEST_FIRST if role in named), None)
