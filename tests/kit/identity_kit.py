"""What the tests of identity share: a store in memory, clocks that stand still, an issuer of tokens, a server."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from fairlane.clock import now_ms
from fairlane_server.api_keys.api_key import NewKey, Role, Scope, new_key
from fairlane_server.store_error import StoreError
from producers.gateway.identity.api_keys import IdentityStore, StoredKey, UserSettings
from producers.gateway.identity.jwks import KeySetSource
from producers.gateway.identity.signing_keys import KeySetError

ISSUER = "https://login.example/realm"
AUDIENCE = "fairlane"


class Clock:
    """Milliseconds; goes on when it is told to."""

    def __init__(self, at_ms: int = 1_700_000_000_000) -> None:
        self.now_ms = at_ms

    def __call__(self) -> int:
        return self.now_ms


class MemoryIdentityStore(IdentityStore):
    """In memory; may be away, and counts how often it is asked."""

    def __init__(self) -> None:
        self.is_away = False
        self.asked = 0
        self._keys: dict[str, StoredKey] = {}
        self._users: dict[tuple[str, str], UserSettings] = {}

    def create(
        self,
        tenant: str,
        role: Role = Role.TENANT,
        scopes: tuple[Scope, ...] = (),
        user: str | None = None,
        expires_at_ms: int | None = None,
    ) -> NewKey:
        made = new_key()
        stored = StoredKey(made.key_id, tenant, role, frozenset(scopes), made.secret_sha256, user, expires_at_ms)
        self._keys[made.key_id] = stored
        return made

    def revoke(self, key_id: str) -> None:
        self._keys[key_id] = replace(self._keys[key_id], is_revoked=True)

    def delete(self, key_id: str) -> None:
        del self._keys[key_id]

    def set_user(self, tenant: str, subject: str, role: Role, *, disabled: bool = False) -> None:
        self._users[tenant, subject] = UserSettings(role, disabled)

    async def key(self, key_id: str, shown_sha256: bytes, timeout_s: float) -> StoredKey | None:
        self._ask()
        found = self._keys.get(key_id)
        if found is not None and found.secret_sha256 != shown_sha256:
            return None
        if found is None or found.user is None:
            return found
        user = self._users.get((found.tenant, found.user), UserSettings())
        return replace(found, is_user_disabled=user.is_disabled)

    async def user(self, tenant: str, subject: str, timeout_s: float) -> UserSettings:
        self._ask()
        return self._users.get((tenant, subject), UserSettings())

    def _ask(self) -> None:
        self.asked += 1
        if self.is_away:
            raise StoreError("away")


@cache
def rsa_key(name: str = "first", bits: int = 2_048) -> rsa.RSAPrivateKey:
    """One for each name; making one takes a moment."""
    return rsa.generate_private_key(65_537, bits)


@cache
def ec_key(name: str = "first") -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def public_jwk(private: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey, **fields: Any) -> dict[str, Any]:
    """As an issuer publishes it."""
    if isinstance(private, rsa.RSAPrivateKey):
        found = RSAAlgorithm.to_jwk(private.public_key(), as_dict=True)
    else:
        found = ECAlgorithm.to_jwk(private.public_key(), as_dict=True)
    return {**found, "use": "sig", **fields}


def key_set(*jwks: dict[str, Any]) -> bytes:
    """The document."""
    return json.dumps({"keys": jwks}).encode()


def claims(**changed: Any) -> dict[str, Any]:
    """What a token of the issuer says; None leaves a claim out."""
    now_s = now_ms() // 1_000
    usual = {"iss": ISSUER, "aud": AUDIENCE, "sub": "u-17", "tenant": "acme", "role": "tenant", "exp": now_s + 600}
    return {name: value for name, value in (usual | changed).items() if value is not None}


def token(
    payload: dict[str, Any] | None = None,
    private: Any = None,
    algorithm: str = "RS256",
    kid: str | None = "rsa-1",
    **headers: Any,
) -> str:
    """A token, signed; with the issuer's key unless another is given."""
    if kid is not None:
        headers["kid"] = kid
    return jwt.encode(payload or claims(), private or rsa_key(), algorithm, headers=headers)


class FakeIssuer(KeySetSource):
    """May be away."""

    def __init__(self, document: bytes | None = None) -> None:
        self.document = document or key_set(public_jwk(rsa_key(), kid="rsa-1"), public_jwk(ec_key(), kid="ec-1"))
        self.is_away = False
        self.fetches = 0

    async def fetch(self) -> bytes:
        self.fetches += 1
        if self.is_away:
            raise KeySetError("away")
        return self.document


@contextmanager
def http_server(answer: Any) -> Iterator[str]:
    """A server of HTTP on this machine, and its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name that is overridden
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/jwks.json"
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


def with_body(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200) -> None:
    """What the handler answers."""
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.send_header("Location", "/elsewhere")
    handler.end_headers()
    handler.wfile.write(body)
