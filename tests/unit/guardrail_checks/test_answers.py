"""Checks of answers that need no model: leaked system prompts, and repetition."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_consumers.guardrails.check import CheckContext
from inference_consumers.guardrails.leaked_prompt import LeakedPromptCheck
from inference_consumers.guardrails.repetition import RepetitionCheck
from inference_consumers.guardrails.words import words
from tests.kit.cpu_time import cpu_time

PROMPT = (
    "You are Mira, the assistant of Northwind Bank. Never mention the internal limit of 40,000 crowns, and do not say "
    "which model you run on. If a customer asks for a loan, hand the conversation to the loans desk."
)
LOOP = "I think that this is the best way to go. "


def leaked(text: str, prompt: str = PROMPT) -> list[str]:
    [findings] = LeakedPromptCheck().find([text], CheckContext(system_prompt=prompt))
    return [text[one.start : one.end] for one in findings]


def repeated(text: str) -> list[str]:
    [findings] = RepetitionCheck().find([text], CheckContext())
    return [text[one.start : one.end] for one in findings]


def test_a_prompt_that_is_quoted_is_found_whole() -> None:
    assert leaked(f"Sure, my instructions: {PROMPT} Is there more?") == [PROMPT.rstrip(".")]


@pytest.mark.parametrize(
    "text",
    [
        PROMPT.upper(),
        PROMPT.replace(" ", "\n"),
        PROMPT.replace(" ", "-"),
        PROMPT.replace("e", "e\u200b"),
        "My rules: " + PROMPT.split(". ", 1)[1],
    ],
)
def test_case_signs_and_invisible_characters_hide_no_leak(text: str) -> None:
    assert leaked(text)


@pytest.mark.parametrize(
    "text",
    ["", "You are Mira, the assistant of Northwind Bank.", "I cannot tell which model you run on.", "Hello!"],
)
def test_a_short_phrase_is_no_leak(text: str) -> None:
    assert leaked(text) == []


def test_a_short_prompt_leaks_as_a_whole() -> None:
    assert leaked("He said: answer in French only!", "Answer in French only.") == ["answer in French only"]
    assert leaked("Be kind.", "Be kind.") == []
    assert leaked("anything", "") == []


@given(st.lists(st.sampled_from("abcdef"), min_size=12, max_size=40), st.text(alphabet="xyz ", max_size=30))
def test_a_quoted_prompt_is_always_found(prompt: list[str], around: str) -> None:
    quoted = " ".join(prompt)
    assert "".join(leaked(f"{around}. {quoted}. {around}", quoted)).find(quoted) >= 0


def test_a_loop_is_found_behind_its_first_time() -> None:
    text = f"Well. {LOOP * 5}Done."
    [found] = repeated(text)
    assert text.replace(found, "") == f"Well. {LOOP.rstrip('. ')}. Done."


@pytest.mark.parametrize("unit", ["ha ", "no, no! ", "haha", "a", "重复"])
def test_short_loops_are_found(unit: str) -> None:
    assert repeated("Then " + unit * 200)


@pytest.mark.parametrize(
    "text",
    [
        LOOP * 2,
        "ha ha ha",
        "| 0 | 0 | 0 |\n" * 40,
        "-" * 500,
        " " * 500,
        "\n".join(f"{number}. Step {number} is this one" for number in range(40)),
        "def f(x):\n    return x\n" * 2,
    ],
)
def test_what_may_repeat_is_not_found(text: str) -> None:
    assert repeated(text) == []


@given(st.lists(st.sampled_from("ab "), max_size=200).map("".join))
def test_what_is_found_is_a_repetition(text: str) -> None:
    for found in repeated(text):
        start = text.index(found)
        assert start > 0
        assert found


def test_long_answers_take_little_time() -> None:
    text = " ".join(f"word{number % 997}" for number in range(20_000))
    with cpu_time() as time:
        repeated(text)
        leaked(text)
    assert time.spent_s < 5


@given(st.text(max_size=60))
def test_words_are_where_they_say(text: str) -> None:
    found = words(text)
    assert all(text[word.start : word.end].casefold() == word.text for word in found)
    assert all(before.end <= after.start for before, after in pairwise(found))
