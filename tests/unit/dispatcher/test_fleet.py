"""The shares of a fleet: exact parts of the backlogged weight, never more than the whole, and quick to adapt."""

from collections.abc import Mapping
from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.records import ClassLoad, DispatchReport, PoolLoad
from stream_processors.dispatcher.scheduling.window import REPORT_TTL_MS, Fleet, FleetShare

WEIGHTS = {"high": 8.0, "normal": 3.0, "low": 1.0}
POOL = "shared"

Backlog = Mapping[str, float]

# Weights as tenants have them, and none: a class without a backlog.
backlogs = st.fixed_dictionaries({name: st.just(0.0) | st.floats(0.01, 1_000.0) for name in WEIGHTS})
fleets = st.lists(backlogs, min_size=1, max_size=6)


def report(instance_id: str, backlog: Backlog, *, at_ms: int = 0, draining: bool = False) -> DispatchReport:
    classes = tuple(ClassLoad(name, weight, 1, 100) for name, weight in backlog.items())
    load = PoolLoad(POOL, window_tokens=1_000, share=0.0, in_flight_tokens=0, classes=classes)
    return DispatchReport(instance_id, started_at_ms=0, reported_at_ms=at_ms, draining=draining, pools=(load,))


def shares_of(fleet: list[Backlog]) -> list[FleetShare]:
    """Every dispatcher's share, each knowing the reports of all, its own included."""
    shares = []
    for number, own in enumerate(fleet):
        board = Fleet(f"d{number}")
        for other, backlog in enumerate(fleet):
            board.report(report(f"d{other}", backlog), 0)
        shares.append(board.share(POOL, own, WEIGHTS, 0))
    return shares


@given(fleets)
def test_those_who_know_each_other_take_the_whole_window_and_no_more(fleet: list[Backlog]) -> None:
    shares = shares_of(fleet)
    assert isclose(sum(share.share for share in shares), 1.0)
    assert all(0.0 <= share.share <= 1.0 for share in shares)


@given(fleets)
def test_a_share_is_the_part_of_the_backlogged_weight(fleet: list[Backlog]) -> None:
    waiting = [name for name in WEIGHTS if any(backlog[name] for backlog in fleet)]
    whole = sum(WEIGHTS[name] for name in waiting)
    for own, share in zip(fleet, shares_of(fleet), strict=True):
        parts = {name: own[name] / sum(backlog[name] for backlog in fleet) for name in waiting}
        expected = sum(WEIGHTS[name] / whole * part for name, part in parts.items())
        assert isclose(share.share, expected if waiting else 1 / len(fleet))
        for name in waiting:
            if own[name]:
                assert isclose(share.class_weights[name], WEIGHTS[name] * parts[name])


@given(fleets)
def test_the_classes_of_the_fleet_share_by_their_weights(fleet: list[Backlog]) -> None:
    """Each dispatcher serves its share by its class weights: summed over the fleet, each class gets its own."""
    served = dict.fromkeys(WEIGHTS, 0.0)
    for own, share in zip(fleet, shares_of(fleet), strict=True):
        backlogged = [name for name in WEIGHTS if own[name]]
        total = sum(share.class_weights[name] for name in backlogged)
        for name in backlogged:
            served[name] += share.share * share.class_weights[name] / total
    waiting = [name for name in WEIGHTS if any(backlog[name] for backlog in fleet)]
    for name in waiting:
        assert isclose(served[name], WEIGHTS[name] / sum(WEIGHTS[other] for other in waiting))


@given(fleets, st.floats(0.01, 100.0), st.sampled_from(sorted(WEIGHTS)))
def test_what_tenants_are_entitled_to_adds_up_to_the_share(fleet: list[Backlog], weight: float, name: str) -> None:
    for own, share in zip(fleet, shares_of(fleet), strict=True):
        assert all(entry > 0 for entry in share.class_weights.values()), "a queue takes no weight of 0"
        entitled = sum(share.entitled_share(waiting, own[waiting], waits=True) for waiting in WEIGHTS if own[waiting])
        if any(own.values()):
            assert isclose(entitled, share.share)
        assert 0 < share.entitled_share(name, weight, waits=False) <= 1


@given(backlogs)
def test_alone_it_has_the_window_and_its_own_class_weights(own: Backlog) -> None:
    share = Fleet("d0").share(POOL, own, WEIGHTS, 0)
    assert share.share == 1.0
    assert share.class_weights == WEIGHTS


def test_two_dispatchers_share_by_weight() -> None:
    board = Fleet("a")
    board.report(report("b", {"high": 3.0, "low": 5.0}), 0)
    share = board.share(POOL, {"high": 1.0}, WEIGHTS, 0)
    assert share.share == pytest.approx(8 / 9 * 1 / 4)
    assert share.weights_by_class == {"high": 4.0, "normal": 0.0, "low": 5.0}
    assert share.class_weights["high"] == 2.0
    assert share.entitled_share("high", 1.0, waits=True) == pytest.approx(8 / 9 / 4)
    assert share.entitled_share("normal", 1.0, waits=False) == pytest.approx(3 / 12)
    assert board.share("another", {"high": 1.0}, WEIGHTS, 0).share == 1.0
    assert board.share(POOL, {}, WEIGHTS, 0).share == 0.0


def test_a_silent_dispatcher_is_gone_after_800_ms_and_back_with_its_next_report() -> None:
    board, own = Fleet("a"), {"high": 1.0}
    board.report(report("b", own, at_ms=1_000), 1_000)
    assert board.share(POOL, own, WEIGHTS, 1_000 + REPORT_TTL_MS).share == 0.5
    assert board.share(POOL, own, WEIGHTS, 1_001 + REPORT_TTL_MS).share == 1.0
    board.report(report("b", own, at_ms=5_000), 5_000)
    assert board.share(POOL, own, WEIGHTS, 5_000).share == 0.5
    assert board.dispatchers(5_000) == 2


def test_staleness_counts_from_the_receipt_whatever_the_others_clock_says() -> None:
    board, own = Fleet("a"), {"high": 1.0}
    board.report(report("b", own, at_ms=9_000_000), 1_000)
    assert board.dispatchers(1_800) == 2
    assert board.dispatchers(1_801) == 1
    board.report(report("b", own, at_ms=50), 2_000)
    assert board.dispatchers(2_000) == 2, "its clock was set back"


def test_a_draining_dispatcher_is_gone_at_once() -> None:
    board, own = Fleet("a"), {"high": 1.0}
    board.report(report("b", own, at_ms=1), 1)
    board.report(report("b", own, at_ms=2, draining=True), 2)
    assert board.share(POOL, own, WEIGHTS, 2).share == 1.0


def test_an_older_report_changes_nothing() -> None:
    board, own = Fleet("a"), {"high": 1.0}
    board.report(report("b", {"high": 3.0}, at_ms=10), 10)
    board.report(report("b", {}, at_ms=9), 11)
    assert board.share(POOL, own, WEIGHTS, 11).share == 0.25


def test_a_class_that_nobody_configured_does_not_count() -> None:
    board, own = Fleet("a"), {"high": 1.0}
    board.report(report("b", {"urgent": 3.0, "high": 1.0}), 0)
    assert board.share(POOL, own, WEIGHTS, 0).share == 0.5
