"""Browsers log in at Keycloak, through its own form, and call a real gateway with their session."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from fairlane_server.api_keys.api_key import Role
from fairlane_server.api_keys.key_store import ApiKeys
from tests.kit.gateway_kit import LONG_MS, Served, serving
from tests.kit.keycloak import CLIENT_ID, CLIENT_SECRET, Browser, Keycloak, keycloak, needs_keycloak
from tests.kit.stack import PostgresServer
from tests.kit.waiting import PATIENCE_S, eventually

pytestmark = [pytest.mark.broker, pytest.mark.full, pytest.mark.timeout(600), needs_keycloak]

SESSION = "fairlane-session"


@dataclass(frozen=True, slots=True)
class Site:
    """A gateway with a login, and its identity provider."""

    served: Served
    issuer: Keycloak
    origin: str
    redis_url: str

    @property
    def tenant(self) -> str:
        return self.served.pipeline.tenant("a")

    def log_in(self, browser: Browser, user: str = "erin", return_to: str = "/docs") -> httpx.Response:
        return browser.log_in(f"{self.origin}/auth/login?return_to={return_to}", user)

    def session(self, browser: Browser) -> dict[str, Any]:
        found = browser.get(f"{self.origin}/auth/session")
        assert found.status_code == 200, found.text
        return dict(found.json())

    def csrf(self, browser: Browser) -> dict[str, str]:
        return {"x-csrf-token": self.session(browser)["csrf_token"]}

    def post(self, browser: Browser, path: str, body: object = None, **headers: str) -> httpx.Response:
        """As a script of a page does it."""
        return browser.post(f"{self.origin}{path}", json=body, headers={**self.csrf(browser), **headers})


@pytest.fixture(scope="module")
def site(
    broker: str, postgres: PostgresServer, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("login")
    # Keycloak first: it takes most of its time to start, and the others wait for nobody.
    with keycloak(folder / "keycloak") as issuer, serving(broker, postgres, folder, redis_url=redis_url) as served:
        port = served.ports["gateway-2"] = served.pipeline.free_port("gateway-2-http")
        origin = f"http://127.0.0.1:{port}"
        issuer.configure(f"{origin}/auth/callback", served.pipeline.tenant("a"))
        env = {
            "OIDC_ISSUER": issuer.issuer,
            "OIDC_CLIENT_ID": CLIENT_ID,
            "OIDC_CLIENT_SECRET": CLIENT_SECRET,
            "OIDC_REDIRECT_URL": f"{origin}/auth/callback",
        }
        served.gateway(2, env).wait_ready()
        yield Site(served, issuer, origin, redis_url)


@pytest.fixture
def browser(site: Site) -> Iterator[Browser]:
    with site.issuer.browser() as browser:
        yield browser


def test_a_person_logs_in_at_the_form_sends_a_request_and_logs_out(site: Site, browser: Browser) -> None:
    page = browser.get(f"{site.origin}/auth/login?return_to=/docs?from=login")
    assert str(page.url).startswith(f"{site.issuer.issuer}/protocol/openid-connect/auth?")
    wrong = browser.submit(page, username="erin", password="another")
    assert "Invalid username or password" in wrong.text, wrong.text[-3_000:]
    done = browser.submit(wrong, username="erin", password="the password of a user of a test")
    assert (done.status_code, str(done.url)) == (200, f"{site.origin}/docs?from=login")
    info = site.session(browser)
    assert (info["tenant"], info["role"]) == (site.tenant, "tenant")

    body = {
        "model": site.served.pipeline.model_for("generate"),
        "input": {"prompt": "what is a watermark?"},
        "parameters": {"max_tokens": 4},
        "timeout_ms": LONG_MS,
    }
    assert browser.post(f"{site.origin}/v1/requests", json=body).status_code == 403
    assert site.post(browser, "/v1/requests", body, origin="https://evil.example").status_code == 403
    accepted = site.post(browser, "/v1/requests", body, origin=site.origin)
    assert accepted.status_code == 202, accepted.text
    links = accepted.json()["links"]

    def answered() -> bool:
        return browser.get(f"{site.origin}{links['result']}").status_code == 200

    eventually(answered, what="the result")
    line = site.served.call_line(accepted.json()["id"], 2)
    assert (line["tenant"], line["subject"]) == (site.tenant, info["subject"])

    # A WebSocket of our own page, and of another one.
    cookie = {"Cookie": f"{SESSION}={browser.cookies[SESSION]}"}
    events = f"{site.origin}{links['events']}".replace("http", "ws", 1)
    with connect(events, additional_headers={**cookie, "Origin": site.origin}, proxy=None) as socket:
        assert json.loads(socket.recv(PATIENCE_S))["event"] == "status"
    with pytest.raises(InvalidStatus) as refused:
        connect(events, additional_headers={**cookie, "Origin": "https://evil.example"}, proxy=None)
    assert refused.value.response.status_code == 403

    out = site.post(browser, "/auth/logout")
    assert browser.get(f"{site.origin}/auth/session").status_code == 401
    # Keycloak asks, and sends the browser back; then its form must be filled in again.
    asked = browser.get(out.json()["end_session_url"])
    assert "log out" in asked.text.lower()
    end = browser.submit(asked, confirmLogout="Logout")
    assert str(end.url) == f"{site.origin}/"
    again = browser.get(f"{site.origin}/auth/login")
    assert "password" in again.text


def test_whoever_has_no_role_or_tenant_does_not_get_in(site: Site) -> None:
    for user in ("frank", "grace"):
        with site.issuer.browser() as browser:
            done = site.log_in(browser, user)
            assert (done.status_code, done.json()["error"]["code"]) == (403, "forbidden")
            assert browser.get(f"{site.origin}/auth/session").status_code == 401


def test_a_return_counts_once_in_its_browser_and_names_its_issuer(site: Site, browser: Browser) -> None:
    site.log_in(browser)
    browser.follow_redirects = False

    def next_query() -> dict[str, str]:
        """Keycloak knows the browser: it sends it back at once."""
        begun = browser.get(f"{site.origin}/auth/login")
        back = browser.get(begun.headers["location"]).headers["location"]
        assert back.startswith(f"{site.origin}/auth/callback?")
        return {name: values[0] for name, values in parse_qs(urlsplit(back).query).items()}

    def come_back(query: dict[str, str], whose: httpx.Client = browser) -> int:
        return whose.get(f"{site.origin}/auth/callback", params=query).status_code

    query = next_query()
    assert query["iss"] == site.issuer.issuer
    assert come_back(query) == 303
    assert come_back(query) == 400
    query = next_query()
    with httpx.Client() as other:
        assert come_back(query, other) == 400
    query = next_query()
    assert come_back(query | {"iss": "https://other.example"}) == 400
    # The code of one login in another: Keycloak refuses the verifier.
    first, second = next_query(), next_query()
    assert come_back(second | {"code": first["code"]}) == 400
    assert come_back({"state": next_query()["state"], "code": "made up", "iss": site.issuer.issuer}) == 400


def test_a_revoked_session_is_out_at_once(site: Site, browser: Browser) -> None:
    site.log_in(browser)
    subject = site.session(browser)["subject"]

    def fairlane(*words: str) -> Any:
        command = (sys.executable, "-m", "fairlane_server.cli", "sessions", *words, "--tenant", site.tenant, "--json")
        env = {**os.environ, "REDIS_URL": site.redis_url}
        return json.loads(subprocess.run(command, env=env, capture_output=True, check=True, timeout=60).stdout)

    assert fairlane("list", "--subject", subject)["sessions"]
    assert fairlane("revoke", "--subject", subject)["ended"] >= 1
    assert browser.get(f"{site.origin}/auth/session").status_code == 401


def test_no_log_of_the_gateway_has_a_secret(site: Site, browser: Browser) -> None:
    site.log_in(browser)
    text = site.served.pipeline.processes["gateway-2"].log_file.read_text(encoding="utf-8")
    assert "login_succeeded" in text
    assert browser.cookies[SESSION] not in text
    for secret in (CLIENT_SECRET, "code=", "state=", "eyJ"):
        assert secret not in text


def test_a_user_that_is_disabled_is_out_and_must_log_in_again(site: Site, browser: Browser) -> None:
    site.log_in(browser)
    subject = site.session(browser)["subject"]
    with ApiKeys(site.served.database.owner_dsn) as keys:
        keys.set_user(site.tenant, subject, Role.VIEWER)
        eventually(lambda: site.session(browser)["role"] == "viewer", what="the other role")
        keys.set_user(site.tenant, subject, Role.VIEWER, disabled=True)
        eventually(lambda: browser.get(f"{site.origin}/auth/session").status_code == 403, what="the end")
        refused = browser.get(f"{site.origin}/auth/login")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "user_disabled")
        keys.set_user(site.tenant, subject, Role.VIEWER)
    eventually(lambda: browser.get(f"{site.origin}/auth/session").status_code == 401, what="no session")
    eventually(lambda: browser.get(f"{site.origin}/auth/login?return_to=/docs").status_code == 200, what="a login")
    assert site.session(browser)["subject"] == subject
