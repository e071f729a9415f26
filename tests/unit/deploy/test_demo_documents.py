"""The questions about the demo's handbook: what answers them, and what does not."""

from pathlib import Path

import pytest

from benchmarks.grounded import result_of, run_of, write_elsewhere
from deploy.demo.documents import FOLDER, HandbookQuestion, load_questions, says
from fairlane.outcomes import Code, Outcome
from fairlane.records import InferenceReply, Output

BERTH = HandbookQuestion("Which berth is kept free?", "12", "29", "harbour.md")


def answered(text: str | None) -> InferenceReply:
    return InferenceReply("r", "acme", Outcome.OK, output=Output(text=text))


@pytest.mark.parametrize("question", load_questions(), ids=lambda one: one.question)
def test_its_answer_stands_in_its_document_alone_and_not_in_the_question(question: HandbookQuestion) -> None:
    texts = {file.name: file.read_text(encoding="utf-8") for file in FOLDER.iterdir()}
    assert [name for name, text in texts.items() if says(text, question.expect)] == [question.source]
    assert not any(says(text, question.elsewhere) for text in texts.values())
    assert not says(question.question, question.expect)
    assert not question.is_answered_by(answered(question.question))
    assert not question.is_known_to(answered(question.question))


def test_there_are_enough_questions_and_each_is_asked_once() -> None:
    questions = load_questions()
    assert len({one.question for one in questions}) == len(questions) >= 20


@pytest.mark.parametrize("right", ["12", "Berth 12.", "It is berth 12, I think. Or 30.", "the 12th berth", "BERTH 12!"])
def test_a_right_answer_says_so_in_its_first_sentence(right: str) -> None:
    assert BERTH.is_answered_by(answered(right))
    assert BERTH.is_known_to(answered(right))
    assert not BERTH.is_answered_elsewhere_by(answered(right))


@pytest.mark.parametrize("wrong", [None, "", "212", "120", "12:30", "1.12", "12,000", "x12", "twelve"])
def test_a_wrong_answer_does_not_know_it(wrong: str | None) -> None:
    assert not BERTH.is_answered_by(answered(wrong))
    assert not BERTH.is_known_to(answered(wrong))


@pytest.mark.parametrize("listed", ["There are berths. Berth 12 is kept free.", "Berths\nBerth 12 is kept free."])
def test_who_lists_what_there_is_has_not_answered_and_knows_it(listed: str) -> None:
    assert not BERTH.is_answered_by(answered(listed))
    assert BERTH.is_known_to(answered(listed))


def test_the_other_tenant_has_another_answer_to_every_question(tmp_path: Path) -> None:
    questions = load_questions()
    write_elsewhere(questions, tmp_path / "elsewhere")
    texts = {file.name: file.read_text(encoding="utf-8") for file in (tmp_path / "elsewhere").iterdir()}
    assert texts.keys() == {file.name for file in FOLDER.iterdir()}
    for one in questions:
        assert not any(says(text, one.expect) for text in texts.values())
        assert says(texts[one.source], one.elsewhere)


def test_the_benchmark_misses_its_aims_when_answers_are_wrong_or_known_to_others() -> None:
    refused = InferenceReply("r", "initech", Outcome.REJECTED, code=Code.INVALID, field="retrieval.collection")
    good = {
        "grounded": answered("Berth 12."),
        "ungrounded": answered("Berth 3."),
        "neighbour": answered("Berth 29."),
        "stranger": refused,
    }
    assert result_of([run_of(1, BERTH, good)]).met
    with pytest.raises(RuntimeError, match="answered rejected invalid"):
        run_of(1, BERTH, {**good, "neighbour": refused})
    wrong, knowing = answered("Berth 3."), answered("Who knows. Berth 12.")
    for bad in ({"grounded": wrong}, {"ungrounded": knowing}, {"neighbour": knowing}, {"stranger": wrong}):
        figures = result_of([run_of(1, BERTH, {**good, **bad})]).figures
        assert [figure.met for figure in figures].count(False) == 1
