"""Authenticate a call by its headers, before any work, and apply its rate limits."""

from collections.abc import Sequence

from starlette.requests import HTTPConnection

from fairlane import metrics
from fairlane.clock import ClockMs
from fairlane.logs import get_logger
from fairlane.settings import Network
from fairlane_server.api_keys.api_key import looks_like_key
from producers.gateway.edge.connections import address_of
from producers.gateway.identity.api_keys import KeyVerifier
from producers.gateway.identity.browser_sessions import BrowserSessions
from producers.gateway.identity.identity import AuthRefusal, Identity, RefusedError, answer
from producers.gateway.identity.tokens import TokenVerifier
from producers.gateway.limited_log import LimitedLog
from producers.gateway.limits.rate_buckets import RatePolicy
from producers.gateway.limits.rate_limits import CallLimits, refusal
from producers.gateway.pipeline.call_context import current

log = get_logger(__name__)

MOST_CHARACTERS = 8_192 + len("Bearer ")
# Log lines per reason: a caller that guesses keys must not fill the disk. The metric counts all.
_LINES = RatePolicy(rate_per_s=5.0, burst=50)


_SEVERAL = "several"
"""Replaces repeated headers of one name; it is neither a scheme nor a key, so it is refused."""


class Authenticator:
    """FastAPI dependency for HTTP and WebSocket routes: ``Depends(authenticator)`` is the Identity of the call, which
    is recorded for the access log. Without a verifier of tokens, these are refused; without ``sessions``, cookies are
    not read.

    A call shows exactly one credential: ``Authorization: Bearer KEY_OR_TOKEN`` or ``X-API-Key: KEY``. Only a call
    without either may have a session instead: its cookies come by themselves.
    ``trusted_proxies`` are networks whose X-Forwarded-For is trusted.

    Raises GatewayError: 401 invalid credential; 403 expired key, disabled user, token without tenant or role, or a
    session's call from another site; 429 too many failed keys from this address, or over the rate limit; 503 identity
    store, signing keys or sessions unavailable.
    """

    def __init__(
        self,
        keys: KeyVerifier,
        tokens: TokenVerifier | None,
        limits: CallLimits,
        clock: ClockMs,
        trusted_proxies: Sequence[Network] = (),
        sessions: BrowserSessions | None = None,
    ) -> None:
        self._sessions = sessions
        self._keys = keys
        self._tokens = tokens
        self._limits = limits
        self._trusted_proxies = trusted_proxies
        self._log = LimitedLog(log, clock, _LINES)

    async def __call__(self, connection: HTTPConnection) -> Identity:
        identity = await self._identified(connection, is_use=True)
        allowance = await self._limits.take(identity)
        caller = current()
        caller.allowance = allowance
        if not allowance.is_granted:
            raise refusal(allowance)
        caller.tenant, caller.subject = identity.tenant, identity.subject
        caller.requested_by = identity.requested_by
        return identity

    async def identify(self, connection: HTTPConnection) -> Identity:
        """The identity of these headers, without counting a call against its rate limit or as use of its session."""
        return await self._identified(connection, is_use=False)

    async def _identified(self, connection: HTTPConnection, *, is_use: bool) -> Identity:
        try:
            return await self._verify(connection, is_use=is_use)
        except RefusedError as error:
            metrics.AUTHENTICATIONS_REFUSED.labels(reason=error.why).inc()
            self._log.warning("authentication_refused", error.why, reason=error.why, who=error.who)
            raise answer(error.why) from None

    async def _verify(self, connection: HTTPConnection, *, is_use: bool) -> Identity:
        authorization, api_key = _only(connection, b"authorization"), _only(connection, b"x-api-key")
        sessions = self._sessions
        if authorization is None and api_key is None and sessions is not None and sessions.is_shown(connection):
            return (await sessions.verify(connection, is_use=is_use)).identity
        shown = _shown(authorization, api_key)
        if looks_like_key(shown):
            return await self._keys.verify(shown, address_of_call(connection, self._trusted_proxies))
        if self._tokens is None or api_key is not None:
            raise RefusedError(AuthRefusal.MALFORMED)
        return await self._tokens.verify(shown)

    async def close(self) -> None:
        """Cancel lookups and fetches in flight."""
        await self._keys.close()
        if self._tokens is not None:
            await self._tokens.close()
        if self._sessions is not None:
            await self._sessions.close()


def address_of_call(connection: HTTPConnection, trusted_proxies: Sequence[Network]) -> str | None:
    """The caller's address, as ``address_of``; None if the server knows none."""
    client = connection.scope.get("client")
    if client is None:
        return None
    forwarded = [value for name, value in connection.scope["headers"] if name == b"x-forwarded-for"]
    return address_of(tuple(client), forwarded, trusted_proxies)


def _shown(authorization: str | None, api_key_header: str | None) -> str:
    """The call's one key or token. Raises RefusedError."""
    if authorization is None and api_key_header is None:
        raise RefusedError(AuthRefusal.MISSING)
    if authorization is None or api_key_header is None:
        text = authorization or api_key_header or ""
    else:
        # With two credentials, the choice between them would be arbitrary.
        raise RefusedError(AuthRefusal.MALFORMED)
    if len(text) > MOST_CHARACTERS:
        raise RefusedError(AuthRefusal.MALFORMED)
    if authorization is None:
        return text.strip()
    scheme, _, shown = authorization.partition(" ")
    if scheme.lower() != "bearer" or not shown.strip():
        raise RefusedError(AuthRefusal.MALFORMED)
    return shown.strip()


def _only(connection: HTTPConnection, name: bytes) -> str | None:
    """The header's value. A repeated header is not used: a proxy in front may have read the other value."""
    values = [value for header, value in connection.scope["headers"] if header == name]
    return _SEVERAL if len(values) > 1 else (values[0].decode("latin-1") if values else None)
