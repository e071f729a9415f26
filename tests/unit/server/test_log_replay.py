"""Replays of the log without servers: their plans, which work they take, their progress, and their room."""

from dataclasses import astuple, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.evaluation_records import EvaluationMark
from fairlane.offsets import MetadataError
from fairlane.records import InferenceRequest, ModelRoute, ModelVersion, RequestInput, SourceCoordinate, WorkItem
from fairlane_server.evaluation.copies import EvaluationArm, EvaluationKind, copy_id, copy_of
from fairlane_server.log_replay.pace import PATIENCE_S, OutstandingCopies, RecentRate
from fairlane_server.log_replay.plan import (
    ARMS,
    ENDED,
    LogReplayAction,
    LogReplayConflictError,
    LogReplayPlan,
    LogReplayState,
    check_plan,
    new_replay_id,
    state_after,
)
from fairlane_server.log_replay.progress import (
    ReplayCounts,
    ReplayPoint,
    expected_requests,
    remaining_s,
)
from fairlane_server.log_replay.selection import CopyDecision, ReplaySelection, counts_of, is_sampled, room
from fairlane_server.models.catalog import ModelCatalog

ONE = ModelVersion("digits", "1", "classify", "torch", ("classify",), "digits", 1, 1)
TWO = replace(ONE, version="2")
CATALOG = ModelCatalog(
    (ONE, TWO, replace(ONE, version="3", tasks=("embed",))), (ModelRoute("digits", 1, {"champion": "1"}, {}),)
)
PLAN = LogReplayPlan("digits", "2", None, 1_000, 2_000)
REQUEST = InferenceRequest("0b0f1b52-6a3f-4f0e-9a55-0c6f6f5d8a11", "digits", "classify", RequestInput(image=b"x"))
ITEM = WorkItem(
    *(REQUEST, "acme", "classify", "1", "normal", 8, 1_000, 1_000, 1_000, 61_000, "replies.acme", "dispatcher-1"),
    SourceCoordinate("requests.acme", 0, 7),
)
ALL = ReplaySelection("digits", "1")
counts = st.builds(ReplayCounts, *[st.integers(0, 10**12)] * len(astuple(ReplayCounts())))


def test_a_plan_is_compared_with_the_champion_unless_it_names_a_version() -> None:
    assert check_plan(PLAN, CATALOG) == "1"
    assert check_plan(replace(PLAN, candidate="1", against="2"), CATALOG) == "2"


@pytest.mark.parametrize(
    ("plan", "field"),
    [
        (replace(PLAN, model="words"), "model"),
        (replace(PLAN, candidate="9"), "candidate"),
        (replace(PLAN, candidate="1"), "candidate"),
        (replace(PLAN, candidate="3"), "candidate"),
        (replace(PLAN, against="9"), "against"),
        (replace(PLAN, until_ms=1_000), "from"),
        (replace(PLAN, tenants=("Acme",)), "tenants"),
        (replace(PLAN, sample=0.0), "sample"),
        (replace(PLAN, sample=1.1), "sample"),
        (replace(PLAN, most_requests=0), "max_requests"),
        (replace(PLAN, most_outstanding=1), "max_outstanding"),
        (replace(PLAN, name="Yesterday"), "name"),
        (replace(PLAN, name=new_replay_id()), "name"),
    ],
)
def test_an_invalid_plan_names_its_field(plan: LogReplayPlan, field: str) -> None:
    with pytest.raises(ValueError, match=rf"^{field}: "):
        check_plan(plan, CATALOG)


def test_no_replay_of_a_stopped_version() -> None:
    stopped = ModelCatalog((ONE, TWO), (ModelRoute("digits", 1, {"champion": "1"}, {}, stopped=("2",)),))
    with pytest.raises(ValueError, match=r"^candidate: version 2 of digits is stopped"):
        check_plan(PLAN, stopped)


def test_what_has_ended_stays_ended() -> None:
    for state in ENDED:
        for action in LogReplayAction:
            with pytest.raises(LogReplayConflictError, match=state):
                state_after(state, action)


@given(st.lists(st.sampled_from(LogReplayAction)))
def test_a_replay_is_paused_resumed_and_cancelled_in_any_order(actions: list[LogReplayAction]) -> None:
    state = LogReplayState.RUNNING
    for action in actions:
        try:
            state = state_after(state, action)
        except LogReplayConflictError:
            continue
        assert state in (LogReplayState.PLANNED, LogReplayState.PAUSED, LogReplayState.CANCELLED)
    if LogReplayAction.CANCEL in actions:
        assert state is LogReplayState.CANCELLED


@pytest.mark.parametrize(
    ("item", "is_taken"),
    [
        (ITEM, True),
        (replace(ITEM, model_version="2"), False),
        (replace(ITEM, request=replace(REQUEST, model="words")), False),
        (replace(ITEM, evaluation=EvaluationMark("shadow", "s", "candidate", "acme", REQUEST.request_id)), False),
        (replace(ITEM, handed_back=1, unserved=1), True),
    ],
)
def test_a_replay_is_about_the_work_of_one_version(item: WorkItem, is_taken: bool) -> None:
    assert ALL.takes(item) is is_taken


def test_a_replay_of_some_tenants_takes_no_other_work() -> None:
    assert ReplaySelection("digits", "1", ("acme",)).takes(ITEM)
    assert not ReplaySelection("digits", "1", ("globex",)).takes(ITEM)


def test_a_copy_of_a_replay_is_never_copied_again() -> None:
    mark = EvaluationMark(EvaluationKind.REPLAY, "replay-1", EvaluationArm.CHAMPION, "acme", REQUEST.request_id)
    copy = copy_of(ITEM, mark, "1", 5_000, 60_000)

    assert not ALL.takes(copy)
    assert not ReplaySelection("digits", "1", (copy.tenant,)).takes(copy)


@given(st.uuids().map(str), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_sample_holds_the_smaller_one(request_id: str, one: float, other: float) -> None:
    small, large = sorted((one, other))
    assert is_sampled("acme", request_id, large) or not is_sampled("acme", request_id, small)
    assert not is_sampled("acme", request_id, 0.0)
    assert is_sampled("acme", request_id, 1.0)


def test_a_sample_is_as_large_as_asked_for() -> None:
    taken = sum(is_sampled("acme", f"id-{number}", 0.1) for number in range(20_000))
    # Of a binomial with this mean, 6 standard deviations.
    assert abs(taken - 2_000) < 6 * (20_000 * 0.1 * 0.9) ** 0.5


@given(st.lists(st.sampled_from((None, *CopyDecision))))
def test_every_sampled_item_is_counted_once(decisions: list[CopyDecision | None]) -> None:
    total = ReplayCounts.total(map(counts_of, decisions))

    assert total.read == len(decisions)
    assert total.sampled == total.read - decisions.count(None)
    ended = (total.copied, total.denied, total.erased, total.unanswered, total.repeated, total.too_large)
    assert sum(ended) == total.sampled


@given(counts, st.integers(0, 2**62))
def test_committed_progress_is_read_back(found: ReplayCounts, offset: int) -> None:
    point = ReplayPoint(offset, counts=found)

    assert ReplayPoint.parse(offset, point.metadata) == point
    # The limit of the broker, with every count at its most.
    assert len(point.metadata) < 1_000


def test_counts_of_a_later_version_are_left_out() -> None:
    point = ReplayPoint(5, counts=ReplayCounts(read=3))
    assert ReplayPoint.parse(5, point.metadata + ",77") == point


@pytest.mark.parametrize("metadata", [None, "", "1:AAA=", "r1:", "r1:-1", "r1:1,", "r2:1", "r1:1 2", "r1:" + "9" * 19])
def test_metadata_of_something_else_is_refused(metadata: str | None) -> None:
    with pytest.raises(MetadataError):
        ReplayPoint.parse(5, metadata)


@given(st.integers(0, 500), st.integers(2, 400), st.integers(0, 100), st.none() | st.integers(1, 200))
def test_no_more_copies_are_outstanding_than_may_be(
    outstanding: int, most: int, copied: int, most_copied: int | None
) -> None:
    free = room(outstanding, most, copied, most_copied, ARMS)

    assert free >= 0
    assert free == 0 or outstanding + ARMS * free <= most
    assert most_copied is None or free == 0 or copied + free <= most_copied


@given(
    st.lists(
        st.tuples(st.uuids().map(str), st.sampled_from(("acme", "globex")), st.sampled_from(EvaluationArm)), unique=True
    )
)
def test_copies_of_different_requests_have_different_ids(made: list[tuple[str, str, EvaluationArm]]) -> None:
    ids = [copy_id("replay-1", arm, tenant, request) for request, tenant, arm in made]
    assert len(set(ids)) == len(made)
    assert set(ids).isdisjoint(copy_id("replay-2", arm, tenant, request) for request, tenant, arm in made)


def test_time_left_follows_from_what_was_read() -> None:
    half = ReplayCounts(copied=50)

    assert expected_requests(half, 500, 1_000, None) == 100
    assert expected_requests(half, 500, 1_000, 60) == 60
    assert expected_requests(ReplayCounts(), 0, 1_000, None) is None
    assert expected_requests(ReplayCounts(), 0, 0, None) == 0
    assert remaining_s(100, 40, 3.0) == 20
    assert remaining_s(100, 140, 3.0) == 0
    assert remaining_s(100, 40, None) is None
    assert remaining_s(100, 40, 0.0) is None


def test_the_rate_is_of_the_last_minute() -> None:
    rate = RecentRate()
    assert rate.per_s is None
    for second in range(200):
        rate.mark(second if second < 100 else 100 + 10 * (second - 100), float(second))
    assert rate.per_s == pytest.approx(10.0)
    rate.mark(0, 200.0)
    assert rate.per_s is None


def test_copies_whose_results_never_come_are_written_off() -> None:
    copies = OutstandingCopies()
    copies.seen(0, 0.0)
    assert copies.of(10) == 20
    copies.seen(14, 1.0)
    assert copies.of(10) == 6
    assert not copies.is_to_be_counted(10, 1.0 + PATIENCE_S / 2)
    assert copies.is_to_be_counted(10, 1.0 + PATIENCE_S)

    # Of six, four are of requests that were erased.
    copies.counted(10, 2, 40.0)
    assert copies.of(10) == 2
    assert copies.of(11) == 4
    assert not copies.is_to_be_counted(10, 41.0)
    copies.seen(16, 42.0)
    assert copies.of(10) == 0
    assert not copies.is_to_be_counted(10, 1_000.0)
