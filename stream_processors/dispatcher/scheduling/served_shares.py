"""The part of a pool's service that each backlogged tenant really gets. Pure.

An entitled share is what a tenant gets while every *present* backlog lasts. Beside neighbours whose queues run empty
and fill again it is wrong most of the time: at some moments the tenant is alone, at others one of many. So while a
tenant stays backlogged its share is measured: its dispatched tokens over those of all. Older dispatches are forgotten
by the tokens dispatched since and not by time, since a pool with long runs dispatches in bursts."""

from dataclasses import dataclass
from math import exp

_TURNS_REMEMBERED = 32
_LEAST_TURNS = 2


@dataclass(slots=True)
class _Backlog:
    memory_tokens: float
    """Tokens of all tenants after which a dispatch counts for 1 / e."""
    since: float
    """Tokens that all were dispatched when it began."""
    own_tokens: float = 0.0
    at: float = 0.0

    def own_at(self, total: float) -> float:
        if total > self.at:
            self.own_tokens *= exp((self.at - total) / self.memory_tokens)
            self.at = total
        return self.own_tokens


class ServedShares:
    """Of one pool. O(1) each; keeps an entry for each tenant and class with a backlog. For one thread."""

    def __init__(self) -> None:
        self._total = 0.0
        """Tokens that were dispatched."""
        self._backlogs: dict[tuple[str, str], _Backlog] = {}

    def begin(self, tenant: str, priority_class: str, turn_tokens: float) -> None:
        """A backlog begins; ignored if there is one. ``turn_tokens``: what all are dispatched, as far as is known, from
        one turn of this tenant to the next."""
        key = tenant, priority_class
        if key not in self._backlogs:
            memory_tokens = _TURNS_REMEMBERED * max(1.0, turn_tokens)
            self._backlogs[key] = _Backlog(memory_tokens, self._total, at=self._total)

    def end(self, tenant: str, priority_class: str) -> None:
        """The backlog is gone; ignored if there is none."""
        self._backlogs.pop((tenant, priority_class), None)

    def dispatched(self, tenant: str, priority_class: str, tokens: float) -> None:
        self._total += tokens
        backlog = self._backlogs.get((tenant, priority_class))
        if backlog is not None:
            backlog.own_tokens = backlog.own_at(self._total) + tokens

    def share(self, tenant: str, priority_class: str) -> float | None:
        """The tenant's part of what was dispatched since its backlog began, 0 to 1, recent dispatches counting most.
        None before it could be expected to have had ``_LEAST_TURNS`` turns."""
        backlog = self._backlogs.get((tenant, priority_class))
        if backlog is None:
            return None
        passed = (self._total - backlog.since) / backlog.memory_tokens
        if passed < _LEAST_TURNS / _TURNS_REMEMBERED:
            return None
        return min(1.0, backlog.own_at(self._total) / (backlog.memory_tokens * (1 - exp(-passed))))
