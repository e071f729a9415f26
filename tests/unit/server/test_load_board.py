"""Heartbeats to rows: what counts, for how long, and how rates and shares come about."""

from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from fairlane.records import (
    CapacityReport,
    ClassLoad,
    DispatchReport,
    PoolLoad,
    ShedCount,
    TenantLoad,
    TenantSpec,
    VersionChange,
)
from fairlane_server.cli.top import as_plain, render
from fairlane_server.kafka.load_board import LoadBoard, LoadView, PoolRow, TenantRow, VersionRow

T0 = 1_000_000
CONSUMER = CapacityReport(
    *("c1", "gpu", ("words",), "healthy", False, 9_000.0, 900.0, 32, 16_384, 0.5, 3, 300, T0),
    cost_tokens_per_s=1_000.0,
)
POOL = PoolLoad("gpu", 4_000, 0.5, 1_500, (ClassLoad("high", 2.0, 3, 600), ClassLoad("low", 1.0, 5, 900)))
LOAD = TenantLoad("acme", "gpu", 8, 1_500, 700, 10_000, 0.5, 120.0, (ShedCount("overloaded", 4),))


def dispatch(at_ms: int, *tenants: TenantLoad, name: str = "d1", **fields: Any) -> DispatchReport:
    report = DispatchReport(name, T0, T0 + at_ms, draining=False, pools=(POOL,), tenants=tenants)
    return replace(report, **fields)


def served(tokens: int) -> dict[str, Any]:
    """What the pool served, of whomever."""
    return {"pools": (replace(POOL, served_tokens=tokens),)}


def pool(view: LoadView, name: str = "gpu") -> PoolRow:
    (row,) = [row for row in view.pools if row.pool == name]
    return row


def tenant(view: LoadView, name: str = "acme") -> TenantRow:
    (row,) = [row for row in view.tenants if row.tenant == name]
    return row


def test_nothing_heard_is_nothing_shown() -> None:
    assert LoadBoard().view(T0) == LoadView(T0, 0, 0, (), ())


def test_a_pool_adds_up_its_consumers_and_dispatchers() -> None:
    board = LoadBoard()
    board.capacity(CONSUMER, T0)
    board.capacity(replace(CONSUMER, instance_id="c2", batch_fill=1.0, health="failing"), T0)
    board.capacity(replace(CONSUMER, instance_id="c3", pool="other"), T0)
    board.dispatch(dispatch(0), T0)
    board.dispatch(dispatch(0, name="d2", pools=(replace(POOL, window_tokens=3_900, in_flight_tokens=500),)), T0)
    view = board.view(T0 + 100)
    assert (view.dispatchers, view.dispatchers_gone) == (2, 0)
    assert pool(view) == PoolRow("gpu", 2, 1, 0, 2_000.0, 0.75, 4_000, 2_000, 16, 3_000, {"high": 6, "low": 10}, 2)
    assert (pool(view, "other").consumers, pool(view, "other").dispatchers) == (1, 0)


def test_who_is_silent_is_gone_and_later_forgotten() -> None:
    board = LoadBoard()
    board.capacity(CONSUMER, T0)
    board.dispatch(dispatch(0, LOAD), T0)
    assert board.view(T0 + 2_000).dispatchers == 1
    view = board.view(T0 + 2_001)
    assert (view.dispatchers, view.dispatchers_gone, view.tenants) == (0, 1, ())
    assert pool(view).in_flight_tokens == 0
    assert pool(board.view(T0 + 3_000)).consumers == 1
    silent = pool(board.view(T0 + 3_001))
    assert (silent.consumers, silent.consumers_gone, silent.capacity_tokens_per_s, silent.batch_fill) == (0, 1, 0, None)
    assert board.view(T0 + 60_001) == LoadView(T0 + 60_001, 0, 0, (), ())


def test_who_says_goodbye_is_not_shown_as_gone() -> None:
    board = LoadBoard()
    board.capacity(CONSUMER, T0)
    board.dispatch(dispatch(0, LOAD), T0)
    board.capacity(replace(CONSUMER, draining=True), T0 + 1)
    board.dispatch(dispatch(1, draining=True), T0 + 1)
    assert board.view(T0 + 10_000) == LoadView(T0 + 10_000, 0, 0, (), ())


def test_an_older_report_changes_nothing() -> None:
    board = LoadBoard()
    board.capacity(CONSUMER, T0)
    board.capacity(replace(CONSUMER, reported_at_ms=T0 - 1, draining=True), T0 + 5)
    board.dispatch(dispatch(0), T0)
    board.dispatch(dispatch(-1, draining=True), T0 + 5)
    view = board.view(T0 + 10)
    assert (pool(view).consumers, view.dispatchers) == (1, 1)


def test_rates_and_shares_come_from_what_was_served_between_reports() -> None:
    board = LoadBoard()
    other = replace(LOAD, tenant="globex", waiting_tokens=9_000, shed=())
    board.dispatch(dispatch(0, LOAD, other, **served(20_000)), T0)
    first = tenant(board.view(T0))
    assert (first.tokens_per_s, first.served_share) == (None, None)
    assert (first.shed, first.shed_recently) == ({"overloaded": 4}, {})
    more = replace(LOAD, served_tokens=13_000, shed=(ShedCount("overloaded", 9), ShedCount("quota_exceeded", 1)))
    board.dispatch(dispatch(200, **served(22_000)), T0 + 200)  # most reports name no tenants
    board.dispatch(dispatch(2_000, more, replace(other, served_tokens=11_000), **served(24_000)), T0 + 2_000)
    view = board.view(T0 + 2_000)
    assert [row.tenant for row in view.tenants] == ["globex", "acme"], "the longest line first"
    row = tenant(view)
    assert (row.tokens_per_s, row.served_share, row.entitled_share) == (1_500.0, 0.75, 0.5)
    assert tenant(view, "globex").served_share == 0.25
    assert row.shed == {"overloaded": 9, "quota_exceeded": 1}
    assert row.shed_recently == {"overloaded": 5, "quota_exceeded": 1}
    assert (row.waiting_requests, row.waiting_tokens, row.in_flight_tokens, row.wait_p99_ms) == (8, 1_500, 700, 120.0)


def test_a_share_is_of_what_everybody_got_not_only_those_who_are_named() -> None:
    """A dispatcher names 100 tenants: the others were served too, here three times as much as all that are named."""
    board = LoadBoard()
    board.dispatch(dispatch(0, LOAD, **served(50_000)), T0)
    board.dispatch(dispatch(2_000, replace(LOAD, served_tokens=11_000), **served(54_000)), T0 + 2_000)
    board.dispatch(dispatch(0, replace(LOAD, tenant="other"), name="d2", **served(0)), T0)
    board.dispatch(dispatch(2_000, replace(LOAD, tenant="other"), name="d2", **served(4_000)), T0 + 2_000)
    row = tenant(board.view(T0 + 2_000))
    assert (row.tokens_per_s, row.served_share) == (500.0, 0.125)


def test_a_share_is_measured_over_the_time_in_which_the_tenant_was_named() -> None:
    board = LoadBoard()
    other = replace(LOAD, tenant="other")
    board.dispatch(dispatch(0, other, **served(20_000)), T0)
    board.dispatch(dispatch(1_000, other, LOAD, **served(29_000)), T0 + 1_000)
    assert tenant(board.view(T0 + 1_000)).served_share is None
    more = replace(LOAD, served_tokens=11_000)
    board.dispatch(dispatch(2_000, other, more, **served(31_000)), T0 + 2_000)
    assert tenant(board.view(T0 + 2_000)).served_share == 0.5


def test_without_word_of_the_whole_there_is_no_share() -> None:
    """Of a dispatcher that is not upgraded yet."""
    board = LoadBoard()
    for name in ("d1", "d2"):
        board.dispatch(dispatch(0, LOAD, name=name), T0)
        board.dispatch(dispatch(1_000, replace(LOAD, served_tokens=11_000), name=name), T0 + 1_000)
    row = tenant(board.view(T0 + 1_000))
    assert (row.tokens_per_s, row.served_share) == (2_000.0, None)
    board.dispatch(dispatch(0, LOAD, name="d3", **served(10_000)), T0)
    more = replace(LOAD, served_tokens=11_000)
    board.dispatch(dispatch(1_000, more, name="d3", **served(11_000)), T0 + 1_000)
    assert tenant(board.view(T0 + 1_000)).served_share is None, "never more than everything"


def test_rates_forget_what_is_older_than_their_window() -> None:
    board = LoadBoard()
    for second in range(30):
        served = 1_000 * second if second < 15 else 15_000
        board.dispatch(dispatch(1_000 * second, replace(LOAD, served_tokens=served)), T0 + 1_000 * second)
        if second == 14:
            assert tenant(board.view(T0 + 14_000)).tokens_per_s == 1_000.0
    assert tenant(board.view(T0 + 29_000)).tokens_per_s == 0.0


def test_a_dispatcher_that_counts_anew_gives_no_negative_rate() -> None:
    board = LoadBoard()
    board.dispatch(dispatch(0, LOAD), T0)
    board.dispatch(dispatch(1_000, replace(LOAD, served_tokens=50)), T0 + 1_000)
    assert tenant(board.view(T0 + 1_000)).tokens_per_s is None
    board.dispatch(dispatch(2_000, replace(LOAD, served_tokens=10), started_at_ms=T0 + 1_500), T0 + 2_000)
    board.dispatch(dispatch(3_000, replace(LOAD, served_tokens=110), started_at_ms=T0 + 1_500), T0 + 3_000)
    assert tenant(board.view(T0 + 3_000)).tokens_per_s == 100.0


def test_a_tenant_at_two_dispatchers_is_one_row() -> None:
    board = LoadBoard()
    idle = replace(LOAD, waiting_requests=0, waiting_tokens=0, entitled_share=0.4, wait_p99_ms=900.0)
    board.dispatch(dispatch(0, replace(LOAD, entitled_share=0.3)), T0)
    board.dispatch(dispatch(0, replace(LOAD, entitled_share=0.2), name="d2"), T0)
    board.dispatch(dispatch(0, idle, name="d3"), T0)
    row = tenant(board.view(T0))
    assert (row.waiting_requests, row.wait_p99_ms) == (16, 900.0)
    assert row.entitled_share == pytest.approx(0.5)
    board = LoadBoard()
    for name in ("d1", "d2"):
        board.dispatch(dispatch(0, idle, name=name), T0)
    assert tenant(board.view(T0)).entitled_share == 0.4, "who waits nowhere has the same claim everywhere"


def test_tenants_that_no_report_names_any_more_go_away() -> None:
    board = LoadBoard()
    board.dispatch(dispatch(0, LOAD), T0)
    board.dispatch(dispatch(5_000), T0 + 5_000)
    assert tenant(board.view(T0 + 5_000)).waiting_requests == 8
    board.dispatch(dispatch(5_001), T0 + 5_001)
    assert board.view(T0 + 5_001).tenants == ()


def test_configured_tenants_are_shown_and_withdrawn_ones_are_not() -> None:
    board = LoadBoard()
    board.configure("acme", TenantSpec("acme", weight=2.0))
    board.configure("globex", TenantSpec("globex", pool="globex-gpu"))
    board.configure("gone", TenantSpec("gone"))
    board.configure("gone", None)
    board.dispatch(dispatch(0, LOAD, replace(LOAD, tenant="unknown")), T0)
    view = board.view(T0)
    assert {(row.tenant, row.pool, row.weight) for row in view.tenants} == {
        ("acme", "gpu", 2.0),
        ("unknown", "gpu", None),
        ("globex", None, 1.0),
    }
    assert pool(view, "globex-gpu").consumers == 0, "a dedicated pool that nobody serves is seen"


def test_the_picture_says_it_all_and_takes_nothing_for_a_command() -> None:
    board = LoadBoard()
    board.configure("acme", TenantSpec("acme", weight=2.0))
    board.capacity(CONSUMER, T0)
    board.capacity(replace(CONSUMER, instance_id="c2"), T0 - 4_000)
    board.dispatch(dispatch(-1_000, LOAD, **served(20_000)), T0 - 1_000)
    more = replace(LOAD, served_tokens=13_000, shed=(ShedCount("overloaded", 9),))
    board.dispatch(dispatch(0, more, replace(more, tenant="\x1b[2J[red]x"), **served(23_000)), T0)
    out = Console(width=160)
    with out.capture() as captured:
        out.print(render(board.view(T0), "no broker answers"))
    text = captured.get()
    for words in (
        *("dispatchers: 1", "nothing comes in: no broker answers", "1, 1 gone", "4,000", "3/0/5"),
        *("3,000", "100%", "50%", "120 ms", "overloaded 9 (+5)", "[red]x"),
    ):
        assert words in text, words
    assert "\x1b" not in text


def test_as_json_it_says_why_nothing_comes_in() -> None:
    view = LoadBoard().view(T0)
    assert as_plain(view, "no broker answers")["trouble"] == "no broker answers"
    nothing = dict.fromkeys(("pools", "tenants", "budgets", "versions"), ())
    assert as_plain(view, None) == nothing | {
        "trouble": None,
        "at_ms": T0,
        "dispatchers": 0,
        "dispatchers_gone": 0,
    }


def test_versions_are_shown_with_why_they_are_missing_as_long_as_their_consumer_lives() -> None:
    board = LoadBoard()
    failed = VersionChange("words/2", "failed", "mean score 0.4 is below 0.9")
    board.capacity(replace(CONSUMER, versions=("words/1",), changes=(failed,)), T0)
    board.capacity(replace(CONSUMER, instance_id="c0", versions=("words/2", "words/1")), T0)
    assert board.view(T0).versions == (
        VersionRow("gpu", "words/1", "c0", "loaded"),
        VersionRow("gpu", "words/1", "c1", "loaded"),
        VersionRow("gpu", "words/2", "c0", "loaded"),
        VersionRow("gpu", "words/2", "c1", "failed", "mean score 0.4 is below 0.9"),
    )
    assert board.view(T0 + 3_001).versions == ()
