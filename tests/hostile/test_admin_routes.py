"""A hostile tenant with real credentials tries every route of the admin API in every way of showing who it is."""

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from random import Random
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import httpx
import pytest
from fastapi import FastAPI

from fairlane.settings import Settings
from fairlane_server.api_keys.api_key import DEPLOYMENT, Role, Scope
from fairlane_server.api_keys.permissions import GRANTABLE
from fairlane_server.circuit_breaker import CircuitBreaker
from producers.admin.app import AdminApi
from producers.gateway.identity.api_keys import KeyVerifier
from producers.gateway.identity.authentication import Authenticator
from producers.gateway.identity.jwks import KeySet
from producers.gateway.identity.tokens import SignedTokens, TokenVerifier
from producers.gateway.identity.users import Users
from producers.gateway.limits.rate_buckets import RatePolicy
from producers.gateway.limits.rate_limits import CallLimits, LocalRateLimits
from tests.kit.identity_kit import AUDIENCE, ISSUER, Clock, FakeIssuer, MemoryIdentityStore, claims, rsa_key, token
from tests.kit.permission_matrix import PUBLIC, routes_of

TRIES = 1_000
SEED = 43
_MANY = RatePolicy(1_000_000.0, 1_000_000)
_NAMES = (
    "acme",
    "globex",
    DEPLOYMENT,
    "*",
    "_",
    "..",
    "%2e%2e",
    "acme%00",
    "ACME",
    "0123456789abcdef",
    "work",
    "0",
    "-1",
)
_BODIES = (
    b"",
    b"{}",
    b"[]",
    b"null",
    b'{"tenant": "_deployment", "name": "x", "role": "admin"}',
    b'{"all": true}',
    b"\xff",
)


class Touched:
    """A store that must never be asked."""

    asked: list[str] = []  # noqa: RUF012 - of all of them together

    def __init__(self, *_parts: object) -> None:
        pass

    def close(self) -> None:
        """The process ends."""

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        def ask(*_arguments: object, **_named: object) -> NoReturn:
            self.asked.append(name)
            raise AssertionError(name)

        return ask


@pytest.fixture
def store() -> MemoryIdentityStore:
    return MemoryIdentityStore()


@pytest.fixture
def app(store: MemoryIdentityStore) -> Iterator[FastAPI]:
    clock = Clock()
    keys = KeyVerifier(store, 300_000, clock, clock, CircuitBreaker(), 1_000_000.0)
    users = Users(store, 300_000, clock, CircuitBreaker())
    tokens = TokenVerifier(SignedTokens(ISSUER, AUDIENCE, 30.0, KeySet(FakeIssuer(), clock)), users)
    gate = Authenticator(keys, tokens, CallLimits(LocalRateLimits(clock), _MANY, _MANY, clock), clock)
    with ExitStack() as patched:
        patched.enter_context(
            patch("producers.admin.app.authentication", lambda *_parts, **_more: SimpleNamespace(authenticator=gate))
        )
        for name in ("ApiKeys", "AdminAudit", "Tenants", "DeadLetterOffice", "Observer"):
            patched.enter_context(patch(f"producers.admin.app.{name}", Touched))
        yield AdminApi(Settings()).app
    assert Touched.asked == []


def credentials(store: MemoryIdentityStore) -> list[dict[str, str]]:
    """All that a tenant, or somebody who knows its tenant's keys and can get tokens, could show."""
    shown: list[str] = []
    for role in Role:
        shown.append(store.create("acme", role).text)
        shown.append(store.create("acme", role, (Scope.IDENTITIES, Scope.TENANTS)).text)
        for tenant in ("acme", DEPLOYMENT, f"{DEPLOYMENT} ", DEPLOYMENT.upper(), "*"):
            shown.append(token(claims(tenant=tenant, role=role.value, roles=[one.value for one in Role])))
            shown.append(token(claims(tenant=tenant, role=role.value, grants=[*map(str, GRANTABLE)], scope="admin")))
    of_another = store.create(DEPLOYMENT, Role.ADMIN).text
    # Its id is in logs and lists; its secret is not.
    shown.append(of_another[:20] + "A" * 43)
    shown.append(token(claims(tenant=DEPLOYMENT, role="admin"), private=rsa_key("another")))
    headers = [{"authorization": f"Bearer {one}"} for one in shown] + [{"x-api-key": one} for one in shown]
    return [*headers, {}, {"authorization": "Bearer "}, {"authorization": "Basic YWRtaW46YWRtaW4="}]


def test_no_credential_of_a_tenant_reaches_a_store(app: FastAPI, store: MemoryIdentityStore) -> None:
    random = Random(SEED)
    shown, routes = credentials(store), [one for one in routes_of(app) if one.path not in PUBLIC]
    outcomes: dict[int, int] = {}

    async def attack() -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
            for _ in range(TRIES):
                route = random.choice(routes)
                path = re.sub(r"\{[a-z_]+\}", lambda _found: random.choice(_NAMES), route.path)
                headers = {**random.choice(shown), "if-match": '"*"', "x-forwarded-for": "127.0.0.1"}
                query: dict[str, Any] = random.choice(
                    [{}, {"tenant": DEPLOYMENT}, {"adopt": "true"}, {"cursor": "AAAA"}]
                )
                method = random.choice([*route.methods, "PATCH", "HEAD"])
                answer = await client.request(
                    method, path, headers=headers, params=query, content=random.choice(_BODIES)
                )
                outcomes[answer.status_code] = outcomes.get(answer.status_code, 0) + 1
                assert answer.status_code in (401, 403, 404, 405), (method, path, answer.status_code, answer.text)

    asyncio.run(attack())
    assert {401, 403} <= outcomes.keys()
    assert outcomes[403] > TRIES // 10


def test_the_attack_would_find_an_open_route(app: FastAPI, store: MemoryIdentityStore) -> None:
    """With an administrator's key the same call reaches a store."""

    async def ask() -> int:
        headers = {"authorization": f"Bearer {store.create(DEPLOYMENT, Role.ADMIN).text}"}
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://admin", headers=headers) as client:
            return (await client.get("/v1/admin/keys")).status_code

    assert asyncio.run(ask()) == 500
    assert Touched.asked == ["list"]
    Touched.asked.clear()
