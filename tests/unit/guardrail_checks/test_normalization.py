"""Normalized texts, and the way back to the original's characters."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_consumers.guardrails.check import CheckContext, Finding
from inference_consumers.guardrails.normalization import normalized
from inference_consumers.guardrails.patterns import PatternsCheck
from inference_consumers.guardrails.secrets import SecretsCheck
from tests.kit.cpu_time import cpu_time

HIDDEN = (
    "\u200b\u00ad\u2060\ufeff\u202e\U000e0041"
    "\x00\x01\x08\x0b\x1f\x7f\x80\x9f\u034f\u115f\u1160\u2800\u3164\uffa0\ufff9\ufffb\U0001d173\U0001d17a"
)
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


def test_no_control_and_no_character_of_a_format_is_left() -> None:
    kept = {"\t", "\n", "\r"}
    hidden = [one for one in map(chr, range(0x110000)) if unicodedata.category(one) in {"Cc", "Cf"} and one not in kept]
    assert normalized("".join(hidden)).text == ""
    assert normalized("\t\n\r").text == "\t\n\r"


def test_nothing_invisible_comes_out_of_what_is_visible() -> None:
    changed = [one for one in map(chr, range(0x110000)) if not unicodedata.is_normalized("NFKC", one)]
    for one in changed:
        once = normalized(one).text
        assert normalized(once).text == once, hex(ord(one))


@pytest.mark.parametrize("hidden", HIDDEN, ids=lambda one: f"{ord(one):x}")
def test_a_hidden_character_hides_no_key_no_denied_word_and_no_pattern(hidden: str) -> None:
    def split(text: str) -> str:
        return hidden.join(text)

    key, word, number = split("AKIAQX7PLN4TEDLE6K77"), split("unobtainium"), split("project x-1234")
    [keys] = SecretsCheck().find([f"use {key} now"], CheckContext())
    assert [one.type for one in keys] == ["aws_access_key"]
    context = CheckContext(patterns=("project [a-z]+-[0-9]{4}",), denied_words=("unobtainium",))
    [found] = PatternsCheck().find([f"{word} of {number}"], context)
    assert [one.type for one in found] == ["denied_word", "pattern"]


def test_a_long_text_with_one_odd_character_takes_little_time() -> None:
    """The longest request has four times as many bytes, and a question to a check may take 5 s."""
    text = "an ordinary sentence, 16 \u2014 \u0441\u043b\u043e\u0432\u043e " * 55_000 + "\u2026"
    with cpu_time() as time:
        normalized(text)
    assert time.spent_s < 1


@given(st.text(alphabet=st.one_of(st.characters(min_codepoint=32, max_codepoint=126), st.sampled_from("\t\n\r"))))
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
