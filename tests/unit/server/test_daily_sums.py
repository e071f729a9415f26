"""Sums of usage: which groups go together, and totals by currency."""

from datetime import date

import pytest

from fairlane_server.costs.daily_sums import KEYS, SUMS, Group, SumQuery, UsageSum, sum_question, totals


def summed(currency: str | None, nanos: int | None, requests: int = 1) -> UsageSum:
    return UsageSum(("acme",), currency, requests, 1, 2, 3, 4, 5, 6, nanos)


def test_totals_are_by_currency_and_what_has_no_price_stands_alone() -> None:
    found = totals([summed("USD", 5), summed(None, None), summed("EUR", 7), summed("USD", 10**30, 3)])
    assert [(one.currency, one.requests, one.cost_nanos) for one in found] == [
        (None, 1, None),
        ("EUR", 1, 7),
        ("USD", 4, 10**30 + 5),
    ]
    assert (found[2].keys, found[2].engine_ms, found[0].amount) == ((), 12, None)
    assert totals([]) == []


@pytest.mark.parametrize("group", [Group.MODEL, Group.VERSION, Group.POOL, Group.CLASS])
def test_sums_of_callers_are_not_divided_by_models(group: Group) -> None:
    for query in ({"by": (Group.CALLER, group)}, {"by": (group,), "only": {Group.CALLER: "key:1"}}):
        with pytest.raises(ValueError, match=f"caller: the sums of callers are not divided by {group}"):
            SumQuery(**query)
    assert SumQuery((Group.CALLER, Group.TENANT, Group.MONTH)).table == "usage_daily_callers"
    assert SumQuery((group, Group.DAY)).table == "usage_daily"


def test_values_are_parameters() -> None:
    hostile = "'; DROP TABLE usage; --"
    query = SumQuery((Group.MODEL, Group.MONTH), date(2026, 1, 1), date(2026, 2, 1), {Group.POOL: hostile})
    statement, parameters = sum_question(query, (hostile, "2026-01-01", hostile), 10)
    assert b"DROP" not in statement
    assert statement.count(b"%s") == len(parameters) == 7
    assert parameters == (date(2026, 1, 1), date(2026, 2, 1), hostile, hostile, "2026-01-01", hostile, 10)


def test_every_table_has_a_column_for_each_group_and_sum() -> None:
    assert all({"tenant", "day", "currency"} <= set(keys) for keys in KEYS.values())
    assert SUMS[-1] == "cost_nanos"
