"""The gate of every route: who calls, and whether that one may call so often."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fairlane.settings import Network
from producers.gateway.edge.addresses import address_of
from producers.gateway.identity.authenticator import Authenticator
from producers.gateway.identity.principal import Identity
from producers.gateway.limits.call_limits import CallLimits, headers_of, refusal
from producers.gateway.limits.rate_buckets import Allowance

_ALLOWANCE = "fairlane_allowance"
_CHALLENGE = (b"www-authenticate", b'Bearer realm="fairlane"')
_SEVERAL = "several"
"""Stands for several headers of one name: neither a scheme nor a key."""


class Gate:
    """A dependency of FastAPI for routes of HTTP and of WebSockets: ``Depends(gate)`` is the Identity of the call.

    Raises GatewayError: 401, 403, 429 and 503 as ``Authenticator`` does, 429 with ``retry_after_ms``.

    Args:
        authenticator: knows callers.
        limits: of calls.
        trusted_proxies: networks whose word for a caller's address is taken.
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
        """Who shows these headers, where that is no call of its own: no limit counts it. Raises GatewayError: 401, 403
        and 503."""
        return await self._authenticator.authenticate(
            _only(connection, b"authorization"), _only(connection, b"x-api-key"), self._address(connection)
        )

    def _address(self, connection: HTTPConnection) -> str | None:
        client = connection.scope.get("client")
        if client is None:
            return None
        forwarded = [value for name, value in connection.scope["headers"] if name == b"x-forwarded-for"]
        return address_of(tuple(client), forwarded, self._trusted_proxies)


class GateHeaders:
    """ASGI middleware: what is left of the caller's limit in every answer behind the gate, and with 401 how to ask."""

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
    # No route of ours sets one of these.
    added = [_CHALLENGE] if message["status"] == 401 else []
    allowance: Any = scope.get(_ALLOWANCE)
    if isinstance(allowance, Allowance):
        added += [(name.encode(), value.encode()) for name, value in headers_of(allowance).items()]
    if added:
        message["headers"] = [*message.get("headers", ()), *added]


def _only(connection: HTTPConnection, name: bytes) -> str | None:
    """The header, if there is one. Of two, a proxy before us may have read the other."""
    values = [value for header, value in connection.scope["headers"] if header == name]
    return _SEVERAL if len(values) > 1 else (values[0].decode("latin-1") if values else None)
