"""Early refusal of requests whose hard budget is spent, from what dispatchers said when they refused others. Pure.

A dispatcher refuses every request of whoever has spent as much as a hard budget allows, until it renews. Its refusals
say what is spent, and within a period that only grows; reservations, which may be settled for less, count for nothing
here. The dispatcher's own rule, ``spent >= hard``, is applied to the tenant's present budgets: a budget that was raised
or taken away refuses nobody.

Nothing is believed for long: after ``FRESH_MS`` one request passes, and if it is not refused within ``PROBE_MS``, so do
all. Whatever changes the sums, as a restored database, nobody is refused for longer by mistake.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from fairlane.outcomes import CacheMode, Code
from fairlane.records import Budget, BudgetNotice, InferenceReply, InferenceRequest, TenantSpec
from fairlane_server.budgets.budgets import CLOCKS_WITHIN_MS, account_of, concerns
from fairlane_server.budgets.refusals import refusal_text
from producers.gateway.tenant_bounds import TenantMap
from producers.openai_api.errors import GatewayError

FRESH_MS = 1_000
"""How long a refusal is believed."""

PROBE_MS = 500
"""How long it is believed after that, while one request asks again."""

MOST = 10_000
"""Beyond it the tenant with the most callers is forgotten first."""

_HARD = "hard"


@dataclass(slots=True)
class _Spent:
    """What an account has spent in the present period, at least."""

    spent_nanos: int
    reserved_nanos: int
    renews_at_ms: int
    said_at_ms: int
    asked_again_at_ms: int | None = None

    def counts(self, now_ms: int) -> bool:
        """Whether this is believed; if not, the caller's request asks again."""
        if now_ms >= self.renews_at_ms:
            return False
        if now_ms - self.said_at_ms < FRESH_MS:
            return True
        if self.asked_again_at_ms is None:
            self.asked_again_at_ms = now_ms
            return False
        return now_ms - self.asked_again_at_ms < PROBE_MS


class SpentBudgets:
    """Of all tenants, for one event loop."""

    def __init__(self, most: int = MOST) -> None:
        self._spent: TenantMap[_Spent] = TenantMap(most)

    def learn(self, replies: Iterable[InferenceReply], now_ms: int) -> None:
        """Note what refusals among these replies say."""
        for reply in replies:
            notice = reply.budget
            if notice is None or reply.code != Code.INSUFFICIENT_QUOTA or notice.limit != _HARD:
                continue
            if notice.spent_nanos >= notice.limit_nanos:
                spent = _Spent(notice.spent_nanos, notice.reserved_nanos, notice.renews_at_ms, now_ms)
                self._spent.put(reply.tenant, (reply.tenant, notice.caller, notice.period, notice.currency), spent)

    def refusal(
        self, spec: TenantSpec, request: InferenceRequest, caller: str | None, now_ms: int
    ) -> GatewayError | None:
        """The dispatcher's refusal of this request, as far as it is known; None if it may be admitted. One that may be
        answered from the cache may cost nothing."""
        if not spec.budgets or (request.cache or spec.cache) != CacheMode.NONE:
            return None
        found: tuple[Budget, _Spent] | None = None
        for budget in spec.budgets:
            if budget.hard_nanos is None or not concerns(budget, caller):
                continue
            spent = self._spent.get((spec.tenant, account_of(budget, caller), budget.period, budget.currency))
            if spent is None or spent.spent_nanos < budget.hard_nanos or not spent.counts(now_ms):
                continue
            # As the dispatcher does: the one that renews last.
            if found is None or spent.renews_at_ms > found[1].renews_at_ms:
                found = budget, spent
        if found is None:
            return None
        budget, spent = found
        notice = BudgetNotice(
            limit=_HARD,
            of=budget.of,
            period=budget.period,
            currency=budget.currency,
            limit_nanos=budget.hard_nanos or 0,
            spent_nanos=spent.spent_nanos,
            reserved_nanos=spent.reserved_nanos,
            renews_at_ms=spent.renews_at_ms,
            caller=account_of(budget, caller),
        )
        renewed_ms = spent.renews_at_ms + CLOCKS_WITHIN_MS - now_ms
        message, retry_after_ms = refusal_text(notice, renewed_ms, request.request_id)
        return GatewayError(429, Code.INSUFFICIENT_QUOTA, message, retry_after_ms=retry_after_ms, budget=notice)
