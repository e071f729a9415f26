"""GET /v1/budgets: the budgets of the caller's tenant, with what is spent and reserved."""

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from fairlane.outcomes import BudgetScope
from fairlane.records import TenantSpec
from fairlane_server.budgets.budgets import concerns, since
from fairlane_server.budgets.status import DailyCost, daily_costs, statuses
from fairlane_server.costs.daily_sums import Group, SumQuery
from producers.gateway import openapi
from producers.gateway.identity.identity import Identity, Permission, require
from producers.gateway.native.deps import NativeDeps
from producers.gateway.native.response_bodies import BudgetPage, BudgetState, answered
from producers.gateway.openapi import READING

_MOST_SUMS = 1_000
"""Of one account: days of a month, in each currency."""


def add_budgets_route(router: APIRouter, deps: NativeDeps) -> None:
    """GET /v1/budgets."""
    Caller = Annotated[Identity, Depends(require(deps.authenticate, Permission.USAGE_READ))]  # noqa: N806 - a type

    @router.get("/v1/budgets", responses=openapi.answered(openapi.BUDGETS, "The budgets") | READING, tags=["usage"])
    async def get_budgets(caller: Caller) -> Response:
        """The budgets of the tenant. Of those of each key or user, that of the caller."""
        tenant, now_ms = caller.tenant, deps.clock_ms()
        spec = (deps.registry().tenants or {}).get(tenant) or TenantSpec(tenant)
        accounts = _accounts(spec, caller.requested_by)
        costs = [cost for account in accounts for cost in await _costs(deps, tenant, account, now_ms)]
        reserved = deps.load.reserved(tenant, now_ms)
        found = statuses(spec, costs, reserved, now_ms, only=caller.requested_by)
        return answered(BudgetPage(data=tuple(BudgetState.model_validate(one.as_plain()) for one in found)))


def _accounts(spec: TenantSpec, own: str) -> list[str | None]:
    """Whose spending is shown: that of the tenant (None), of the caller, and of callers with budgets of their own."""
    accounts: dict[str | None, None] = {}
    for budget in spec.budgets:
        if budget.of == BudgetScope.TENANT:
            accounts[None] = None
        elif budget.of not in tuple(BudgetScope):
            accounts[budget.of] = None
        elif concerns(budget, own):
            accounts[own] = None
    return list(accounts)


async def _costs(deps: NativeDeps, tenant: str, account: str | None, now_ms: int) -> list[DailyCost]:
    only = {} if account is None else {Group.CALLER: account}
    sums = await deps.results.usage(tenant, SumQuery((Group.DAY,), since(now_ms), None, only), None, _MOST_SUMS)
    return daily_costs(sums, account)
