"""The tenants and models that the dispatcher knows, and the pool that serves each request."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fairlane.guardrail_records import GuardrailPolicy
from fairlane.logs import get_logger
from fairlane.names import is_name
from fairlane.outcomes import Code, EvaluationConsent
from fairlane.ownership import Claim
from fairlane.records import InferenceRequest, ModelVersion, TenantSpec
from fairlane_server.admission_rule import latency_target_ms
from fairlane_server.control.tenants_file import check_values
from fairlane_server.guardrail_policy import active_policy
from fairlane_server.models.catalog import Choice, ModelCatalog, NoVersion
from fairlane_server.models.routes import version_key
from stream_processors.dispatcher.intake.validation import Rejection, refusal_of, within_tenant_bound
from stream_processors.dispatcher.queued_request import QueuedRequest
from stream_processors.dispatcher.scheduling.backlog_statistics import Share
from stream_processors.dispatcher.scheduling.copy_queue import CopyQueue
from stream_processors.dispatcher.scheduling.cost import CostModel
from stream_processors.dispatcher.scheduling.scheduler import Scheduler

log = get_logger(__name__)


@dataclass(slots=True)
class Registry:
    """The present tenants and models by name. One object, shared by all stages."""

    costs: CostModel = field(default_factory=CostModel)
    latency_targets: Mapping[str, int] = field(default_factory=dict)
    """The deployment's, in milliseconds by class."""
    tenants: Mapping[str, TenantSpec] = field(default_factory=dict)
    models: ModelCatalog = field(default_factory=ModelCatalog)
    loaded: Mapping[str, Mapping[str, float | None] | None] = field(default_factory=dict)
    """By pool that has ever reported, the part of its consumers that has loaded each version, ``model/version``, and
    None for one that is only being loaded; None for a pool of which that is not known."""
    _pool_owners: Mapping[str, str] = field(default_factory=dict)
    _guardrails: Mapping[str, GuardrailPolicy] = field(default_factory=dict)
    """Of the tenants that have requests checked."""

    def replace(self, tenants: Mapping[str, TenantSpec], models: ModelCatalog) -> bool:
        """Set the tenants and models. Returns whether ``serving`` may answer otherwise for admitted requests."""
        reassigns = reassigns_pools(self.tenants, tenants, self.models, models)
        if tenants is not self.tenants:
            self._pool_owners = _owners_of_pools(tenants)
            self._guardrails = {
                name: policy for name, spec in tenants.items() if (policy := active_policy(spec.guardrails)) is not None
            }
        self.tenants, self.models = tenants, models
        return reassigns

    def tenant(self, name: str) -> TenantSpec:
        """The tenant, with the defaults if it is not registered."""
        return self.tenants.get(name) or TenantSpec(name)

    def guardrails(self, tenant: str) -> GuardrailPolicy | None:
        """The checks of the tenant's requests; None for a tenant that has none."""
        return self._guardrails.get(tenant)

    def latency_target_ms(self, tenant: str, priority_class: str, timeout_ms: int) -> int:
        """The latency target of a request with this timeout."""
        return latency_target_ms(self.tenants.get(tenant), priority_class, timeout_ms, self.latency_targets)

    def pool_for(self, model: ModelVersion, tenant: str) -> str | Rejection:
        """The pool for this model: the tenant's own pool if it has one, never another tenant's. A refusal if none."""
        own_pool = self.tenant(tenant).pool
        if own_pool is not None:
            if own_pool == model.pool or own_pool in model.dedicated_pools:
                return own_pool
            return Rejection(Code.UNKNOWN_MODEL, "model", f"the pool of {tenant} does not serve {model.model}")
        if self._pool_owners.get(model.pool, tenant) != tenant:
            return Rejection(Code.FORBIDDEN, "model", f"the pool of {model.model} belongs to another tenant")
        return model.pool

    def served(self, model: ModelVersion, tenant: str) -> float | None:
        """The part of the consumers of the tenant's pool for this model that has loaded the version; None for a pool
        that never reported, and for a version that is only being loaded."""
        pool = self.tenant(tenant).pool or model.pool
        if pool not in self.loaded:
            return None
        loaded = self.loaded[pool]
        return 1.0 if loaded is None else loaded.get(version_key(model.model, model.version), 0.0)

    def allows_evaluation(self, tenant: str) -> bool:
        """Whether requests of the tenant may be used for evaluation."""
        return self.tenant(tenant).evaluation == EvaluationConsent.ALLOWED

    def serving(
        self,
        version: str,
        arm: str | None,
        request: InferenceRequest,
        tenant: str,
        now_ms: int,
        *,
        is_copy: bool = False,
    ) -> tuple[Choice, str] | Rejection:
        """The version and the pool for a request that was admitted before, for this version by this arm; a refusal if
        nothing serves it any more. ``request.model`` is the name of the model; ``tenant`` is that of the original for a
        copy that runs for evaluation (``is_copy``)."""
        spec = self.tenants.get(tenant)
        if spec is None:
            return Rejection(Code.FORBIDDEN, "tenant", f"{tenant} is not registered any more")
        if is_copy and not self.allows_evaluation(tenant):
            return Rejection(Code.FORBIDDEN, "tenant", f"{tenant} does not allow evaluation any more")
        choice = self.models.again(version, arm, request, tenant, now_ms, self.served)
        if isinstance(choice, NoVersion):
            return refusal_of(choice)
        if spec.models and request.model not in spec.models:
            return Rejection(Code.FORBIDDEN, "model", f"{tenant} may not use {request.model} any more")
        pool = self.pool_for(choice.model, tenant)
        return pool if isinstance(pool, Rejection) else (choice, pool)

    def as_of_now(self, queued: QueuedRequest, now_ms: int) -> QueuedRequest | Rejection:
        """The request with its present pool and model version (the same object if unchanged), or the refusal if no pool
        serves it any more. Its version stays what it was at admission, except as ``ModelCatalog.again`` says."""
        is_copy = queued.evaluation is not None
        found = self.serving(queued.model.version, queued.arm, queued.request, queued.owner, now_ms, is_copy=is_copy)
        if isinstance(found, Rejection):
            return found
        choice, pool = found
        model, arm = choice.model, choice.arm
        if model is queued.model or model == queued.model:
            return queued if pool == queued.pool else replace(queued, pool=pool)
        request = within_tenant_bound(queued.request, model, self.tenants.get(queued.tenant))
        renewed = replace(queued, request=request, model=model, arm=arm, pool=pool)
        if not queued.input_bytes:
            # Requeued work has no known input size: its cost estimate stays.
            return renewed
        cost = self.costs.estimate(queued.tenant, model, queued.input_bytes, request.parameters.max_tokens)
        more = queued.expected_tokens
        return replace(
            renewed,
            cost_tokens=cost.total + more,
            cautious_cost_tokens=cost.cautious_total + more,
            prompt_tokens=cost.prompt_tokens + more,
        )

    def reassign(
        self, scheduler: Scheduler[QueuedRequest] | CopyQueue[QueuedRequest], now_ms: int
    ) -> list[tuple[QueuedRequest, Rejection]]:
        """Move queued requests, or copies, whose pool or model version has changed to the present one, uncharged and
        not judged again. Removes and returns those that no pool serves any more, with the refusal. O(waiting)."""
        renewed: dict[Claim, QueuedRequest | Rejection] = {}

        def is_misplaced(queued: QueuedRequest) -> bool:
            now = self.as_of_now(queued, now_ms)
            if now is queued:
                return False
            renewed[queued.claim] = now
            return True

        refused: list[tuple[QueuedRequest, Rejection]] = []
        taken = scheduler.take(is_misplaced)
        for queued in taken:
            now = renewed[queued.claim]
            if isinstance(now, Rejection):
                refused.append((queued, now))
            else:
                scheduler.push(now)
        if taken:
            log.info("waiting_moved", moved=len(taken) - len(refused), refused=len(refused))
        return refused


def reassigns_pools(
    tenants_before: Mapping[str, TenantSpec],
    tenants: Mapping[str, TenantSpec],
    models_before: ModelCatalog,
    models: ModelCatalog,
) -> bool:
    """Whether ``Registry.serving`` may return something else for admitted requests. Weights and quotas do not matter,
    nor do new versions, other aliases and rules, nor new tenants without a pool of their own."""
    if models is not models_before and _readmits(models_before, models):
        return True
    if tenants is tenants_before:
        return False
    return _owners_of_pools(tenants) != _owners_of_pools(tenants_before) or any(
        _served(spec) != _served(tenants.get(name)) for name, spec in tenants_before.items()
    )


def _readmits(before: ModelCatalog, now: ModelCatalog) -> bool:
    """Whether the new catalog changes, withdraws or stops a version of the one before."""
    return any(
        now.versions.get(key) != model or (now.is_stopped(model) and not before.is_stopped(model))
        for key, model in before.versions.items()
    )


def _owners_of_pools(tenants: Mapping[str, TenantSpec]) -> dict[str, str]:
    return {spec.pool: name for name, spec in tenants.items() if spec.pool is not None}


def _served(spec: TenantSpec | None) -> object:
    return None if spec is None else (spec.pool, spec.models, spec.evaluation)


def check_tenant(name: str, spec: TenantSpec) -> None:
    """Raises ValueError for an invalid name, number, weight, group or guardrail. Tenant, pool and service names become
    part of topic names; an invalid one would stop the feeds of every dispatcher."""
    if spec.tenant != name or not is_name(name):
        raise ValueError(f"tenant: {spec.tenant!r} under the key {name!r}")
    if spec.pool is not None and not is_name(spec.pool):
        raise ValueError(f"pool: {spec.pool!r} cannot name one")
    for service in spec.services:
        if not is_name(service):
            raise ValueError(f"services: {service!r} cannot name one")
    Share(spec.weight, spec.groups)
    check_values(spec)
