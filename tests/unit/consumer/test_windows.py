"""Where sentences end, in texts of every make."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_consumers.engines.windows import SENTENCE_END, WindowSize
from tests.kit.cpu_time import cpu_time

MOST_CHARACTERS = 65_536
"""Of a question to a check."""


@given(st.text("a.!? \n\"')]", max_size=60))
def test_a_sentence_ends_behind_its_marks_and_what_closes_it(text: str) -> None:
    plain = re.finditer(r"[.!?:;]+[\s\"')\]]+|\n+", text)
    assert [one.span() for one in SENTENCE_END.finditer(text)] == [one.span() for one in plain]


@pytest.mark.parametrize("piece", [".", "\n", ". ", '."', ".a", " ", "?!", ".\n\n"])
def test_sentences_are_found_in_time_in_proportion_to_the_text(piece: str) -> None:
    text = piece * (MOST_CHARACTERS // len(piece)) + "x"
    offsets = [(place, place + 1) for place in range(len(text))]
    with cpu_time() as time:
        assert WindowSize(tokens=254, overlap=32).cut_with_sentences(text, offsets)
    assert time.spent_s < 2
