"""Authentication and rate limit of every route."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fairlane.settings import Network
from producers.gateway.edge.addresses import address_of
from producers.gateway.identity.authenticator import Authenticator
from producers.gateway.identity.identity import Identity
from producers.gateway.limits.call_limits import CallLimits, headers_of, refusal
from producers.gateway.limits.rate_buckets import Allowance

_ALLOWANCE = "fairlane_allowance"
_CHALLENGE = (b"www-authenticate", b'Bearer realm="fairlane"')
_SEVERAL = "several"
"""Replaces repeated headers of one name; it is neither a scheme nor a key, so it is refused."""


class AuthenticatedCall:
    """FastAPI dependency for HTTP and WebSocket routes: ``Depends(gate)`` is the Identity of the call.

    Raises GatewayError as ``Authenticator`` does, and 429 with ``retry_after_ms`` over the rate limit.

    Args:
        authenticator: authenticates calls.
        limits: rate limits of calls.
        trusted_proxies: networks whose X-Forwarded-For is trusted.
    """

    def __init__(
        self, authenticator: Authenticator, limits: CallLimits, trusted_proxies: Sequence[Network] = ()
    ) -> None:
        self._authenticator = authenticator
        self._limits = limits
        self._trusted_proxies = trusted_proxies

    async def __call__(self, connection: HTTPConnection) -> Identity:
        identity = await self.identify(connection)
        allowance = await self._limits.take(identity)
        connection.scope[_ALLOWANCE] = allowance
        if not allowance.is_granted:
            raise refusal(allowance)
        return identity

    async def identify(self, connection: HTTPConnection) -> Identity:
        """The identity of these headers, without counting a call against its rate limit. Raises GatewayError as
        ``Authenticator`` does."""
        return await self._authenticator.authenticate(
            _only(connection, b"authorization"), _only(connection, b"x-api-key"), self._address(connection)
        )

    def _address(self, connection: HTTPConnection) -> str | None:
        client = connection.scope.get("client")
        if client is None:
            return None
        forwarded = [value for name, value in connection.scope["headers"] if name == b"x-forwarded-for"]
        return address_of(tuple(client), forwarded, self._trusted_proxies)


class RateLimitHeaders:
    """ASGI middleware: adds the caller's remaining rate limit to answers, and the challenge to a 401."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                _add(scope, message)
            await send(message)

        await self._app(scope, receive, send_with_headers)


def _add(scope: Scope, message: Message) -> None:
    # No route sets these headers itself.
    added = [_CHALLENGE] if message["status"] == 401 else []
    allowance: Any = scope.get(_ALLOWANCE)
    if isinstance(allowance, Allowance):
        added += [(name.encode(), value.encode()) for name, value in headers_of(allowance).items()]
    if added:
        message["headers"] = [*message.get("headers", ()), *added]


def _only(connection: HTTPConnection, name: bytes) -> str | None:
    """The header's value. A repeated header is not used: a proxy in front may have read the other value."""
    values = [value for header, value in connection.scope["headers"] if header == name]
    return _SEVERAL if len(values) > 1 else (values[0].decode("latin-1") if values else None)
