"""A run of an evaluation set: what is asked for each example, and what is scored of a reply."""

import base64
from typing import Any

import pytest

from fairlane.records import InferenceReply, LabelScore, Output
from fairlane_server.evaluation.evaluation_set import EvaluationExample
from fairlane_server.evaluation.run import EvaluationRun, ExampleError, answer_of, request_fields
from fairlane_server.evaluation.scorers import ScorerName


def example(given: dict[str, Any], expected: Any = "a", task: str | None = None) -> EvaluationExample:
    return EvaluationExample("one", given, expected, {}, task)


def reply(output: Output | None = None, **fields: Any) -> InferenceReply:
    return InferenceReply("id", "acme", **{"outcome": "ok", "model_version": "2", "output": output, **fields})


@pytest.mark.parametrize(
    ("given", "scorer", "fields"),
    [
        ({"prompt": "p"}, ScorerName.EXACT, {"task": "generate", "prompt": "p"}),
        ({"query": "q", "documents": ["d"]}, ScorerName.NDCG, {"task": "rank", "query": "q", "documents": ["d"]}),
        ({"texts": ["t"]}, ScorerName.SIMILARITY, {"task": "embed", "texts": ["t"]}),
        (
            {"image": base64.b64encode(b"pixels").decode()},
            ScorerName.ACCURACY,
            {"task": "classify", "image": b"pixels"},
        ),
    ],
)
def test_the_task_follows_from_the_scorer(given: dict[str, Any], scorer: ScorerName, fields: dict[str, Any]) -> None:
    assert request_fields(example(given), scorer) == fields


def test_an_example_may_name_its_task() -> None:
    assert request_fields(example({"texts": ["t"]}, task="embed"), ScorerName.EXACT)["task"] == "embed"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"image": "no base64!"}, "one: input.image: must be base64"),
        ({"promt": "p"}, "one: input.promt: no input has this field"),
        ({"image": 7}, "one: input.image: must be base64"),
        ({"prompt": "p", "passages": ["text"]}, "one: input.passages: its answer depended on it"),
        ({"prompt": "p", "history": ["text"]}, "one: input.history: its answer depended on it"),
    ],
)
def test_an_example_that_makes_no_request_is_named(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ExampleError, match=problem):
        request_fields(example(given), ScorerName.EXACT)


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        (Output(text="t"), "t"),
        (Output(labels=(LabelScore("7", 0.9), LabelScore("1", 0.1))), "7"),
        (Output(scores=(0.1, 0.2)), [0.1, 0.2]),
        (Output(embeddings=((1.0, 0.0), (0.0, 1.0))), [1.0, 0.0]),
        (None, None),
    ],
)
def test_what_is_scored_of_a_reply(output: Output | None, answer: Any) -> None:
    assert answer_of(reply(output)) == answer


def test_a_model_that_fails_is_no_better_than_one_that_is_wrong() -> None:
    run = EvaluationRun("words")
    run.answered(ScorerName.EXACT, example({"prompt": "p"}), reply(Output(text="a")), None)
    run.answered(ScorerName.EXACT, example({"prompt": "p"}), reply(Output(text="b")), None)
    run.answered(ScorerName.EXACT, example({"prompt": "p"}), reply(outcome="failed", code="engine_error"), None)
    run.answered(ScorerName.EXACT, example({"prompt": "p"}, expected=None), reply(Output(text="a")), None)
    assert run.values == [1.0, 0.0, 0.0, None]
    assert run.mean.count == 3
    assert run.mean.mean == pytest.approx(1 / 3)
    assert (dict(run.versions), dict(run.failed)) == ({"2": 3}, {"engine_error": 1})
    assert run.scores[2].reason == "no answer: engine_error"


@pytest.mark.parametrize(
    ("outcome", "code", "value"),
    [
        ("failed", "context_too_long", 0.0),
        ("rejected", "overloaded", None),
        ("expired", None, None),
        ("cancelled", None, None),
    ],
)
def test_what_the_service_did_not_run_says_nothing_of_the_model(
    outcome: str, code: str | None, value: float | None
) -> None:
    run = EvaluationRun("words")
    run.answered(ScorerName.EXACT, example({"prompt": "p"}), reply(outcome=outcome, code=code), None)
    assert run.values == [value]
    assert dict(run.failed) == {code or outcome: 1}
