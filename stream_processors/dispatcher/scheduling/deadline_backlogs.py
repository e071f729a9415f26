"""How much of a tenant's backlog goes before a request with a given deadline. Pure."""

from dataclasses import dataclass, field

from stream_processors.dispatcher.scheduling.backlog_statistics import Schedulable

_SPANS_MS = (3_600_000, 60_000, 1_000)
"""Hours, minutes and seconds: a look-up adds up whole hours before the deadline, then minutes, then seconds."""


@dataclass(slots=True)
class _Span:
    requests: int = 0
    tokens: int = 0
    parts: "dict[int, _Span]" = field(default_factory=dict)
    """The next shorter spans in it, by their number since the epoch; none of a second."""

    def change(self, deadline_at_ms: int, requests: int, tokens: int, depth: int = 0) -> None:
        self.requests += requests
        self.tokens += tokens
        if depth == len(_SPANS_MS):
            return
        number = deadline_at_ms // _SPANS_MS[depth]
        part = self.parts.setdefault(number, _Span())
        part.change(deadline_at_ms, requests, tokens, depth + 1)
        if not part.requests:
            del self.parts[number]

    def tokens_until(self, deadline_at_ms: int, depth: int = 0) -> int:
        if depth == len(_SPANS_MS):
            return self.tokens
        last = deadline_at_ms // _SPANS_MS[depth]
        tokens = sum(part.tokens for number, part in self.parts.items() if number < last)
        part = self.parts.get(last)
        return tokens if part is None else tokens + part.tokens_until(deadline_at_ms, depth + 1)


@dataclass(slots=True)
class DeadlineBacklogs:
    """The queued online tokens of each tenant and class in one pool, by second of their deadline. A look-up adds up at
    most 24 hours (the longest timeout), 60 minutes and 60 seconds. For one thread."""

    _backlogs: dict[tuple[str, str], _Span] = field(default_factory=dict)

    def add(self, item: Schedulable) -> None:
        """Count a request that is queued now; backfill goes last and is left out."""
        if not item.is_backfill:
            backlog = self._backlogs.setdefault((item.tenant, item.priority_class), _Span())
            backlog.change(item.deadline_at_ms, 1, item.cost_tokens)

    def remove(self, item: Schedulable) -> None:
        """Undo ``add``."""
        if item.is_backfill:
            return
        key = item.tenant, item.priority_class
        backlog = self._backlogs[key]
        backlog.change(item.deadline_at_ms, -1, -item.cost_tokens)
        if not backlog.requests:
            del self._backlogs[key]

    def tokens_until(self, tenant: str, priority_class: str, deadline_at_ms: int) -> int:
        """Of the requests with a deadline in this second or an earlier one."""
        backlog = self._backlogs.get((tenant, priority_class))
        return 0 if backlog is None else backlog.tokens_until(deadline_at_ms)
