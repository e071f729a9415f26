"""Quota charges of requests, their refunds, and the debts of backfill admitted beyond its tenant's quota."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from fairlane.ownership import Claim
from fairlane.records import TenantSpec
from stream_processors.dispatcher.admission.quotas import Charge, Exceeded, Quotas, buckets_of, has_quotas
from stream_processors.dispatcher.queued_request import QueuedRequest
from stream_processors.dispatcher.registry import Registry

_MAX_DEBTS_PER_PAYMENT = 64
"""Debts of one tenant per quota request."""

_PAID_EVERY_MS = 200
"""Longest interval between payments. Shorter if a bucket would overflow: tokens beyond its capacity are lost."""


@dataclass(slots=True)
class _Debt:
    """A tenant's unpaid requests, oldest first, and when payment is tried next."""

    owed: dict[Claim, Charge] = field(default_factory=dict)
    due_at_ms: int = 0


class BackfillDebts:
    """Unpaid backfill by tenant. Backfill is not rejected for a used-up quota: the excess becomes a debt, paid as the
    quota refills, and the tenant's backfill topics are paused until the debt is 0.

    So over any interval the admitted backfill is at most the quota plus the debt, and the debt is at most what had been
    fetched when reading paused. A tenant without debt takes no memory.
    """

    def __init__(self) -> None:
        self._debts: dict[str, _Debt] = {}

    def owe(self, claim: Claim, charge: Charge, due_at_ms: int) -> None:
        """Record the debt of an admitted request; the quota can grant it at ``due_at_ms`` at the earliest."""
        debt = self._debts.get(charge.tenant)
        if debt is None:
            debt = self._debts[charge.tenant] = _Debt(due_at_ms=due_at_ms)
        debt.owed[claim] = charge

    def settle(self, tenant: str, claim: Claim) -> bool:
        """Remove the debt of a record that was paid or whose partition was revoked. False when there was none."""
        debt = self._debts.get(tenant)
        if debt is None or debt.owed.pop(claim, None) is None:
            return False
        if not debt.owed:
            del self._debts[tenant]
        return True

    def postpone(self, tenant: str, due_at_ms: int) -> None:
        debt = self._debts.get(tenant)
        if debt is not None:
            debt.due_at_ms = due_at_ms

    def next_due_ms(self) -> int | None:
        return min((debt.due_at_ms for debt in self._debts.values()), default=None)

    def due(self, now_ms: int, most_per_tenant: int) -> Iterator[tuple[Claim, Charge]]:
        """Debts due now, oldest first per tenant. Exhaust the iterator before changing any debt."""
        for debt in self._debts.values():
            if debt.due_at_ms <= now_ms:
                yield from islice(debt.owed.items(), most_per_tenant)

    def tenants(self) -> set[str]:
        """Tenants with debts."""
        return set(self._debts)


@dataclass(slots=True)
class QuotaCharges:
    """Charges requests to their tenants' quotas. Requeued work was charged once and is never charged again."""

    quotas: Quotas
    registry: Registry
    debts: BackfillDebts = field(default_factory=BackfillDebts)

    async def charge(self, fresh: Sequence[QueuedRequest]) -> list[Exceeded | None]:
        """Charge quotas. Returns per request the quota it exceeds, or None when it was charged."""
        if not any(has_quotas(self.registry.tenant(queued.tenant)) for queued in fresh):
            return [None] * len(fresh)
        return await self.quotas.take([self._charge_of(queued) for queued in fresh])

    def owe(self, queued: QueuedRequest, due_at_ms: int) -> None:
        """Record an admitted request that exceeds its quota, which can grant it at ``due_at_ms`` at the earliest."""
        self.debts.owe(queued.claim, self._charge_of(queued), due_at_ms)

    async def refund(self, undispatched: Sequence[QueuedRequest]) -> None:
        """Refund the quotas of requests that are not dispatched after all; drop their debts."""
        if charges := self._paid(undispatched):
            await self.quotas.give_back(charges)

    async def hand_over(self, revoked: Sequence[QueuedRequest]) -> None:
        """Release the quota grants of requests whose partitions were revoked: the new owner decides again."""
        if charges := self._paid(revoked):
            await self.quotas.hand_over(charges)

    async def pay_debts(self, now_ms: int) -> bool:
        """Pay debts as far as the quotas grant it now. Returns whether any tenant became free of debt."""
        before = self.debts.tenants()
        while due := list(self.debts.due(now_ms, _MAX_DEBTS_PER_PAYMENT)):
            charges = [replace(charge, spec=self.registry.tenant(charge.tenant)) for _, charge in due]
            later_ms: dict[str, int] = {}
            moved_on: list[Charge] = []
            for (claim, _), charge, exceeded in zip(due, charges, await self.quotas.take(charges), strict=True):
                # A quota lowered below the request's size can never be paid: drop the debt.
                if exceeded is not None and exceeded.retry_after_ms is not None:
                    wait_ms = max(exceeded.retry_after_ms, _pace_ms(charge.spec))
                    later_ms.setdefault(charge.tenant, now_ms + wait_ms)
                elif not self.debts.settle(charge.tenant, claim) and exceeded is None:
                    moved_on.append(charge)
            await self.quotas.give_back(moved_on)
            for tenant, due_at_ms in later_ms.items():
                self.debts.postpone(tenant, due_at_ms)
        return bool(before - self.debts.tenants())

    def _paid(self, undispatched: Sequence[QueuedRequest]) -> list[Charge]:
        """The charges of these requests. Settles their debts instead where they owed."""
        charged = [queued for queued in undispatched if not queued.handed_back]
        paid = [queued for queued in charged if not self.debts.settle(queued.tenant, queued.claim)]
        return [self._charge_of(queued) for queued in paid if has_quotas(self.registry.tenant(queued.tenant))]

    def _charge_of(self, queued: QueuedRequest) -> Charge:
        spec = self.registry.tenant(queued.tenant)
        return Charge(queued.tenant, spec, queued.quota_tokens, queued.source, queued.deadline_at_ms)


def _pace_ms(spec: TenantSpec) -> int:
    """Interval between payments: half the fill time of the fastest bucket, at most ``_PAID_EVERY_MS``. Each payment
    costs a round trip and collects at most one bucket."""
    full_ms = min((bucket.capacity / bucket.per_ms for bucket in buckets_of(spec) if bucket.per_ms > 0), default=0.0)
    return round(min(full_ms / 2, _PAID_EVERY_MS))
