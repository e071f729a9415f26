"""Routes of the login: /auth/login, /auth/callback, /auth/session and /auth/logout."""

from collections.abc import Sequence
from typing import Annotated
from urllib.parse import parse_qs

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from fairlane import metrics
from fairlane.settings import Network
from fairlane_server.api_keys.api_key import Role
from fairlane_server.sessions.pending_logins import LONGEST_MS
from fairlane_server.sessions.session import csrf_token_of
from producers.gateway.identity.authentication import address_of_call
from producers.gateway.identity.browser_sessions import FoundSession
from producers.gateway.identity.identity import AuthRefusal, RefusedError, answer
from producers.gateway.identity.site import LOGIN_COOKIE, SESSION_COOKIE
from producers.gateway.login.login import BrowserLogin
from producers.gateway.pipeline.call_context import current
from producers.openai_api.errors import GatewayError

_MOST_QUERY_CHARACTERS = 8_192
_MOST_PARAMETERS = 20
# Browsers store no answer of a login, and send its address, which has a code, to no other site.
_PRIVATE = {"cache-control": "no-store", "referrer-policy": "no-referrer"}


class SessionInfo(BaseModel):
    """The session of this browser. Times are in milliseconds since the epoch."""

    subject: str = Field(description="`sub` of the user")
    tenant: str
    role: Role
    expires_at_ms: int = Field(description="When it ends, whatever happens")
    idle_expires_at_ms: int = Field(description="When it ends without another call")
    csrf_token: str = Field(description="Value of `x-csrf-token` for every call that changes something")


class LoggedOut(BaseModel):
    """The session has ended here."""

    end_session_url: str | None = Field(description="Where to send the browser to log out at the identity provider too")


def router(login: BrowserLogin, trusted_proxies: Sequence[Network]) -> APIRouter:
    """The routes."""
    api = APIRouter(prefix="/auth", tags=["Login"])
    site = login.site
    session_s = login.sessions.sessions.limits.absolute_ms // 1_000

    def login_secret(request: Request) -> str | None:
        return site.secret(request.scope["headers"], LOGIN_COOKIE)

    @api.get("/login", summary="Log in at the identity provider", status_code=303, response_class=RedirectResponse)
    async def begin(
        request: Request,
        return_to: Annotated[str, Query(description="A path of this site to continue at")] = "/",
    ) -> Response:
        """Send the browser to the identity provider."""
        address = address_of_call(request, trusted_proxies)
        redirect = await login.begin(return_to, address, login_secret(request))
        response = RedirectResponse(redirect.url, 303, headers=_PRIVATE)
        response.headers.append("set-cookie", site.set_cookie(LOGIN_COOKIE, redirect.secret, LONGEST_MS // 1_000))
        return response

    @api.get("/callback", include_in_schema=False)
    async def callback(request: Request) -> Response:
        """The identity provider sends the browser here."""
        address = address_of_call(request, trusted_proxies)
        query = _query(request)
        redirect, identity = await login.complete(query, address, login_secret(request), await _former(login, request))
        caller = current()
        caller.tenant, caller.subject = identity.tenant, identity.subject
        response = RedirectResponse(redirect.url, 303, headers=_PRIVATE)
        response.headers.append("set-cookie", site.set_cookie(SESSION_COOKIE, redirect.secret, session_s))
        return response

    @api.get("/session", summary="Who is logged in", response_model=SessionInfo)
    async def session(request: Request) -> Response:
        """The session of this browser. Asking does not count as use of it."""
        found = await _session(login, request)
        limits = login.sessions.sessions.limits
        info = SessionInfo(
            subject=found.identity.subject,
            tenant=found.identity.tenant,
            role=found.identity.role,
            expires_at_ms=found.session.created_ms + limits.absolute_ms,
            idle_expires_at_ms=found.session.ends_ms(limits),
            csrf_token=csrf_token_of(found.session_id),
        )
        return JSONResponse(info.model_dump(mode="json"), headers=_PRIVATE)

    @api.post("/logout", summary="Log out", response_model=LoggedOut)
    async def logout(
        request: Request,
        everywhere: Annotated[bool, Query(description="End all sessions of this user")] = False,
    ) -> Response:
        """End the session of this browser. Needs its CSRF token."""
        found = await _session(login, request)
        url = await login.log_out(found, everywhere=everywhere)
        response = JSONResponse(LoggedOut(end_session_url=url).model_dump(), headers=_PRIVATE)
        response.headers.append("set-cookie", site.set_cookie(SESSION_COOKIE, "", 0))
        return response

    return api


async def _session(login: BrowserLogin, request: Request) -> FoundSession:
    try:
        found = await login.sessions.verify(request, is_use=False)
    except RefusedError as error:
        metrics.AUTHENTICATIONS_REFUSED.labels(reason=error.why).inc()
        raise answer(error.why) from None
    caller = current()
    caller.tenant, caller.subject = found.identity.tenant, found.identity.subject
    return found


async def _former(login: BrowserLogin, request: Request) -> FoundSession | None:
    """The session that the browser still has, if any."""
    try:
        return await login.sessions.verify(request, is_use=False)
    except RefusedError as error:
        if error.why is AuthRefusal.SESSIONS_UNAVAILABLE:
            raise answer(error.why) from None
        return None


def _query(request: Request) -> dict[str, list[str]]:
    text = request.scope["query_string"].decode("latin-1")
    if len(text) > _MOST_QUERY_CHARACTERS or text.count("&") >= _MOST_PARAMETERS:
        raise GatewayError(400, "invalid", "the query is too large")
    return parse_qs(text, keep_blank_values=True)
