"""Verdicts on replays: above the noise floor, within it, and not enough."""

from collections.abc import Iterable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.outcomes import Code, Outcome, Task
from fairlane_server.evaluation.copies import CopyEnd
from fairlane_server.evaluation.pairs import Answer, Pair
from fairlane_server.log_replay.report import ReportBuilder
from fairlane_server.log_replay.verdict import (
    FALSE_DIFFERENCE_RATE,
    LEAST_PAIRS,
    ReplayedAnswers,
    ReplayFinding,
    ReplayMeasure,
    ReplayReport,
    ReplayTally,
    ReplayVerdict,
    judge_replay,
)
from fairlane_server.postgres.evaluation_results import ArmPair
from fairlane_server.rollouts.evidence import Moments
from fairlane_server.rollouts.means import paired_bounds


def label(name: str, **fields: Any) -> Answer:
    return Answer(Outcome.OK, {"labels": [{"label": name, "score": 0.9}]}, engine_ms=5, **fields)


def text(content: str, tokens: int = 10, engine_ms: int = 100) -> Answer:
    return Answer(Outcome.OK, {"text": content}, prompt_tokens=10, completion_tokens=tokens, engine_ms=engine_ms)


FAILED = Answer(Outcome.FAILED, None, Code.ENGINE_ERROR)


def replayed(original: Answer, candidate: Answer, champion: Answer, **fields: Any) -> ReplayedAnswers:
    task = Task.CLASSIFY if original.output is None or "labels" in original.output else Task.GENERATE
    ends = [CopyEnd.COMPLETED if answer.outcome == Outcome.OK else CopyEnd.FAILED for answer in (candidate, champion)]
    return ReplayedAnswers(task, original, candidate, ends[0], champion, ends[1], **fields)


def judged(answers: Iterable[ReplayedAnswers]) -> ReplayReport:
    tallies: dict[str, ReplayTally] = {}
    for one in answers:
        tallies.setdefault(one.task, ReplayTally(one.task)).add(one)
    return judge_replay(tallies.values())


def finding(report: ReplayReport, measure: ReplayMeasure, task: int = 0) -> ReplayFinding:
    return next(one for one in report.tasks[task].findings if one.measure == measure)


SAME = replayed(label("7"), label("7"), label("7"))
OTHER = replayed(label("7"), label("1"), label("7"))
NOISE = replayed(label("7"), label("1"), label("1"))


def test_equal_answers_are_the_same() -> None:
    report = judged([SAME] * 500)

    assert report.verdict == ReplayVerdict.SAME
    assert report.tasks[0].equal == {"candidate": 1.0, "champion": 1.0}
    assert finding(report, ReplayMeasure.DISTANCE).excess == 0
    assert finding(report, ReplayMeasure.QUALITY).verdict is None, "no label is known"


def test_few_equal_answers_are_not_enough() -> None:
    report = judged([SAME] * (LEAST_PAIRS - 1))

    assert report.verdict == ReplayVerdict.UNDECIDED
    assert f"{LEAST_PAIRS - 1} pairs are fewer than {LEAST_PAIRS}" in report.reason
    assert judged([]).verdict == ReplayVerdict.UNDECIDED


def test_other_answers_than_the_champion_gives_are_different() -> None:
    report = judged([SAME] * 450 + [OTHER] * 50)

    assert report.verdict == ReplayVerdict.DIFFERENT
    found = finding(report, ReplayMeasure.DISTANCE)
    assert (found.candidate, found.champion, found.excess) == (0.1, 0.0, 0.1)


def test_a_champion_that_differs_from_itself_as_much_is_the_noise_floor() -> None:
    """Each of the two differs in a fifth of the requests, partly in other ones."""
    dice = Random(1)
    other = replayed(label("7"), label("7"), label("1"))
    answers = [dice.choices((SAME, OTHER, other, NOISE), (75, 5, 5, 15))[0] for _ in range(20_000)]

    report = judged(answers)

    assert report.verdict == ReplayVerdict.SAME
    assert report.tasks[0].equal["candidate"] == pytest.approx(0.8, abs=0.02)


def test_more_failures_are_worse() -> None:
    report = judged([SAME] * 400 + [replayed(label("7"), FAILED, label("7"))] * 40)

    assert report.verdict == ReplayVerdict.WORSE
    assert report.reason.startswith("classify: errors: ")


def test_failures_of_both_are_no_difference() -> None:
    assert judged([SAME] * 1_000 + [replayed(label("7"), FAILED, FAILED)] * 200).verdict == ReplayVerdict.SAME


def test_what_did_not_run_says_nothing() -> None:
    stopped = replace(FAILED, code=Code.UNKNOWN_MODEL)
    dropped = replace(SAME, candidate=Answer(Outcome.EXPIRED), candidate_end=CopyEnd.DROPPED)

    report = judged([SAME] * 500 + [replayed(label("7"), stopped, label("7")), dropped] * 300)

    assert report.verdict == ReplayVerdict.SAME
    assert (report.tasks[0].pairs, report.tasks[0].dropped) == (500, 600)


def test_an_original_that_is_gone_counts_for_errors_alone() -> None:
    report = judged([replace(SAME, original=None)] * 500)

    assert finding(report, ReplayMeasure.ERRORS).verdict == ReplayVerdict.SAME
    assert finding(report, ReplayMeasure.DISTANCE).pairs == 0
    assert report.verdict == ReplayVerdict.UNDECIDED


def test_known_labels_tell_worse_from_different() -> None:
    """The same differences: once the candidate is right where the champion was wrong, once the other way round."""
    right = judged([replace(SAME, expected="7")] * 400 + [replace(OTHER, expected="1")] * 60)
    wrong = judged([replace(SAME, expected="7")] * 400 + [replace(OTHER, expected="7")] * 60)

    assert right.verdict == ReplayVerdict.DIFFERENT
    assert finding(right, ReplayMeasure.QUALITY).verdict == ReplayVerdict.SAME
    assert wrong.verdict == ReplayVerdict.WORSE


@pytest.mark.parametrize("tokens", [5, 20])
def test_shorter_and_longer_answers_are_different(tokens: int) -> None:
    said = "the warehouse is managed by Ada Orion"
    report = judged([replayed(text(said), text(said, tokens), text(said))] * 300)

    assert report.verdict == ReplayVerdict.DIFFERENT
    assert finding(report, ReplayMeasure.LENGTH).verdict == ReplayVerdict.DIFFERENT
    assert finding(report, ReplayMeasure.DISTANCE).verdict == ReplayVerdict.SAME


def test_engine_time_is_shown_and_decides_nothing() -> None:
    said = "the warehouse is managed by Ada Orion"
    report = judged([replayed(text(said), text(said, engine_ms=300), text(said))] * 600)

    assert finding(report, ReplayMeasure.ENGINE_TIME).verdict == ReplayVerdict.DIFFERENT
    assert report.verdict == ReplayVerdict.SAME


def test_the_worst_task_decides() -> None:
    said = "the warehouse is managed by Ada Orion"
    fine = [replayed(text(said), text(said), text(said))] * 600

    report = judged([*fine, *[SAME] * 270, *[OTHER] * 30])

    assert [one.task for one in report.tasks] == ["classify", "generate"]
    assert [one.verdict for one in report.tasks] == [ReplayVerdict.DIFFERENT, ReplayVerdict.SAME]
    assert report.verdict == ReplayVerdict.DIFFERENT
    assert report.reason.startswith("classify: ")


@given(st.permutations([SAME] * 30 + [OTHER] * 10 + [NOISE] * 20 + [replayed(label("7"), FAILED, label("7"))] * 5))
def test_the_order_of_the_requests_does_not_matter(answers: list[ReplayedAnswers]) -> None:
    one, other = judged(answers), judged(reversed(answers))

    assert one.verdict == other.verdict
    for measure in ReplayMeasure:
        first, second = finding(one, measure), finding(other, measure)
        assert (first.verdict, first.pairs) == (second.verdict, second.pairs)
        assert first.excess == pytest.approx(second.excess)


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=60))
def test_bounds_of_pairs_hold_the_mean_and_mirror_it(values: list[float]) -> None:
    found = paired_bounds(Moments.of(values), 0.02, (0.01, 0.01))
    mirrored = paired_bounds(Moments.of([-value for value in values]), 0.02, (0.01, 0.01))

    assert found.lower < found.harm < found.upper
    assert (mirrored.lower, mirrored.upper) == pytest.approx((-found.upper, -found.lower))


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.4])
def test_an_equal_candidate_is_seldom_different_however_often_somebody_looks(rate: float) -> None:
    """Candidate and champion each differ from the earlier answer with one probability; a report every 50 requests."""
    dice = np.random.default_rng(7)
    runs, requests, looks = 400, 3_000, range(50, 3_001, 50)
    differences = (dice.random((runs, requests)) < rate).astype(float) - (dice.random((runs, requests)) < rate)
    totals, squares = np.cumsum(differences, axis=1), np.cumsum(differences**2, axis=1)
    false = 0
    for run in range(runs):
        for look in looks:
            moments = Moments(look, float(totals[run, look - 1]), float(squares[run, look - 1]))
            found = paired_bounds(moments, 0.02, (FALSE_DIFFERENCE_RATE, 0.05))
            if found.lower > 0 and found.harm >= 0.02:
                false += 1
                break

    # With a true rate of 0.01, eleven of 400 are exceeded with a probability below 0.002.
    assert false <= 11


def pair(request: str, arm: str, answer: Answer) -> ArmPair:
    return ArmPair(arm, Pair("acme", request, Task.CLASSIFY, label("7"), answer, CopyEnd.COMPLETED))


def test_a_request_counts_when_both_of_its_copies_have_a_result() -> None:
    builder = ReportBuilder({("acme", "2"): "7"})
    # The pages end anywhere.
    builder.add([pair("1", "candidate", label("7")), pair("2", "candidate", label("1"))])
    builder.add([pair("2", "champion", label("7")), pair("3", "champion", label("7"))])
    builder.add([pair("4", "candidate", label("7")), pair("4", "champion", label("7"))])

    (task,) = builder.report().tasks

    assert task.pairs == 2
    assert builder.place == ("acme", "4", "champion")
    assert next(one for one in task.findings if one.measure == ReplayMeasure.QUALITY).pairs == 1
