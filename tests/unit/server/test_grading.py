"""One example of a run: what is asked after which reply, and what its score is."""

from typing import Any

import pytest

from fairlane.records import Cost, InferenceReply, LabelScore, Output, TokenUsage
from fairlane_server.evaluation.evaluation_set import EvaluationExample
from fairlane_server.evaluation.grading import (
    ANSWER,
    OTHER,
    REVERSED,
    VERDICT,
    Grading,
    JudgePlan,
    MeasurePlan,
    asked_for_calibration,
    check_example,
)
from fairlane_server.evaluation.judge import JUDGE, Rubric
from fairlane_server.evaluation.run import ExampleError
from fairlane_server.evaluation.stored_runs import result_of

RUBRIC = Rubric("It is right.")
EXAMPLE = EvaluationExample("a", {"prompt": "2 + 2 = ?"}, "4", {})
GRADED = MeasurePlan("words/2", JUDGE, judge=JudgePlan("judge", RUBRIC))
PAIRED = MeasurePlan("words/2", JUDGE, judge=JudgePlan("judge", RUBRIC, against="words/1"))


def reply(text: str | None = None, outcome: str = "ok", **fields: Any) -> InferenceReply:
    usage = TokenUsage(10, 2)
    output = None if text is None else Output(text=text)
    return InferenceReply("id", "acme", outcome, model_version="7", output=output, usage=usage, **fields)


def test_a_scorer_needs_one_answer() -> None:
    grading = Grading(EXAMPLE, MeasurePlan("words/2", "exact", max_tokens=8), "s")
    (asked,) = grading.first()
    assert (asked.part, asked.fields["model"], asked.fields["max_tokens"]) == (ANSWER, "words/2", 8)
    assert asked.fields["cache"] == "none"
    assert grading.replied(ANSWER, reply(" 4\n")) == ()
    scored = grading.scored
    assert scored is not None
    assert (scored.value, scored.model_version, scored.failure, scored.judged) == (1.0, "7", None, None)
    assert (scored.prompt_tokens, scored.completion_tokens) == (10, 2)
    assert (scored.costs, scored.is_degraded) == ({}, False)


def test_costs_are_those_of_all_requests_of_an_example() -> None:
    grading = Grading(EXAMPLE, GRADED, "s")
    grading.first()
    grading.replied(ANSWER, reply("four", cost=Cost(500, "EUR"), degradations=("cap_max_tokens",)))
    grading.replied(VERDICT, reply("4", cost=Cost(70, "EUR")))
    assert grading.scored is not None
    assert (grading.scored.costs, grading.scored.is_degraded) == ({"EUR": 570}, True)
    found = result_of([grading.scored, grading.scored], None)
    assert (found.costs, found.degraded) == ({"EUR": 1_140}, 2)


def test_other_tasks_take_no_bound_of_tokens() -> None:
    example = EvaluationExample("a", {"image": ""}, "4", {})
    grading = Grading(example, MeasurePlan("digits", "accuracy", max_tokens=8), "s")
    assert "max_tokens" not in grading.first()[0].fields
    grading.replied(ANSWER, InferenceReply("id", "acme", "ok", output=Output(labels=(LabelScore("4", 1.0),))))
    assert grading.scored is not None
    assert grading.scored.value == 1.0


def test_without_an_answer_the_score_is_0() -> None:
    for plan in (MeasurePlan("words/2", "exact"), GRADED, PAIRED):
        grading = Grading(EXAMPLE, plan, "s")
        grading.first()
        assert grading.replied(ANSWER, reply(outcome="failed", code="engine_error")) == ()
        assert grading.scored is not None
        assert (grading.scored.value, grading.scored.failure) == (0.0, "engine_error")
        assert grading.replied(OTHER, reply("4")) == ()


def test_a_judge_grades_an_answer() -> None:
    grading = Grading(EXAMPLE, GRADED, "s")
    grading.first()
    (asked,) = grading.replied(ANSWER, reply("four"))
    shown = asked.fields["messages"][1]["content"]
    assert (asked.part, asked.fields["model"]) == (VERDICT, "judge")
    assert all(text in shown for text in ("2 + 2 = ?", "four", "4"))
    grading.replied(VERDICT, reply("4"))
    assert grading.scored is not None
    assert grading.scored.value == 0.75
    judged = {"grade": 4, "versions": ["7"], "prompt_tokens": 10, "completion_tokens": 2}
    assert grading.scored.judged == judged
    assert (grading.scored.prompt_tokens, grading.scored.completion_tokens) == (10, 2)


def test_a_calibrated_grade_is_worth_what_people_said() -> None:
    plan = MeasurePlan("words/2", JUDGE, judge=JudgePlan("judge", RUBRIC, scores=(0.1, 0.2, 0.3, 0.4, 0.9)))
    grading = Grading(EXAMPLE, plan, "s")
    grading.first()
    grading.replied(ANSWER, reply("four"))
    grading.replied(VERDICT, reply("5"))
    assert grading.scored is not None
    assert grading.scored.value == 0.9


@pytest.mark.parametrize("verdict", [reply("I would say 4"), reply(outcome="expired"), reply(None)])
def test_without_a_verdict_there_is_no_score(verdict: InferenceReply) -> None:
    grading = Grading(EXAMPLE, GRADED, "s")
    grading.first()
    grading.replied(ANSWER, reply("four"))
    grading.replied(VERDICT, verdict)
    assert grading.scored is not None
    assert grading.scored.value is None
    assert grading.scored.reason.startswith("the judge gave no verdict")
    assert "say" not in grading.scored.reason


def test_a_pair_is_judged_in_both_orders_whichever_answer_comes_first() -> None:
    for parts in ((ANSWER, OTHER), (OTHER, ANSWER)):
        grading = Grading(EXAMPLE, PAIRED, "s")
        assert {one.part: one.fields["model"] for one in grading.first()} == {ANSWER: "words/2", OTHER: "words/1"}
        texts = {ANSWER: "mine", OTHER: "theirs"}
        assert grading.replied(parts[0], reply(texts[parts[0]])) == ()
        asked = {
            one.part: one.fields["messages"][1]["content"] for one in grading.replied(parts[1], reply(texts[parts[1]]))
        }
        assert asked[VERDICT].index("mine") < asked[VERDICT].index("theirs")
        assert asked[REVERSED].index("theirs") < asked[REVERSED].index("mine")
        grading.replied(REVERSED, reply("2"))
        assert not is_over(grading)
        grading.replied(VERDICT, reply("1"))
        assert grading.scored is not None
        assert grading.scored.value == 1.0


def is_over(grading: Grading) -> bool:
    return grading.scored is not None


def test_a_failure_of_the_other_model_says_nothing_of_this_one() -> None:
    grading = Grading(EXAMPLE, PAIRED, "s")
    grading.first()
    grading.replied(OTHER, reply(outcome="expired"))
    assert grading.scored is not None
    assert (grading.scored.value, grading.scored.failure) == (None, None)


def test_a_judge_needs_a_question_in_words() -> None:
    check_example(EXAMPLE, GRADED)
    with pytest.raises(ExampleError, match="b: input: a judge needs"):
        check_example(EvaluationExample("b", {"texts": ["t"]}, "4", {}, "embed"), GRADED)
    with pytest.raises(ExampleError, match=r"c: input\.promt: "):
        check_example(EvaluationExample("c", {"promt": "t"}, "4", {}), MeasurePlan("words", "exact"))


def test_a_calibration_asks_about_what_people_rated() -> None:
    judge = JudgePlan("judge", RUBRIC)
    rated = EvaluationExample("a", {"prompt": "2 + 2 = ?"}, "4", {}, output="five", rating=0.0)
    asked = asked_for_calibration(rated, judge, "s")
    assert asked is not None
    assert "five" in asked.fields["messages"][1]["content"]
    assert "reference" not in asked.fields["messages"][1]["content"]
    assert asked_for_calibration(EXAMPLE, judge, "s") is None
