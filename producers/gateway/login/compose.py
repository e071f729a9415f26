"""Wire authentication from settings, for any application of ours: keys, tokens, and sessions with their login."""

from dataclasses import dataclass

from redis.asyncio import Redis

from fairlane.clock import ClockMs, monotonic_ms, now_ms
from fairlane.settings import Settings
from fairlane_server.circuit_breaker import BreakerPolicy, CircuitBreaker
from fairlane_server.postgres.pool import DeadlinePool
from fairlane_server.redis.availability import RedisAvailability
from fairlane_server.sessions.pending_logins import RedisLogins
from fairlane_server.sessions.session import SessionLimits
from fairlane_server.sessions.store import RedisSessions
from producers.gateway.identity.api_keys import IdentityStore, KeyVerifier
from producers.gateway.identity.authentication import Authenticator
from producers.gateway.identity.browser_sessions import BrowserSessions
from producers.gateway.identity.http_documents import checked_url
from producers.gateway.identity.jwks import KeySet, KeySetSource
from producers.gateway.identity.site import Site
from producers.gateway.identity.tokens import SignedTokens, TokenVerifier
from producers.gateway.identity.users import Users
from producers.gateway.limits.rate_buckets import RatePolicy
from producers.gateway.limits.rate_limits import CallLimits, LocalRateLimits, RedisRateLimits
from producers.gateway.login.login import BrowserLogin
from producers.gateway.login.oidc_client import OidcClient
from producers.gateway.login.routes import CALLBACK_PATH


@dataclass(frozen=True, slots=True)
class Authentication:
    """What authenticates the calls of an application, and the login of browsers, if an issuer is set."""

    authenticator: Authenticator
    login: BrowserLogin | None


def authentication(
    settings: Settings,
    pool: DeadlinePool,
    redis: "Redis | None" = None,
    watch: RedisAvailability | None = None,
    *,
    has_sessions: bool = True,
) -> Authentication:
    """Authentication and rate limits of an application; without ``has_sessions`` browsers cannot log in. ``watch``
    belongs to ``redis``; the caller closes all three, and what it gets.

    Raises ValueError for an invalid setting; the message quotes no secret.
    """
    store, breaker = IdentityStore(pool), CircuitBreaker(BreakerPolicy(failures=3))
    grace_ms = round(1_000 * settings.gateway_key_grace_s)
    users = Users(store, grace_ms, monotonic_ms, breaker)
    keys, tokens = KeyVerifier(store, grace_ms, now_ms, monotonic_ms, breaker, settings.gateway_failed_keys_per_s), None
    if settings.jwt_issuer and settings.jwt_audience and settings.jwt_jwks_url:
        key_set = KeySet(KeySetSource(settings.jwt_jwks_url), monotonic_ms)
        signed = SignedTokens(settings.jwt_issuer, settings.jwt_audience, settings.jwt_leeway_s, key_set)
        tokens = TokenVerifier(signed, users)
    local = LocalRateLimits(monotonic_ms)
    limits: LocalRateLimits | RedisRateLimits = local
    if redis is not None and watch is not None:
        limits = RedisRateLimits(redis, local, watch, settings.gateway_redis_timeout_s)
    calls = CallLimits(
        limits,
        RatePolicy(settings.gateway_key_rate_per_s, settings.gateway_key_burst),
        RatePolicy(settings.gateway_tenant_rate_per_s, settings.gateway_tenant_burst),
        monotonic_ms,
    )
    login = browser_login(settings, redis, watch, users) if has_sessions else None
    sessions = None if login is None else login.sessions
    return Authentication(Authenticator(keys, tokens, calls, monotonic_ms, settings.trusted_proxies, sessions), login)


def session_limits(settings: Settings) -> SessionLimits:
    """The limits in the settings."""
    return SessionLimits(round(1_000 * settings.session_absolute_s), round(1_000 * settings.session_idle_s))


def browser_login(
    settings: Settings,
    redis: "Redis | None",
    watch: RedisAvailability | None,
    users: Users,
    clock: ClockMs = now_ms,
    monotonic_clock: ClockMs = monotonic_ms,
) -> BrowserLogin | None:
    """The login of browsers; None if no issuer is set. The caller closes all that it passes.

    Raises ValueError for an invalid setting; the message quotes no secret.
    """
    if settings.oidc_issuer is None or settings.oidc_client_id is None or settings.oidc_redirect_url is None:
        return None
    if redis is None or watch is None:
        raise ValueError("REDIS_URL is needed with OIDC_ISSUER: sessions are kept there")
    redirect_url = checked_url(settings.oidc_redirect_url, "OIDC_REDIRECT_URL")
    if redirect_url.raw_path != CALLBACK_PATH.encode() or redirect_url.fragment:
        raise ValueError(f"OIDC_REDIRECT_URL: must end with {CALLBACK_PATH}, without a query")
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
    timeout_s = settings.gateway_redis_timeout_s
    store = RedisSessions(redis, watch, timeout_s, session_limits(settings), clock)
    sessions = BrowserSessions(Site(redirect_url), store, users)
    return BrowserLogin(client, RedisLogins(redis, watch, timeout_s, clock), sessions, users, clock, monotonic_clock)
