"""Verify the session cookie of a call: the cookie in, an identity out."""

from dataclasses import dataclass

from starlette.requests import HTTPConnection

from fairlane.logs import get_logger
from fairlane_server.sessions.session import Session
from fairlane_server.sessions.store import RedisSessions
from fairlane_server.store_error import StoreError
from producers.gateway.identity.identity import AuthRefusal, Identity, RefusedError
from producers.gateway.identity.site import SESSION_COOKIE, Site
from producers.gateway.identity.users import ClaimedUser, Users

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class FoundSession:
    """A valid session, and the identity of its user now."""

    session_id: str
    session: Session
    identity: Identity


class BrowserSessions:
    """Sessions of one site. A session is looked up in Redis with each call, so that it ends at once; its user's
    settings are those of at most a second ago, as with tokens."""

    def __init__(self, site: Site, sessions: RedisSessions, users: Users) -> None:
        self.site = site
        self.sessions = sessions
        self._users = users

    def is_shown(self, connection: HTTPConnection) -> bool:
        """Whether the call shows a session."""
        return self.site.has_cookie(connection.scope["headers"], SESSION_COOKIE)

    async def verify(self, connection: HTTPConnection, *, is_use: bool) -> FoundSession:
        """The session of the call. With ``is_use`` it counts as used now. Raises RefusedError."""
        headers = connection.scope["headers"]
        session_id = self.site.secret(headers, SESSION_COOKIE)
        if session_id is None:
            raise RefusedError(AuthRefusal.NO_SESSION)
        method = "WEBSOCKET" if connection.scope["type"] == "websocket" else connection.scope["method"]
        if not self.site.is_own_call(method, headers, session_id):
            raise RefusedError(AuthRefusal.CROSS_SITE)
        try:
            session = await self.sessions.find(session_id, is_use=is_use)
        except StoreError:
            raise RefusedError(AuthRefusal.SESSIONS_UNAVAILABLE) from None
        if session is None:
            raise RefusedError(AuthRefusal.NO_SESSION)
        try:
            identity = await self._users.identity(ClaimedUser(session.tenant, session.subject, session.role))
        except RefusedError as error:
            if error.why is AuthRefusal.USER_DISABLED:
                await self._end_all(session)
            raise
        return FoundSession(session_id, session, identity)

    async def close(self) -> None:
        """Cancel lookups in flight."""
        await self._users.close()

    async def _end_all(self, session: Session) -> None:
        """A user that is enabled again must log in again."""
        try:
            ended = await self.sessions.end_all(session.tenant, session.subject)
        except StoreError:
            return
        log.info("sessions_ended", reason="user_disabled", tenant=session.tenant, who=session.subject, sessions=ended)
