"""What a job may cost, and whether its tenant's budgets have room for it as a whole. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fairlane.money import nanos_text
from fairlane.outcomes import BudgetPeriod, Task
from fairlane.records import Budget, TenantSpec
from fairlane_server.budgets.budgets import account_of, budget_name, concerns, day_of, month_of, renews_at_ms, utc_text
from fairlane_server.costs.price_book import PriceBook, Used, nanos_of
from fairlane_server.models.routes import model_of
from producers.backfill.job import BadRow, Job, ParsedRow
from producers.backfill.submission import EXPECTED_OUTPUT_TOKENS, prompt_tokens


@dataclass(frozen=True, slots=True)
class Spent:
    """Money of an account (``caller`` None: of the whole tenant), spent on a ``day`` since the epoch; without a day
    what another job still has reserved."""

    caller: str | None
    day: int | None
    nanos: int


def job_nanos(rows: Sequence[ParsedRow], total_rows: int, prices: PriceBook, currency: str, now_ms: int) -> int:
    """The estimated cost of a job, extrapolated from its first rows. Rows without a price in the currency cost nothing.
    A price for one version of a model counts only for rows that name the version: which other one will run is not
    known here."""
    if not rows:
        return 0
    return sum(_row_nanos(row, prices, currency, now_ms) for row in rows) * total_rows // len(rows)


def left_nanos(job: Job, nanos: int) -> int:
    """The part of a job's cost that is for its rows without a result."""
    left = job.total_rows - max(job.tally.rows, job.answered)
    return nanos * left // job.total_rows if job.total_rows else 0


def _row_nanos(row: ParsedRow, prices: PriceBook, currency: str, now_ms: int) -> int:
    if isinstance(row, BadRow):
        return 0
    request = row.request
    model, version = model_of(request.model), request.model.partition("/")[2]
    price, nothing = prices.price(model, version, now_ms), prices.nothing(model)
    if price is None or nothing is None or nothing.currency != currency:
        return 0
    output = request.parameters.max_tokens or EXPECTED_OUTPUT_TOKENS if request.task == Task.GENERATE else 0
    return nanos_of(price, Used(prompt_tokens(request), output, images=int(request.input.image is not None)))


def too_expensive(spec: TenantSpec, caller: str | None, nanos: int, spent: Sequence[Spent], now_ms: int) -> str | None:
    """Why a job of this estimate does not fit; None if it fits every hard budget that concerns its caller."""
    for budget in spec.budgets:
        if budget.hard_nanos is None or not concerns(budget, caller):
            continue
        used = _used(budget, account_of(budget, caller), spent, now_ms)
        left = budget.hard_nanos - used["spent"] - used["reserved"]
        if nanos > left:
            return (
                f"estimated at {nanos_text(nanos)} {budget.currency}, more than what is left of the "
                f"{budget_name(budget)}: {nanos_text(used['spent'])} spent and {nanos_text(used['reserved'])} "
                f"reserved by other jobs of {nanos_text(budget.hard_nanos)}; "
                f"it renews at {utc_text(renews_at_ms(budget.period, now_ms))}"
            )
    return None


def _used(budget: Budget, account: str | None, spent: Sequence[Spent], now_ms: int) -> Mapping[str, int]:
    today = day_of(now_ms)
    used = {"spent": 0, "reserved": 0}
    for one in spent:
        if one.caller != account:
            continue
        if one.day is None:
            used["reserved"] += one.nanos
        elif one.day == today or (budget.period == BudgetPeriod.MONTH and month_of(one.day) == month_of(today)):
            used["spent"] += one.nanos
    return used
