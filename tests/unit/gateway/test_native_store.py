"""The memory that stands for the recorder's tables does as they do."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from producers.gateway.results.request_store import EndedFilter, RequestStore, ended_question
from tests.kit.native_kit import MemoryRequests
from tests.kit.request_store_suite import Requests, RequestStoreSuite


class InMemory(MemoryRequests):
    """Asked from outside an event loop."""

    def ask(self, use: Callable[[RequestStore], Awaitable[Any]]) -> Any:
        async def within() -> Any:
            return await use(self)

        return asyncio.run(within())


class TestMemoryRequests(RequestStoreSuite):
    @pytest.fixture
    def requests(self) -> Requests:
        return InMemory()


def test_only_those_that_did_not_end_well_have_an_index_of_their_own() -> None:
    for outcome, is_partial in (("ok", False), ("failed", True), (None, False)):
        statement, _ = ended_question("acme", EndedFilter(outcome), None, 10)
        assert (b"outcome <> 'ok'" in statement) == is_partial
