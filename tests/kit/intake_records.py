"""Records around intake: requeued work and its topic."""

from dataclasses import replace
from typing import Any

from fairlane import names
from fairlane.records import (
    WorkItem,
)
from tests.kit.dispatcher_bench import NOW_MS, handed_back, request

RETURNED = names.returned_topic("pool")


def work_item(**fields: Any) -> WorkItem:
    """Work of acme that a consumer handed back."""
    made = handed_back(
        request=request(),
        admitted_at_ms=NOW_MS - 900,
        dispatched_at_ms=NOW_MS - 500,
        deadline_at_ms=NOW_MS + 5_000,
        dispatcher_id="dispatcher-7",
    )
    return replace(made, **fields)
