"""A browser's session and an unfinished login: their content, their secrets, and when they end. No I/O.

A secret is 256 random bits that only the browser holds. The server stores its SHA-256, from which it cannot be found.
"""

import hmac
import json
import re
import secrets
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

from fairlane.names import is_name
from fairlane_server.api_keys.api_key import DEPLOYMENT, Role

_SECRET_BYTES = 32
_SECRET = re.compile(r"[A-Za-z0-9_-]{43}")
_TOUCH_MS = 60_000
HANDLE_CHARACTERS = 12
"""Characters of a digest by which commands name a session."""


def new_secret() -> str:
    """256 random bits, in 43 characters that need no quoting."""
    return secrets.token_urlsafe(_SECRET_BYTES)


def is_secret(text: str) -> bool:
    """Whether ``new_secret`` could have returned it."""
    return _SECRET.fullmatch(text) is not None


def digest_of(secret: str) -> str:
    """What is stored instead of a secret."""
    return sha256(secret.encode()).hexdigest()


def csrf_token_of(session_id: str) -> str:
    """The token that calls of this session repeat in a header. It tells nothing about the id."""
    return hmac.digest(session_id.encode(), b"fairlane csrf token", "sha256").hex()


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """How long a session lasts after its login, and how long without use."""

    absolute_ms: int
    idle_ms: int

    @property
    def touch_ms(self) -> int:
        """Age of the recorded last use from which it is recorded anew: not with every call."""
        return min(_TOUCH_MS, self.idle_ms // 10)


@dataclass(frozen=True, slots=True)
class Session:
    """A stored session.

    Attributes:
        tenant, subject: the user.
        role: what the issuer's token said; None if only the settings of the user give one.
        created_ms: time of the login.
        seen_ms: time of the last recorded use.
    """

    tenant: str
    subject: str
    role: Role | None
    created_ms: int
    seen_ms: int

    def ends_ms(self, limits: SessionLimits) -> int:
        """When it ends without further use."""
        return min(self.created_ms + limits.absolute_ms, self.seen_ms + limits.idle_ms)

    def packed(self) -> str:
        """The stored form."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def unpacked(cls, stored: bytes) -> "Session | None":
        """Inverse of ``packed``; None for anything else."""
        found = _object(stored, {"tenant": str, "subject": str, "created_ms": int, "seen_ms": int})
        if found is None or not (is_name(found["tenant"]) or found["tenant"] == DEPLOYMENT):
            return None
        role = found.get("role")
        if role is not None and role not in {*Role}:
            return None
        role = None if role is None else Role(role)
        return cls(found["tenant"], found["subject"], role, found["created_ms"], found["seen_ms"])


@dataclass(frozen=True, slots=True)
class PendingLogin:
    """A login between the redirect to the issuer and the return from it; stored under the digest of its ``state``.

    Attributes:
        browser_sha256: digest of the secret in the cookie of the browser that began it.
        nonce: that the issuer's token must repeat.
        verifier: secret of the PKCE challenge (RFC 7636).
        return_to: path to continue at.
        ends_ms: when it is no longer accepted.
    """

    browser_sha256: str
    nonce: str
    verifier: str
    return_to: str
    ends_ms: int

    def packed(self) -> str:
        """The stored form."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def unpacked(cls, stored: bytes) -> "PendingLogin | None":
        """Inverse of ``packed``; None for anything else."""
        kinds = {"browser_sha256": str, "nonce": str, "verifier": str, "return_to": str, "ends_ms": int}
        found = _object(stored, kinds)
        return None if found is None else cls(**{name: found[name] for name in kinds})


def _object(stored: bytes, kinds: dict[str, type]) -> dict[str, Any] | None:
    try:
        found = json.loads(stored)
    except ValueError:
        return None
    if not isinstance(found, dict) or not all(type(found.get(name)) is kind for name, kind in kinds.items()):
        return None
    return found
