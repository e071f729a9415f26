"""Debts of backfill admitted beyond its tenant's quota; reading of that backfill pauses until they are paid. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from fairlane.ownership import Claim
from stream_processors.dispatcher.admission.quotas import Ask


@dataclass(slots=True)
class _Debt:
    """A tenant's unpaid requests, oldest first, and when payment is tried next."""

    owed: dict[Claim, Ask] = field(default_factory=dict)
    due_at_ms: int = 0


class BackfillDebts:
    """Unpaid backfill by tenant. Backfill is not rejected for a used-up quota: the excess becomes a debt, paid as the
    quota refills, and the tenant's backfill topics are paused until the debt is 0.

    So over any interval the admitted backfill is at most the quota plus the debt, and the debt is at most what had been
    fetched when reading paused. A tenant without debt takes no memory.
    """

    def __init__(self) -> None:
        self._debts: dict[str, _Debt] = {}

    def owe(self, claim: Claim, ask: Ask, due_at_ms: int) -> None:
        """Record the debt of an admitted request; the quota can grant it at ``due_at_ms`` at the earliest."""
        debt = self._debts.get(ask.tenant)
        if debt is None:
            debt = self._debts[ask.tenant] = _Debt(due_at_ms=due_at_ms)
        debt.owed[claim] = ask

    def settle(self, tenant: str, claim: Claim) -> bool:
        """Remove the debt of a record that was paid or whose partition was revoked. False when there was none."""
        debt = self._debts.get(tenant)
        if debt is None or debt.owed.pop(claim, None) is None:
            return False
        if not debt.owed:
            del self._debts[tenant]
        return True

    def postpone(self, tenant: str, due_at_ms: int) -> None:
        """Set when payment of the tenant's debts is tried next."""
        debt = self._debts.get(tenant)
        if debt is not None:
            debt.due_at_ms = due_at_ms

    def next_due_ms(self) -> int | None:
        """When the next payment is due; None without debts."""
        return min((debt.due_at_ms for debt in self._debts.values()), default=None)

    def due(self, now_ms: int, most_per_tenant: int) -> Iterator[tuple[Claim, Ask]]:
        """Debts due now, oldest first per tenant. Exhaust the iterator before changing any debt."""
        for debt in self._debts.values():
            if debt.due_at_ms <= now_ms:
                yield from islice(debt.owed.items(), most_per_tenant)

    def tenants(self) -> set[str]:
        """Tenants with debts."""
        return set(self._debts)
