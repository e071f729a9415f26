"""Rate limits of a caller: its key, its user and its tenant."""

from hashlib import sha256
from math import ceil

from fairlane import metrics
from fairlane.clock import ClockMs
from producers.gateway.identity.identity import Identity
from producers.gateway.limits.rate_buckets import Allowance, RatePolicy, TokenBuckets
from producers.gateway.limits.rate_limits import RateLimits
from producers.openai_api.errors import GatewayError

RATE_LIMITED = "rate_limit_exceeded"
_MS_PER_S, _MS_PER_MINUTE, _MS_PER_HOUR = 1_000, 60_000, 3_600_000


class CallLimits:
    """Every key and every user has a token bucket; a call takes from both of its caller, or from none. A granted call
    then takes from its tenant's bucket, so that many users do not multiply a tenant's rate. The tenants' buckets are
    local: they protect this process, and cost no round trip."""

    def __init__(self, limits: RateLimits, policy: RatePolicy, tenant_policy: RatePolicy, clock: ClockMs) -> None:
        self._limits = limits
        self._policy = policy
        self._tenant_policy = tenant_policy
        self._tenants = TokenBuckets()
        self._clock = clock

    async def take(self, identity: Identity) -> Allowance:
        """Take one call of this caller."""
        found = await self._limits.take(owners_of(identity), self._policy)
        if found.is_granted:
            of_tenant = self._tenants.take([identity.tenant], self._tenant_policy, self._clock())
            if not of_tenant.is_granted or of_tenant.remaining < found.remaining:
                found = of_tenant
        if not found.is_granted:
            metrics.CALLS_LIMITED.labels(tenant=identity.tenant).inc()
        return found


def owners_of(identity: Identity) -> tuple[str, ...]:
    """Names of the caller's buckets of key and user."""
    if identity.user is None:
        return (f"key:{identity.subject}",)
    # A digest: a subject may be any text of any length.
    user = f"user:{identity.tenant}:{sha256(identity.user.encode()).hexdigest()}"
    return (user,) if identity.user == identity.subject else (f"key:{identity.subject}", user)


def refusal(allowance: Allowance) -> GatewayError:
    """The error for a caller over its rate."""
    return GatewayError(
        429,
        RATE_LIMITED,
        "Too many calls with this key, of this user or of this tenant.",
        retry_after_ms=allowance.retry_after_ms,
    )


def headers_of(allowance: Allowance) -> dict[str, str]:
    """The headers of OpenAI's API, by the same names."""
    return {
        "x-ratelimit-limit-requests": str(allowance.limit),
        "x-ratelimit-remaining-requests": str(allowance.remaining),
        "x-ratelimit-reset-requests": span_text(allowance.reset_ms),
    }


def span_text(span_ms: int) -> str:
    """A duration as ``12ms``, ``3s``, ``6m0s``, ``1h2m3s``: from one second on, whole seconds rounded up."""
    if span_ms < _MS_PER_S:
        return f"{span_ms}ms"
    span_ms = ceil(span_ms / _MS_PER_S) * _MS_PER_S
    hours, rest = divmod(span_ms, _MS_PER_HOUR)
    minutes, rest = divmod(rest, _MS_PER_MINUTE)
    text = f"{hours}h" if hours else ""
    text += f"{minutes}m" if hours or minutes else ""
    return f"{text}{rest // _MS_PER_S}s"
