"""Keycloak as the identity provider of a test, and a browser that fills in its forms.

    with keycloak(folder) as issuer, issuer.browser() as browser:
        issuer.configure(redirect_url, "acme")
        browser.get(f"{gateway}/auth/login")

``SKIP_KEYCLOAK=1`` skips the tests marked with ``needs_keycloak``; without it, a missing Keycloak fails them.
"""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.local.layout import PROJECT_ROOT
from deploy.local.ports import PortClaims
from tests.kit.waiting import eventually

needs_keycloak = pytest.mark.skipif(os.environ.get("SKIP_KEYCLOAK") == "1", reason="SKIP_KEYCLOAK=1: it is not tested")

FOLDER = PROJECT_ROOT / ".fairlane" / "keycloak"
CLIENT_ID, CLIENT_SECRET = "fairlane-console", "the secret of a client of a test"
PASSWORD = "the password of a user of a test"
REALM = "main"
_START_S = 360.0
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Keycloak:
    """A running one.

    Attributes:
        url: its address.
    """

    url: str

    @property
    def issuer(self) -> str:
        """As its tokens name it."""
        return f"{self.url}/realms/{REALM}"

    def configure(self, redirect_url: str, tenant: str) -> None:
        """Add a client that may send browsers to this URL and its origin, and the users ``erin`` (role ``tenant`` of
        this tenant), ``frank`` (no role) and ``grace`` (no tenant), all with PASSWORD."""
        with httpx.Client(base_url=self.url, timeout=_TIMEOUT_S) as client:
            form = {"grant_type": "password", "client_id": "admin-cli", "username": "admin", "password": PASSWORD}
            token = client.post("/realms/master/protocol/openid-connect/token", data=form).json()["access_token"]
            headers = {"authorization": f"Bearer {token}"}
            done = client.post("/admin/realms", json=_realm(redirect_url, tenant), headers=headers)
            assert done.status_code == 201, done.text

    def browser(self) -> "Browser":
        """With no cookies; to be closed."""
        return Browser()


class Browser(httpx.Client):
    """Follows redirects, keeps cookies, and fills in forms."""

    def __init__(self) -> None:
        super().__init__(transport=_TrustingTransport(), follow_redirects=True, timeout=_TIMEOUT_S)

    def log_in(self, url: str, user: str, password: str = PASSWORD) -> httpx.Response:
        """Open a page that needs a login, and log in. Returns where it ends."""
        return self.submit(self.get(url), username=user, password=password)

    def submit(self, page: httpx.Response, **fields: str) -> httpx.Response:
        """Send the form of a page, with these fields and its hidden ones."""
        found = re.search(r"<form[^>]*\baction=\"([^\"]+)\"", page.text)
        assert found is not None, f"{page.status_code} {page.url}: no form in {page.text[-2_000:]}"
        hidden = re.findall(r"<input[^>]*type=\"hidden\"[^>]*name=\"([^\"]+)\"[^>]*value=\"([^\"]*)\"", page.text)
        data = {name: unescape(value) for name, value in hidden} | fields
        return self.post(page.url.join(unescape(found[1])), data=data)


class _TrustingTransport(httpx.HTTPTransport):
    """Takes cookies for TLS without it, as browsers do from this machine."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        fields = response.headers.multi_items()
        response.headers = httpx.Headers(
            [(name, re.sub(r"(?i); *secure\b", "", value) if name == "set-cookie" else value) for name, value in fields]
        )
        return response


@contextmanager
def keycloak(folder: Path) -> Iterator[Keycloak]:
    """One that knows nobody yet; its files and its output are in the folder."""
    assert (FOLDER / "bin" / "kc.sh").exists(), f"{FOLDER} is missing: run `make keycloak`, or set SKIP_KEYCLOAK=1"
    ports = PortClaims()
    url = f"http://127.0.0.1:{ports.take('keycloak')}"
    env = {
        **os.environ,
        "KC_BOOTSTRAP_ADMIN_USERNAME": "admin",
        "KC_BOOTSTRAP_ADMIN_PASSWORD": PASSWORD,
        "JAVA_OPTS_KC_HEAP": "-Xms64m -Xmx512m",
        "JAVA_OPTS_APPEND": f"-XX:TieredStopAtLevel=1 -Djava.io.tmpdir={folder}",
    }
    options = ["--optimized", "--http-enabled=true", "--http-host=127.0.0.1", f"--http-port={url.rpartition(':')[2]}"]
    options += [f"--hostname={url}", "--cache=local"]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "keycloak.out").open("wb") as output:
        # A group of its own: the shell waits for Java, and passes no signal on.
        process = subprocess.Popen(
            ("/bin/sh", str(FOLDER / "bin" / "kc.sh"), "start", *options),
            env=env,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            try:
                eventually(lambda: _answers(process, url), timeout_s=_START_S, what="Keycloak")
            except AssertionError as error:
                error.add_note((folder / "keycloak.out").read_text(errors="replace")[-2_000:])
                raise
            yield Keycloak(url)
        finally:
            # It has nothing to lose.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(_TIMEOUT_S)
            ports.close()


def _answers(process: "subprocess.Popen[bytes]", url: str) -> bool:
    assert process.poll() is None, f"Keycloak ended with status {process.returncode}"
    try:
        return httpx.get(f"{url}/realms/master", timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False


def _realm(redirect_url: str, tenant: str) -> dict[str, Any]:
    origin = redirect_url.removesuffix("/auth/callback")
    profile = {
        "attributes": [{"name": name} for name in ("username", "email", "firstName", "lastName")],
        "unmanagedAttributePolicy": "ENABLED",
    }
    return {
        "realm": REALM,
        "enabled": True,
        "sslRequired": "external",
        "roles": {"realm": [{"name": "tenant"}]},
        "components": {
            "org.keycloak.userprofile.UserProfileProvider": [
                {
                    "providerId": "declarative-user-profile",
                    "config": {"kc.user.profile.config": [json.dumps(profile)]},
                }
            ]
        },
        "clients": [
            {
                "clientId": CLIENT_ID,
                "secret": CLIENT_SECRET,
                "redirectUris": [redirect_url],
                "standardFlowEnabled": True,
                "attributes": {
                    "pkce.code.challenge.method": "S256",
                    "post.logout.redirect.uris": f"{origin}/",
                },
                "protocolMappers": [
                    _mapper("oidc-usermodel-attribute-mapper", "tenant", {"user.attribute": "tenant"}),
                    _mapper("oidc-usermodel-realm-role-mapper", "roles", {"multivalued": "true"}),
                ],
            }
        ],
        "users": [
            _user("erin", {"tenant": [tenant]}, ["tenant"]),
            _user("frank", {"tenant": [tenant]}, []),
            _user("grace", {}, ["tenant"]),
        ],
    }


def _mapper(kind: str, claim: str, config: dict[str, str]) -> dict[str, Any]:
    usual = {"claim.name": claim, "jsonType.label": "String", "id.token.claim": "true", "access.token.claim": "false"}
    return {"name": claim, "protocol": "openid-connect", "protocolMapper": kind, "config": usual | config}


def _user(name: str, attributes: dict[str, list[str]], roles: list[str]) -> dict[str, Any]:
    return {
        "username": name,
        "enabled": True,
        "email": f"{name}@example.test",
        "emailVerified": True,
        "firstName": name.title(),
        "lastName": "Example",
        "attributes": attributes,
        "realmRoles": roles,
        "credentials": [{"type": "password", "value": PASSWORD, "temporary": False}],
    }
