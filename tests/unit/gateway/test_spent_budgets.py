"""Early refusals of spent budgets, held against the dispatcher's ledger: the same answers, and never one more."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.outcomes import Code
from fairlane.records import Budget, InferenceReply, InferenceRequest, RequestInput, TenantSpec
from fairlane_server.budgets.budgets import DAY_MS
from fairlane_server.budgets.refusals import refusal_text
from producers.gateway.pipeline.spent_budgets import FRESH_MS, PROBE_MS, SpentBudgets
from producers.openai_api.errors import GatewayError, error_headers, error_of
from stream_processors.dispatcher.budgets.accounts import Spending
from stream_processors.dispatcher.budgets.ledger import BudgetLedger, SpendingBase

DAY = 20_000
NOW = DAY * DAY_MS + 3_600_000  # 2024-10-04T01:00Z
HARD = Budget("tenant", "day", "XTS", hard_nanos=100)
MONTH = Budget("tenant", "month", "XTS", hard_nanos=150)
EACH = Budget("each_key", "day", "XTS", hard_nanos=10)
KEY, OTHER = "key:1", "key:2"
REQUEST = InferenceRequest("0b0f1b52-6a3f-4f0e-9a55-0c6f6f5d8a11", "m", "generate", RequestInput(prompt="p"))
ACME = TenantSpec("acme", budgets=(HARD,))


def ledger(budgets: tuple[Budget, ...], spent: int, of: str | None = KEY, reserved: int = 0) -> BudgetLedger:
    """What a dispatcher knows when this caller has spent so much."""
    made = BudgetLedger()
    made.started(0, 0)
    made.set_budgets({"acme": budgets}, NOW)
    rows = [Spending(None, DAY, spent), *([] if of is None else [Spending(of, DAY, spent)])]
    assert made.load("acme", SpendingBase({0: 0}, rows), NOW)
    made.promise("acme", {None: reserved, KEY: reserved}, NOW)
    return made


def said(book: BudgetLedger, caller: str | None = KEY, nanos: int = 1) -> InferenceReply:
    """The dispatcher's refusal."""
    verdict = book.judge("acme", caller, nanos, NOW)
    assert verdict.refused is not None
    message, retry_after_ms = refusal_text(verdict.refused, verdict.retry_after_ms, REQUEST.request_id)
    return InferenceReply(
        *(REQUEST.request_id, "acme", "rejected"),
        code=Code.INSUFFICIENT_QUOTA,
        message=message,
        retry_after_ms=retry_after_ms,
        budget=verdict.refused,
    )


def learned(*replies: InferenceReply) -> SpentBudgets:
    spent = SpentBudgets()
    spent.learn(replies, NOW)
    return spent


def told(error: GatewayError | None) -> object:
    """All that a caller gets, but for the id of the request, which an early refusal has not."""
    assert error is not None
    error.request_id = None
    return error.status, error.code, error.message, error.field, error.budget, error_headers(error)


@pytest.mark.parametrize("budgets", [(HARD,), (HARD, MONTH), (EACH, HARD), (MONTH,)])
def test_the_answer_is_the_dispatchers(budgets: tuple[Budget, ...]) -> None:
    reply = said(ledger(budgets, 150, reserved=7))
    early = learned(reply).refusal(replace(ACME, budgets=budgets), REQUEST, KEY, NOW)
    assert told(early) == told(error_of(reply))


def test_reservations_alone_are_settled_soon_and_refuse_nobody_here() -> None:
    reply = said(ledger((HARD,), 99, reserved=50))
    assert learned(reply).refusal(ACME, REQUEST, KEY, NOW) is None


def test_a_soft_budget_refuses_nobody() -> None:
    soft = Budget("tenant", "day", "XTS", soft_nanos=1)
    notice = ledger((soft,), 100).judge("acme", KEY, 1, NOW).soft
    reply = InferenceReply(REQUEST.request_id, "acme", "ok", budget=notice)
    assert learned(reply).refusal(ACME, REQUEST, KEY, NOW) is None


def test_only_whom_it_concerns() -> None:
    spec = TenantSpec("acme", budgets=(EACH,))
    spent = learned(said(ledger((EACH,), 10)))
    assert spent.refusal(spec, REQUEST, KEY, NOW) is not None
    assert spent.refusal(spec, REQUEST, OTHER, NOW) is None
    assert spent.refusal(spec, REQUEST, None, NOW) is None
    assert spent.refusal(replace(spec, tenant="globex"), REQUEST, KEY, NOW) is None


def test_a_budget_that_was_changed_counts_as_it_is_now() -> None:
    spent = learned(said(ledger((HARD,), 100)))
    for budget, is_refused in (
        (replace(HARD, hard_nanos=100), True),
        (replace(HARD, hard_nanos=50), True),
        (replace(HARD, hard_nanos=101), False),
        (replace(HARD, currency="EUR"), False),
        (replace(HARD, period="month"), False),
        (Budget("tenant", "day", "XTS", soft_nanos=1), False),
        # It is the same amount that counts.
        (replace(EACH, hard_nanos=1), False),
    ):
        found = spent.refusal(replace(ACME, budgets=(budget,)), REQUEST, KEY, NOW)
        assert (found is not None) is is_refused, budget
    assert spent.refusal(replace(ACME, budgets=()), REQUEST, KEY, NOW) is None


def test_what_may_come_from_the_cache_may_be_free() -> None:
    spent = learned(said(ledger((HARD,), 100)))
    cached = replace(ACME, cache="exact")
    assert spent.refusal(cached, REQUEST, KEY, NOW) is None
    assert spent.refusal(ACME, replace(REQUEST, cache="semantic"), KEY, NOW) is None
    assert spent.refusal(cached, replace(REQUEST, cache="none"), KEY, NOW) is not None


def test_it_ends_when_the_budget_renews() -> None:
    midnight = (DAY + 1) * DAY_MS
    reply = said(ledger((HARD,), 100))
    spent = SpentBudgets()
    spent.learn([reply], midnight - 10)
    assert spent.refusal(ACME, REQUEST, KEY, midnight - 1) is not None
    assert spent.refusal(ACME, REQUEST, KEY, midnight) is None


def test_one_request_asks_again_and_without_a_new_refusal_all_pass() -> None:
    reply = said(ledger((HARD,), 100))
    spent = learned(reply)

    def passes(after_ms: int) -> bool:
        return spent.refusal(ACME, REQUEST, KEY, NOW + after_ms) is None

    assert not passes(FRESH_MS - 1)
    assert [passes(FRESH_MS) for _ in range(3)] == [True, False, False]
    # Refused again: once more one asks, as long after that.
    spent.learn([reply], NOW + FRESH_MS + 20)
    assert not passes(2 * FRESH_MS + 19)
    assert [passes(2 * FRESH_MS + 20) for _ in range(2)] == [True, False]
    assert not passes(2 * FRESH_MS + 19 + PROBE_MS)
    assert [passes(2 * FRESH_MS + 20 + PROBE_MS) for _ in range(3)] == [True, True, True]


def test_many_callers_are_not_remembered_without_bound() -> None:
    spent = SpentBudgets(most=3)
    budgets = (EACH,)
    for number in range(5):
        caller = f"key:{number}"
        spent.learn([said(ledger(budgets, 10, caller), caller)], NOW)
    spec = TenantSpec("acme", budgets=budgets)
    refused = [spent.refusal(spec, REQUEST, f"key:{number}", NOW) is not None for number in range(5)]
    assert refused == [False, False, True, True, True]


hard_budgets = st.lists(
    st.builds(
        Budget,
        st.sampled_from(["tenant", "each_key", "each_user", KEY]),
        st.sampled_from(["day", "month"]),
        st.just("XTS"),
        hard_nanos=st.integers(0, 30),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda one: (one.of, one.period),
).map(tuple)


@given(
    hard_budgets, hard_budgets, st.integers(0, 30), st.integers(0, 30), st.sampled_from([KEY, OTHER, "user:1", None])
)
def test_nobody_is_refused_here_whom_the_dispatcher_admits(
    before: tuple[Budget, ...], now: tuple[Budget, ...], spent: int, reserved: int, caller: str | None
) -> None:
    book, known = ledger(before, spent, reserved=reserved), SpentBudgets()
    for one in (KEY, OTHER, "user:1", None):
        if book.judge("acme", one, 0, NOW).refused is not None:
            known.learn([said(book, one, 0)], NOW)
    early = known.refusal(replace(ACME, budgets=now), REQUEST, caller, NOW)
    if early is not None:
        # Even one that costs nothing.
        assert ledger(now, spent).judge("acme", caller, 0, NOW).refused is not None
