"""Authorization: the scope and role that a call needs."""

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Depends

from fairlane import metrics
from fairlane.logs import get_logger
from fairlane_server.api_keys.roles import Scope
from producers.gateway.identity.identity import Identity
from producers.gateway.identity.refusals import AuthRefusal, answer

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
