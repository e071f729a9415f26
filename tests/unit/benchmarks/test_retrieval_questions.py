"""The questions on the standard library: each has its passage, and none gives it away."""

import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.retrieval import StdlibQuestion, documentation, read_questions, recalled, squeezed, stdlib_passages

QUESTIONS = read_questions()
TEXTS = documentation()


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.question[:40])
def test_the_answer_stands_once_in_the_text_it_is_said_to_stand_in(question: StdlibQuestion) -> None:
    assert squeezed(TEXTS[question.source]).count(squeezed(question.phrase)) == 1


def test_there_are_enough_of_them_and_no_two_are_the_same() -> None:
    assert len(QUESTIONS) >= 60
    assert len({question.question for question in QUESTIONS}) == len(QUESTIONS)
    assert len({(question.source, question.phrase) for question in QUESTIONS}) == len(QUESTIONS)
    assert len({question.source for question in QUESTIONS}) >= 30


def test_no_question_quotes_its_answer() -> None:
    for question in QUESTIONS:
        asked = re.findall(r"\w+", question.question.lower())
        answer = " ".join(re.findall(r"\w+", question.phrase.lower()))
        runs = [" ".join(asked[start : start + 4]) for start in range(len(asked) - 3)]
        assert not [run for run in runs if run in answer], question.question


def test_white_space_does_not_count_and_the_text_does() -> None:
    question = StdlibQuestion("Why?", "topic/a", "one two\nthree")
    assert question.is_answered_by("topic/a", "zero one\n   two three four")
    assert not question.is_answered_by("topic/b", "zero one two three")
    assert not question.is_answered_by("topic/a", "one two")


def test_an_entry_that_lacks_something_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "questions.yaml"
    path.write_text("- question: Why?\n  phrase: because\n")
    with pytest.raises(KeyError, match="module"):
        read_questions(path)


def test_recall_is_of_the_questions_whose_passage_is_near_enough() -> None:
    questions = [StdlibQuestion("?", "topic/a", "first"), StdlibQuestion("??", "topic/b", "second")]
    passages = [("topic/a", "the second"), ("topic/a", "the first"), ("topic/b", "the second")]
    held = np.eye(3, dtype=np.float32)
    asked = np.array([[0.1, 0.9, 0.0], [0.9, 0.5, 0.1]], dtype=np.float32)
    assert [recalled(questions, passages, asked, held, cut) for cut in (1, 2, 3)] == [0.5, 0.5, 1.0]


def test_every_question_has_a_passage_when_the_documentation_is_cut() -> None:
    passages = stdlib_passages()
    assert len(passages) > 500
    assert [question for question in QUESTIONS if not any(question.is_answered_by(*one) for one in passages)] == []
