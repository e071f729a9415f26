"""Reading of what was spent, while budgets change."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from fairlane.records import Budget
from fairlane_server.budgets.budgets import date_of
from fairlane_server.postgres.pool import DeadlinePool
from stream_processors.dispatcher.budgets import loader
from stream_processors.dispatcher.budgets.ledger import BudgetLedger

TODAY = 20_000
NOW = TODAY * 86_400_000 + 3_600_000


@pytest.mark.parametrize(
    "later",
    [(Budget("tenant", "day", "EUR", hard_nanos=9),), (Budget("each_key", "day", "XTS", hard_nanos=9),)],
    ids=["currency", "callers"],
)
def test_what_was_read_for_other_budgets_is_read_again(
    later: tuple[Budget, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = BudgetLedger()
    ledger.started(0, 0)
    ledger.set_budgets({"acme": (Budget("tenant", "day", "XTS", hard_nanos=9),)}, NOW)
    asked: list[Sequence[Any]] = []

    async def rows_for(
        _pool: object, tenant: str, questions: Sequence[Sequence[Any]], _timeout_s: float
    ) -> Sequence[Sequence[tuple[Any, ...]]]:
        assert tenant == "acme"
        asked.extend(questions)
        ledger.set_budgets({"acme": later}, NOW)
        return ([("offset", "0", None, 0), ("tenant", None, date_of(TODAY), 7)],)

    monkeypatch.setattr(loader, "rows_for", rows_for)
    loading = loader.SpendingLoader(ledger, cast("DeadlinePool", None), lambda: NOW)
    asyncio.run(loading._load_once())
    assert not ledger.is_loaded()
    asyncio.run(loading._load_once())
    assert ledger.is_loaded()
    assert len(asked) == 2
