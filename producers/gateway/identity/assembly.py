"""Assemble authentication and rate limits for the gateway's composition root."""

from dataclasses import dataclass

from redis.asyncio import Redis

from fairlane.clock import monotonic_ms, now_ms
from fairlane.settings import Settings
from fairlane_server.circuit_breaker import BreakerPolicy, CircuitBreaker
from fairlane_server.postgres.pool import DeadlinePool
from fairlane_server.redis.availability import RedisAvailability
from producers.gateway.identity.api_keys import IdentityStore, KeyVerifier
from producers.gateway.identity.authentication import AuthenticatedCall, Authenticator
from producers.gateway.identity.jwks import KeySet, KeySetSource
from producers.gateway.identity.tokens import TokenPolicy, TokenVerifier
from producers.gateway.limits.rate_buckets import FailedKeys, RatePolicy
from producers.gateway.limits.rate_limits import CallLimits, LocalRateLimits, RedisRateLimits

APPLICATION_NAME = "fairlane-gateway-identity"
# A separate pool: slow result queries must not block authentication.
_CONNECTIONS = 4


@dataclass(frozen=True, slots=True)
class IdentityParts:
    """Parts of authentication; open them on the serving event loop, close them after serving."""

    gate: AuthenticatedCall
    authenticator: Authenticator
    keys: KeyVerifier
    tokens: TokenVerifier | None
    key_set: KeySet | None
    pool: DeadlinePool

    async def open(self) -> None:
        """Start connecting; neither Postgres nor the issuer need be available."""
        await self.pool.open()

    async def close(self) -> None:
        """Cancel lookups and fetches in flight; close the pool."""
        await self.keys.close()
        if self.tokens is not None:
            await self.tokens.close()
        if self.key_set is not None:
            await self.key_set.close()
        await self.pool.close()


def assemble(settings: Settings, redis: "Redis | None", watch: RedisAvailability | None) -> IdentityParts:
    """Authentication and rate limits of a gateway. ``watch`` belongs to ``redis``; the caller closes it.

    Raises ValueError for an invalid setting; the message quotes no secret.
    """
    pool = DeadlinePool(settings.postgres_dsn.get_secret_value(), APPLICATION_NAME, _CONNECTIONS)
    store, breaker = IdentityStore(pool), CircuitBreaker(BreakerPolicy(failures=3))
    grace_ms = round(1_000 * settings.gateway_key_grace_s)
    failed = FailedKeys(settings.gateway_failed_keys_per_s)
    keys = KeyVerifier(store, grace_ms, now_ms, monotonic_ms, breaker, failed)
    key_set, tokens = None, None
    if settings.jwt_issuer and settings.jwt_audience and settings.jwt_jwks_url:
        key_set = KeySet(KeySetSource(settings.jwt_jwks_url), monotonic_ms)
        policy = TokenPolicy(settings.jwt_issuer, settings.jwt_audience, settings.jwt_leeway_s)
        tokens = TokenVerifier(policy, key_set, store, grace_ms, monotonic_ms, breaker)
    authenticator = Authenticator(keys, tokens, monotonic_ms)
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
    gate = AuthenticatedCall(authenticator, calls, settings.trusted_proxies)
    return IdentityParts(gate, authenticator, keys, tokens, key_set, pool)
