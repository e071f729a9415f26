"""The tenants and models that the dispatcher knows, and the pool that serves each request."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from fairlane.guardrail_records import GuardrailPolicy
from fairlane.logs import get_logger
from fairlane.names import is_model_name, is_name
from fairlane.outcomes import Code
from fairlane.ownership import Claim
from fairlane.records import ModelVersion, TenantSpec
from fairlane_server.admission_rule import latency_target_ms
from fairlane_server.control.tenants_file import check_values
from fairlane_server.guardrail_policy import active_policy
from stream_processors.dispatcher.intake.validation import Rejection, within_tenant_bound
from stream_processors.dispatcher.queued_request import QueuedRequest
from stream_processors.dispatcher.scheduling.backlog_statistics import Share
from stream_processors.dispatcher.scheduling.cost import CostModel
from stream_processors.dispatcher.scheduling.scheduler import Scheduler

log = get_logger(__name__)

SpecT = TypeVar("SpecT")


@dataclass(slots=True)
class Registry:
    """The present tenants and models by name. One object, shared by all stages."""

    costs: CostModel = field(default_factory=CostModel)
    latency_targets: Mapping[str, int] = field(default_factory=dict)
    """The deployment's, in milliseconds by class."""
    tenants: Mapping[str, TenantSpec] = field(default_factory=dict)
    models: Mapping[str, ModelVersion] = field(default_factory=dict)
    _pool_owners: Mapping[str, str] = field(default_factory=dict)
    _guardrails: Mapping[str, GuardrailPolicy] = field(default_factory=dict)
    """Of the tenants that have requests checked."""

    def replace(self, tenants: Mapping[str, TenantSpec], models: Mapping[str, ModelVersion]) -> bool:
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

    def serving(self, name: str, tenant: str) -> tuple[ModelVersion, str] | Rejection:
        """The present model of that name and its pool, for a request that was admitted before; a refusal if there is
        none any more."""
        spec, model = self.tenants.get(tenant), self.models.get(name)
        if spec is None:
            return Rejection(Code.FORBIDDEN, "tenant", f"{tenant} is not registered any more")
        if model is None:
            return Rejection(Code.UNKNOWN_MODEL, "model", f"{name} is not served any more")
        if spec.models and name not in spec.models:
            return Rejection(Code.FORBIDDEN, "model", f"{tenant} may not use {name} any more")
        pool = self.pool_for(model, tenant)
        return pool if isinstance(pool, Rejection) else (model, pool)

    def as_of_now(self, queued: QueuedRequest) -> QueuedRequest | Rejection:
        """The request with its present pool and model version (the same object if unchanged), or the refusal if no pool
        serves it any more."""
        found = self.serving(queued.model_name, queued.tenant)
        if isinstance(found, Rejection):
            return found
        model, pool = found
        if model == queued.model:
            return queued if pool == queued.pool else replace(queued, pool=pool)
        request = within_tenant_bound(queued.request, model, self.tenants.get(queued.tenant))
        renewed = replace(queued, request=request, model=model, pool=pool)
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

    def reassign(self, scheduler: Scheduler[QueuedRequest]) -> list[tuple[QueuedRequest, Rejection]]:
        """Move queued requests whose pool or model version has changed to the present one, uncharged and not judged
        again. Removes and returns those that no pool serves any more, with the refusal. O(waiting)."""
        renewed: dict[Claim, QueuedRequest | Rejection] = {}

        def is_misplaced(queued: QueuedRequest) -> bool:
            now = self.as_of_now(queued)
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
    models_before: Mapping[str, ModelVersion],
    models: Mapping[str, ModelVersion],
) -> bool:
    """Whether ``Registry.serving`` may return something else for admitted requests. Weights and quotas do not matter,
    nor do new models, nor new tenants without a pool of their own."""
    if models is not models_before and any(models.get(name) != model for name, model in models_before.items()):
        return True
    if tenants is tenants_before:
        return False
    return _owners_of_pools(tenants) != _owners_of_pools(tenants_before) or any(
        _served(spec) != _served(tenants.get(name)) for name, spec in tenants_before.items()
    )


def _owners_of_pools(tenants: Mapping[str, TenantSpec]) -> dict[str, str]:
    return {spec.pool: name for name, spec in tenants.items() if spec.pool is not None}


def _served(spec: TenantSpec | None) -> object:
    return None if spec is None else (spec.pool, spec.models)


class LastGood(Generic[SpecT]):
    """Keeps the last valid specification of a name whose new one is invalid, and omits a name that never had one.

    The command line rejects an invalid file as a whole, but a record written by another client must not stop a
    dispatcher. For one thread.

    Args:
        check: raises ValueError if the specification under this name is invalid.
        unusable: the log event of an invalid specification.
    """

    def __init__(self, check: Callable[[str, SpecT], None], unusable: str) -> None:
        self._check = check
        self._unusable = unusable
        self._seen: Mapping[str, SpecT] | None = None
        self._usable: dict[str, SpecT] = {}

    def usable(self, specs: Mapping[str, SpecT]) -> Mapping[str, SpecT]:
        """The valid specifications by name; the same object until ``specs`` is another object."""
        if specs is not self._seen:
            self._seen, before, self._usable = specs, self._usable, {}
            for name, spec in specs.items():
                try:
                    self._check(name, spec)
                except ValueError as error:
                    log.error(self._unusable, name=name, reason=str(error), kept=name in before)
                    if name in before:
                        self._usable[name] = before[name]
                else:
                    self._usable[name] = spec
        return self._usable


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


def check_model(name: str, spec: ModelVersion) -> None:
    """Raises ValueError for an invalid model or pool name."""
    if spec.model != name or not is_model_name(name):
        raise ValueError(f"model: {spec.model!r} under the key {name!r}")
    for pool in (spec.pool, *spec.dedicated_pools):
        if not is_name(pool):
            raise ValueError(f"pool: {pool!r} cannot name one")
