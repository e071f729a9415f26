"""Whether a job fits the budgets of its tenant as a whole."""

import json
from dataclasses import replace
from typing import Any

import pytest

from fairlane.records import Budget, ModelPrices, Price, TenantSpec
from fairlane_server.costs.price_book import NO_PRICES, PriceBook
from producers.backfill.budgets import Spent, job_nanos, left_nanos, too_expensive
from producers.backfill.job import Fingerprint, Job, JobSpec, ParsedRow, RowTally
from producers.backfill.rows import parse_row

DAY_MS = 86_400_000
TODAY = 20_000
NOW = TODAY * DAY_MS
PRICES = PriceBook([ModelPrices("words", "XTS", (Price(0, None, input_nanos=10**6, output_nanos=2 * 10**6),))])
MONTH = Budget("tenant", "month", "XTS", hard_nanos=1_000)
ALICE = Budget("user:alice", "day", "XTS", hard_nanos=100)


def row(**fields: Any) -> ParsedRow:
    content = json.dumps({"model": "words", "prompt": "0123456789ab", "max_tokens": 5, **fields}).encode()
    return parse_row(content, "acme", {}, None)


def fits(nanos: int, *spent: Spent, caller: str | None = None) -> bool:
    spec = TenantSpec("acme", budgets=(MONTH, ALICE))
    return too_expensive(spec, caller, nanos, spent, NOW) is None


def test_the_estimate_is_that_of_the_first_rows_for_all() -> None:
    one = job_nanos([row()], 1, PRICES, "XTS", NOW)
    assert one >= 10, "five tokens of the answer"
    assert job_nanos([row(), row()], 200, PRICES, "XTS", NOW) == 200 * one
    assert job_nanos([row(), parse_row(b"no json", "acme", {}, None)], 200, PRICES, "XTS", NOW) == 100 * one
    assert job_nanos([], 0, PRICES, "XTS", NOW) == 0


def test_a_row_that_names_a_version_or_an_alias_costs_what_its_model_or_that_version_does() -> None:
    dear = Price(0, "2", input_nanos=10**9, output_nanos=10**9)
    prices = PriceBook([ModelPrices("words", "XTS", (Price(0, None, output_nanos=10**6), dear))])
    plain, by_alias, by_version = (
        job_nanos([row(model=model)], 1, prices, "XTS", NOW) for model in ("words", "words@candidate", "words/2")
    )
    assert by_alias == plain > 0
    assert by_version > 100 * plain


@pytest.mark.parametrize(("prices", "currency"), [(NO_PRICES, "XTS"), (PRICES, "EUR")])
def test_without_a_price_in_the_currency_a_job_costs_nothing(prices: PriceBook, currency: str) -> None:
    assert job_nanos([row()], 10, prices, currency, NOW) == 0


def test_a_job_fits_what_is_neither_spent_nor_reserved_by_other_jobs() -> None:
    assert fits(1_000)
    assert not fits(1_001)
    spent = Spent(None, TODAY - 1, 300), Spent(None, TODAY, 100), Spent(None, None, 200), Spent(None, TODAY - 40, 9_999)
    assert fits(400, *spent)
    assert not fits(401, *spent)


def test_the_budgets_of_its_caller_count_too() -> None:
    assert not fits(101, caller="user:alice")
    assert fits(101, caller="user:bob")
    yesterday = Spent("user:alice", TODAY - 1, 90)
    assert fits(100, yesterday, caller="user:alice")
    assert not fits(100, yesterday, Spent("user:alice", None, 1), caller="user:alice")


def test_a_job_that_goes_on_needs_room_for_its_rows_without_a_result() -> None:
    job = Job("0" * 16, "acme", JobSpec("in", "out"), Fingerprint(1, "1"), 10, 12)
    assert left_nanos(job, 1_000) == 1_000
    assert left_nanos(replace(job, tally=RowTally(ok=3, failed=1)), 1_000) == 600
    assert left_nanos(replace(job, tally=RowTally(ok=3), answered=9), 1_000) == 100
    assert left_nanos(replace(job, total_rows=0), 0) == 0


def test_the_reason_names_budget_amounts_and_renewal() -> None:
    spec = TenantSpec("acme", budgets=(MONTH,))
    assert too_expensive(spec, None, 2_000, [Spent(None, TODAY, 5), Spent(None, None, 7)], NOW) == (
        "estimated at 0.000002 XTS, more than what is left of the month budget of the tenant: 0.000000005 spent and "
        "0.000000007 reserved by other jobs of 0.000001; it renews at 2024-11-01T00:00:00Z"
    )
