"""Early rejection of requests that the dispatcher would reject, from heartbeats and ``now_ms``. Pure.

The dispatcher decides on admission; this applies its rule early, so that the caller need not wait for it
(``fairlane_server.admission_rule``). So nothing is rejected that the dispatcher might admit: not while the load is
unknown, and not where a step of the degradation ladder might still serve the request. The request's own cost, which
only the dispatcher can estimate, counts as nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fairlane.outcomes import DEFAULT_TIMEOUT_MS, Code, Degradation
from fairlane.records import InferenceRequest, ModelVersion, TenantSpec
from fairlane_server.admission_rule import (
    AFTERWARDS_FREE,
    CAPACITY_TTL_MS,
    LEAST_OUTAGE_MS,
    CapacityState,
    PoolCapacity,
    WorkAhead,
    drain_ms,
    predict,
    retry_after_ms,
    takes_anything,
)
from fairlane_server.kafka.load_board import LoadView, PoolRow, TenantRow
from fairlane_server.models.catalog import ModelCatalog, NoVersion
from fairlane_server.models.routes import model_of
from producers.openai_api.errors import GatewayError

NO_CAPACITY = "no_capacity"
"""The gateway's own code: the pool has lost its last consumer."""

FRESH_MS = 2_500
"""Age beyond which a view is ignored."""

SLACK_MS = 2_000
"""Longest delay of a heartbeat: as much work may have drained since."""

_LEAST_RETRY_MS = 500
_JITTER = 0.5


@dataclass(frozen=True, slots=True)
class RegistrySnapshot:
    """Tenants and models by name. None: not known yet."""

    tenants: Mapping[str, TenantSpec] | None = None
    models: ModelCatalog | None = None


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

    def is_known(self, now_ms: int) -> bool:
        """Whether there is a view that is not too old, and a dispatcher in it."""
        return self._view is not None and now_ms - self._view.at_ms <= FRESH_MS and self._view.dispatchers > 0

    def tenant(self, tenant: str, pool: str) -> TenantRow | None:
        """Row of the tenant in this pool; None if no dispatcher reports it."""
        return self._tenants.get((tenant, pool))

    def reserved(self, tenant: str, now_ms: int) -> Mapping[str | None, int] | None:
        """Reservations of a tenant's budgets, by caller (None: of the tenant). None while they are not known."""
        return self._view.reserved(tenant) if self._view is not None and self.is_known(now_ms) else None

    def ahead(self, pool: str, now_ms: int) -> WorkAhead:
        """Work that is certainly ahead of a request. A pool without consumers during the whole observation counts as
        never seen."""
        row = self._pools.get(pool)
        if row is None or not row.consumers:
            lived_at_ms = self._lived_at_ms.get(pool)
            if lived_at_ms is None:
                return WorkAhead(PoolCapacity(), 0, 0, 0)
            lost_for_ms = max(0, now_ms - lived_at_ms) + CAPACITY_TTL_MS
            return WorkAhead(PoolCapacity(CapacityState.LOST, lost_for_ms=lost_for_ms), 0, 0, 0)
        capacity = PoolCapacity(CapacityState.LIVE, row.consumers, row.capacity_tokens_per_s)
        # Only what is dispatched: of what waits, even of the same tenant, a later deadline or backfill goes after it.
        return WorkAhead(capacity, row.in_flight_tokens, row.waiting_tokens, 0)


def reject_early(
    tenant: str, request: InferenceRequest, registry: RegistrySnapshot, latest: LatestLoad, now_ms: int
) -> GatewayError | None:
    """Why this request would be rejected; None if it may be admitted.

    - 403 for an unregistered tenant, and for a model that it may not use; 404 for an unknown model.
    - 503 ``no_capacity`` if its pool has lost its last consumer and is not expected back within the request's timeout.
    - 429 ``overloaded`` if the tenant's queue is full and the dispatcher has recently rejected for that.
    - 429 ``deadline_unmeetable`` if the work in flight takes longer than its timeout.
    """
    if registry.tenants is None or registry.models is None:
        return None
    spec = registry.tenants.get(tenant)
    if spec is None:
        return GatewayError(403, Code.FORBIDDEN, f"{tenant} is not registered", field="tenant")
    name = model_of(request.model)
    if spec.models and name not in spec.models:
        return GatewayError(403, Code.FORBIDDEN, f"{tenant} may not use this model", field="model")
    choice = registry.models.choose(request, tenant, now_ms)
    if isinstance(choice, NoVersion):
        return GatewayError(404, Code.UNKNOWN_MODEL, choice.reason, field="model")
    model = choice.model
    pool = pool_of(spec, model)
    if any(pool_of(spec, other) != pool for other in registry.models.versions_of(name)):
        # Which version it gets depends on what is loaded, which is not known here.
        return None
    if pool is None or not latest.is_known(now_ms) or request.task not in model.tasks:
        return None
    timeout_ms = request.timeout_ms or DEFAULT_TIMEOUT_MS.get(request.priority)
    if timeout_ms is None:
        return None
    load = latest.ahead(pool, now_ms)
    elsewhere = _may_answer_elsewhere(spec, model, request.task, registry.models)
    late = None if elsewhere else _too_late(pool, load, timeout_ms, request.request_id)
    if late is not None and late.code == NO_CAPACITY:
        return late
    return _queue_is_full(spec, latest.tenant(tenant, pool), request.request_id) or late


def pool_of(spec: TenantSpec, model: ModelVersion) -> str | None:
    """Pool that serves the tenant; None if that is uncertain."""
    if spec.pool is None:
        return model.pool
    return spec.pool if spec.pool in (model.pool, *model.dedicated_pools) else None


def _may_answer_elsewhere(spec: TenantSpec, model: ModelVersion, task: str, models: ModelCatalog) -> bool:
    """Whether a smaller model may answer, in another pool. In the same one it has the same work ahead."""
    smaller = models.champion(model.smaller_model or "")
    if smaller is None or task not in smaller.tasks or Degradation.SMALLER_MODEL in spec.forbidden_degradations:
        return False
    return (not spec.models or smaller.model in spec.models) and pool_of(spec, smaller) != pool_of(spec, model)


def _too_late(pool: str, load: WorkAhead, timeout_ms: int, request_id: str) -> GatewayError | None:
    prediction = predict(load, cost_tokens=0)
    if prediction.finish_ms - SLACK_MS <= timeout_ms or takes_anything(load):
        return None
    retry_ms = _retry_ms(prediction.return_ms + prediction.ms_until_in_time(timeout_ms), request_id)
    if load.capacity.state is CapacityState.LOST:
        message = f"the pool {pool} has been without consumers for {load.capacity.lost_for_ms / 1_000:.0f} s"
        return GatewayError(503, NO_CAPACITY, message, retry_after_ms=retry_ms)
    message = f"it would wait for {prediction.wait_ms / 1_000:.1f} s, and has {timeout_ms / 1_000:.1f} s"
    return GatewayError(429, Code.DEADLINE_UNMEETABLE, message, retry_after_ms=retry_ms)


def _queue_is_full(spec: TenantSpec, row: TenantRow | None, request_id: str) -> GatewayError | None:
    # The backlog includes backfill, which has a limit of its own: only a recent rejection proves the queue full.
    if row is None or row.waiting_requests < spec.max_queue_requests or not row.shed_recently.get(Code.OVERLOADED):
        return None
    rate = row.tokens_per_s or 0.0
    free_in_ms = AFTERWARDS_FREE * drain_ms(row.waiting_tokens, rate) if rate > 0 else LEAST_OUTAGE_MS
    message = f"the tenant's queue is full: {row.waiting_requests} of {spec.max_queue_requests} requests wait"
    return GatewayError(429, Code.OVERLOADED, message, retry_after_ms=_retry_ms(free_in_ms, request_id))


def _retry_ms(least_ms: float, request_id: str) -> int:
    return retry_after_ms(max(least_ms, _LEAST_RETRY_MS), _JITTER, request_id)
