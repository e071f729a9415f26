"""Texts and retry times of requests that a hard budget refuses. Pure."""

from fairlane.backoff import jittered_ms
from fairlane.money import nanos_text
from fairlane.records import BudgetNotice
from fairlane_server.budgets.budgets import budget_name, utc_text

_SPREAD_MS = 10_000
"""Requests that were refused for the same budget return within this time after its renewal."""


def refusal_text(notice: BudgetNotice, retry_after_ms: int | None, request_id: str) -> tuple[str, int | None]:
    """The message of a refusal, and when to try again. ``retry_after_ms`` is the least time until then; None for a
    request that alone is more than the budget."""
    amounts = (
        f"{nanos_text(notice.spent_nanos)} spent and {nanos_text(notice.reserved_nanos)} reserved "
        f"of {nanos_text(notice.limit_nanos)} {notice.currency}"
    )
    what = f"the {budget_name(notice)}"
    if retry_after_ms is None:
        return f"the request alone is more than {what} allows: {amounts}", None
    message = f"{what} is used up: {amounts}; it renews at {utc_text(notice.renews_at_ms)}"
    return message, retry_after_ms + jittered_ms(_SPREAD_MS, 1.0, request_id) - _SPREAD_MS
