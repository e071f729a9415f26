"""Backfill that was let in beyond its tenant's quota, and must be paid for before more of it is read. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from fairlane.ownership import Claim
from stream_processors.dispatcher.scheduling.quotas import Ask


@dataclass(slots=True)
class _Debt:
    """What is owed, oldest record first, and when paying is tried next."""

    owed: dict[Claim, Ask] = field(default_factory=dict)
    due_at_ms: int = 0


class BackfillDebts:
    """Backfill is never refused for a quota. What comes in beyond it is owed: it is taken from the quota as that
    refills, and the tenant's backfill is not read until nothing is owed.

    So over any time the backfill let in is at most what the quota grants plus what is owed, which is at most what had
    been fetched when reading paused. Pays and pauses by tenant; a tenant that owes nothing takes no memory.
    """

    def __init__(self) -> None:
        self._debts: dict[str, _Debt] = {}

    def owe(self, claim: Claim, ask: Ask, due_at_ms: int) -> None:
        """This request was let in; its quota grants it at ``due_at_ms`` at the earliest."""
        debt = self._debts.get(ask.tenant)
        if debt is None:
            debt = self._debts[ask.tenant] = _Debt(due_at_ms=due_at_ms)
        debt.owed[claim] = ask

    def settle(self, tenant: str, claim: Claim) -> bool:
        """It is paid for, or its record moved on. False when nothing was owed for it."""
        debt = self._debts.get(tenant)
        if debt is None or debt.owed.pop(claim, None) is None:
            return False
        if not debt.owed:
            del self._debts[tenant]
        return True

    def postpone(self, tenant: str, due_at_ms: int) -> None:
        """The quota does not grant the rest before then."""
        debt = self._debts.get(tenant)
        if debt is not None:
            debt.due_at_ms = due_at_ms

    def next_due_ms(self) -> int | None:
        """When paying something is tried next; None when nothing is owed."""
        return min((debt.due_at_ms for debt in self._debts.values()), default=None)

    def due(self, now_ms: int, most_per_tenant: int) -> Iterator[tuple[Claim, Ask]]:
        """What may be paid now, oldest first. Change nothing before it is read to the end."""
        for debt in self._debts.values():
            if debt.due_at_ms <= now_ms:
                yield from islice(debt.owed.items(), most_per_tenant)

    def tenants(self) -> set[str]:
        """Those that owe something."""
        return set(self._debts)
