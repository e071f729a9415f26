"""Users: what an issuer says of them, and what their settings here change."""

from dataclasses import dataclass

from fairlane.clock import ClockMs
from fairlane_server.api_keys.api_key import DEPLOYMENT, Role
from fairlane_server.circuit_breaker import CircuitBreaker
from fairlane_server.store_error import StoreError
from producers.gateway.identity.api_keys import IdentityStore, UserSettings
from producers.gateway.identity.identity import AuthRefusal, Identity, RefusedError
from producers.gateway.identity.lookups import TIMEOUT_S, Lookups


@dataclass(frozen=True, slots=True)
class ClaimedUser:
    """A user as its issuer's token names it; ``role`` is the strongest known one, if any."""

    tenant: str
    subject: str
    role: Role | None


class Users:
    """The store knows users that were disabled or given another role; its answers count for ``grace_ms`` while it is
    unavailable. For one event loop."""

    def __init__(self, store: IdentityStore, grace_ms: int, monotonic_clock: ClockMs, breaker: CircuitBreaker) -> None:
        self._store = store
        self._found: Lookups[UserSettings] = Lookups(
            grace_ms,
            monotonic_clock,
            breaker,
            lambda name, _user: str(name[0]),  # type: ignore[index]  # as below
        )

    async def identity(self, claimed: ClaimedUser) -> Identity:
        """The identity of this user, with the role of its settings, else, in a tenant, of its token. Raises
        RefusedError."""
        tenant, subject = claimed.tenant, claimed.subject
        try:
            user = await self._found.find(
                (tenant, subject), lambda: self._store.user(tenant, subject, TIMEOUT_S), tenant
            )
        except StoreError:
            raise RefusedError(AuthRefusal.UNAVAILABLE, subject) from None
        if user is not None and user.is_disabled:
            raise RefusedError(AuthRefusal.USER_DISABLED, subject)
        # A claim alone makes nobody an operator of the deployment: `fairlane users` must know the user.
        claimed_role = None if tenant == DEPLOYMENT else claimed.role
        role = claimed_role if user is None or user.role is None else user.role
        if role is None:
            raise RefusedError(AuthRefusal.NO_ROLE, subject)
        return Identity(tenant, subject, role, user=subject, grants=frozenset() if user is None else user.grants)

    async def close(self) -> None:
        """Cancel lookups in flight."""
        await self._found.close()
