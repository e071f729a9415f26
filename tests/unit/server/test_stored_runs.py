"""Results, falls and schedules of evaluation runs."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.client.requests import build_request, check_request
from fairlane_server.evaluation.grading import ExampleScore
from fairlane_server.evaluation.schedules import (
    EvaluationSchedule,
    LastRun,
    check_schedule,
    due_versions,
    measured_versions,
)
from fairlane_server.evaluation.stored_runs import (
    FALL_P_VALUE,
    JudgeUse,
    RunHead,
    compare_by_place,
    fall_of,
    request_id_of,
    result_of,
)

HOUR_MS = 3_600_000
HEAD = RunHead("holdout", 3, "d" * 64, 100, "digits/2", "digits", "accuracy", {"priority": "low"})
JUDGE = JudgeUse("judge", "It is right.", "r" * 64, "c", "7", None, 0.6)
DAILY = EvaluationSchedule("digits", "holdout", "accuracy", {}, None, every_hours=24.0)


def test_a_result_counts_what_was_measured() -> None:
    scores = [
        ExampleScore(1.0, model_version="2", prompt_tokens=5, completion_tokens=1),
        ExampleScore(0.0, model_version="2", prompt_tokens=5, completion_tokens=1),
        ExampleScore(0.0, "no answer: expired", "expired", prompt_tokens=5),
        ExampleScore(None, "expected: must be a text", model_version="2"),
    ]
    found = result_of(scores, None)
    assert found.mean == pytest.approx(1 / 3)
    assert (found.scored, found.not_scored) == (3, 1)
    assert (found.failed, found.versions) == ({"expired": 1}, {"2": 3})
    assert (found.prompt_tokens, found.completion_tokens, found.judge_tokens) == (15, 2, 0)
    assert found.judge_refusal is None
    assert result_of([], None).mean is None


@pytest.mark.parametrize(
    ("version", "refusal", "said"),
    [
        ("7", None, None),
        ("8", None, "version 8 judged, and 7 was calibrated"),
        ("7", "30 are needed", "30 are needed"),
    ],
)
def test_a_judge_counts_as_the_version_that_was_calibrated(version: str, refusal: str | None, said: str | None) -> None:
    judged = {"grade": 5, "versions": [version], "prompt_tokens": 9, "completion_tokens": 1}
    found = result_of([ExampleScore(1.0, judged=judged)], replace(JUDGE, refusal=refusal))
    assert (found.judge_refusal, found.judge_tokens) == (said, 10)


def test_runs_are_comparable_if_they_measure_the_same() -> None:
    assert HEAD.measure == replace(HEAD, reference="digits/3", parameters={"priority": "high"}).measure
    others: list[dict[str, Any]] = [
        {"set_digest": "e" * 64},
        {"scorer": "exact"},
        {"parameters": {"top": 3}},
        {"judge": JUDGE},
    ]
    assert all(HEAD.measure != replace(HEAD, **other).measure for other in others)
    assert replace(HEAD, judge=JUDGE).measure != replace(HEAD, judge=replace(JUDGE, calibration_id="d")).measure


def scores(right: int, count: int) -> dict[int, float | None]:
    return {place: float(place < right) for place in range(count)}


def test_a_fall_is_more_than_chance_explains() -> None:
    fallen = fall_of(scores(95, 100), scores(80, 100))
    assert fallen is not None
    assert fallen.is_fall
    for right in (95, 92, 98):
        unchanged = fall_of(scores(95, 100), scores(right, 100))
        assert unchanged is not None
        assert not unchanged.is_fall
    assert fall_of(scores(1, 2), {7: 1.0}) is None
    assert compare_by_place({0: None}, {0: 1.0}) is None


@given(st.integers(0, 2**32), st.integers(20, 200))
def test_a_few_changed_examples_are_no_fall(seed: int, count: int) -> None:
    found = fall_of(scores(count, count), scores(count - 6, count), seed=seed)
    assert found is not None
    # McNemar: 6 worse and none better are 1 in 32.
    assert found.comparison.p_value > FALL_P_VALUE
    assert not found.is_fall


def test_the_ids_of_a_run_are_its_own_and_always_the_same() -> None:
    ids = {request_id_of(run, place, part) for run in "ab" for place in range(50) for part in ("answer", "verdict")}
    assert len(ids) == 200
    assert request_id_of("a", 1, "answer") == request_id_of("a", 1, "answer")
    for one in ids:
        assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-8[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", one)
        check_request(build_request(model="m", prompt="p", request_id=one), "acme")


@pytest.mark.parametrize(
    ("aliases", "rollout", "versions"),
    [
        ({}, None, ()),
        ({"champion": "1"}, None, ("1",)),
        ({"champion": "1", "candidate": "2"}, None, ("1", "2")),
        ({"champion": "1", "candidate": "1"}, None, ("1",)),
        ({"champion": "1", "candidate": "2"}, {"status": "running", "candidate": "3"}, ("1", "3")),
        ({"champion": "1"}, {"status": "paused", "candidate": "3"}, ("1", "3")),
        ({"champion": "1"}, {"status": "rolled_back", "candidate": "3"}, ("1",)),
    ],
)
def test_the_champion_and_the_candidate_are_measured(
    aliases: dict[str, str], rollout: dict[str, str] | None, versions: tuple[str, ...]
) -> None:
    assert measured_versions(aliases, rollout) == versions


def test_a_version_is_due_by_time_by_requests_and_when_it_is_new() -> None:
    last = {"1": LastRun("1", 0, 1_000)}
    assert due_versions(DAILY, ("1",), last, 9_999, 23 * HOUR_MS) == ()
    assert due_versions(DAILY, ("1",), last, 1_000, 24 * HOUR_MS) == ("1",)
    assert due_versions(DAILY, ("1", "2"), last, 1_000, 0) == ("2",)
    busy = replace(DAILY, every_hours=None, every_requests=500)
    assert due_versions(busy, ("1",), last, 1_499, 99 * HOUR_MS) == ()
    assert due_versions(busy, ("1",), last, 1_500, 0) == ("1",)
    # The sums of old days are gone: nobody knows how many it were.
    assert due_versions(busy, ("1",), last, 10, 0) == ("1",)


@given(st.integers(0, 100), st.integers(1, 50))
def test_what_was_measured_is_not_due_at_once(hours: int, requests: int) -> None:
    both = replace(DAILY, every_requests=requests)
    now_ms = hours * HOUR_MS
    last = {"1": LastRun("1", now_ms, 77)}
    assert due_versions(both, ("1",), last, 77, now_ms) == ()


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"every_hours": None}, "every_hours"),
        ({"every_hours": 0.01}, "every_hours"),
        ({"every_hours": float("nan")}, "every_hours"),
        ({"every_requests": 0}, "every_requests"),
    ],
)
def test_an_invalid_schedule_is_refused(changed: dict[str, Any], field: str) -> None:
    check_schedule(DAILY)
    with pytest.raises(ValueError, match=f"^{field}: "):
        check_schedule(replace(DAILY, **changed))
