"""Texts and retry times of requests that a budget refuses. Pure."""

from fairlane.backoff import jittered_ms
from fairlane_server.budgets.budgets import budget_name
from fairlane_server.budgets.refusals import refusal_text
from stream_processors.dispatcher.budgets.ledger import Judgement
from stream_processors.dispatcher.queued_request import QueuedRequest

UNKNOWN_RETRY_MS = 2_000


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
    message, retry_after_ms = refusal_text(notice, retry_after_ms, queued.request_id)
    return message, retry_after_ms, inputs
