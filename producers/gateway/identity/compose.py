"""Wire authentication from settings, for any application of ours: keys, tokens, and sessions of browsers."""

from dataclasses import dataclass

from fairlane.clock import ClockMs, monotonic_ms, now_ms
from fairlane.settings import Settings
from fairlane_server.circuit_breaker import BreakerPolicy, CircuitBreaker
from fairlane_server.postgres.pool import DeadlinePool
from fairlane_server.redis.availability import WatchedRedis
from fairlane_server.sessions.session import SessionLimits
from fairlane_server.sessions.store import RedisSessions
from producers.gateway.identity.api_keys import IdentityStore, KeyVerifier
from producers.gateway.identity.authentication import Authenticator
from producers.gateway.identity.browser_sessions import BrowserSessions
from producers.gateway.identity.http_documents import checked_url
from producers.gateway.identity.jwks import KeySet, KeySetSource
from producers.gateway.identity.site import CALLBACK_PATH, Site
from producers.gateway.identity.tokens import SignedTokens, TokenVerifier
from producers.gateway.identity.users import Users
from producers.gateway.limits.rate_buckets import RatePolicy
from producers.gateway.limits.rate_limits import CallLimits, LocalRateLimits, RedisRateLimits


@dataclass(frozen=True, slots=True)
class Authentication:
    """What authenticates the calls of an application; ``sessions`` are None if there are none."""

    authenticator: Authenticator
    users: Users
    sessions: BrowserSessions | None


def authentication(
    settings: Settings,
    pool: DeadlinePool,
    redis: WatchedRedis | None,
    *,
    has_sessions: bool = True,
    has_shared_limits: bool = True,
) -> Authentication:
    """Authentication and rate limits of an application; the caller closes all that it passes and gets. Without
    ``has_shared_limits``, and without Redis, each process has rate limits of its own. Without ``has_sessions`` cookies
    are not read.

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
    if redis is not None and has_shared_limits:
        limits = RedisRateLimits(redis.client, local, redis.watch, settings.gateway_redis_timeout_s)
    calls = CallLimits(
        limits,
        RatePolicy(settings.gateway_key_rate_per_s, settings.gateway_key_burst),
        RatePolicy(settings.gateway_tenant_rate_per_s, settings.gateway_tenant_burst),
        monotonic_ms,
    )
    sessions = browser_sessions(settings, redis, users) if has_sessions else None
    authenticator = Authenticator(keys, tokens, calls, monotonic_ms, settings.trusted_proxies, sessions)
    return Authentication(authenticator, users, sessions)


def session_limits(settings: Settings) -> SessionLimits:
    """The limits in the settings."""
    return SessionLimits(round(1_000 * settings.session_absolute_s), round(1_000 * settings.session_idle_s))


def browser_sessions(
    settings: Settings, redis: WatchedRedis | None, users: Users, clock: ClockMs = now_ms
) -> BrowserSessions | None:
    """Sessions of browsers, whichever process they logged in at; None if no issuer is set.

    Raises ValueError for an invalid setting; the message quotes no secret.
    """
    if settings.oidc_redirect_url is None:
        return None
    if redis is None:
        raise ValueError("REDIS_URL is needed with OIDC_ISSUER: sessions are kept there")
    redirect_url = checked_url(settings.oidc_redirect_url, "OIDC_REDIRECT_URL")
    if redirect_url.raw_path != CALLBACK_PATH.encode() or redirect_url.fragment:
        raise ValueError(f"OIDC_REDIRECT_URL: must end with {CALLBACK_PATH}, without a query")
    timeout_s = settings.gateway_redis_timeout_s
    store = RedisSessions(redis.client, redis.watch, timeout_s, session_limits(settings), clock)
    return BrowserSessions(Site(redirect_url), store, users)
