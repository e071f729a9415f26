"""Logins of browsers: begin one, complete it, and end its session."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

from fairlane import metrics
from fairlane.clock import ClockMs
from fairlane.logs import get_logger
from fairlane_server.sessions.pending_logins import LONGEST_MS, RedisLogins
from fairlane_server.sessions.session import PendingLogin, Session, digest_of, is_secret, new_secret
from fairlane_server.store_error import StoreError
from producers.gateway.identity.browser_sessions import BrowserSessions, FoundSession
from producers.gateway.identity.identity import AuthRefusal, Identity, RefusedError, answer
from producers.gateway.identity.users import ClaimedUser, Users
from producers.gateway.limited_log import LimitedLog
from producers.gateway.limits.rate_buckets import RatePolicy, TokenBuckets
from producers.gateway.login.oidc_client import OidcClient, WrongTokenError, issuer_mismatch
from producers.gateway.login.provider import ProviderError
from producers.gateway.login.return_to import checked_path
from producers.openai_api.errors import GatewayError

log = get_logger(__name__)

LOGIN_FAILED = "login_failed"
LOGIN_UNAVAILABLE = "login_unavailable"
TOO_MANY_LOGINS = "too_many_logins"
OF_ADDRESS = RatePolicy(rate_per_s=2.0, burst=60)
"""Of begun and completed logins of one address; many browsers may share one."""
MOST_ADDRESSES = 20_000
_MOST_CODE_CHARACTERS = 4_096
_RETRY_AFTER_MS = 5_000
_LINES = RatePolicy(rate_per_s=5.0, burst=50)

Query = Mapping[str, Sequence[str]]
"""Values of a query by name."""


@dataclass(frozen=True, slots=True)
class Redirect:
    """Where to send a browser, and the secret to set: of its login, or the id of its session."""

    url: str
    secret: str


class BrowserLogin:
    """Logins at one issuer, for one site and one event loop. ``clock`` is since the epoch, ``monotonic_clock`` is not.
    All calls raise GatewayError."""

    def __init__(
        self,
        client: OidcClient,
        logins: RedisLogins,
        sessions: BrowserSessions,
        users: Users,
        clock: ClockMs,
        monotonic_clock: ClockMs,
    ) -> None:
        self._client = client
        self._logins = logins
        self.sessions = sessions
        self.site = sessions.site
        self._users = users
        self._clock = clock
        self._monotonic_clock = monotonic_clock
        self._addresses = TokenBuckets(MOST_ADDRESSES)
        self._log = LimitedLog(log, monotonic_clock, _LINES)

    async def begin(self, return_to: str, address: str | None, browser: str | None) -> Redirect:
        """Begin a login. ``browser`` is the secret of the browser's cookie, if it has one: logins in several windows
        share it."""
        self._count(address)
        path = checked_path(return_to)
        if path is None:
            raise GatewayError(400, "invalid", "must be a path of this site, such as /console/", field="return_to")
        state, nonce, verifier, browser = new_secret(), new_secret(), new_secret(), browser or new_secret()
        pending = PendingLogin(digest_of(browser), nonce, verifier, path, self._clock() + LONGEST_MS)
        try:
            url = await self._client.authorization_url(state, nonce, verifier)
            await self._logins.put(state, pending)
        except ProviderError as error:
            raise self._unavailable(error) from None
        except StoreError:
            raise self._refused("sessions_unavailable", answer(AuthRefusal.SESSIONS_UNAVAILABLE)) from None
        return Redirect(url, browser)

    async def complete(
        self, query: Query, address: str | None, browser: str | None, former: FoundSession | None
    ) -> tuple[Redirect, Identity]:
        """Complete the login that the issuer sent the browser back from. ``former`` is the session that the browser had
        before, which ends."""
        self._count(address)
        pending = await self._pending(query, browser)
        try:
            provider = await self._client.provider()
        except ProviderError as error:
            raise self._unavailable(error) from None
        if issuer_mismatch(self._client.issuer, provider, query.get("iss", ())):
            raise self._failed("issuer")
        code = _only(query, "code")
        if "error" in query or code is None or not 1 <= len(code) <= _MOST_CODE_CHARACTERS:
            raise self._failed("refused_by_issuer" if "error" in query else "code")
        claimed = await self._claimed(code, pending)
        try:
            identity = await self._users.identity(claimed)
        except RefusedError as error:
            raise self._refused(error.why, answer(error.why), error.who) from None
        session_id = await self._opened(claimed, former)
        metrics.LOGINS.labels(result="ok").inc()
        log.info("login_succeeded", tenant=identity.tenant, who=identity.subject, role=identity.role)
        return Redirect(f"{self.site.origin}{pending.return_to}", session_id), identity

    async def log_out(self, found: FoundSession, *, everywhere: bool) -> str | None:
        """End the session, or all of its user. Returns where the browser can log out at the issuer, if anywhere."""
        session = found.session
        try:
            if everywhere:
                await self.sessions.sessions.end_all(session.tenant, session.subject)
            await self.sessions.sessions.end(found.session_id, session)
        except StoreError:
            raise answer(AuthRefusal.SESSIONS_UNAVAILABLE) from None
        log.info("logged_out", tenant=session.tenant, who=session.subject, everywhere=everywhere)
        try:
            endpoint = (await self._client.provider()).end_session_endpoint
        except ProviderError:
            return None
        if endpoint is None:
            return None
        # Without a token as a hint: none is kept. The issuer may ask the user.
        query = {"client_id": self._client.client_id, "post_logout_redirect_uri": f"{self.site.origin}/"}
        return f"{endpoint}{'&' if '?' in endpoint else '?'}{urlencode(query)}"

    async def close(self) -> None:
        """Cancel fetches and lookups in flight."""
        await self._client.close()

    async def _pending(self, query: Query, browser: str | None) -> PendingLogin:
        state = _only(query, "state")
        if state is None or not is_secret(state) or browser is None:
            raise self._failed("state")
        try:
            pending = await self._logins.take(state)
        except StoreError:
            raise self._refused("sessions_unavailable", answer(AuthRefusal.SESSIONS_UNAVAILABLE)) from None
        # In another browser it is the login of somebody else (RFC 6819, section 4.4.1.8).
        if pending is None or pending.browser_sha256 != digest_of(browser):
            raise self._failed("state")
        return pending

    async def _claimed(self, code: str, pending: PendingLogin) -> ClaimedUser:
        try:
            return await self._client.user(code, pending.nonce, pending.verifier)
        except ProviderError as error:
            raise self._unavailable(error) from None
        except WrongTokenError as error:
            raise self._failed(str(error)) from None
        except RefusedError as error:
            if error.why in (AuthRefusal.NO_TENANT, AuthRefusal.UNAVAILABLE):
                raise self._refused(error.why, answer(error.why), error.who) from None
            raise self._failed(error.why) from None

    async def _opened(self, claimed: ClaimedUser, former: FoundSession | None) -> str:
        """The id of a new session. It is always a new one: nobody can prepare it for somebody else."""
        now_ms, session_id = self._clock(), new_secret()
        try:
            if former is not None:
                await self.sessions.sessions.end(former.session_id, former.session)
            session = Session(claimed.tenant, claimed.subject, claimed.role, now_ms, now_ms)
            await self.sessions.sessions.create(session_id, session)
        except StoreError:
            raise self._refused("sessions_unavailable", answer(AuthRefusal.SESSIONS_UNAVAILABLE)) from None
        return session_id

    def _count(self, address: str | None) -> None:
        if address is None:
            return
        allowance = self._addresses.take([address], OF_ADDRESS, self._monotonic_clock())
        if not allowance.is_granted:
            text = "Too many logins came from this address."
            error = GatewayError(429, TOO_MANY_LOGINS, text, retry_after_ms=allowance.retry_after_ms)
            raise self._refused("too_many", error)

    def _failed(self, why: str) -> GatewayError:
        """The same answer for all reasons; the log has the reason."""
        text = "This login has failed, was used before, or took too long: begin again."
        return self._refused(why, GatewayError(400, LOGIN_FAILED, text))

    def _unavailable(self, error: ProviderError) -> GatewayError:
        log.debug("login_unavailable", error=str(error))
        text = "Nobody can log in at the moment: the identity provider cannot be used."
        return self._refused(
            "issuer_unavailable", GatewayError(503, LOGIN_UNAVAILABLE, text, retry_after_ms=_RETRY_AFTER_MS)
        )

    def _refused(self, why: str, error: GatewayError, who: str | None = None) -> GatewayError:
        metrics.LOGINS.labels(result=why).inc()
        self._log.warning("login_refused", why, reason=why, who=who)
        return error


def _only(query: Query, name: str) -> str | None:
    values = query.get(name, ())
    return values[0] if len(values) == 1 else None
