"""GET /v1/budgets: the budgets of the caller's own tenant, with what it spent; and the header about a budget."""

from typing import Any

from fairlane.outcomes import Code
from fairlane.records import Budget, BudgetNotice, TenantSpec
from fairlane_server.kafka.load_board import BudgetRow, LoadView
from fairlane_server.models.catalog import ModelCatalog
from producers.gateway.pipeline.early_rejection import LatestLoad, RegistrySnapshot
from producers.openai_api.errors import GatewayError, budget_headers, error_headers
from tests.kit.native_kit import KEY, OTHER_KEY, WORK_KEY, Bench, used

UNIT = 10**9
JANUARY_31_MS = 1_769_817_600_000
FEBRUARY_MS = JANUARY_31_MS + 86_400_000
BUDGETS = (
    Budget("tenant", "month", "XTS", 80 * UNIT, 100 * UNIT, degrade=True),
    Budget("each_key", "day", "XTS", None, 2 * UNIT),
    Budget("each_user", "day", "XTS", None, UNIT),
    Budget("user:alice", "month", "XTS", UNIT, None),
)
NOTICE = BudgetNotice("hard", "user:alice", "month", "XTS", UNIT, UNIT, 5, FEBRUARY_MS, "user:alice")


def asked(key: str = KEY, load: LatestLoad | None = None) -> list[dict[str, Any]]:
    registry = RegistrySnapshot({"acme": TenantSpec("acme", budgets=BUDGETS)}, ModelCatalog())
    bench = Bench(registry=lambda: registry, load=load or LatestLoad())
    bench.now_ms = JANUARY_31_MS + 1
    bench.store.use(used(1, "2026-01-30", 3 * UNIT), used(2, "2026-01-31", 1), used(3, "2025-12-31", 7))
    response = bench.run(lambda client: client.get("/v1/budgets"), key)
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["data"]
    return found


def test_the_budgets_of_the_tenant_and_of_the_caller_are_shown() -> None:
    tenant, own, alice = asked()
    assert tenant == {
        "of": "tenant",
        "period": "month",
        "currency": "XTS",
        "soft": "80",
        "hard": "100",
        "at_soft": "degrade",
        "spent": "3.000000001",
        "renews_at_ms": FEBRUARY_MS,
    }
    assert (own["of"], own["caller"], own["hard"]) == ("each_key", "key:key-1", "2")
    assert (alice["of"], alice["caller"], alice["spent"]) == ("user:alice", "user:alice", "0")


def test_what_is_reserved_comes_from_the_dispatchers() -> None:
    load = LatestLoad()
    rows = (BudgetRow("acme", None, 5, 2), BudgetRow("acme", "key:key-1", 1, 0), BudgetRow("globex", None, 9, 9))
    load.look(LoadView(JANUARY_31_MS, 1, 0, (), (), rows))
    assert [one["reserved"] for one in asked(load=load)] == ["0.000000007", "0.000000001", "0"]


def test_others_see_nothing_of_it() -> None:
    assert asked(OTHER_KEY) == []
    bench = Bench()
    assert bench.run(lambda client: client.get("/v1/budgets"), WORK_KEY).status_code == 403


def test_a_budget_that_is_reached_is_a_header_without_the_name_of_the_caller() -> None:
    assert budget_headers(NOTICE) == {
        "x-fairlane-budget": "month; limit=hard; of=caller; amount=1; spent=1; reserved=0.000000005; currency=XTS; "
        "renews=2026-02-01T00:00:00Z"
    }
    assert budget_headers(None) == {}


def test_clients_are_not_to_retry_a_budget_that_renews_late() -> None:
    for retry_after_ms, told in ((None, "false"), (60_001, "false"), (2_000, None)):
        error = GatewayError(429, Code.INSUFFICIENT_QUOTA, "spent", retry_after_ms=retry_after_ms, budget=NOTICE)
        assert error_headers(error).get("x-should-retry") == told
        assert "x-fairlane-budget" in error_headers(error)
