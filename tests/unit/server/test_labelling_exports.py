"""Exports of agreed labels: what is expected, what is an example for fine-tuning, and where each is from."""

import json
from dataclasses import replace
from typing import Any

import pytest

from fairlane_server.evaluation.evaluation_set import read_evaluation_set
from fairlane_server.evaluation.run import request_fields
from fairlane_server.evaluation.scorers import ScorerName
from fairlane_server.labelling.decisions import GivenLabel
from fairlane_server.labelling.exports import AgreedItem, evaluation_line, fine_tuning_lines, json_line, reviewer_id

GOOD = AgreedItem(
    request_id="r-1",
    origin="feedback",
    model="words",
    model_version="2",
    arm="new",
    task="generate",
    input={
        "history": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}],
        "messages": [{"role": "user", "content": "What is the capital of Australia?"}],
    },
    output={"text": "Canberra."},
    guardrails=[{"stage": "input", "check": "pii", "verdict": "passed", "types": []}],
    correction="by the user",
    label="good",
    answered_at_ms=10,
    closed_at_ms=20,
    labels=(GivenLabel("anna", "good"), GivenLabel("cleo", "bad", "no"), GivenLabel("ben", "good")),
)
BAD = replace(
    GOOD,
    output={"text": "Sydney."},
    label="bad",
    labels=(GivenLabel("anna", "bad", "Canberra"), GivenLabel("ben", "bad", "Canberra, since 1913.")),
)


ALONE = replace(GOOD, input={"messages": GOOD.input["messages"]})


def expected(item: AgreedItem) -> Any:
    line = evaluation_line(item, "acme", keep_context=True)
    assert line is not None
    return line["expected"]


def test_a_good_answer_is_expected_a_bad_one_is_replaced_by_its_latest_correction() -> None:
    assert expected(GOOD) == "Canberra."
    assert expected(BAD) == "Canberra, since 1913."
    uncorrected = replace(BAD, labels=(GivenLabel("anna", "bad"), GivenLabel("ben", "bad")))
    assert expected(uncorrected) == "by the user"
    assert expected(replace(uncorrected, correction=None)) is None
    assert expected(replace(GOOD, task="classify", label="7", output={})) == "7"


@pytest.mark.parametrize("task", ["embed", "rank"])
def test_no_label_says_what_vectors_or_ranks_should_be(task: str) -> None:
    assert expected(replace(GOOD, task=task, output={"scores": [1.0]})) is None


def test_a_set_has_what_can_be_asked_again_and_can_be_read() -> None:
    picture = replace(GOOD, task="classify", label="7", input={"image": "iVBORw0KGgo="}, request_id="r-2")
    vectors = replace(GOOD, task="embed", input={"texts": ["a", "b"]}, output={"embeddings": [[1.0]]}, request_id="r-3")
    lines = [evaluation_line(item, "acme") for item in (ALONE, picture, vectors)]
    found = read_evaluation_set(json_line(line) for line in lines if line is not None)
    for example, item in zip(found.examples, (ALONE, picture, vectors), strict=True):
        asked = request_fields(example, ScorerName.EXACT)
        assert (example.example_id, asked["task"]) == (item.request_id, item.task)
    assert evaluation_line(GOOD, "acme") is None, "its answer depended on earlier turns"
    passages = ALONE.input | {"passages": [{"passage_id": "p", "text": "t", "score": 1}]}
    assert evaluation_line(replace(ALONE, input=passages), "acme") is None
    assert evaluation_line(GOOD, "acme", keep_context=True) is not None


@pytest.mark.parametrize(("text", "is_example"), [("é" * 500_000, True), ("é" * 524_288, False), ("a" * 524_288, True)])
def test_a_line_is_at_most_as_long_as_a_set_may_have_it(text: str, *, is_example: bool) -> None:
    line = evaluation_line(replace(ALONE, input={"prompt": text}), "acme")
    assert (line is not None) == is_example
    if line is not None:
        assert read_evaluation_set([json_line(line)]).examples[0].input == {"prompt": text}


def test_a_line_says_where_it_is_from_and_names_no_reviewer() -> None:
    line = evaluation_line(ALONE, "acme")
    assert line is not None
    assert line["provenance"] == {
        "request_id": "r-1",
        "tenant": "acme",
        "consent": "evaluation: allowed",
        "origin": "feedback",
        "model": "words",
        "model_version": "2",
        "arm": "new",
        "answered_at_ms": 10,
        "agreed_at_ms": 20,
        "label": "good",
        "reviewers": [reviewer_id("acme", "anna"), reviewer_id("acme", "ben")],
    }
    assert not {"anna", "ben"} & set(json.dumps(line).replace('"', " ").split())
    assert reviewer_id("acme", "anna") != reviewer_id("globex", "anna")


def test_a_fine_tuning_line_is_the_chat_with_the_expected_answer() -> None:
    lines = fine_tuning_lines(BAD, "acme")
    assert lines is not None
    assert lines.example == {
        "messages": [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hi."},
            {"role": "user", "content": "What is the capital of Australia?"},
            {"role": "assistant", "content": "Canberra, since 1913."},
        ]
    }
    assert lines.provenance["request_id"] == "r-1"
    history = [{"role": "tool", "content": "{}"}, *GOOD.input["history"]]
    system, asked = {"role": "system", "content": "Be brief."}, GOOD.input["messages"][0]
    led = fine_tuning_lines(replace(BAD, input={"history": history, "messages": [system, asked]}), "acme")
    assert led is not None
    assert led.example["messages"][:4] == [system, *GOOD.input["history"], asked], "as the model got it"
    prompt = fine_tuning_lines(replace(GOOD, input={"prompt": "2 + 2 ="}), "acme")
    assert prompt is not None
    assert prompt.example["messages"][0] == {"role": "user", "content": "2 + 2 ="}


@pytest.mark.parametrize(
    "fields",
    [
        {"task": "classify"},
        {"label": "bad", "labels": (), "correction": None},
        {"input": GOOD.input | {"passages": [{"passage_id": "p", "text": "t", "score": 1}]}},
        {"input": {}},
        {"guardrails": [{"stage": "input", "check": "pii", "verdict": "redacted", "types": ["email"]}]},
        {"guardrails": [{"stage": "output", "check": "secrets", "verdict": "blocked", "types": []}]},
    ],
)
def test_what_is_no_example_is_left_out(fields: dict[str, Any]) -> None:
    assert fine_tuning_lines(replace(GOOD, **fields), "acme") is None
