"""``fairlane budgets``: limits from Kafka, spending from Postgres, reservations from heartbeats."""

import json
from collections.abc import Sequence
from datetime import date

import pytest

from fairlane.records import Budget, BudgetLoad, DispatchReport, TenantLoad, TenantSpec
from fairlane.settings import Settings
from fairlane_server.cli import budgets, main
from fairlane_server.costs.daily_sums import Group, SumQuery, UsageSum
from fairlane_server.kafka.load_board import LoadBoard

UNIT = 10**9
NOW_MS = 1_769_817_600_000
"""2026-01-31."""
EARLIER, TODAY = date(2026, 1, 2), date(2026, 1, 31)
SPECS = (
    TenantSpec(
        "acme",
        budgets=(
            Budget("tenant", "month", "XTS", 80 * UNIT, 100 * UNIT),
            Budget("each_user", "day", "XTS", None, 2 * UNIT),
        ),
    ),
    TenantSpec("globex"),
)


def cost(*keys: str | date, nanos: int, currency: str = "XTS") -> UsageSum:
    return UsageSum(keys, currency, 1, 0, 1, 1, 0, 0, 1, nanos)


@pytest.fixture(autouse=True)
def sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster with two dispatchers, and tables with some costs."""

    class Feed:
        def __init__(self, _settings: object, _codec: object, board: LoadBoard) -> None:
            self.board = board

        def catch_up(self) -> None:
            for spec in SPECS:
                self.board.configure(spec.tenant, spec)

        def follow(self, _duration_s: float) -> None:
            for name, queued in (("d1", 5), ("d2", 7)):
                loads = BudgetLoad("acme", queued, 100), BudgetLoad("acme", 0, 100, "user:b")
                report = DispatchReport(name, 0, NOW_MS, draining=False, budgets=loads)
                self.board.dispatch(report, NOW_MS)

        def close(self) -> None: ...

    def read(_settings: Settings, query: SumQuery, tenant: str | None) -> Sequence[UsageSum]:
        assert (tenant, query.since) == ("acme", date(2026, 1, 1))
        if query.by == (Group.DAY,):
            return [cost(EARLIER, nanos=3), cost(TODAY, nanos=4), cost(TODAY, nanos=9, currency="EUR")]
        of_today = {"user:a": 1, "user:b": 2, "key:1": 8}
        return [cost(EARLIER, "user:c", nanos=1), *(cost(TODAY, name, nanos=nanos) for name, nanos in of_today.items())]

    monkeypatch.setattr(budgets, "LoadFeed", Feed)
    monkeypatch.setattr(budgets, "read_sums", read)
    monkeypatch.setattr(budgets, "now_ms", lambda: NOW_MS)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(("budgets", *arguments))
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_a_table_has_a_row_for_each_budget_and_caller(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:] == [
        ["acme", "tenant", "month", "80", "100", "0.000000007", "0.000000112", "XTS", "2026-02-01", "00:00:00"],
        ["acme", "user:b", "day", "-", "2", "0.000000002", "0.0000001", "XTS", "2026-02-01", "00:00:00"],
        ["acme", "user:a", "day", "-", "2", "0.000000001", "0", "XTS", "2026-02-01", "00:00:00"],
    ]


def test_json_has_exact_amounts(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--tenant", "acme", "--json") == 0
    first, *_ = json.loads(capsys.readouterr().out)["budgets"]
    assert (first["spent"], first["reserved"], first["at_soft"]) == ("0.000000007", "0.000000112", "warn")
    assert first["renews_at_ms"] == NOW_MS + 86_400_000


def test_a_tenant_without_budgets_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--tenant", "globex") == 0
    assert capsys.readouterr().out == "no tenant has a budget\n"


def test_a_report_without_tenants_leaves_the_reservations_as_they_were() -> None:
    board = LoadBoard()
    load = TenantLoad("acme", "gpu", 0, 0, 0, 0, 0.5, 0.0)
    full = DispatchReport("d1", 0, NOW_MS, draining=False, tenants=(load,), budgets=(BudgetLoad("acme", 5, 0),))
    board.dispatch(full, NOW_MS)
    board.dispatch(DispatchReport("d1", 0, NOW_MS + 200, draining=False), NOW_MS + 200)
    assert board.view(NOW_MS + 200).reserved("acme") == {None: 5}
    assert board.view(NOW_MS + 200).reserved("globex") is None
