"""What a job may still spend. Pure."""

from dataclasses import dataclass

from producers.backfill.job import Tally

_LEAST_COST = 1e-6
"""What a row costs that costs anything worth counting."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The most that a job may cost, in cost tokens; None has no end.

    What a row will cost is taken from the rows that are done, and before the first of them from the estimate.
    """

    max_cost_tokens: int | None
    estimated_row_cost: float = 0.0

    def row_cost(self, done: Tally) -> float:
        """What the next row is expected to cost."""
        return done.cost_tokens / done.rows if done.rows else self.estimated_row_cost

    def affordable_rows(self, done: Tally, open_rows: int) -> int | None:
        """How many more rows may be sent while so many others are under way; None: any number."""
        if self.max_cost_tokens is None:
            return None
        left = self.max_cost_tokens - done.cost_tokens
        if left <= 0:
            return 0
        row_cost = self.row_cost(done)
        return max(0, int(left / row_cost) - open_rows) if row_cost > _LEAST_COST else None
