"""Choice of the pool that serves a tenant's request for a model. Pure."""

from collections.abc import Mapping

from fairlane.outcomes import Code
from fairlane.records import ModelVersion, TenantSpec
from stream_processors.dispatcher.intake.validation import Rejection


def owners_of_pools(tenants: Mapping[str, TenantSpec]) -> dict[str, str]:
    """The tenant of each pool that belongs to one tenant alone."""
    return {spec.pool: name for name, spec in tenants.items() if spec.pool is not None}


def pool_for(model: ModelVersion, tenant: str, own_pool: str | None, owners: Mapping[str, str]) -> str | Rejection:
    """The pool for this model: the tenant's own pool if it has one, never another tenant's. A refusal if none."""
    if own_pool is not None:
        if own_pool == model.pool or own_pool in model.dedicated_pools:
            return own_pool
        return Rejection(Code.UNKNOWN_MODEL, "model", f"the pool of {tenant} does not serve {model.model}")
    if owners.get(model.pool, tenant) != tenant:
        return Rejection(Code.FORBIDDEN, "model", f"the pool of {model.model} belongs to another tenant")
    return model.pool


def serving(
    name: str,
    tenant: str,
    tenants: Mapping[str, TenantSpec],
    models: Mapping[str, ModelVersion],
    owners: Mapping[str, str],
) -> tuple[ModelVersion, str] | Rejection:
    """The present model of that name and its pool, for a request that was admitted before; a refusal if there is none
    any more."""
    spec, model = tenants.get(tenant), models.get(name)
    if spec is None:
        return Rejection(Code.FORBIDDEN, "tenant", f"{tenant} is not registered any more")
    if model is None:
        return Rejection(Code.UNKNOWN_MODEL, "model", f"{name} is not served any more")
    if spec.models and name not in spec.models:
        return Rejection(Code.FORBIDDEN, "model", f"{tenant} may not use {name} any more")
    pool = pool_for(model, tenant, spec.pool, owners)
    return pool if isinstance(pool, Rejection) else (model, pool)


def reassigns_pools(
    tenants_before: Mapping[str, TenantSpec],
    tenants: Mapping[str, TenantSpec],
    models_before: Mapping[str, ModelVersion],
    models: Mapping[str, ModelVersion],
) -> bool:
    """Whether ``serving`` may return something else for admitted requests. Weights and quotas do not matter, nor do new
    models, nor new tenants without a pool of their own."""
    if models is not models_before and any(models.get(name) != model for name, model in models_before.items()):
        return True
    if tenants is tenants_before:
        return False
    return owners_of_pools(tenants) != owners_of_pools(tenants_before) or any(
        _served(spec) != _served(tenants.get(name)) for name, spec in tenants_before.items()
    )


def _served(spec: TenantSpec | None) -> object:
    return None if spec is None else (spec.pool, spec.models)
