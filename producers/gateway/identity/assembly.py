"""Authentication and rate limits of a process, put together from its settings."""

from redis.asyncio import Redis

from fairlane.clock import monotonic_ms, now_ms
from fairlane.settings import Settings
from fairlane_server.circuit_breaker import BreakerPolicy, CircuitBreaker
from fairlane_server.postgres.pool import DeadlinePool
from fairlane_server.redis.availability import RedisAvailability
from producers.gateway.identity.api_keys import IdentityStore, KeyVerifier
from producers.gateway.identity.authentication import Authenticator
from producers.gateway.identity.jwks import KeySet, KeySetSource
from producers.gateway.identity.tokens import TokenVerifier
from producers.gateway.limits.rate_buckets import RatePolicy
from producers.gateway.limits.rate_limits import CallLimits, LocalRateLimits, RedisRateLimits


def authenticator(
    settings: Settings, pool: DeadlinePool, redis: "Redis | None", watch: RedisAvailability | None
) -> Authenticator:
    """Authentication and rate limits of callers. Without Redis the limits are those of this process alone.
    ``watch`` belongs to ``redis``; the caller closes all three.

    Raises ValueError for an invalid setting; the message quotes no secret.
    """
    store, breaker = IdentityStore(pool), CircuitBreaker(BreakerPolicy(failures=3))
    grace_ms = round(1_000 * settings.gateway_key_grace_s)
    keys, tokens = KeyVerifier(store, grace_ms, now_ms, monotonic_ms, breaker, settings.gateway_failed_keys_per_s), None
    if settings.jwt_issuer and settings.jwt_audience and settings.jwt_jwks_url:
        tokens = TokenVerifier(
            settings.jwt_issuer,
            settings.jwt_audience,
            settings.jwt_leeway_s,
            KeySet(KeySetSource(settings.jwt_jwks_url), monotonic_ms),
            store,
            grace_ms,
            monotonic_ms,
            breaker,
        )
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
    return Authenticator(keys, tokens, calls, monotonic_ms, settings.trusted_proxies)
