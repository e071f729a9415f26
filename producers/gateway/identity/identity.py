"""The authenticated caller, the permission that a call needs, and reasons to refuse a caller.

The errors do not reveal which keys exist.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from fastapi import Depends
from fastapi.dependencies.models import Dependant

from fairlane import metrics
from fairlane.logs import get_logger
from fairlane_server.api_keys.api_key import Role, Scope
from fairlane_server.api_keys.permissions import Permission, role_permissions, scope_permissions
from producers.openai_api.errors import GatewayError

__all__ = ["Identity", "Permission", "Role", "Scope"]


@dataclass(frozen=True, slots=True)
class Identity:
    """One authenticated caller.

    Attributes:
        tenant: owner of the topics, documents and results that it can access; DEPLOYMENT if it belongs to no tenant.
        subject: its name in logs and audits: the id of a key, or the subject of a token or session. Never a secret.
        role: the strongest of its roles.
        scopes: scopes of a key; empty means all.
        user: the subject of a token or session, or the user that a key was made for, if any.
        grants: permissions besides those of its role.
    """

    tenant: str
    subject: str
    role: Role
    scopes: frozenset[Scope] = frozenset()
    user: str | None = None
    grants: frozenset[Permission] = frozenset()

    def may(self, permission: Permission) -> bool:
        """Whether its role, or a grant, has the permission, and no scope takes it away."""
        return permission in self.role_permissions and permission in scope_permissions(self.scopes)

    @property
    def role_permissions(self) -> frozenset[Permission]:
        """Those of its role and its grants, whatever its scopes are."""
        return role_permissions(self.tenant, self.role, self.grants)

    @property
    def requested_by(self) -> str:
        """How its requests and their usage name it: ``key:`` and the id of the key, or ``user:`` and the subject of the
        token."""
        return f"{'user' if self.user == self.subject else 'key'}:{self.subject}"


log = get_logger(__name__)

Authenticate = Callable[..., Awaitable[Identity]]
"""A FastAPI dependency that returns the identity of a call."""


_PERMISSION = "fairlane_permission"


def permit(identity: Identity, permission: Permission) -> Identity:
    """The same identity, if it has the permission. Raises GatewayError: 403."""
    if identity.may(permission):
        return identity
    why = AuthRefusal.NO_SCOPE if permission in identity.role_permissions else AuthRefusal.NO_PERMISSION
    metrics.AUTHENTICATIONS_REFUSED.labels(reason=why).inc()
    # Bounded by the caller's rate limit.
    who = {"who": identity.subject, "tenant": identity.tenant, "role": identity.role}
    log.warning("permission_refused", reason=why, permission=permission, **who)
    raise answer(why, permission)


def require(authenticate: Authenticate, permission: Permission) -> Authenticate:
    """A dependency that authenticates a call and applies ``permit``. Raises GatewayError as both do."""

    async def permitted(identity: Annotated[Identity, Depends(authenticate)]) -> Identity:
        return permit(identity, permission)

    permitted.__dict__[_PERMISSION] = permission
    return permitted


def declared(permission: Permission) -> Callable[[], Awaitable[None]]:
    """A dependency without effect, for a route that calls ``permit`` itself."""

    async def declares() -> None:
        return None

    declares.__dict__[_PERMISSION] = permission
    return declares


def permissions_of(dependant: Dependant) -> frozenset[Permission]:
    """The permissions that a route's dependencies require or declare."""
    own = getattr(dependant.call, "__dict__", {}).get(_PERMISSION)
    inner = (permissions_of(one) for one in dependant.dependencies)
    return frozenset({own} if isinstance(own, Permission) else ()).union(*inner)


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
    NO_PERMISSION = "no_permission"
    UNAVAILABLE = "unavailable"
    TOO_MANY_FAILURES = "too_many_failures"
    NO_SESSION = "no_session"
    CROSS_SITE = "cross_site"
    SESSIONS_UNAVAILABLE = "sessions_unavailable"


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
    AuthRefusal.NO_PERMISSION: (403, "forbidden", "The role of this identity does not permit this."),
    AuthRefusal.TOO_MANY_FAILURES: (
        429,
        "too_many_failed_keys",
        "Too many API keys that do not exist came from this address; this one is not looked up.",
    ),
    AuthRefusal.NO_SESSION: (401, "no_session", "There is no such session, or it has ended: log in again."),
    AuthRefusal.CROSS_SITE: (
        403,
        "csrf_failed",
        "This call has a session, but not its CSRF token (`x-csrf-token`), or comes from another site.",
    ),
    AuthRefusal.SESSIONS_UNAVAILABLE: (
        503,
        "sessions_unavailable",
        "Sessions cannot be checked at the moment; keys and tokens can.",
    ),
    AuthRefusal.UNAVAILABLE: (503, "identity_unavailable", "Who you are cannot be checked at the moment."),
}


def answer(why: AuthRefusal, permission: Permission | None = None) -> GatewayError:
    """The error for the caller. ``permission``: the one that is missing."""
    status, code, text = _ANSWERS.get(why, _INVALID)
    if permission is not None:
        text += f" The permission is `{permission}`."
    return GatewayError(status, code, text, retry_after_ms=_RETRY_AFTER_MS if status in (429, 503) else None)
