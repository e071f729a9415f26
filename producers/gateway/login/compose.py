"""Wire the login of browsers from settings."""

from fairlane.clock import ClockMs, monotonic_ms, now_ms
from fairlane.settings import Settings
from fairlane_server.redis.availability import WatchedRedis
from fairlane_server.sessions.pending_logins import RedisLogins
from producers.gateway.identity.browser_sessions import BrowserSessions
from producers.gateway.identity.users import Users
from producers.gateway.login.login import BrowserLogin
from producers.gateway.login.oidc_client import OidcClient


def browser_login(
    settings: Settings,
    redis: WatchedRedis | None,
    users: Users,
    sessions: BrowserSessions | None,
    clock: ClockMs = now_ms,
    monotonic_clock: ClockMs = monotonic_ms,
) -> BrowserLogin | None:
    """The login of browsers; None if no issuer is set, as ``sessions`` then are. The caller closes all that it passes
    and gets.

    Raises ValueError for an invalid setting; the message quotes no secret.
    """
    if settings.oidc_issuer is None or settings.oidc_client_id is None or settings.oidc_redirect_url is None:
        return None
    if redis is None or sessions is None:
        return None
    secret = settings.oidc_client_secret
    client = OidcClient(
        settings.oidc_issuer,
        settings.oidc_client_id,
        None if secret is None else secret.get_secret_value(),
        settings.oidc_scopes,
        settings.oidc_redirect_url,
        settings.jwt_leeway_s,
        monotonic_clock,
    )
    logins = RedisLogins(redis.client, redis.watch, settings.gateway_redis_timeout_s, clock)
    return BrowserLogin(client, logins, sessions, users, clock, monotonic_clock)
