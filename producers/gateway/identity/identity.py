"""The authenticated caller, the scope and role that a call needs, and reasons to refuse a caller.

The errors do not reveal which keys exist.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from fastapi import Depends

from fairlane import metrics
from fairlane.logs import get_logger
from fairlane_server.api_keys.api_key import Role, Scope
from producers.openai_api.errors import GatewayError

__all__ = ["Identity", "Role", "Scope"]


@dataclass(frozen=True, slots=True)
class Identity:
    """One authenticated caller.

    Attributes:
        tenant: owner of the topics, documents and results that it can access.
        subject: its name in logs and audits: the id of a key, or the subject of a token. Never a secret.
        role: the strongest of its roles.
        scopes: scopes of a key; empty means all.
        user: the subject of a token, or the user that a key was made for, if any.
    """

    tenant: str
    subject: str
    role: Role
    scopes: frozenset[Scope] = frozenset()
    user: str | None = None

    @property
    def requested_by(self) -> str:
        """How its requests and their usage name it: ``key:`` and the id of the key, or ``user:`` and the subject of the
        token."""
        return f"{'user' if self.user == self.subject else 'key'}:{self.subject}"


log = get_logger(__name__)

Authenticate = Callable[..., Awaitable[Identity]]
"""A FastAPI dependency that returns the identity of a call."""


def permit(identity: Identity, scope: Scope, *, writes: bool = False) -> Identity:
    """The same identity, if it has the scope and, with ``writes``, may write. Raises GatewayError: 403."""
    why = None
    if identity.scopes and scope not in identity.scopes:
        why = AuthRefusal.NO_SCOPE
    elif writes and identity.role not in (Role.ADMIN, Role.TENANT):
        why = AuthRefusal.READ_ONLY
    if why is None:
        return identity
    metrics.AUTHENTICATIONS_REFUSED.labels(reason=why).inc()
    # Bounded by the caller's rate limit.
    log.warning("permission_refused", reason=why, scope=scope, who=identity.subject, tenant=identity.tenant)
    raise answer(why)


def require(authenticate: Authenticate, scope: Scope, *, writes: bool = False) -> Authenticate:
    """A dependency that authenticates a call and applies ``permit``. Raises GatewayError as both do."""

    async def permitted(identity: Annotated[Identity, Depends(authenticate)]) -> Identity:
        return permit(identity, scope, writes=writes)

    return permitted


INVALID_KEY = "invalid_api_key"
_RETRY_AFTER_MS = 1_000


class AuthRefusal(StrEnum):
    """Reasons; also the labels of their metric."""

    MISSING = "missing"
    MALFORMED = "malformed"
    WRONG_KEY = "wrong_key"
    KEY_REVOKED = "key_revoked"
    KEY_EXPIRED = "key_expired"
    USER_DISABLED = "user_disabled"
    WRONG_TOKEN = "wrong_token"  # noqa: S105 - a reason, no password
    TOKEN_EXPIRED = "token_expired"  # noqa: S105 - a reason, no password
    UNKNOWN_SIGNER = "unknown_signer"
    NO_TENANT = "no_tenant"
    NO_ROLE = "no_role"
    NO_SCOPE = "no_scope"
    READ_ONLY = "read_only"
    UNAVAILABLE = "unavailable"
    TOO_MANY_FAILURES = "too_many_failures"


class RefusedError(Exception):
    """The caller is not authenticated, or not allowed. ``who`` is a key id or a subject, for logs; never a secret."""

    def __init__(self, why: AuthRefusal, who: str | None = None) -> None:
        super().__init__(why.value)
        self.why = why
        self.who = who


_INVALID = (401, INVALID_KEY, "This API key or token is not valid.")
# 403 only for callers that have proved to hold the key or the token.
_ANSWERS = {
    AuthRefusal.MISSING: (401, INVALID_KEY, "An API key or a token is needed: `Authorization: Bearer ...`."),
    AuthRefusal.KEY_EXPIRED: (403, "key_expired", "This API key has expired."),
    AuthRefusal.USER_DISABLED: (403, "user_disabled", "This user is disabled."),
    AuthRefusal.NO_TENANT: (403, "forbidden", "This token names no tenant (claim `tenant`)."),
    AuthRefusal.NO_ROLE: (403, "forbidden", "This token names no role that is known here (claim `role` or `roles`)."),
    AuthRefusal.NO_SCOPE: (403, "insufficient_scope", "This API key has not the scope that this needs."),
    AuthRefusal.READ_ONLY: (403, "forbidden", "This identity may read only."),
    AuthRefusal.TOO_MANY_FAILURES: (
        429,
        "too_many_failed_keys",
        "Too many API keys that do not exist came from this address; this one is not looked up.",
    ),
    AuthRefusal.UNAVAILABLE: (503, "identity_unavailable", "Who you are cannot be checked at the moment."),
}


def answer(why: AuthRefusal) -> GatewayError:
    """The error for the caller."""
    status, code, text = _ANSWERS.get(why, _INVALID)
    return GatewayError(status, code, text, retry_after_ms=_RETRY_AFTER_MS if status in (429, 503) else None)
