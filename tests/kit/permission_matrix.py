"""Every route of an application called as every role and scope; who may is known from the table of permissions."""

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
from fastapi import FastAPI
from fastapi.routing import APIRoute, APIWebSocketRoute, iter_route_contexts
from starlette.requests import HTTPConnection

from fairlane_server.api_keys.api_key import DEPLOYMENT
from fairlane_server.api_keys.permissions import (
    DEPLOYMENT_ROLES,
    GRANTABLE,
    OF_DEPLOYMENT,
    OF_TENANTS,
    SCOPES,
    TENANT_ROLES,
    Permission,
)
from producers.gateway.identity.identity import Identity, Role, permissions_of
from producers.openai_api.errors import GatewayError

PUBLIC = frozenset({"/health", "/health/ready"})
"""Routes that ask for no identity."""
_REFUSALS = frozenset({"forbidden", "insufficient_scope"})
_CALL_TIMEOUT_S = 20.0
_ID = "0b0f1b52-6a3f-4f0e-9a55-0c6f6f5d8a11"


def _identities() -> Iterator[tuple[str, Identity]]:
    for role in TENANT_ROLES:
        yield f"{role} of acme", Identity("acme", "key", role)
        # What only the deployment can be granted.
        yield f"{role} of acme with grants", Identity("acme", "key", role, grants=GRANTABLE)
    for role in DEPLOYMENT_ROLES:
        yield f"{role} of the deployment", Identity(DEPLOYMENT, "key", role)
        yield f"{role} of the deployment with grants", Identity(DEPLOYMENT, "key", role, grants=GRANTABLE)
    yield "tenant of the deployment", Identity(DEPLOYMENT, "key", Role.TENANT)
    for scope in SCOPES:
        yield f"tenant of acme with {scope}", Identity("acme", "key", Role.TENANT, frozenset({scope}))
        yield f"admin of the deployment with {scope}", Identity(DEPLOYMENT, "key", Role.ADMIN, frozenset({scope}))


IDENTITIES = dict(_identities())


class ScriptedAuthenticator:
    """The identity that a call names in its authorization."""

    async def __call__(self, connection: HTTPConnection) -> Identity:
        identity = IDENTITIES.get(connection.headers.get("authorization", ""))
        if identity is None:
            raise GatewayError(401, "invalid_api_key", "no identity")
        return identity

    identify = __call__

    async def close(self) -> None:
        """Nothing to close."""


@dataclass(frozen=True, slots=True)
class DeclaredRoute:
    """A route and the permission that it declares."""

    methods: tuple[str, ...]
    path: str
    permissions: frozenset[Permission]
    is_socket: bool = False


def routes_of(app: FastAPI) -> list[DeclaredRoute]:
    """All routes but FastAPI's own pages of documentation."""
    found = []
    for context in iter_route_contexts(app.routes):
        route, path = context.original_route, context.path
        if isinstance(route, APIRoute | APIWebSocketRoute) and path is not None:
            methods = tuple(sorted(route.methods or ())) if isinstance(route, APIRoute) else ("GET",)
            is_socket = isinstance(route, APIWebSocketRoute)
            found.append(DeclaredRoute(methods, path, permissions_of(route.dependant), is_socket))
    return found


def undeclared(app: FastAPI) -> list[str]:
    """Paths of routes that do not name exactly one permission, and of public ones that name any."""
    return [one.path for one in routes_of(app) if len(one.permissions) != (one.path not in PUBLIC)]


def may(name: str, permission: Permission) -> bool:
    """Whether this identity has the permission: once more from the table, by other code than the routes use."""
    identity = IDENTITIES[name]
    is_of_deployment = identity.tenant == DEPLOYMENT
    if permission not in (OF_DEPLOYMENT if is_of_deployment else OF_TENANTS):
        return False
    if identity.scopes and permission is not Permission.MODELS_READ:
        return any(permission in SCOPES[scope] for scope in identity.scopes)
    if is_of_deployment and permission in GRANTABLE and identity.grants:
        return True
    return permission in (DEPLOYMENT_ROLES if is_of_deployment else TENANT_ROLES).get(identity.role, ())


def deviations(app: FastAPI) -> tuple[int, list[str]]:
    """Calls each route as each identity and as nobody. Returns the number of calls, and those answered wrongly."""
    return asyncio.run(_called(app))


async def _called(app: FastAPI) -> tuple[int, list[str]]:
    wrong: list[str] = []
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    calls = 0
    async with httpx.AsyncClient(transport=transport, base_url="http://fairlane", timeout=_CALL_TIMEOUT_S) as client:
        for route in routes_of(app):
            if route.path in PUBLIC or route.is_socket:
                continue
            (permission,) = route.permissions
            path = re.sub(r"\{[a-z_]+(:path)?\}", _ID, route.path)
            for method in route.methods:
                for name in IDENTITIES:
                    answer = await client.request(method, path, headers={"authorization": name})
                    is_refused = answer.status_code == 403 and _code(answer) in _REFUSALS
                    calls += 1
                    if is_refused is may(name, permission) or answer.status_code == 401:
                        wrong.append(f"{method} {route.path} as {name}: {answer.status_code} {answer.text[:200]}")
                calls += 1
                if (status := (await client.request(method, path)).status_code) != 401:
                    wrong.append(f"{method} {route.path} as nobody: {status}")
    return calls, wrong


def _code(answer: httpx.Response) -> str:
    body = answer.json()
    return str(body["error"]["code"] if "error" in body else body["code"])
