"""What a client's end means to its request."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from fairlane.outcomes import Outcome
from fairlane.records import InferenceReply
from producers.gateway.sending import leave
from producers.openai_api.errors import GatewayError


class Cancels:
    """Where the submitter would be."""

    def __init__(self, error: GatewayError | None = None) -> None:
        self.cancelled: list[tuple[str, str]] = []
        self.error = error

    async def cancel(self, tenant: str, request_id: str) -> None:
        self.cancelled.append((tenant, request_id))
        if self.error is not None:
            raise self.error


def published(answer: InferenceReply | None = None, *, has_key: bool = False) -> Any:
    waiting = SimpleNamespace(tenant="acme", request_id="id-1", answer=answer)
    return SimpleNamespace(source=waiting, request_id="id-1", call=SimpleNamespace(has_key=has_key))


REPLY = InferenceReply("id-1", "acme", Outcome.OK)


@pytest.mark.parametrize(
    ("left", "cancelled"),
    [(published(), [("acme", "id-1")]), (published(REPLY), []), (published(has_key=True), [])],
    ids=["waiting", "answered", "its answer may be fetched"],
)
def test_what_nobody_can_fetch_any_more_is_cancelled(left: Any, cancelled: list[tuple[str, str]]) -> None:
    submitter = Cancels()
    asyncio.run(leave(SimpleNamespace(submitter=submitter), left))  # type: ignore[arg-type]  # a double
    assert submitter.cancelled == cancelled


def test_a_cancel_that_cannot_be_published_is_no_error_of_the_call() -> None:
    submitter = Cancels(GatewayError(503, "unavailable", "Kafka is away"))
    asyncio.run(leave(SimpleNamespace(submitter=submitter), published()))  # type: ignore[arg-type]  # a double
    assert submitter.cancelled
