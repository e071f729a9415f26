"""Normalized texts, and the way back to the original's characters."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_consumers.guardrails.check import Finding
from inference_consumers.guardrails.normalization import normalized

HIDDEN = "\u200b\u00ad\u2060\ufeff\u202e\U000e0041"
characters = st.one_of(
    st.characters(exclude_categories=[]),
    st.sampled_from([*HIDDEN, "ﬁ", "\uff21", "é", "e\u0301", "\u1112\u1161\u11ab", "가"]),
)
texts = st.lists(characters, max_size=30).map("".join)


def original(text: str, start: int, end: int) -> str:
    place = normalized(text).original(Finding("A", start, end, 1.0))
    return text[place.start : place.end]


@given(texts)
def test_every_character_leads_back_to_where_it_comes_from(text: str) -> None:
    plain = normalized(text)
    end_before = 0
    for place in range(len(plain.text)):
        found = plain.original(Finding("A", place, place + 1, 1.0))
        assert 0 <= found.start < found.end <= len(text)
        assert found.start >= end_before or found.end == end_before
        end_before = found.end
        again = normalized(text[found.start : found.end]).text
        assert plain.text[place] in again


@given(texts)
def test_the_result_is_normal_and_shows_all_it_has(text: str) -> None:
    plain = normalized(text).text
    plain.encode("utf-8")
    assert normalized(plain).text == plain
    assert not set(plain) & set(HIDDEN)


@given(st.text(alphabet=st.characters(max_codepoint=127)))
def test_ascii_is_as_it_was(text: str) -> None:
    plain = normalized(text)
    assert plain.text == text
    assert plain.original(Finding("A", 0, 1, 0.5)) == Finding("A", 0, 1, 0.5)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("\uff50\uff41\uff53\uff53\uff57\uff4f\uff52\uff44", "password"),
        ("pass\u200bword", "password"),
        ("pa\u00adss\u202eword", "password"),
        ("caf\u0065\u0301", "café"),
        ("ﬁne", "fine"),
        ("\u1112\u1161\u11ab", "한"),
        ("a\ud800b", "a\ufffdb"),
        ("\u200b\u200b", ""),
    ],
)
def test_what_looks_the_same_is_the_same(text: str, plain: str) -> None:
    assert normalized(text).text == unicodedata.normalize("NFC", plain)


def test_a_finding_includes_what_was_left_out_within_it() -> None:
    text = "my pass\u200bword\u200b is"
    assert original(text, 3, 11).startswith("pass\u200bword")
    assert original("a ﬁ b", 2, 3) == "ﬁ"
