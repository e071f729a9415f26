"""The address that browsers know us by, and the cookies and headers that are valid there. Pure."""

import hmac
from collections.abc import Sequence

import httpx

from fairlane import names
from fairlane_server.sessions.session import csrf_token_of, is_secret

CSRF_HEADER = "x-csrf-token"
SESSION_COOKIE = "fairlane-session"
LOGIN_COOKIE = "fairlane-login"
CALLBACK_PATH = "/auth/callback"
"""Where an issuer sends browsers back to, below the origin of the site."""

_READING = frozenset({"GET", "HEAD", "OPTIONS"})
Headers = Sequence[tuple[bytes, bytes]]


class Site:
    """Origin and cookies of one deployment. Over https, cookies have the prefix ``__Host-``: browsers accept them only
    from this host and without a domain. Over http, which only this machine may use, they have neither the prefix nor
    ``Secure``. TOPIC_PREFIX in their names keeps apart deployments on one host.

    Attributes:
        origin: scheme, host and port, as browsers send it.
    """

    def __init__(self, url: httpx.URL) -> None:
        port = "" if url.port is None else f":{url.port}"
        host = f"[{url.host}]" if ":" in url.host else url.host
        self.origin = f"{url.scheme}://{host}{port}"
        self._is_secure = url.scheme == "https"

    def cookie(self, kind: str) -> str:
        """The name of the cookie of this kind."""
        return f"{'__Host-' if self._is_secure else ''}{names.TOPIC_PREFIX}{kind}"

    def set_cookie(self, kind: str, value: str, longest_s: int) -> str:
        """The header that sets the cookie; with 0 seconds, that deletes it. Scripts cannot read it, and other sites'
        forms and scripts do not send it."""
        secure = "; Secure" if self._is_secure else ""
        return f"{self.cookie(kind)}={value}; Path=/; Max-Age={longest_s}; HttpOnly; SameSite=Lax{secure}"

    def secret(self, headers: Headers, kind: str) -> str | None:
        """The secret in the call's cookie of this kind; None without one, and for anything else. Two values are none:
        one of them may be another site's."""
        name, found = self.cookie(kind), []
        for header, value in headers:
            if header == b"cookie":
                pairs = (pair.strip().partition("=") for pair in value.decode("latin-1").split(";"))
                found += [content for key, _, content in pairs if key == name]
        return found[0] if len(found) == 1 and is_secret(found[0]) else None

    def has_cookie(self, headers: Headers, kind: str) -> bool:
        """Whether the call shows a cookie of this kind, valid or not."""
        name = self.cookie(kind).encode("latin-1") + b"="
        return any(
            part.strip().startswith(name)
            for header, value in headers
            if header == b"cookie"
            for part in value.split(b";")
        )

    def is_own_call(self, method: str, headers: Headers, session_id: str) -> bool:
        """Whether our own pages made this call, as far as it matters: a call that changes something must show the CSRF
        token of its session, and a WebSocket, which no page can give a header, our origin. Calls that only read need
        neither: other sites cannot see their answers."""
        shown = {name: [value for key, value in headers if key == name] for name in (b"origin", b"sec-fetch-site")}
        origins = shown[b"origin"]
        if method == "WEBSOCKET":
            return origins == [self.origin.encode()]
        if method in _READING:
            return True
        if any(origin != self.origin.encode() for origin in origins):
            return False
        if any(site != b"same-origin" for site in shown[b"sec-fetch-site"]):
            return False
        tokens = [value for key, value in headers if key == CSRF_HEADER.encode()]
        return len(tokens) == 1 and hmac.compare_digest(tokens[0], csrf_token_of(session_id).encode())
