"""Budgets in tenants.yaml."""

from dataclasses import replace
from pathlib import Path

import pytest

from fairlane.records import Budget, TenantSpec
from fairlane_server.budgets.budgets import MOST_BUDGETS, check_budgets
from fairlane_server.control.tenants_file import load_tenants
from fairlane_server.yaml_config import ConfigError

UNIT = 10**9
MONTH = Budget("tenant", "month", "XTS", 80 * UNIT, 100 * UNIT, degrade=True)


def load(tmp_path: Path, *budgets: str) -> tuple[Budget, ...]:
    file = tmp_path / "tenants.yaml"
    lines = "".join(f"      - {budget}\n" for budget in budgets)
    file.write_text(f"tenants:\n  - tenant: acme\n    budgets:\n{lines}")
    (spec,) = load_tenants(file)
    return spec.budgets


def test_budgets_are_read_as_they_are_written(tmp_path: Path) -> None:
    found = load(
        tmp_path,
        "{period: month, currency: XTS, soft: 80, hard: 100, at_soft: degrade}",
        "{of: each_user, period: day, currency: XTS, hard: 0.000000001}",
        '{of: "key:3f2a", period: day, currency: XTS, soft: 2.50, at_soft: warn}',
    )
    assert found == (
        MONTH,
        Budget("each_user", "day", "XTS", None, 1),
        Budget("key:3f2a", "day", "XTS", 2_500_000_000, None),
    )


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("{period: month, hard: 1}", "missing: currency"),
        ("{period: week, currency: XTS, hard: 1}", "unknown period 'week'"),
        ("{period: month, currency: euro, hard: 1}", "does not match"),
        ("{period: month, currency: XTS}", "neither soft nor hard"),
        ("{period: month, currency: XTS, soft: 2, hard: 1}", "soft is more than hard"),
        ("{period: month, currency: XTS, hard: 1, at_soft: degrade}", "there is none"),
        ("{period: month, currency: XTS, hard: -1}", "must be a decimal number from 0 on"),
        ("{period: month, currency: XTS, hard: 0.0000000001}", "at most 9 decimal places"),
        ("{period: month, currency: XTS, hard: 1, at_soft: stop}", "unknown reaction 'stop'"),
        ("{of: everybody, period: month, currency: XTS, hard: 1}", "must be one of tenant, each_key, each_user, or"),
        ('{of: "key:", period: month, currency: XTS, hard: 1}', "or key:ID"),
    ],
)
def test_a_wrong_budget_is_refused_with_its_line(tmp_path: Path, budget: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        load(tmp_path, budget)
    assert refused.value.line == 4


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ((replace(MONTH, soft_nanos=None, degrade=False),), "two of the same callers and the same period"),
        ((replace(MONTH, period="day", currency="EUR"),), "one currency"),
        (tuple(replace(MONTH, of=f"key:{number}") for number in range(MOST_BUDGETS)), f"at most {MOST_BUDGETS}"),
        ((replace(MONTH, of="user:a", hard_nanos=2**63),), "amounts must be"),
    ],
)
def test_budgets_that_do_not_go_together_are_refused(others: tuple[Budget, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_budgets(TenantSpec("acme", budgets=(MONTH, *others)))
