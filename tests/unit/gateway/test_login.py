"""Logins of browsers, from the redirect to the end of the session, and what attackers try with them."""

import asyncio
import io
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any
from urllib.parse import parse_qs, urlsplit

import httpx
import jwt
import pytest
from fastapi import Depends, FastAPI, WebSocket
from prometheus_client import REGISTRY

from fairlane.settings import Settings
from fairlane_server.api_keys.api_key import Role
from fairlane_server.circuit_breaker import CircuitBreaker
from fairlane_server.redis.availability import WatchedRedis
from fairlane_server.sessions.session import Session, digest_of, new_secret
from producers.gateway.edge import error_responses
from producers.gateway.edge.access_log import CallLog
from producers.gateway.identity.api_keys import KeyVerifier
from producers.gateway.identity.authentication import Authenticator
from producers.gateway.identity.browser_sessions import BrowserSessions
from producers.gateway.identity.compose import browser_sessions
from producers.gateway.identity.identity import Identity, Permission, require
from producers.gateway.identity.site import Site
from producers.gateway.identity.users import Users
from producers.gateway.limits.rate_buckets import RatePolicy
from producers.gateway.limits.rate_limits import CallLimits, LocalRateLimits
from producers.gateway.login.compose import browser_login
from producers.gateway.login.login import OF_ADDRESS, BrowserLogin
from producers.gateway.login.oidc_client import OidcClient
from producers.gateway.login.return_to import checked_path
from producers.gateway.login.routes import router
from tests.kit.identity_kit import Clock, MemoryIdentityStore, rsa_key
from tests.kit.session_kit import (
    CLIENT_ID,
    CLIENT_SECRET,
    LIMITS,
    MemoryLogins,
    MemorySessions,
    ScriptedIssuer,
    cookies_of,
    scripted_issuer,
)

ORIGIN = "https://console.example"
SESSION, LOGIN = "__Host-fairlane-session", "__Host-fairlane-login"


class Bench:
    """An application with a login, its stores, and its issuer."""

    def __init__(self, issuer: ScriptedIssuer, origin: str = ORIGIN) -> None:
        self.issuer = issuer
        self.clock = Clock()
        self.users = MemoryIdentityStore()
        self.sessions = MemorySessions(self.clock)
        self.logins = MemoryLogins(self.clock)
        users = Users(self.users, 300_000, self.clock, CircuitBreaker())
        redirect_url = f"{origin}/auth/callback"
        client = OidcClient(issuer.url, CLIENT_ID, CLIENT_SECRET, "openid", redirect_url, 30.0, self.clock)
        shown = BrowserSessions(Site(httpx.URL(redirect_url)), self.sessions, users)
        self.login = BrowserLogin(client, self.logins, shown, users, self.clock, self.clock)
        keys = KeyVerifier(self.users, 300_000, self.clock, self.clock, CircuitBreaker(), 1.0)
        limits = CallLimits(LocalRateLimits(self.clock), RatePolicy(100.0, 100), RatePolicy(100.0, 100), self.clock)
        self.gate = Authenticator(keys, None, limits, self.clock, (), shown)
        self.app = FastAPI()
        error_responses.install(self.app)
        self.app.include_router(router(self.login, ()))

        @self.app.get("/who")
        async def who(identity: Annotated[Identity, Depends(self.gate)]) -> dict[str, str]:
            return {"tenant": identity.tenant, "subject": identity.subject, "role": identity.role}

        @self.app.post("/work")
        async def work(
            identity: Annotated[Identity, Depends(require(self.gate, Permission.REQUESTS_SEND))],
        ) -> dict[str, str]:
            return {"tenant": identity.tenant}

        @self.app.websocket("/events")
        async def events(socket: WebSocket, identity: Annotated[Identity, Depends(self.gate)]) -> None:
            await socket.accept()
            await socket.send_text(identity.tenant)


class Browser:
    """A browser: it keeps cookies and does not follow redirects by itself."""

    def __init__(self, bench: Bench, client: httpx.AsyncClient) -> None:
        self.bench = bench
        self.client = client

    async def begin(self, return_to: str = "/console/") -> dict[str, str]:
        """The query with which the issuer sends it back."""
        found = await self.client.get("/auth/login", params={"return_to": return_to})
        assert found.status_code == 303, found.text
        return self.bench.issuer.authorize(found.headers["location"])

    async def come_back(self, query: Any) -> httpx.Response:
        return await self.client.get("/auth/callback", params=query)

    async def log_in(self, return_to: str = "/console/") -> httpx.Response:
        return await self.come_back(await self.begin(return_to))

    async def csrf(self) -> dict[str, str]:
        return {"x-csrf-token": (await self.client.get("/auth/session")).json()["csrf_token"]}


Use = Callable[[Bench, Browser], Awaitable[None]]


def run(use: Use, origin: str = ORIGIN) -> None:
    async def within_a_loop(issuer: ScriptedIssuer) -> None:
        bench = Bench(issuer, origin)
        async with browsing(bench) as client:
            await use(bench, Browser(bench, client))
        await bench.gate.close()
        await bench.login.close()

    with scripted_issuer() as issuer:
        asyncio.run(within_a_loop(issuer))


def browsing(bench: Bench, origin: str = ORIGIN) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(CallLog(bench.app))
    return httpx.AsyncClient(transport=transport, base_url=origin, follow_redirects=False)


def is_refused(response: httpx.Response, status: int, code: str) -> bool:
    assert (response.status_code, response.json()["error"]["code"]) == (status, code), response.text
    return True


# ------------------------------------------------------------------ a login


def test_a_browser_logs_in_calls_and_logs_out() -> None:
    async def use(bench: Bench, browser: Browser) -> None:
        begun = await browser.client.get("/auth/login", params={"return_to": "/console/jobs?page=2"})
        asked = {name: values[0] for name, values in parse_qs(urlsplit(begun.headers["location"]).query).items()}
        assert begun.headers["location"].startswith(f"{bench.issuer.url}/authorize?")
        assert asked["response_type"] == "code"
        assert asked["code_challenge_method"] == "S256"
        assert asked["scope"] == "openid"
        assert asked["redirect_uri"] == f"{ORIGIN}/auth/callback"
        cookie = cookies_of(begun)[LOGIN]
        assert cookie.endswith("; Path=/; Max-Age=600; HttpOnly; SameSite=Lax; Secure")
        # Neither the state nor the secret of the browser is kept as it is.
        assert asked["state"] not in str(bench.logins.kept)
        assert cookie.split(";")[0].partition("=")[2] not in str(bench.logins.kept)

        done = await browser.come_back(bench.issuer.authorize(begun.headers["location"]))
        assert (done.status_code, done.headers["location"]) == (303, f"{ORIGIN}/console/jobs?page=2")
        assert done.headers["cache-control"] == "no-store"
        assert done.headers["referrer-policy"] == "no-referrer"
        cookie = cookies_of(done)[SESSION]
        assert cookie.endswith("; Path=/; Max-Age=3600; HttpOnly; SameSite=Lax; Secure")
        session_id = browser.client.cookies[SESSION]
        assert [*bench.sessions.kept] == [digest_of(session_id)]

        who = await browser.client.get("/who")
        assert who.json() == {"tenant": "acme", "subject": "u-17", "role": "tenant"}
        info = (await browser.client.get("/auth/session")).json()
        assert info["expires_at_ms"] == bench.clock() + LIMITS.absolute_ms
        assert info["idle_expires_at_ms"] == bench.clock() + LIMITS.idle_ms
        csrf = {"x-csrf-token": info["csrf_token"]}
        assert (await browser.client.post("/work", headers=csrf)).status_code == 200

        out = await browser.client.post("/auth/logout", headers=csrf)
        logout = urlsplit(out.json()["end_session_url"])
        assert f"{logout.scheme}://{logout.netloc}{logout.path}" == f"{bench.issuer.url}/logout"
        assert parse_qs(logout.query) == {"client_id": [CLIENT_ID], "post_logout_redirect_uri": [f"{ORIGIN}/"]}
        assert SESSION not in browser.client.cookies
        assert bench.sessions.kept == {}
        browser.client.cookies.set(SESSION, session_id)
        assert is_refused(await browser.client.get("/who"), 401, "no_session")

    run(use)


def test_logins_in_two_windows_of_a_browser_both_succeed() -> None:
    async def use(bench: Bench, browser: Browser) -> None:
        first, second = await browser.begin("/a"), await browser.begin("/b")
        assert (await browser.come_back(first)).headers["location"] == f"{ORIGIN}/a"
        assert (await browser.come_back(second)).headers["location"] == f"{ORIGIN}/b"

    run(use)


def test_over_http_on_this_machine_cookies_have_no_prefix() -> None:
    async def use(bench: Bench, browser: Browser) -> None:
        async with browsing(bench, "http://127.0.0.1:8080") as client:
            done = await Browser(bench, client).log_in()
            assert cookies_of(done)["fairlane-session"].endswith("; HttpOnly; SameSite=Lax")
            assert (await client.get("/who")).status_code == 200

    run(use, "http://127.0.0.1:8080")


def test_the_settings_of_a_user_override_the_token_and_end_its_sessions() -> None:
    async def use(bench: Bench, browser: Browser) -> None:
        bench.issuer.claims["role"] = None
        assert is_refused(await browser.log_in(), 403, "forbidden")
        bench.users.set_user("acme", "u-17", Role.VIEWER)
        bench.clock.now_ms += 1_000
        await browser.log_in()
        assert (await browser.client.get("/who")).json()["role"] == "viewer"
        assert is_refused(await browser.client.post("/work", headers=await browser.csrf()), 403, "forbidden")
        bench.users.set_user("acme", "u-17", Role.TENANT)
        bench.clock.now_ms += 1_000
        assert (await browser.client.get("/who")).json()["role"] == "tenant"
        bench.users.set_user("acme", "u-17", Role.TENANT, disabled=True)
        bench.clock.now_ms += 1_000
        assert is_refused(await browser.client.get("/who"), 403, "user_disabled")
        assert bench.sessions.kept == {}
        assert is_refused(await browser.log_in(), 403, "user_disabled")
        bench.users.set_user("acme", "u-17", Role.TENANT)
        bench.clock.now_ms += 1_000
        assert is_refused(await browser.client.get("/who"), 401, "no_session")

    run(use)


def test_a_login_without_a_tenant_is_refused() -> None:
    async def use(bench: Bench, browser: Browser) -> None:
        for tenant in (None, "Not A Tenant", 7):
            bench.issuer.claims["tenant"] = tenant
            assert is_refused(await browser.log_in(), 403, "forbidden")
        assert bench.sessions.kept == {}

    run(use)


# ------------------------------------------------------------------ the end of a session


def test_a_session_ends_without_use_and_at_the_latest() -> None:
    async def use(bench: Bench, browser: Browser) -> None:
        await browser.log_in()
        for _ in range(6):
            bench.clock.now_ms += LIMITS.idle_ms - 1
            assert (await browser.client.get("/who")).status_code == 200
        # The longest life is over soon, whatever the use.
        bench.clock.now_ms += 7
        assert is_refused(await browser.client.get("/who"), 401, "no_session")
        await browser.log_in()
        bench.clock.now_ms += LIMITS.idle_ms
        assert is_refused(await browser.client.get("/who"), 401, "no_session")

    run(use)


def test_asking_who_is_logged_in_and_watching_a_stream_are_no_use() -> None:
    async def use(bench: Bench, browser: Browser) -> None:
        await browser.log_in()
        bench.clock.now_ms += LIMITS.idle_ms // 2
        assert (await browser.client.get("/auth/session")).status_code == 200
        scope = {"type": "http", "method": "GET", "headers": [(b"cookie", _cookie(browser).encode())]}
        assert (await bench.gate.identify(_connection(scope))).subject == "u-17"
        bench.clock.now_ms += LIMITS.idle_ms // 2
        assert is_refused(await browser.client.get("/auth/session"), 401, "no_session")

    run(use)


def test_a_user_has_few_sessions_and_can_end_all() -> None:
    async def use(bench: Bench, browser: Browser) -> None:
        await browser.log_in()
        first = browser.client.cookies[SESSION]
        for _ in range(10):
            async with browsing(bench) as other:
                await Browser(bench, other).log_in()
        browser.client.cookies.set(SESSION, first, domain="console.example")
        assert is_refused(await browser.client.get("/who"), 401, "no_session")
        await browser.log_in()
        assert len(bench.sessions.kept) == 10
        out = await browser.client.post("/auth/logout", params={"everywhere": True}, headers=await browser.csrf())
        assert out.status_code == 200
        assert bench.sessions.kept == {}

    run(use)


# ------------------------------------------------------------------ attacks on the login


def test_a_state_counts_once_in_one_browser_and_for_ten_minutes() -> None:
    async def use(bench: Bench, browser: Browser) -> None:
        query = await browser.begin()
        assert (await browser.come_back(query)).status_code == 303
        assert is_refused(await browser.come_back(query), 400, "login_failed")
        # Somebody's login in another browser would be a session of theirs there.
        query = await browser.begin()
        async with browsing(bench) as other:
            assert is_refused(await Browser(bench, other).come_back(query), 400, "login_failed")
            await Browser(bench, other).begin()
            assert is_refused(await Browser(bench, other).come_back(query), 400, "login_failed")
        assert is_refused(await browser.come_back(query), 400, "login_failed")
        query = await browser.begin()
        bench.clock.now_ms += 600_000
        assert is_refused(await browser.come_back(query), 400, "login_failed")
        for state in ("", new_secret(), "x" * 5_000, "\N{SNOWMAN}"):
            assert is_refused(await browser.come_back({"code": "code", "state": state}), 400, "login_failed")
        query = await browser.begin()
        twice = [("state", query["state"]), ("state", query["state"]), ("code", query["code"])]
        assert is_refused(await browser.come_back(twice), 400, "login_failed")

    run(use)


@pytest.mark.parametrize(
    "claims",
    [
        {"nonce": "another"},
        {"nonce": None},
        {"nonce": 7},
        {"aud": "another-client"},
        {"aud": [CLIENT_ID, "another-client"]},
        {"azp": "another-client"},
        {"iss": "https://other.example/realm"},
        {"exp": 1_700_000_000},
        {"exp": None},
        {"iat": None},
        {"at_hash": "AAAAAAAAAAAAAAAAAAAAAA"},
        {"sub": ""},
        {"sub": None},
    ],
)
def test_a_token_that_is_not_of_this_login_is_refused(claims: dict[str, Any]) -> None:
    async def use(bench: Bench, browser: Browser) -> None:
        bench.issuer.claims |= claims
        assert is_refused(await browser.log_in(), 400, "login_failed")
        assert bench.sessions.kept == {}

    run(use)


def test_a_token_for_several_audiences_names_its_party() -> None:
    async def use(bench: Bench, browser: Browser) -> None:
        bench.issuer.claims |= {"aud": [CLIENT_ID, "another"], "azp": CLIENT_ID, "at_hash": None}
        assert (await browser.log_in()).status_code == 303

    run(use)


def test_a_token_of_another_signer_is_refused() -> None:
    async def use(bench: Bench, browser: Browser) -> None:
        claims = {"iss": bench.issuer.url, "aud": CLIENT_ID, "sub": "u-1", "tenant": "acme", "exp": 4_000_000_000}
        for forged in (
            jwt.encode(claims, rsa_key("other"), "RS256", headers={"kid": "rsa-1"}),
            jwt.encode(claims, "k" * 32, "HS256", headers={"kid": "rsa-1"}),
            jwt.encode(claims, "", "none", headers={"kid": "rsa-1"}),
            "not.a.token",
        ):
            bench.issuer.token = forged
            assert is_refused(await browser.log_in(), 400, "login_failed")

    run(use)


def test_a_code_of_another_client_or_another_login_is_refused() -> None:
    async def use(bench: Bench, browser: Browser) -> None:
        found = await browser.client.get("/auth/login")
        query = bench.issuer.authorize(found.headers["location"], client_id="another-client")
        assert is_refused(await browser.come_back(query), 400, "login_failed")
        # A stolen code, brought into a login of the thief: it does not fit the verifier.
        stolen = (await browser.begin())["code"]
        async with browsing(bench) as other:
            thief = Browser(bench, other)
            query = await thief.begin()
            assert is_refused(await thief.come_back(query | {"code": stolen}), 400, "login_failed")

    run(use)


def test_a_redirect_of_another_issuer_is_refused_before_its_code_is_shown() -> None:
    async def use(bench: Bench, browser: Browser) -> None:
        for shown in (
            {"iss": "https://other.example"},
            {"iss": ""},
            {"iss": [bench.issuer.url, "https://other.example"]},
        ):
            query = await browser.begin()
            assert is_refused(await browser.come_back(query | shown), 400, "login_failed")
        # This issuer always names itself.
        query = await browser.begin()
        del query["iss"]
        assert is_refused(await browser.come_back(query), 400, "login_failed")
        assert bench.issuer.redeemed == []

    run(use)


def test_an_issuer_that_does_not_name_itself_need_not() -> None:
    async def use(bench: Bench, browser: Browser) -> None:
        bench.issuer.discovery["authorization_response_iss_parameter_supported"] = None
        query = await browser.begin()
        del query["iss"]
        assert (await browser.come_back(query)).status_code == 303

    run(use)


def test_an_error_of_the_issuer_is_a_failed_login_and_is_not_repeated() -> None:
    async def use(bench: Bench, browser: Browser) -> None:
        query = await browser.begin()
        found = await browser.come_back({"state": query["state"], "error": "<b>", "iss": bench.issuer.url})
        assert is_refused(found, 400, "login_failed")
        assert "<b>" not in found.text

    run(use)


def test_a_session_cannot_be_prepared_for_somebody_else() -> None:
    async def use(bench: Bench, browser: Browser) -> None:
        prepared = new_secret()
        browser.client.cookies.set(SESSION, prepared, domain="console.example")
        await browser.log_in()
        assert browser.client.cookies.get(SESSION, domain="console.example") != prepared
        assert digest_of(prepared) not in bench.sessions.kept
        # A new login ends the session before.
        (before,) = bench.sessions.kept
        await browser.log_in()
        assert before not in bench.sessions.kept
        assert len(bench.sessions.kept) == 1

    run(use)


SAME_SITE = ["/", "/console/", "/console/jobs?page=2&x=a%20b", "/a#part", "/a?next=//b", "/caf%C3%A9", "/authors/"]
ELSEWHERE = [
    *("", "console", "//evil.example", "/\\evil.example", "\\\\evil.example", "///evil.example", "/%2Fevil.example"),
    *("/%2f%2fevil.example", "/%5Cevil.example", "/%255Cevil.example", "/%252F/evil.example", "/a//evil.example"),
    *("https://evil.example", "https:evil.example", "javascript:alert(1)", "/\tx", "/\n/evil.example", "/%0d%0aX: y"),
    *("/\N{FULLWIDTH SOLIDUS}evil.example", "/ /evil.example", " //evil.example", "@evil.example", "/%00", "/" * 2_000),
    *("/auth/login", "/auth/logout", "/auth", "/%61uth/login", "/%" + "25" * 6 + "41", "/a\x00b", "/;/../%2F/evil"),
]


@pytest.mark.parametrize("text", SAME_SITE)
def test_a_path_of_the_site_is_one_to_return_to(text: str) -> None:
    assert checked_path(text) == text


@pytest.mark.parametrize("text", ELSEWHERE)
def test_nothing_else_is(text: str) -> None:
    assert checked_path(text) is None


def test_a_login_that_would_return_elsewhere_does_not_begin() -> None:
    async def use(bench: Bench, browser: Browser) -> None:
        for text in ELSEWHERE[:10]:
            found = await browser.client.get("/auth/login", params={"return_to": text})
            assert is_refused(found, 400, "invalid")
            assert "evil" not in found.text
        assert bench.logins.kept == {}

    run(use)


def test_logins_of_one_address_are_limited() -> None:
    async def use(bench: Bench, browser: Browser) -> None:
        for _ in range(OF_ADDRESS.burst // 2):
            await browser.log_in()
        found = await browser.client.get("/auth/login")
        assert is_refused(found, 429, "too_many_logins")
        assert int(found.headers["retry-after-ms"]) > 0
        assert is_refused(await browser.come_back({}), 429, "too_many_logins")
        # What is known already is not limited with it.
        assert (await browser.client.get("/who")).status_code == 200
        bench.clock.now_ms += 1_000
        assert (await browser.client.get("/auth/login")).status_code == 303

    run(use)


# ------------------------------------------------------------------ attacks on the session


def test_calls_that_change_something_need_the_token_of_their_session() -> None:
    async def use(bench: Bench, browser: Browser) -> None:
        await browser.log_in()
        csrf = await browser.csrf()
        async with browsing(bench) as client:
            await Browser(bench, client).log_in()
            others = await Browser(bench, client).csrf()
        for headers in (
            {},
            {"x-csrf-token": ""},
            {"x-csrf-token": "0" * 64},
            {"x-csrf-token": "\N{LATIN SMALL LETTER E WITH ACUTE}"},
            others,
            csrf | {"origin": "https://evil.example"},
            csrf | {"origin": "null"},
            csrf | {"origin": "https://console.example.evil.example"},
            csrf | {"origin": "http://console.example"},
            csrf | {"sec-fetch-site": "cross-site"},
            csrf | {"sec-fetch-site": "same-site"},
            csrf | {"sec-fetch-site": "none"},
        ):
            for path in ("/work", "/auth/logout"):
                encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
                assert is_refused(await browser.client.post(path, headers=encoded), 403, "csrf_failed"), headers
        assert len(bench.sessions.kept) == 2
        own = csrf | {"origin": ORIGIN, "sec-fetch-site": "same-origin"}
        assert (await browser.client.post("/work", headers=own)).status_code == 200

    run(use)


def test_a_key_counts_and_the_cookie_beside_it_does_not() -> None:
    async def use(bench: Bench, browser: Browser) -> None:
        await browser.log_in()
        key = bench.users.create("globex")
        headers = {"authorization": f"Bearer {key.text}"}
        assert (await browser.client.get("/who", headers=headers)).json()["tenant"] == "globex"
        assert (await browser.client.post("/work", headers=headers)).json() == {"tenant": "globex"}
        assert (await browser.client.get("/who", headers={"authorization": "Bearer wrong"})).status_code == 401
        assert (await browser.client.get("/who", headers={"x-api-key": ""})).status_code == 401

    run(use)


def test_a_cookie_of_another_deployment_is_no_session() -> None:
    async def use(bench: Bench, browser: Browser) -> None:
        for value in (new_secret(), "", "x", "x" * 10_000, "\xe9" * 43, digest_of(new_secret())):
            found = await browser.client.get("/who", headers=[(b"cookie", f"{SESSION}={value}".encode("latin-1"))])
            assert is_refused(found, 401, "no_session")
        await browser.log_in()
        cookie = _cookie(browser)
        for shown in (f"{cookie}; {SESSION}={new_secret()}", f"{cookie}; {cookie}", cookie.replace("__Host-", "")):
            browser.client.cookies.clear()
            assert (await browser.client.get("/who", headers={"cookie": shown})).status_code == 401
        # What is stored does not open what it is stored for.
        (digest,) = bench.sessions.kept
        assert (await browser.client.get("/who", headers={"cookie": f"{SESSION}={digest[:43]}"})).status_code == 401

    run(use)


def test_a_websocket_with_a_session_comes_from_our_own_pages() -> None:
    async def use(bench: Bench, browser: Browser) -> None:
        await browser.log_in()
        for origin, accepted in ((ORIGIN, True), ("https://evil.example", False), (None, False)):
            assert await _connects(bench, _cookie(browser), origin) is accepted

    run(use)


async def _connects(bench: Bench, cookie: str, origin: str | None) -> bool:
    headers = [(b"cookie", cookie.encode())] + ([] if origin is None else [(b"origin", origin.encode())])
    scope = {
        "type": "websocket",
        "path": "/events",
        "raw_path": b"/events",
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("console.example", 443),
        "scheme": "wss",
        "subprotocols": [],
        "extensions": {"websocket.http.response": {}},
        "asgi": {"version": "3.0"},
    }
    sent: list[str] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await CallLog(bench.app)(scope, receive, send)
    return "websocket.accept" in sent


# ------------------------------------------------------------------ what is away


def test_without_redis_nobody_logs_in_and_keys_go_on() -> None:
    async def use(bench: Bench, browser: Browser) -> None:
        await browser.log_in()
        query = await browser.begin()
        key = bench.users.create("globex")
        bench.sessions.is_away = bench.logins.is_away = True
        for path in ("/auth/login", "/auth/session", "/who"):
            found = await browser.client.get(path)
            assert is_refused(found, 503, "sessions_unavailable")
            assert found.headers["retry-after"]
        assert is_refused(await browser.come_back(query), 503, "sessions_unavailable")
        shown = {"authorization": f"Bearer {key.text}"}
        assert (await browser.client.get("/who", headers=shown)).status_code == 200
        bench.sessions.is_away = bench.logins.is_away = False
        assert (await browser.client.get("/who")).status_code == 200

    run(use)


def test_without_its_issuer_nobody_logs_in_and_sessions_go_on() -> None:
    async def use(bench: Bench, browser: Browser) -> None:
        bench.issuer.discovery["issuer"] = "https://other.example"
        assert is_refused(await browser.client.get("/auth/login"), 503, "login_unavailable")
        bench.issuer.discovery.clear()
        bench.clock.now_ms += 60_000
        await browser.log_in()
        bench.issuer.status = 500
        assert is_refused(await browser.log_in(), 503, "login_unavailable")
        assert (await browser.client.get("/who")).status_code == 200
        bench.issuer.status = 400
        assert is_refused(await browser.log_in(), 400, "login_failed")

    run(use)


@contextmanager
def _logged() -> Iterator[io.StringIO]:
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield text
    finally:
        root.removeHandler(handler)


def test_no_log_and_no_answer_holds_a_secret(capsys: pytest.CaptureFixture[str]) -> None:
    def refused(reason: str) -> float:
        return REGISTRY.get_sample_value("fairlane_logins_total", {"result": reason}) or 0.0

    async def use(bench: Bench, browser: Browser) -> None:
        before = refused("ok"), refused("nonce"), refused("state")
        query = await browser.begin()
        done = await browser.come_back(query)
        failed = await browser.come_back(query)
        bench.issuer.claims["nonce"] = "another"
        other = await browser.begin()
        await browser.come_back(other)
        assert (refused("ok"), refused("nonce"), refused("state")) == tuple(count + 1 for count in before)
        session_id = browser.client.cookies[SESSION]
        secrets = [session_id, query["code"], query["state"], other["state"], CLIENT_SECRET, "id_token"]
        secrets += [form["code_verifier"] for form in bench.issuer.redeemed]
        written = capsys.readouterr()
        text = written.out + written.err + failed.text + done.text + log.getvalue()
        assert "login_succeeded" in text
        assert "login_refused" in text
        assert [secret for secret in secrets if secret in text] == []

    with _logged() as log:
        run(use)


# ------------------------------------------------------------------ settings


WHOLE: dict[str, Any] = {
    "oidc_issuer": "https://login.example/realm",
    "oidc_client_id": "console",
    "oidc_redirect_url": f"{ORIGIN}/auth/callback",
}


def test_a_login_that_is_set_in_part_names_what_is_missing() -> None:
    for name in WHOLE:
        rest = {key: value for key, value in WHOLE.items() if key != name}
        with pytest.raises(ValueError, match=f"{name.upper()} is needed with OIDC_"):
            Settings(**rest)
    with pytest.raises(ValueError, match="OIDC_ISSUER is needed with OIDC_CLIENT_SECRET"):
        Settings(oidc_client_secret="x")
    with pytest.raises(ValueError, match="OIDC_SCOPES must have openid"):
        Settings(**WHOLE, oidc_scopes="profile")


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, "REDIS_URL is needed"),
        ({"oidc_redirect_url": "http://console.example/auth/callback"}, "OIDC_REDIRECT_URL: must begin with https"),
        ({"oidc_redirect_url": f"{ORIGIN}/callback"}, "OIDC_REDIRECT_URL: must end with /auth/callback"),
        ({"oidc_redirect_url": f"{ORIGIN}/auth/callback?x"}, "OIDC_REDIRECT_URL: must end with /auth/callback"),
        ({"oidc_issuer": "http://login.example"}, "OIDC_ISSUER: must begin with https"),
    ],
)
def test_a_login_that_cannot_be_is_refused_at_the_start(changed: dict[str, Any], problem: str) -> None:
    users = Users(MemoryIdentityStore(), 0, Clock(), CircuitBreaker())
    there: Any = None if not changed else WatchedRedis(_AnyRedis(), _AnyRedis())  # type: ignore[arg-type]  # not called
    settings = Settings(**(WHOLE | changed))
    with pytest.raises(ValueError, match=problem):
        browser_login(settings, there, users, browser_sessions(settings, there, users))


def test_without_an_issuer_there_is_no_login() -> None:
    users = Users(MemoryIdentityStore(), 0, Clock(), CircuitBreaker())
    assert browser_sessions(Settings(), None, users) is None
    assert browser_login(Settings(), None, users, None) is None


class _AnyRedis:
    def register_script(self, _script: str) -> None: ...


def test_a_stored_session_that_is_none_is_no_session() -> None:
    session = Session("acme", "u-17", Role.VIEWER, 1, 2)
    assert Session.unpacked(session.packed().encode()) == session
    whole = session.packed()
    for stored in (
        "",
        "{",
        "[]",
        "7",
        whole.replace("acme", "A B"),
        whole.replace("viewer", "owner"),
        whole.replace("1", '"1"'),
    ):
        assert Session.unpacked(stored.encode()) is None, stored


def _cookie(browser: Browser) -> str:
    return f"{SESSION}={browser.client.cookies[SESSION]}"


def _connection(scope: dict[str, Any]) -> Any:
    from starlette.requests import HTTPConnection

    return HTTPConnection(scope)
