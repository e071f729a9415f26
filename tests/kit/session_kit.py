"""What the tests of logins share: sessions and logins in memory, an issuer that does what it is told, a browser."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import jwt

from fairlane.clock import ClockMs, now_ms
from fairlane_server.sessions.pending_logins import RedisLogins
from fairlane_server.sessions.session import PendingLogin, Session, SessionLimits, digest_of
from fairlane_server.sessions.store import MOST_OF_USER, RedisSessions
from fairlane_server.store_error import StoreError
from tests.kit.identity_kit import public_jwk, rsa_key

CLIENT_ID = "fairlane-console"
CLIENT_SECRET = "a secret: of & the client"
LIMITS = SessionLimits(absolute_ms=3_600_000, idle_ms=600_000)


class MemorySessions(RedisSessions):
    """In memory; may be away."""

    def __init__(self, clock: ClockMs, limits: SessionLimits = LIMITS) -> None:
        self.limits = limits
        self.is_away = False
        self._time = clock
        self.kept: dict[str, Session] = {}
        """By digest."""

    async def create(self, session_id: str, session: Session) -> None:
        self._ask()
        self.kept[digest_of(session_id)] = session
        user = [digest for digest, kept in self.kept.items() if kept.subject == session.subject]
        for digest in user[:-MOST_OF_USER]:
            del self.kept[digest]

    async def find(self, session_id: str, *, is_use: bool) -> Session | None:
        self._ask()
        session = self.kept.get(digest_of(session_id))
        if session is None or session.ends_ms(self.limits) <= self._time():
            return None
        if is_use and self._time() - session.seen_ms >= self.limits.touch_ms:
            session = self.kept[digest_of(session_id)] = replace(session, seen_ms=self._time())
        return session

    async def end(self, session_id: str, session: Session) -> None:
        self._ask()
        self.kept.pop(digest_of(session_id), None)

    async def end_all(self, tenant: str, subject: str) -> int:
        self._ask()
        ended = [key for key, kept in self.kept.items() if (kept.tenant, kept.subject) == (tenant, subject)]
        for key in ended:
            del self.kept[key]
        return len(ended)

    def _ask(self) -> None:
        if self.is_away:
            raise StoreError("away")


class MemoryLogins(RedisLogins):
    """In memory; may be away."""

    def __init__(self, clock: ClockMs) -> None:
        self.is_away = False
        self._time = clock
        self.kept: dict[str, PendingLogin] = {}

    async def put(self, state: str, login: PendingLogin) -> None:
        self._ask()
        self.kept[digest_of(state)] = login

    async def take(self, state: str) -> PendingLogin | None:
        self._ask()
        login = self.kept.pop(digest_of(state), None)
        return None if login is None or login.ends_ms <= self._time() else login

    def _ask(self) -> None:
        if self.is_away:
            raise StoreError("away")


@dataclass(slots=True)
class ScriptedIssuer:
    """An issuer that redeems codes as OpenID Connect says, except for what a test changes.

    Attributes:
        url: its name and address.
        discovery: changes of its discovery document; None leaves a field out.
        claims: changes of the claims of its ID tokens; None leaves a claim out.
        token: replaces its ID tokens.
        status: of its token endpoint, if not 200.
        redeemed: forms that its token endpoint got.
    """

    url: str
    discovery: dict[str, Any] = field(default_factory=dict)
    claims: dict[str, Any] = field(default_factory=dict)
    token: str | None = None
    status: int = 200
    redeemed: list[dict[str, str]] = field(default_factory=list)
    codes: dict[str, dict[str, str]] = field(default_factory=dict)

    def authorize(self, location: str, client_id: str = CLIENT_ID) -> dict[str, str]:
        """What the browser comes back with after a login at this address: ``code`` and ``state``."""
        asked = {name: values[0] for name, values in parse_qs(urlsplit(location).query).items()}
        code = f"code-{len(self.codes)}"
        self.codes[code] = asked | {"client_id": client_id}
        return {"code": code, "state": asked["state"], "iss": self.url}

    def document(self) -> dict[str, Any]:
        usual = {
            "issuer": self.url,
            "authorization_endpoint": f"{self.url}/authorize",
            "token_endpoint": f"{self.url}/token",
            "jwks_uri": f"{self.url}/jwks",
            "end_session_endpoint": f"{self.url}/logout",
            "response_types_supported": ["code"],
            "id_token_signing_alg_values_supported": ["RS256"],
            "code_challenge_methods_supported": ["S256"],
            "authorization_response_iss_parameter_supported": True,
        }
        return {name: value for name, value in (usual | self.discovery).items() if value is not None}

    def redeem(self, form: dict[str, str], authorization: str | None) -> tuple[int, dict[str, Any]]:
        self.redeemed.append(form)
        if self.status != 200:
            return self.status, {"error": "server_error"}
        basic = base64.b64encode(f"{CLIENT_ID}:{CLIENT_SECRET}".encode()).decode()
        asked = self.codes.pop(form.get("code", ""), None)
        challenge = base64.urlsafe_b64encode(sha256(form.get("code_verifier", "").encode()).digest())
        if (
            asked is None
            or authorization != f"Basic {basic}"
            or asked["client_id"] != CLIENT_ID
            or asked["redirect_uri"] != form.get("redirect_uri")
            or asked["code_challenge_method"] != "S256"
            or asked["code_challenge"] != challenge.rstrip(b"=").decode()
        ):
            return 400, {"error": "invalid_grant"}
        now_s = now_ms() // 1_000
        half = sha256(b"access").digest()[:16]
        usual = {
            "iss": self.url,
            "aud": CLIENT_ID,
            "sub": "u-17",
            "iat": now_s,
            "exp": now_s + 60,
            "nonce": asked["nonce"],
            "at_hash": base64.urlsafe_b64encode(half).rstrip(b"=").decode(),
            "tenant": "acme",
            "role": "tenant",
        }
        claims = {name: value for name, value in (usual | self.claims).items() if value is not None}
        token = self.token or jwt.encode(claims, rsa_key(), "RS256", headers={"kid": "rsa-1"})
        return 200, {"access_token": "access", "token_type": "Bearer", "id_token": token}


@contextmanager
def scripted_issuer() -> Iterator[ScriptedIssuer]:
    """An issuer on this machine."""
    issuer = ScriptedIssuer("")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.endswith("/jwks"):
                self._answer(200, {"keys": [public_jwk(rsa_key(), kid="rsa-1")]})
            else:
                self._answer(200, issuer.document())

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            form = {name: values[0] for name, values in parse_qs(body).items()}
            self._answer(*issuer.redeem(form, self.headers["Authorization"]))

        def _answer(self, status: int, document: dict[str, Any]) -> None:
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name that is overridden
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    issuer.url = f"http://127.0.0.1:{server.server_port}/realm"
    try:
        yield issuer
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


def cookies_of(response: httpx.Response) -> dict[str, str]:
    """Whole Set-Cookie headers by the name of the cookie."""
    return {text.partition("=")[0]: text for text in response.headers.get_list("set-cookie")}
