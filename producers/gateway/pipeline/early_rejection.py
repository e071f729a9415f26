"""Early rejection of requests that the dispatcher would reject, from heartbeats and ``now_ms``. Pure.

The dispatcher decides on admission; this only saves the caller the way there. So nothing is rejected that the
dispatcher might admit: not while the load is unknown, not where a step of the degradation ladder might still serve the
request, and not for a pool that never reported, since incoming work is its reason to start.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fairlane.backoff import jittered_ms
from fairlane.outcomes import DEFAULT_TIMEOUT_MS, Code, Task
from fairlane.records import InferenceRequest, ModelVersion, TenantSpec
from fairlane_server.heartbeats import CAPACITY_TTL_MS, LEAST_OUTAGE_MS
from fairlane_server.kafka.load_board import LoadView, PoolRow, TenantRow

NO_CAPACITY = "no_capacity"
"""The gateway's own code: the pool has lost its last consumer."""

FRESH_MS = 2_500
"""Age beyond which a view is ignored."""

SLACK_MS = 2_000
"""Longest delay of a heartbeat: as much work may have drained since."""

_FULL_AGAIN_PART = 0.1
_LEAST_RETRY_MS = 500
_MOST_RETRY_MS = 300_000
_JITTER = 0.5


@dataclass(frozen=True, slots=True)
class EarlyRejection:
    """Rejection of a request, as an HTTP error."""

    status: int
    code: str
    message: str
    field: str | None = None
    retry_after_ms: int | None = None


@dataclass(frozen=True, slots=True)
class RegistrySnapshot:
    """Tenants and models by name. None: not known yet."""

    tenants: Mapping[str, TenantSpec] | None = None
    models: Mapping[str, ModelVersion] | None = None


@dataclass(slots=True)
class LatestLoad:
    """The latest view of the load, and when each pool last had consumers."""

    _view: LoadView | None = None
    _pools: Mapping[str, PoolRow] = field(default_factory=dict)
    _tenants: Mapping[tuple[str, str], TenantRow] = field(default_factory=dict)
    _lived_at_ms: dict[str, int] = field(default_factory=dict)

    def look(self, view: LoadView) -> None:
        """Replace the view by a newer one."""
        self._view = view
        self._pools = {row.pool: row for row in view.pools}
        self._tenants = {(row.tenant, row.pool): row for row in view.tenants if row.pool is not None}
        for row in view.pools:
            if row.consumers:
                self._lived_at_ms[row.pool] = view.at_ms

    def view(self, now_ms: int) -> LoadView | None:
        """The view; None if there is none or it is too old."""
        return self._view if self._view is not None and now_ms - self._view.at_ms <= FRESH_MS else None

    def pool(self, name: str) -> PoolRow | None:
        """Row of the pool; None if the view has none."""
        return self._pools.get(name)

    def tenant(self, tenant: str, pool: str) -> TenantRow | None:
        """Row of the tenant in this pool; None if no dispatcher reports it."""
        return self._tenants.get((tenant, pool))

    def lost_for_ms(self, pool: str, now_ms: int) -> int | None:
        """Time since the pool's last consumer reported; None if it has consumers, or never had any while observed."""
        lived_at_ms = self._lived_at_ms.get(pool)
        row = self._pools.get(pool)
        if lived_at_ms is None or (row is not None and row.consumers):
            return None
        return max(0, now_ms - lived_at_ms) + CAPACITY_TTL_MS


def early_answer(
    tenant: str, request: InferenceRequest, registry: RegistrySnapshot, picture: LatestLoad, now_ms: int
) -> EarlyRejection | None:
    """Why this request would be rejected; None if it may be admitted.

    - 403 for an unregistered tenant, and for a model that it may not use; 404 for an unknown model.
    - 503 ``no_capacity`` if its pool has lost its last consumer and is not expected back within the request's timeout.
    - 429 ``overloaded`` if the tenant's queue is full and the dispatcher has recently rejected for that.
    - 429 ``deadline_unmeetable`` if the work ahead of it takes longer than its timeout.
    """
    if registry.tenants is None or registry.models is None:
        return None
    spec = registry.tenants.get(tenant)
    if spec is None:
        return EarlyRejection(403, Code.FORBIDDEN, f"{tenant} is not registered", "tenant")
    model = registry.models.get(request.model)
    if model is None:
        return EarlyRejection(404, Code.UNKNOWN_MODEL, "no model has this name", "model")
    if spec.models and model.model not in spec.models:
        return EarlyRejection(403, Code.FORBIDDEN, f"{tenant} may not use {model.model}", "model")
    pool = pool_of(spec, model)
    view = picture.view(now_ms)
    if pool is None or view is None or not view.dispatchers or request.task not in model.tasks:
        return None
    timeout_ms = request.timeout_ms or DEFAULT_TIMEOUT_MS.get(request.priority)
    if timeout_ms is None:
        return None
    another = model.smaller_model is not None and request.task == Task.GENERATE
    return (
        (None if another else _no_capacity(pool, timeout_ms, request.request_id, picture, now_ms))
        or _queue_is_full(spec, pool, request.request_id, picture)
        or (None if another else _too_late(tenant, pool, timeout_ms, request, picture))
    )


def pool_of(spec: TenantSpec, model: ModelVersion) -> str | None:
    """Pool that serves the tenant; None if that is uncertain."""
    if spec.pool is None:
        return model.pool
    return spec.pool if spec.pool in (model.pool, *model.dedicated_pools) else None


def _no_capacity(
    pool: str, timeout_ms: int, request_id: str, picture: LatestLoad, now_ms: int
) -> EarlyRejection | None:
    lost_for_ms = picture.lost_for_ms(pool, now_ms)
    if lost_for_ms is None:
        return None
    # An outage of unknown length is expected to last as long again as it has lasted so far.
    back_in_ms = max(LEAST_OUTAGE_MS, lost_for_ms)
    if back_in_ms - SLACK_MS <= timeout_ms:
        return None
    message = f"the pool {pool} has been without consumers for {lost_for_ms / 1_000:.0f} s"
    return EarlyRejection(503, NO_CAPACITY, message, retry_after_ms=_retry_ms(back_in_ms, request_id))


def _queue_is_full(spec: TenantSpec, pool: str, request_id: str, picture: LatestLoad) -> EarlyRejection | None:
    row = picture.tenant(spec.tenant, pool)
    # The backlog includes backfill, which has a limit of its own: only a recent rejection proves the queue full.
    if row is None or row.waiting_requests < spec.max_queue_requests or not row.shed_recently.get(Code.OVERLOADED):
        return None
    rate = row.tokens_per_s or 0.0
    drains_in_ms = 1_000 * _FULL_AGAIN_PART * row.waiting_tokens / rate if rate > 0 else LEAST_OUTAGE_MS
    message = f"the tenant's queue is full: {row.waiting_requests} of {spec.max_queue_requests} requests wait"
    return EarlyRejection(429, Code.OVERLOADED, message, retry_after_ms=_retry_ms(drains_in_ms, request_id))


def _too_late(
    tenant: str, pool: str, timeout_ms: int, request: InferenceRequest, picture: LatestLoad
) -> EarlyRejection | None:
    row = picture.pool(pool)
    if row is None or not row.consumers or row.capacity_tokens_per_s <= 0:
        return None
    rate = row.capacity_tokens_per_s
    all_ms = 1_000 * row.waiting_tokens / rate
    own = picture.tenant(tenant, pool)
    own_ms = 0.0
    # A tenant's backlog is not reported by class: it is known only where no other class waits in the pool.
    if own is not None and own.entitled_share and set(row.waiting_by_class) <= {request.priority}:
        own_ms = 1_000 * own.waiting_tokens / (rate * own.entitled_share)
    wait_ms = 1_000 * row.in_flight_tokens / rate + min(all_ms, own_ms)
    if wait_ms - SLACK_MS <= timeout_ms:
        return None
    message = f"it would wait for {wait_ms / 1_000:.1f} s, and has {timeout_ms / 1_000:.1f} s"
    retry_ms = _retry_ms(wait_ms - timeout_ms, request.request_id)
    return EarlyRejection(429, Code.DEADLINE_UNMEETABLE, message, retry_after_ms=retry_ms)


def _retry_ms(least_ms: float, request_id: str) -> int:
    bounded_ms = min(max(least_ms, _LEAST_RETRY_MS), _MOST_RETRY_MS / (1 + _JITTER))
    return jittered_ms(bounded_ms, _JITTER, request_id)
