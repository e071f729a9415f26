"""The authenticated caller, and the scope and role that a call needs."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends

from fairlane import metrics
from fairlane.logs import get_logger
from fairlane_server.api_keys.api_key import Role, Scope
from producers.gateway.identity.refusals import AuthRefusal, answer

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

    def may(self, scope: Scope) -> bool:
        """Whether it has this scope."""
        return not self.scopes or scope in self.scopes

    @property
    def may_write(self) -> bool:
        """Whether it may send and cancel requests."""
        return self.role in (Role.ADMIN, Role.TENANT)


log = get_logger(__name__)

Authenticate = Callable[..., Awaitable[Identity]]
"""A FastAPI dependency that returns the identity of a call."""


def permit(identity: Identity, scope: Scope, *, writes: bool = False) -> Identity:
    """The same identity, if it has the scope and, with ``writes``, may write. Raises GatewayError: 403."""
    why = None
    if not identity.may(scope):
        why = AuthRefusal.NO_SCOPE
    elif writes and not identity.may_write:
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
