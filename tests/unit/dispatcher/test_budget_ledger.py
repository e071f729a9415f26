"""The ledger of budgets: spending from sums and log, reservations, verdicts."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from fairlane.records import Budget, Cost, SourceCoordinate, UsageEvent
from fairlane_server.budgets.budgets import CLOCKS_WITHIN_MS
from stream_processors.dispatcher.budgets import accounts
from stream_processors.dispatcher.budgets.accounts import Spending
from stream_processors.dispatcher.budgets.ledger import (
    GRACE_MS,
    WITHIN,
    BudgetLedger,
    ReadUsage,
    SpendingBase,
)
from stream_processors.dispatcher.budgets.reservations import MISSED_AFTER_MS
from stream_processors.dispatcher.scheduling.in_flight import WorkId

DAY_MS = 86_400_000
NOW = 20_000 * DAY_MS + 3_600_000  # 2024-10-04T01:00Z
TODAY = 20_000
HARD = Budget("tenant", "day", "XTS", hard_nanos=100)
MONTH = Budget("tenant", "month", "XTS", soft_nanos=150, hard_nanos=200, degrade=True)
EACH = Budget("each_user", "day", "XTS", soft_nanos=5, hard_nanos=10)
SOURCE = SourceCoordinate("requests.acme", 0, 0)
WORK = WorkId("priority.p.normal", 0, 7)


def usage(
    nanos: int, offset: int = 0, *, caller: str | None = None, at_ms: int = NOW, currency: str = "XTS", work: int = 99
) -> ReadUsage:
    cost = Cost(nanos, currency)
    place = SourceCoordinate(WORK.topic, 0, work)
    event = UsageEvent(
        *("id", "acme", "p", "m", "1", "normal", "ok", None, 1, 1, 0, 3, 0, at_ms, place),
        cost=cost,
        requested_by=caller,
    )
    return ReadUsage(0, offset, event)


def ledger(*budgets: Budget, began: int = 0, rows: Sequence[Spending] = (), known: bool = True) -> BudgetLedger:
    made = BudgetLedger()
    made.started(0, began)
    made.set_budgets({"acme": budgets or (HARD,)}, NOW)
    if known:
        assert made.load("acme", SpendingBase({0: began}, rows), NOW)
    return made


def spent(of: BudgetLedger) -> list[int]:
    return [nanos for _, _, nanos in of.parts(NOW)]


# Spending


def test_spending_is_the_sums_and_what_was_read_behind_them() -> None:
    book = ledger(began=5, known=False)
    book.read([usage(1, 5), usage(2, 6), usage(4, 7)], NOW)
    assert spent(book) == []
    assert not book.load("acme", SpendingBase({0: 4}, ()), NOW), "what is in 4 was read by nobody"
    assert book.load("acme", SpendingBase({0: 6}, [Spending(None, TODAY, 31)]), NOW)
    assert spent(book) == [31 + 2 + 4]
    book.read([usage(8, 8)], NOW)
    assert spent(book) == [45]


def test_an_offset_counts_once_however_often_it_is_read() -> None:
    book = ledger()
    for _ in range(3):
        book.read([usage(1, 0), usage(2, 1)], NOW)
    assert spent(book) == [3]


def test_sums_that_are_ahead_of_the_reading_contain_what_is_read_later() -> None:
    book = ledger(known=False)
    assert book.load("acme", SpendingBase({0: 3}, [Spending(None, TODAY, 7)]), NOW)
    book.read([usage(1, 0), usage(2, 1), usage(4, 2), usage(8, 3)], NOW)
    assert spent(book) == [15]


def test_a_log_that_starts_anew_makes_spending_unknown() -> None:
    book = ledger()
    book.started(0, 0)
    assert book.unknown() == []
    book.read([usage(1, 0)], NOW)
    book.started(0, 10)
    assert book.unknown() == [("acme", "XTS", False)]
    assert book.judge("acme", None, 1, NOW).is_unknown


def test_usage_that_cannot_be_read_makes_spending_unknown_until_the_recorder_is_behind_it() -> None:
    book = ledger(began=4)
    book.reserve(SOURCE, "acme", None, 5, NOW)
    book.seen(WORK, SOURCE, "acme", None, 5, NOW)
    book.read([usage(1, 4, work=WORK.offset), ReadUsage(0, 5, None), usage(2, 6)], NOW)
    assert book.unknown() == [("acme", "XTS", False)]
    assert book.judge("acme", None, 1, NOW).is_unknown
    assert reserved(book) == (0, 0), "what was read before it settles its work"
    assert not book.load("acme", SpendingBase({0: 5}, [Spending(None, TODAY, 1)]), NOW), "it is not in these sums"
    assert book.load("acme", SpendingBase({0: 6}, [Spending(None, TODAY, 99)]), NOW)
    assert spent(book) == [101]
    book.read([ReadUsage(0, 5, None)], NOW)
    assert spent(book) == [101], "it was read before"


def test_days_and_months_begin_in_utc_and_only_the_currency_of_the_budget_counts() -> None:
    book = ledger(HARD, MONTH, rows=[Spending(None, TODAY - 1, 40), Spending(None, TODAY - 4, 1_000)])
    book.read([usage(3, 0), usage(500, 1, currency="EUR"), usage(2, 2, at_ms=NOW - DAY_MS)], NOW)
    assert spent(book) == [3, 45]
    tomorrow = NOW + DAY_MS
    book.expire(tomorrow)
    assert [nanos for _, _, nanos in book.parts(tomorrow)] == [0, 45]
    november = NOW + 28 * DAY_MS
    book.expire(november)
    assert [nanos for _, _, nanos in book.parts(november)] == [0, 0]


def test_new_budgets_of_the_same_kind_are_known_at_once_and_others_not() -> None:
    book = ledger()
    book.set_budgets({"acme": (replace(HARD, hard_nanos=7), MONTH)}, NOW)
    assert book.is_loaded()
    book.set_budgets({"acme": (HARD, EACH)}, NOW)
    assert book.unknown() == [("acme", "XTS", True)]


# Verdicts


def test_a_request_fits_as_long_as_everything_reserved_fits_with_it() -> None:
    book = ledger(rows=[Spending(None, TODAY, 70)])
    book.reserve(SOURCE, "acme", None, 20, NOW)
    assert book.judge("acme", None, 10, NOW).refused is None
    verdict = book.judge("acme", None, 11, NOW)
    assert verdict.refused is not None
    assert (verdict.refused.spent_nanos, verdict.refused.reserved_nanos, verdict.refused.limit_nanos) == (70, 20, 100)
    assert verdict.retry_after_ms == 2_000, "what is reserved may be settled for less"
    book.reservations.release(SOURCE)
    assert book.judge("acme", None, 30, NOW).refused is None
    assert book.judge("acme", None, 31, NOW).retry_after_ms == DAY_MS - 3_600_000 + CLOCKS_WITHIN_MS
    assert book.judge("acme", None, 101, NOW).retry_after_ms is None, "waiting does not help"


def test_near_a_renewal_a_request_must_fit_both_periods() -> None:
    """Clocks differ: its usage may be dated in either."""
    midnight = (TODAY + 1) * DAY_MS
    before, after = midnight - CLOCKS_WITHIN_MS, midnight + CLOCKS_WITHIN_MS
    book = ledger(rows=[Spending(None, TODAY, 100)])
    for now_ms in (before, midnight, after - 1):
        book.expire(now_ms)
        verdict = book.judge("acme", None, 1, now_ms)
        assert verdict.refused is not None
        assert (verdict.refused.spent_nanos, verdict.refused.renews_at_ms) == (100, midnight)
        assert verdict.retry_after_ms == after - now_ms
        assert book.judge("acme", None, 1, now_ms + verdict.retry_after_ms) == WITHIN
    book.read([usage(40, 0, at_ms=midnight)], before)
    assert book.judge("acme", None, 60, after).refused is None
    assert book.judge("acme", None, 61, after).refused is not None
    book.expire(after)
    assert book.judge("acme", None, 60, before) == WITHIN, "the old period is forgotten by then"

    ahead = ledger(rows=[Spending(None, TODAY, 10)])
    ahead.read([usage(70, 0, at_ms=midnight)], before)
    assert ahead.judge("acme", None, 31, before - 1).refused is None
    assert ahead.judge("acme", None, 31, before).refused is not None
    ahead.reserve(SOURCE, "acme", None, 31, before)
    assert ahead.judge_dispatch(SOURCE, None, before).refused is not None


def test_sums_are_not_taken_while_a_period_that_has_just_ended_counts() -> None:
    midnight = (TODAY + 1) * DAY_MS
    book = ledger(known=False)
    assert not book.load("acme", SpendingBase({0: 0}, ()), midnight + CLOCKS_WITHIN_MS - 1)
    assert book.load("acme", SpendingBase({0: 0}, ()), midnight + CLOCKS_WITHIN_MS)


def test_of_two_budgets_the_one_that_renews_last_is_named() -> None:
    book = ledger(HARD, MONTH, rows=[Spending(None, TODAY, 200)])
    verdict = book.judge("acme", None, 1, NOW)
    assert verdict.refused is not None
    assert verdict.refused.period == "month"
    assert verdict.refused.renews_at_ms == (TODAY + 28) * DAY_MS


def test_a_soft_budget_is_noticed_and_may_ask_for_less() -> None:
    book = ledger(MONTH, rows=[Spending(None, TODAY, 149)])
    assert book.judge("acme", None, 1, NOW).soft is None
    verdict = book.judge("acme", None, 2, NOW)
    assert verdict.soft is not None
    assert (verdict.soft.limit, verdict.soft.limit_nanos, verdict.degrade, verdict.refused) == ("soft", 150, True, None)


def test_each_caller_has_its_own_amount_and_others_do_not_count() -> None:
    book = ledger(EACH, Budget("key:1", "day", "XTS", hard_nanos=3))
    book.read([usage(9, 0, caller="user:a"), usage(50, 1, caller="key:2"), usage(50, 2)], NOW)
    assert book.judge("acme", "user:a", 2, NOW).refused is not None
    assert book.judge("acme", "user:b", 2, NOW).refused is None
    assert book.judge("acme", "key:2", 1_000, NOW).refused is None
    assert book.judge("acme", "key:1", 4, NOW).refused is not None
    assert book.judge("acme", None, 1_000, NOW).refused is None


def test_callers_beyond_the_bound_share_one_amount(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "MOST_CALLERS", 2)
    book = ledger(EACH)
    book.read([usage(6, number, caller=f"user:{number}") for number in range(4)], NOW)
    assert book.judge("acme", "user:0", 4, NOW).refused is None
    for late in ("user:2", "user:3", "user:never"):
        assert book.judge("acme", late, 1, NOW).refused is not None, "never less than what each has spent"


def test_unknown_spending_refuses_only_what_a_hard_budget_is_about() -> None:
    book = ledger(replace(EACH, soft_nanos=None), known=False)
    assert book.judge("acme", "user:a", 1, NOW).is_unknown
    assert not book.judge("acme", "key:1", 1, NOW).is_unknown
    soft = ledger(replace(HARD, soft_nanos=0, hard_nanos=None), known=False)
    assert soft.judge("acme", None, 1, NOW) == BudgetLedger().judge("acme", None, 1, NOW)


def test_a_budget_that_is_set_later_has_some_time_to_become_known() -> None:
    book = BudgetLedger()
    book.started(0, 0)
    book.set_budgets({}, NOW)
    book.set_budgets({"acme": (HARD,)}, NOW)
    assert not book.judge("acme", None, 1, NOW).is_unknown
    assert book.judge("acme", None, 1, NOW + GRACE_MS).is_unknown


def test_budgets_that_are_known_hold_while_the_spending_of_callers_is_read() -> None:
    book = ledger(rows=[Spending(None, TODAY, 60)])
    book.reserve(SOURCE, "acme", "user:a", 30, NOW)
    book.set_budgets({"acme": (HARD, EACH)}, NOW)
    assert book.unknown() == [("acme", "XTS", True)]
    assert book.judge("acme", "user:a", 11, NOW).refused is not None
    assert book.judge("acme", "user:a", 10, NOW) == WITHIN, "nothing limited the user before"
    assert book.judge("acme", "user:a", 10, NOW + GRACE_MS).is_unknown
    book.read([usage(20, 0, caller="user:a")], NOW)
    assert spent(book) == [80]
    assert book.judge_dispatch(SOURCE, "user:a", NOW).refused is not None, "80 and 30"
    book.reservations.release(SOURCE)
    rows = [Spending(None, TODAY, 60), Spending("user:a", TODAY, 3)]
    assert book.load("acme", SpendingBase({0: 0}, rows), NOW)
    assert spent(book) == [80, 23]
    assert book.judge("acme", "user:a", 1, NOW).refused is not None


def test_callers_of_another_kind_have_spent_before_their_budget_was_set() -> None:
    keys = Budget("each_key", "day", "XTS", hard_nanos=10)
    book = ledger(keys, rows=[Spending(None, TODAY, 21), Spending("key:1", TODAY, 9), Spending("user:a", TODAY, 12)])
    book.set_budgets({"acme": (keys, EACH)}, NOW)
    assert book.unknown() == [("acme", "XTS", True)]
    assert book.judge("acme", "key:1", 2, NOW).refused is not None
    assert book.load("acme", SpendingBase({0: 0}, [Spending("key:1", TODAY, 9), Spending("user:a", TODAY, 12)]), NOW)
    assert book.judge("acme", "key:1", 2, NOW).refused is not None
    assert book.judge("acme", "user:a", 1, NOW).refused is not None


@pytest.mark.parametrize("again", [(HARD,), (HARD, EACH), (replace(HARD, currency="EUR"),)], ids=str)
def test_a_budget_that_was_there_before_gets_no_time(again: tuple[Budget, ...]) -> None:
    book = ledger(rows=[Spending(None, TODAY, 100)])
    if again == (HARD,):
        book.set_budgets({}, NOW)
    book.set_budgets({"acme": again}, NOW)
    assert book.judge("acme", None, 1, NOW).is_refusal


def test_without_budgets_nothing_is_kept() -> None:
    book = BudgetLedger()
    book.started(0, 0)
    book.set_budgets({}, NOW)
    book.reserve(SOURCE, "acme", None, 5, NOW)
    book.seen(WORK, SOURCE, "acme", None, 5, NOW)
    book.read([usage(5)], NOW)
    assert book.reservations.queued(SOURCE) is None
    assert book.loads(9) == ()
    assert list(book.parts(NOW)) == []


# Reservations


def reserved(of: BudgetLedger) -> tuple[int, int]:
    (load, *_) = of.loads(9)
    return load.queued_nanos, load.in_flight_nanos


def test_a_reservation_goes_from_queue_to_flight_to_spending() -> None:
    book = ledger()
    book.reserve(SOURCE, "acme", None, 5, NOW)
    assert reserved(book) == (5, 0)
    assert book.reservations.sent(SOURCE, NOW) == 5
    assert reserved(book) == (0, 5)
    book.seen(WORK, SOURCE, "acme", None, 5, NOW)
    book.seen(WORK, SOURCE, "acme", None, 5, NOW)
    assert reserved(book) == (0, 5)
    book.read([usage(4, work=WORK.offset)], NOW)
    assert (reserved(book), spent(book)) == ((0, 0), [4])


def test_usage_that_is_read_before_its_work_leaves_no_reservation() -> None:
    book = ledger()
    book.reserve(SOURCE, "acme", None, 5, NOW)
    book.read([usage(4, work=WORK.offset)], NOW)
    book.seen(WORK, SOURCE, "acme", None, 5, NOW)
    assert reserved(book) == (0, 0)


def test_work_that_was_done_before_it_was_read_is_not_reserved() -> None:
    """Its usage may lie before the start of reading, and would be missed."""
    book = ledger()
    book.reservations.committed(WORK.topic, WORK.partition, lambda offset: offset in {7, 9}, NOW)
    for offset, held in ((7, 0), (8, 5), (9, 5)):
        book.seen(WORK._replace(offset=offset), replace(SOURCE, offset=offset), "acme", None, 5, NOW)
        assert reserved(book) == (0, held)
    book.reservations.recreated(WORK.topic, WORK.partition)
    book.seen(WORK, SOURCE, "acme", None, 5, NOW)
    assert reserved(book) == (0, 5), "what was done was done in another log"


def test_without_budgets_nothing_stays_reserved() -> None:
    """Of what ends then, nothing is told."""
    book = ledger()
    book.reserve(SOURCE, "acme", None, 5, NOW)
    book.seen(WORK, replace(SOURCE, offset=1), "acme", None, 5, NOW)
    book.reservations.committed(WORK.topic, WORK.partition, lambda offset: offset == WORK.offset, NOW)
    book.set_budgets({}, NOW)
    assert book.reservations.queued(SOURCE) is None
    assert book.expire(NOW + MISSED_AFTER_MS) == 0


def test_the_work_of_other_dispatchers_is_reserved_too() -> None:
    book = ledger()
    book.seen(WORK, SOURCE, "acme", None, 95, NOW)
    assert book.judge("acme", None, 6, NOW).refused is not None


def test_a_queued_request_is_judged_again_when_its_turn_comes() -> None:
    book = ledger()
    book.reserve(SOURCE, "acme", None, 30, NOW)
    book.reserve(replace(SOURCE, offset=1), "acme", None, 70, NOW)
    assert book.judge_dispatch(SOURCE, None, NOW).refused is None, "what is queued behind it does not count"
    book.read([usage(71)], NOW)
    assert book.judge_dispatch(SOURCE, None, NOW).refused is not None


def test_an_answer_from_the_cache_settles_by_its_source() -> None:
    book = ledger()
    book.reserve(SOURCE, "acme", None, 5, NOW)
    one = usage(5)
    assert one.event is not None
    book.read([replace(one, event=replace(one.event, cached=True, work=SOURCE))], NOW)
    assert (reserved(book), spent(book)) == ((0, 0), [5])


def test_a_reservation_whose_end_was_missed_expires() -> None:
    book = ledger()
    book.reserve(SOURCE, "acme", None, 1, NOW)
    book.reserve(replace(SOURCE, offset=1), "acme", None, 2, NOW)
    book.reservations.sent(SOURCE, NOW)
    book.seen(WORK, replace(SOURCE, offset=2), "acme", None, 4, NOW)
    book.reservations.committed(WORK.topic, 0, lambda offset: offset < 8, NOW)
    assert book.expire(NOW + MISSED_AFTER_MS - 1) == 0
    assert book.expire(NOW + MISSED_AFTER_MS) == 2
    assert reserved(book) == (2, 0), "a request may wait for its turn for any time"


def test_a_partition_that_was_recreated_holds_no_reservations() -> None:
    book = ledger()
    book.seen(WORK, SOURCE, "acme", None, 4, NOW)
    book.reservations.recreated(WORK.topic, 0)
    assert reserved(book) == (0, 0)


def test_reservations_of_callers_are_reported_largest_first() -> None:
    book = ledger(EACH)
    for number, nanos in enumerate((1, 3, 2)):
        book.reserve(replace(SOURCE, offset=number), "acme", f"user:{number}", nanos, NOW)
    assert [(load.caller, load.queued_nanos) for load in book.loads(3)] == [(None, 6), ("user:1", 3), ("user:2", 2)]


# Batch jobs


def test_what_a_job_has_reserved_is_free_for_its_own_rows_only() -> None:
    book = ledger()
    book.promise("acme", {None: 90, "user:a": 90}, NOW)
    assert book.judge("acme", None, 11, NOW).refused is not None
    assert book.judge("acme", None, 10, NOW).refused is None
    assert book.judge("acme", "user:a", 100, NOW, is_batch=True).refused is None
    assert book.judge("acme", "user:a", 101, NOW, is_batch=True).refused is not None


def test_a_row_that_is_here_counts_in_the_reservation_of_its_job() -> None:
    book = ledger()
    book.promise("acme", {None: 90}, NOW)
    row = SourceCoordinate("backfill.acme", 0, 0)
    book.reserve(row, "acme", None, 40, NOW, is_batch=True)
    assert book.judge("acme", None, 10, NOW).refused is None, "not twice"
    assert book.judge("acme", None, 11, NOW).refused is not None
    book.reservations.sent(row, NOW)
    book.seen(WORK, row, "acme", None, 40, NOW, is_batch=True)
    assert book.judge("acme", None, 10, NOW).refused is None
    book.promise("acme", {}, NOW)
    assert book.judge("acme", None, 60, NOW).refused is None
    assert book.judge("acme", None, 61, NOW).refused is not None


def test_what_jobs_have_reserved_counts_for_their_callers() -> None:
    book = ledger(EACH)
    book.promise("acme", {None: 6, "user:a": 6}, NOW)
    assert book.judge("acme", "user:a", 5, NOW).refused is not None
    assert book.judge("acme", "user:b", 5, NOW).refused is None
