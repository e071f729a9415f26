"""Figures of requests: what is computed of whom, refusals, languages and projections."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.outcomes import Task
from fairlane.records import Message, RequestInput
from fairlane_server.drift.figures import (
    DIRECTIONS,
    STATISTICS,
    AnsweredRequest,
    figures_of,
    is_refusal,
    projected,
    text_of,
)
from fairlane_server.drift.language import language_of


@pytest.mark.parametrize("task", Task)
def test_without_consent_nothing_is_computed_of_texts_labels_or_vectors(task: Task) -> None:
    everything = AnsweredRequest(task, 5, 7, 0.9, 0.4, False, "I'm sorry, but I can't.", "seven", (0.5,) * 384)

    without, with_consent = figures_of(everything), figures_of(_allowed(everything))

    assert not any(STATISTICS[name].needs_consent for name in without)
    assert all(task in STATISTICS[name].tasks for name in with_consent)
    assert without.items() <= with_consent.items()


def _allowed(request: AnsweredRequest) -> AnsweredRequest:
    return AnsweredRequest(
        request.task,
        request.prompt_tokens,
        request.completion_tokens,
        request.confidence,
        request.best_score,
        True,
        request.beginning,
        request.label,
        request.embedding,
    )


def test_an_answer_has_the_figures_of_its_task() -> None:
    assert figures_of(AnsweredRequest("generate", 5, 0, is_allowed=True, beginning="Sorry, no.")) == {
        "prompt_tokens": 5.0,
        "output_tokens": 0.0,
        "refusals": "refused",
    }
    assert figures_of(AnsweredRequest("classify", 0, 0, 0.75, is_allowed=True, label="seven")) == {
        "confidence": 0.75,
        "labels": "seven",
    }


@pytest.mark.parametrize(
    "answer",
    [
        "I'm sorry, but I can't help with that.",
        "I\N{RIGHT SINGLE QUOTATION MARK}m unable to do this",
        "  Unfortunately, I cannot say.",
        "As an AI, I have no opinion.",
        "I apologize for the confusion.",
        "We are not able to share this.",
    ],
)
def test_refusals_are_told_by_their_beginning(answer: str) -> None:
    assert is_refusal(answer)


@pytest.mark.parametrize(
    "answer", ["", "The capital is Canberra.", "Sorrento is in Italy.", "I can do this.", "Yes. " * 40 + "Sorry"]
)
def test_answers_are_no_refusals(answer: str) -> None:
    assert not is_refusal(answer)


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("What is the capital of Australia?", "en"),
        ("Was ist die Hauptstadt von Australien?", "de"),
        ("¿Cuál es la capital de Australia?", "es"),
        ("Какая столица Австралии?", "ru"),
        ("澳大利亚的首都是哪里你知道吗", "zh"),
        ("¿Qué? 12345 67890", "none"),
        ("", "none"),
    ],
)
def test_a_text_has_a_language_unless_it_has_few_letters(text: str, language: str) -> None:
    assert language_of(text) == language


@given(st.text(max_size=200))
def test_every_text_has_one(text: str) -> None:
    assert language_of(text)


def test_projections_keep_distances_about() -> None:
    drawn = random.Random(1)
    pairs = [([drawn.gauss(0, 1) for _ in range(384)], [drawn.gauss(0, 1) for _ in range(384)]) for _ in range(50)]
    ratios = [math.dist(projected(one), projected(other)) / math.dist(one, other) for one, other in pairs]

    assert all(len(projected(one)) == DIRECTIONS for one, _ in pairs)
    assert 0.9 < math.fsum(ratios) / len(ratios) < 1.1
    assert projected(pairs[0][0]) == projected(pairs[0][0])


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (RequestInput(messages=(Message("system", "Be short."), Message("user", "Why?"))), "Why?"),
        (RequestInput(prompt="Once"), "Once"),
        (RequestInput(texts=("a", "b")), "a b"),
        (RequestInput(query="q", documents=("d",)), "q"),
        (RequestInput(image=b"png"), ""),
    ],
)
def test_the_text_of_an_input_is_what_somebody_wrote(asked: RequestInput, text: str) -> None:
    assert text_of(asked) == text
