"""Sessions of browsers at the admin API: every route as every role, with and without what our own pages send."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest

from fairlane.settings import Settings
from fairlane_server.api_keys.api_key import DEPLOYMENT, Role
from fairlane_server.api_keys.key_store import Author
from fairlane_server.api_keys.permissions import DEPLOYMENT_ROLES, Permission
from fairlane_server.circuit_breaker import CircuitBreaker
from fairlane_server.sessions.session import Session, csrf_token_of, new_secret
from producers.admin.app import AdminApi
from producers.gateway.identity.api_keys import KeyVerifier
from producers.gateway.identity.authentication import Authenticator
from producers.gateway.identity.browser_sessions import BrowserSessions
from producers.gateway.identity.site import Site
from producers.gateway.identity.users import Users
from producers.gateway.limits.rate_buckets import RatePolicy
from producers.gateway.limits.rate_limits import CallLimits, LocalRateLimits
from tests.kit.admin_kit import Away, admin_api
from tests.kit.identity_kit import Clock, MemoryIdentityStore
from tests.kit.permission_matrix import PUBLIC, routes_of
from tests.kit.session_kit import LIMITS, MemorySessions

ORIGIN = "https://fairlane.example"
COOKIE = "__Host-fairlane-session"
TENANT_USER = ("acme", Role.TENANT)
USERS = [*((DEPLOYMENT, role) for role in DEPLOYMENT_ROLES), TENANT_USER, ("acme", Role.ADMIN)]
READING = {"GET", "HEAD", "OPTIONS"}
OIDC: dict[str, Any] = {
    "oidc_issuer": "https://login.example/realm",
    "oidc_client_id": "console",
    "oidc_redirect_url": f"{ORIGIN}/auth/callback",
}


class Bench:
    """The application with sessions in memory."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.users = MemoryIdentityStore()
        self.sessions = MemorySessions(self.clock)
        users = Users(self.users, 300_000, self.clock, CircuitBreaker())
        shown = BrowserSessions(Site(httpx.URL(f"{ORIGIN}/auth/callback")), self.sessions, users)
        keys = KeyVerifier(self.users, 300_000, self.clock, self.clock, CircuitBreaker(), 1.0)
        many = RatePolicy(1e6, 1_000_000)
        limits = CallLimits(LocalRateLimits(self.clock), many, many, self.clock)
        self.gate = Authenticator(keys, None, limits, self.clock, (), shown)
        self.keys = Away()
        self.app = admin_api(Settings(), self.gate, self.keys).app

    async def log_in(self, tenant: str, role: Role, subject: str = "u-17") -> str:
        """The id of a new session of a user that has this role."""
        session_id = new_secret()
        self.users.set_user(tenant, subject, role)
        await self.sessions.create(session_id, Session(tenant, subject, None, self.clock(), self.clock()))
        return session_id


Use = Callable[[Bench, httpx.AsyncClient], Awaitable[None]]


def run(use: Use) -> None:
    async def within_a_loop() -> None:
        bench = Bench()
        transport = httpx.ASGITransport(bench.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=ORIGIN) as client:
            await use(bench, client)
        await bench.gate.close()

    asyncio.run(within_a_loop())


def cookie(session_id: str) -> dict[str, str]:
    return {"cookie": f"{COOKIE}={session_id}"}


def own(session_id: str) -> dict[str, str]:
    """What one of our own pages sends."""
    return cookie(session_id) | {"x-csrf-token": csrf_token_of(session_id)}


def error(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def sent_by(session_id: str, other: str) -> Iterator[tuple[str, bool, dict[str, str]]]:
    """A name, whether our own pages send this, and what is sent."""
    token = own(session_id)
    yield "our page", True, token
    yield "our page, as browsers say", True, token | {"origin": ORIGIN, "sec-fetch-site": "same-origin"}
    yield "no token", False, cookie(session_id)
    yield "no token, with our origin", False, cookie(session_id) | {"origin": ORIGIN, "sec-fetch-site": "same-origin"}
    yield "the token of another session", False, token | {"x-csrf-token": csrf_token_of(other)}
    yield "another origin", False, token | {"origin": "https://evil.example"}
    yield "our name without TLS", False, token | {"origin": "http://fairlane.example"}
    yield "no origin that it may say", False, token | {"origin": "null"}
    yield "a host of the same domain", False, token | {"sec-fetch-site": "same-site"}
    yield "another site", False, token | {"sec-fetch-site": "cross-site"}


def may(tenant: str, role: Role, permission: Permission) -> bool:
    return tenant == DEPLOYMENT and permission in DEPLOYMENT_ROLES[role]


def test_every_route_lets_in_whom_the_table_names_from_our_own_pages_alone() -> None:
    async def use(bench: Bench, client: httpx.AsyncClient) -> None:
        other = await bench.log_in(DEPLOYMENT, Role.ADMIN, "u-18")
        calls, wrong = 0, []
        for tenant, role in USERS:
            session_id = await bench.log_in(tenant, role, f"{role}-of-{tenant}")
            for route in routes_of(bench.app):
                if route.path in PUBLIC:
                    continue
                (permission,) = route.permissions
                path = re.sub(r"\{[a-z_]+\}", "x", route.path)
                for method in route.methods:
                    for name, is_ours, headers in sent_by(session_id, other):
                        answer = await client.request(method, path, headers=headers)
                        calls += 1
                        code = answer.json()["error"]["code"] if answer.status_code == 403 else None
                        if method not in READING and not is_ours:
                            expected: str | None = "csrf_failed"
                        else:
                            expected = None if may(tenant, role, permission) else "forbidden"
                        if code != expected or answer.status_code == 401:
                            wrong.append(f"{method} {path} as {role} of {tenant}, {name}: {answer.text[:200]}")
        assert wrong == []
        assert calls > 500

    run(use)


def test_a_change_names_the_user_of_its_session() -> None:
    async def use(bench: Bench, client: httpx.AsyncClient) -> None:
        session_id = await bench.log_in(DEPLOYMENT, Role.ADMIN)
        body = {"tenant": "acme", "name": "x"}
        answer = await client.post("/v1/admin/keys", json=body, headers=cookie(session_id))
        assert error(answer) == (403, "csrf_failed")
        assert bench.keys.asked == []
        answer = await client.post("/v1/admin/keys", json=body, headers=own(session_id))
        assert error(answer) == (503, "unavailable")
        ((name, named),) = bench.keys.asked
        author = named["author"]
        assert isinstance(author, Author)
        assert (name, author.name) == ("create", "user:u-17")

    run(use)


def test_a_session_ends_by_its_limits_when_it_is_ended_and_with_its_user() -> None:
    async def use(bench: Bench, client: httpx.AsyncClient) -> None:
        async def read(session_id: str) -> httpx.Response:
            return await client.get("/v1/admin/keys", headers=cookie(session_id))

        no_session = 401, "no_session"
        used = await bench.log_in(DEPLOYMENT, Role.ADMIN)
        for _ in range(6):
            bench.clock.now_ms += LIMITS.idle_ms - 1
            assert error(await read(used)) == (503, "unavailable")
        bench.clock.now_ms += 7
        assert error(await read(used)) == no_session
        idle = await bench.log_in(DEPLOYMENT, Role.ADMIN)
        bench.clock.now_ms += LIMITS.idle_ms
        assert error(await read(idle)) == no_session
        ended = await bench.log_in(DEPLOYMENT, Role.ADMIN)
        assert error(await read(ended)) == (503, "unavailable")
        assert await bench.sessions.end_all(DEPLOYMENT, "u-17") == 3
        assert error(await read(ended)) == no_session

        session_id = await bench.log_in(DEPLOYMENT, Role.ADMIN)
        bench.users.set_user(DEPLOYMENT, "u-17", Role.VIEWER)
        bench.clock.now_ms += 1_000
        assert error(await read(session_id)) == (403, "forbidden")
        bench.users.set_user(DEPLOYMENT, "u-17", Role.ADMIN, disabled=True)
        bench.clock.now_ms += 1_000
        assert error(await read(session_id)) == (403, "user_disabled")
        assert bench.sessions.kept == {}

    run(use)


def test_what_a_session_says_makes_nobody_an_operator() -> None:
    async def use(bench: Bench, client: httpx.AsyncClient) -> None:
        session_id = new_secret()
        now = bench.clock()
        await bench.sessions.create(session_id, Session(DEPLOYMENT, "unknown", Role.ADMIN, now, now))
        assert error(await client.get("/v1/admin/keys", headers=cookie(session_id))) == (403, "forbidden")

    run(use)


def test_a_key_counts_and_the_cookie_beside_it_does_not() -> None:
    async def use(bench: Bench, client: httpx.AsyncClient) -> None:
        session_id = await bench.log_in(DEPLOYMENT, Role.ADMIN)
        shown = own(session_id)
        of_tenant = {"authorization": f"Bearer {bench.users.create('acme').text}"}
        assert error(await client.get("/v1/admin/keys", headers=shown | of_tenant)) == (403, "forbidden")
        wrong = await client.get("/v1/admin/keys", headers=shown | {"x-api-key": "wrong"})
        assert error(wrong) == (401, "invalid_api_key")

    run(use)


def test_without_redis_keys_go_on_and_sessions_do_not() -> None:
    async def use(bench: Bench, client: httpx.AsyncClient) -> None:
        session_id = await bench.log_in(DEPLOYMENT, Role.ADMIN)
        key = {"authorization": f"Bearer {bench.users.create('acme').text}"}
        bench.sessions.is_away = True
        answer = await client.get("/v1/admin/keys", headers=cookie(session_id))
        assert error(answer) == (503, "sessions_unavailable")
        assert answer.headers["retry-after"]
        assert error(await client.get("/v1/admin/keys", headers=key)) == (403, "forbidden")

    run(use)


def test_nobody_logs_in_here_and_without_an_issuer_a_cookie_is_nothing() -> None:
    async def called(api: AdminApi) -> tuple[int, str]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(api.app), base_url=ORIGIN) as client:
            return error(await client.get("/v1/admin/keys", headers=cookie(new_secret())))

    redis = "redis://127.0.0.1:1/0"
    assert asyncio.run(called(admin_api(Settings(redis_url=redis)))) == (401, "invalid_api_key")
    # Unless it is asked for, what the gateway knows opens nothing here.
    assert asyncio.run(called(admin_api(Settings(redis_url=redis, **OIDC)))) == (401, "invalid_api_key")
    api = admin_api(Settings(redis_url=redis, **OIDC, admin_sessions=True))
    assert not [route.path for route in routes_of(api.app) if route.path.startswith("/auth")]
    assert asyncio.run(called(api)) == (503, "sessions_unavailable")
    with pytest.raises(ValueError, match="REDIS_URL is needed with OIDC_ISSUER"):
        admin_api(Settings(**OIDC, admin_sessions=True))
    with pytest.raises(ValueError, match="OIDC_ISSUER is needed with ADMIN_SESSIONS"):
        Settings(admin_sessions=True)
