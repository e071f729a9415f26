"""Texts and retry times of requests that a budget refuses. Pure."""

from fairlane.backoff import jittered_ms
from fairlane.money import nanos_text
from fairlane.records import BudgetNotice
from fairlane_server.budgets.budgets import budget_name, utc_text
from stream_processors.dispatcher.budgets.ledger import Judgement
from stream_processors.dispatcher.queued_request import QueuedRequest

UNKNOWN_RETRY_MS = 2_000

_SPREAD_MS = 10_000
"""Requests that were refused for the same budget return within this time after its renewal."""


def refusal_of(judgement: Judgement, queued: QueuedRequest) -> tuple[str, int | None, dict[str, object]]:
    """The message of a refusal, when to try again, and the inputs for its audit."""
    inputs: dict[str, object] = {
        "pool": queued.pool,
        "priority_class": queued.priority_class,
        "submitted_at_ms": queued.submitted_at_ms,
        "deadline_at_ms": queued.deadline_at_ms,
    }
    notice, retry_after_ms = judgement.refused, judgement.retry_after_ms
    if notice is None:
        message = f"what was spent of the budgets of {queued.tenant} is not known for now"
        return message, jittered_ms(UNKNOWN_RETRY_MS, 1.0, queued.request_id), inputs
    inputs |= {
        "budget": budget_name(notice),
        "limit_nanos": notice.limit_nanos,
        "spent_nanos": notice.spent_nanos,
        "reserved_nanos": notice.reserved_nanos,
        "currency": notice.currency,
        "renews_at_ms": notice.renews_at_ms,
    }
    if retry_after_ms is not None:
        retry_after_ms += jittered_ms(_SPREAD_MS, 1.0, queued.request_id) - _SPREAD_MS
    return _message(notice, retry_after_ms), retry_after_ms, inputs


def _message(notice: BudgetNotice, retry_after_ms: int | None) -> str:
    amounts = (
        f"{nanos_text(notice.spent_nanos)} spent and {nanos_text(notice.reserved_nanos)} reserved "
        f"of {nanos_text(notice.limit_nanos)} {notice.currency}"
    )
    what = f"the {budget_name(notice)}"
    if retry_after_ms is None:
        return f"the request alone is more than {what} allows: {amounts}"
    return f"{what} is used up: {amounts}; it renews at {utc_text(notice.renews_at_ms)}"
