"""The gate as routes have it: what is answered before any work, and what no log and no answer ever holds."""

import asyncio
import io
import logging
from collections.abc import Awaitable, Callable
from ipaddress import ip_network
from typing import Annotated, Any

import httpx
import pytest
import structlog
from fastapi import Depends, FastAPI, Request, WebSocket
from fastapi.responses import JSONResponse
from prometheus_client import REGISTRY
from starlette.requests import HTTPConnection

from fairlane.logs import redact
from fairlane.settings import Settings
from fairlane_server.api_keys.api_key import Role, Scope, new_key
from fairlane_server.api_keys.permissions import Permission
from fairlane_server.circuit_breaker import CircuitBreaker
from fairlane_server.postgres.pool import DeadlinePool
from producers.gateway.edge.access_log import CallLog
from producers.gateway.identity.api_keys import KeyVerifier
from producers.gateway.identity.authentication import (
    MOST_CHARACTERS,
    Authenticator,
)
from producers.gateway.identity.compose import authentication
from producers.gateway.identity.identity import AuthRefusal, Identity, RefusedError, answer, permit, require
from producers.gateway.identity.jwks import KeySet
from producers.gateway.identity.tokens import SignedTokens, TokenVerifier
from producers.gateway.identity.users import Users
from producers.gateway.limits.rate_buckets import RatePolicy
from producers.gateway.limits.rate_limits import CallLimits, LocalRateLimits, owners_of, span_text
from producers.gateway.pipeline.call_context import current
from producers.openai_api.errors import GatewayError
from tests.kit.identity_kit import (
    AUDIENCE,
    ISSUER,
    Clock,
    FakeIssuer,
    MemoryIdentityStore,
    claims,
    rsa_key,
    token,
)

BURST = 5
TENANT_BURST = 20


class Bench:
    """Routes behind a gate."""

    def __init__(self, *, with_tokens: bool = True, behind_proxy: bool = False) -> None:
        self.clock = Clock()
        self.store = MemoryIdentityStore()
        self.worked = 0
        keys = KeyVerifier(self.store, 300_000, self.clock, self.clock, CircuitBreaker(), 1.0)
        key_set = KeySet(FakeIssuer(), self.clock)
        users = Users(self.store, 300_000, self.clock, CircuitBreaker())
        tokens = TokenVerifier(SignedTokens(ISSUER, AUDIENCE, 30.0, key_set), users)
        limits = CallLimits(
            LocalRateLimits(self.clock),
            RatePolicy(rate_per_s=1.0, burst=BURST),
            RatePolicy(1.0, TENANT_BURST),
            self.clock,
        )
        proxies = (ip_network("10.0.0.0/8"),) if behind_proxy else ()
        self.gate = Authenticator(keys, tokens if with_tokens else None, limits, self.clock, proxies)
        self.app = self._app()

    def _app(self) -> FastAPI:
        app = FastAPI()

        @app.exception_handler(GatewayError)
        async def told(_: Request, error: GatewayError) -> JSONResponse:
            return JSONResponse({"code": error.code, "message": error.message}, error.status)

        @app.get("/who")
        async def who(identity: Annotated[Identity, Depends(self.gate)]) -> dict[str, str]:
            self.worked += 1
            return {"tenant": identity.tenant, "subject": identity.subject, "as": current().requested_by or ""}

        @app.post("/work")
        async def work(
            identity: Annotated[Identity, Depends(require(self.gate, Permission.REQUESTS_SEND))],
        ) -> dict[str, str]:
            self.worked += 1
            return {"tenant": identity.tenant}

        @app.websocket("/events")
        async def events(socket: WebSocket, identity: Annotated[Identity, Depends(self.gate)]) -> None:
            await socket.accept()
            await socket.send_text(identity.tenant)

        return app


def run(use: Callable[[Bench, httpx.AsyncClient], Awaitable[None]], bench: Bench | None = None) -> None:
    async def within_a_loop() -> None:
        made = bench or Bench()
        transport = httpx.ASGITransport(CallLog(made.app))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            await use(made, client)

    asyncio.run(within_a_loop())


def bearer(text: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {text}"}


def test_a_key_or_a_token_is_shown_in_one_of_the_usual_ways() -> None:
    async def use(bench: Bench, client: httpx.AsyncClient) -> None:
        key = bench.store.create("acme")
        for headers in (bearer(key.text), {"authorization": f"bearer  {key.text} "}, {"X-API-Key": key.text}):
            found = await client.get("/who", headers=headers)
            who = {"tenant": "acme", "subject": key.key_id, "as": f"key:{key.key_id}"}
            assert (found.status_code, found.json()) == (200, who)
        found = await client.get("/who", headers=bearer(token()))
        assert found.json() == {"tenant": "acme", "subject": "u-17", "as": "user:u-17"}
        of_user = bench.store.create("acme", user="u-17")
        assert (await client.get("/who", headers=bearer(of_user.text))).json()["as"] == f"key:{of_user.key_id}"

    run(use)


def test_who_is_looked_at_again_makes_no_call() -> None:
    async def use(bench: Bench, _client: httpx.AsyncClient) -> None:
        key = bench.store.create("acme")
        shown = HTTPConnection({"type": "http", "headers": [(b"x-api-key", key.text.encode())]})
        for _ in range(BURST):
            assert (await bench.gate(shown)).tenant == "acme"
        with pytest.raises(GatewayError) as limited:
            await bench.gate(shown)
        assert limited.value.status == 429
        assert (await bench.gate.identify(shown)).tenant == "acme"
        with pytest.raises(GatewayError) as nobody:
            await bench.gate.identify(HTTPConnection({"type": "http", "headers": []}))
        assert nobody.value.status == 401

    run(use)


def test_nobody_gets_in_and_nothing_is_done_for_nobody() -> None:
    async def use(bench: Bench, client: httpx.AsyncClient) -> None:
        key = bench.store.create("acme").text
        attempts: list[Any] = [
            {},
            {"Authorization": ""},
            {"Authorization": "Bearer"},
            {"Authorization": "Bearer "},
            {"Authorization": key},
            {"Authorization": f"Basic {key}"},
            {"Authorization": f"Bearer {key} {key}"},
            {"Authorization": f"Bearer Bearer {key}"},
            {"Authorization": "Bearer " + "x" * MOST_CHARACTERS},
            {"Authorization": f"Bearer {key}".encode() + b"\xff"},
            {"X-API-Key": ""},
            {"X-API-Key": token()},
            {"X-API-Key": f"Bearer {key}"},
            {"Authorization": f"Bearer {key}", "X-API-Key": key},
            [("Authorization", f"Bearer {key}"), ("Authorization", f"Bearer {key}")],
            [("X-API-Key", key), ("X-API-Key", key)],
            {"Cookie": f"api_key={key}"},
            bearer(new_key().text),
            bearer(token(private=rsa_key("attacker"))),
        ]
        for headers in attempts:
            for method, path in (("GET", "/who"), ("POST", "/work")):
                found = await client.request(method, path, headers=headers)
                assert found.status_code == 401, headers
                assert found.json()["code"] == "invalid_api_key"
                assert found.headers["www-authenticate"] == 'Bearer realm="fairlane"'
                assert "x-ratelimit-limit-requests" not in found.headers
        assert (await client.get(f"/who?api_key={key}")).status_code == 401
        assert bench.worked == 0

    run(use)


def test_without_an_issuer_no_token_is_taken() -> None:
    async def use(bench: Bench, client: httpx.AsyncClient) -> None:
        assert (await client.get("/who", headers=bearer(token()))).status_code == 401
        assert (await client.get("/who", headers=bearer(bench.store.create("acme").text))).status_code == 200

    run(use, Bench(with_tokens=False))


def test_an_identity_may_do_what_its_role_and_scopes_say() -> None:
    async def use(bench: Bench, client: httpx.AsyncClient) -> None:
        may = {
            (Role.TENANT, ()): 200,
            (Role.ADMIN, (Scope.INFERENCE, Scope.FILES)): 200,
            (Role.TENANT, (Scope.RESULTS,)): 403,
            (Role.VIEWER, ()): 403,
            (Role.OPERATOR, (Scope.INFERENCE,)): 403,
        }
        for (role, scopes), status in may.items():
            key = bench.store.create("acme", role, scopes).text
            assert (await client.post("/work", headers=bearer(key))).status_code == status, (role, scopes)
            assert (await client.get("/who", headers=bearer(key))).status_code == 200
        expired = bench.store.create("acme", expires_at_ms=bench.clock.now_ms)
        found = await client.get("/who", headers=bearer(expired.text))
        assert (found.status_code, found.json()["code"]) == (403, "key_expired")
        bench.store.set_user("acme", "u-17", Role.TENANT, disabled=True)
        found = await client.get("/who", headers=bearer(token()))
        assert (found.status_code, found.json()["code"]) == (403, "user_disabled")

    run(use)


def test_when_nobody_can_be_known_it_is_said_so() -> None:
    async def use(bench: Bench, client: httpx.AsyncClient) -> None:
        bench.store.is_away = True
        for shown in (bench.store.create("acme").text, new_key().text, token()):
            assert (await client.get("/who", headers=bearer(shown))).status_code == 503
        assert answer(AuthRefusal.UNAVAILABLE).retry_after_ms == 1_000

    run(use)


def test_every_answer_behind_the_gate_says_what_is_left() -> None:
    async def use(bench: Bench, client: httpx.AsyncClient) -> None:
        key, other = bench.store.create("acme"), bench.store.create("acme")
        for left in range(BURST - 1, -1, -1):
            found = await client.get("/who", headers=bearer(key.text))
            assert found.status_code == 200
            assert found.headers["x-ratelimit-limit-requests"] == str(BURST)
            assert found.headers["x-ratelimit-remaining-requests"] == str(left)
            assert found.headers["x-ratelimit-reset-requests"] == f"{BURST - left}s"
        found = await client.get("/who", headers=bearer(key.text))
        assert (found.status_code, found.json()["code"]) == (429, "rate_limit_exceeded")
        assert found.headers["x-ratelimit-remaining-requests"] == "0"
        assert bench.worked == BURST
        assert (await client.get("/who", headers=bearer(other.text))).status_code == 200
        refused = await client.post("/work", headers=bearer(bench.store.create("acme", Role.VIEWER).text))
        assert (refused.status_code, "x-ratelimit-limit-requests" in refused.headers) == (403, True)
        bench.clock.now_ms += 1_001
        assert (await client.get("/who", headers=bearer(key.text))).status_code == 200

    run(use)


def test_the_keys_and_tokens_of_one_user_share_a_limit() -> None:
    async def use(bench: Bench, client: httpx.AsyncClient) -> None:
        bench.store.set_user("acme", "u-17", Role.TENANT)
        keys = [bench.store.create("acme", user="u-17").text for _ in range(3)]
        shown = [*keys, token(), token()]
        assert [(await client.get("/who", headers=bearer(one))).status_code for one in shown] == [200] * BURST
        for one in (*keys, token(), bench.store.create("acme", user="u-17").text):
            assert (await client.get("/who", headers=bearer(one))).status_code == 429
        for others in (bench.store.create("acme").text, token(claims(tenant="globex")), token(claims(sub="u-18"))):
            assert (await client.get("/who", headers=bearer(others))).status_code == 200

    run(use)


def test_buckets_have_names_of_a_bounded_length_and_nobody_gets_anothers() -> None:
    identities = [
        Identity("acme", "0123456789abcdef", Role.TENANT),
        Identity("acme", "0123456789abcdef", Role.TENANT, user="u"),
        Identity("acme", "u", Role.TENANT, user="u"),
        Identity("globex", "u", Role.TENANT, user="u"),
        Identity("acme", "x" * 255, Role.TENANT, user="x" * 255),
    ]
    owners = [owners_of(identity) for identity in identities]
    assert owners[0][0] == owners[1][0]
    assert owners[1][1] == owners[2][0]
    assert len({name for names in owners for name in names}) == 4
    assert max(len(name) for names in owners for name in names) < 120


@pytest.mark.parametrize(
    ("span_ms", "text"),
    [(0, "0ms"), (999, "999ms"), (1_000, "1s"), (1_001, "2s"), (60_000, "1m0s"), (3_661_000, "1h1m1s")],
)
def test_spans_are_written_as_openai_writes_them(span_ms: int, text: str) -> None:
    assert span_text(span_ms) == text


def test_a_websocket_passes_the_same_gate() -> None:
    """In the words of ASGI, so that no server is needed."""
    bench = Bench()

    def connection(headers: list[tuple[bytes, bytes]]) -> HTTPConnection:
        return HTTPConnection({"type": "websocket", "headers": headers, "path": "/events"})

    async def run_it() -> None:
        key = bench.store.create("acme").text
        shown = connection([(b"authorization", f"Bearer {key}".encode())])
        assert (await bench.gate(shown)).tenant == "acme"
        with pytest.raises(GatewayError, match="401"):
            await bench.gate(connection([]))

    asyncio.run(run_it())


# --- audit


def count(reason: AuthRefusal) -> float:
    return REGISTRY.get_sample_value("fairlane_authentications_refused_total", {"reason": reason}) or 0.0


def test_every_refusal_is_counted_and_as_many_logged_as_anybody_reads() -> None:
    before = count(AuthRefusal.WRONG_KEY)
    clock = Clock()

    class Refusing:
        async def verify(self, _text: str, _address: str | None, /) -> Identity:
            raise RefusedError(AuthRefusal.WRONG_KEY, "0123456789abcdef")

    gate = Bench().gate
    gate._keys, gate._log._clock = Refusing(), clock  # type: ignore[assignment]  # a double
    shown = HTTPConnection({"type": "http", "headers": [(b"x-api-key", new_key().text.encode())]})

    async def try_keys(times: int) -> None:
        for _ in range(times):
            with pytest.raises(GatewayError):
                await gate.identify(shown)

    with structlog.testing.capture_logs() as lines:
        asyncio.run(try_keys(10_000))
        assert len(lines) == 50
        clock.now_ms += 1_000
        asyncio.run(try_keys(1))
    assert count(AuthRefusal.WRONG_KEY) == before + 10_001
    assert lines[-1]["not_logged_before"] == 9_950
    assert lines[-1]["who"] == "0123456789abcdef"


def test_what_an_identity_may_not_is_counted_and_logged() -> None:
    before = count(AuthRefusal.NO_SCOPE)
    with structlog.testing.capture_logs() as lines, pytest.raises(GatewayError, match="403"):
        permit(Identity("acme", "0123456789abcdef", Role.TENANT, frozenset({Scope.FILES})), Permission.REQUESTS_SEND)
    assert count(AuthRefusal.NO_SCOPE) == before + 1
    assert (lines[0]["event"], lines[0]["who"], lines[0]["tenant"]) == (
        "permission_refused",
        "0123456789abcdef",
        "acme",
    )


def test_no_secret_is_in_a_log_or_in_an_answer() -> None:
    """Planted in every way to fail; searched in what is logged by us and by libraries, and in what is answered."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    planted: set[str] = set()
    answers: list[str] = []
    reasons: set[str] = set()

    async def use(bench: Bench, client: httpx.AsyncClient) -> None:
        async def show(shown: str, secret: str | None = None, header: str | None = None) -> None:
            planted.add(secret or shown.rsplit(".", 1)[-1][-43:])
            headers = {header: shown} if header else bearer(shown)
            found = await client.post("/work", headers=headers)
            answers.append(f"{found.status_code} {found.text} {found.headers}")

        good, revoked = bench.store.create("acme"), bench.store.create("acme")
        bench.store.revoke(revoked.key_id)
        await show(good.text)
        await show(revoked.text)
        await show(bench.store.create("acme", expires_at_ms=1).text)
        await show(bench.store.create("acme", Role.VIEWER).text)
        await show(bench.store.create("acme", scopes=(Scope.FILES,)).text)
        await show(new_key().text)
        await show(good.text + "x")
        await show(good.text, header="X-API-Key")
        await show(good.text, header="Authorization")
        await show("sk-planted-secret-of-somebody-else", "planted-secret")
        await show(token())
        await show(token(private=rsa_key("attacker")))
        await show(token(claims(exp=1)))
        await show(token(claims(aud="elsewhere")))
        await show(token(claims(tenant=None)))
        await show(token(claims(role=None)))
        await show(token(kid="planted-kid-of-an-attacker"), "planted-kid")
        bench.store.is_away = True
        bench.clock.now_ms += 600_000
        await show(bench.store.create("acme").text)
        await show(token())

    try:
        with structlog.testing.capture_logs() as lines:
            run(use)
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    reasons = {line["reason"] for line in lines if "reason" in line}
    assert len(reasons) >= 10, reasons
    said = " ".join([text.getvalue(), *map(str, lines), *answers])
    assert len(planted) > 15
    for secret in planted:
        assert secret not in said
    # What remains readable is what tells who it was.
    assert any(redact(None, "", dict(line)) == line and line.get("who") for line in lines)


def test_wrong_keys_of_one_caller_behind_a_balancer_are_not_those_of_another() -> None:
    async def show(text: str, *forwarded: bytes) -> Identity:
        headers = [(b"x-api-key", text.encode()), *((b"x-forwarded-for", value) for value in forwarded)]
        scope = {"type": "http", "client": ("10.0.0.1", 4711), "headers": headers}
        return await gate.identify(HTTPConnection(scope))

    async def use() -> None:
        key = bench.store.create("acme")
        for number in range(20):
            with pytest.raises(GatewayError) as refused:
                # It may write what it likes in front of what the balancer writes.
                await show(new_key().text, f"198.51.100.{number}".encode(), b"203.0.113.9")
        assert refused.value.status == 429
        assert (await show(key.text, b"203.0.113.10")).tenant == "acme"

    bench = Bench(behind_proxy=True)
    gate = bench.gate
    asyncio.run(use())


# --- put together


def test_it_is_put_together_from_the_settings() -> None:
    async def run_it() -> None:
        dsn = "postgresql://fairlane:hush@127.0.0.1:1/fairlane"
        pool = DeadlinePool(dsn, "tests", 1)
        assert authentication(Settings(postgres_dsn=dsn), pool, None).authenticator._tokens is None
        whole = Settings(
            postgres_dsn=dsn, jwt_issuer=ISSUER, jwt_audience=AUDIENCE, jwt_jwks_url="https://login.example/jwks"
        )
        assert authentication(whole, pool, None).authenticator._tokens is not None
        trusting = Settings(postgres_dsn=dsn, gateway_trusted_proxies="10.0.0.0/8")
        assert authentication(trusting, pool, None).authenticator._trusted_proxies == (ip_network("10.0.0.0/8"),)
        with pytest.raises(ValueError, match="JWT_JWKS_URL"):
            authentication(whole.model_copy(update={"jwt_jwks_url": "http://login.example/jwks"}), pool, None)

    asyncio.run(run_it())


def test_many_users_of_a_tenant_have_no_more_than_the_tenant() -> None:
    async def use(bench: Bench, client: httpx.AsyncClient) -> None:
        passed = 0
        for number in range(TENANT_BURST + 5):
            answer = await client.get("/who", headers=bearer(token(claims(sub=f"u-{number}"))))
            assert answer.status_code in (200, 429)
            passed += answer.status_code == 200
        assert passed == TENANT_BURST
        assert answer.headers["x-ratelimit-limit-requests"] == str(TENANT_BURST)
        other = bench.store.create("globex").text
        assert (await client.get("/who", headers=bearer(other))).status_code == 200

    run(use)


def test_an_address_that_shows_too_many_wrong_keys_is_told_429() -> None:
    async def use(bench: Bench, _client: httpx.AsyncClient) -> None:
        transport = httpx.ASGITransport(bench.app, client=("10.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            found = [await client.get("/who", headers=bearer(new_key().text)) for _ in range(11)]
        assert [answer.status_code for answer in found] == [401] * 10 + [429]
        assert found[-1].json()["code"] == "too_many_failed_keys"
        elsewhere = httpx.ASGITransport(bench.app, client=("10.0.0.2", 1))
        async with httpx.AsyncClient(transport=elsewhere, base_url="http://gateway") as client:
            assert (await client.get("/who", headers=bearer(bench.store.create("acme").text))).status_code == 200

    run(use)
