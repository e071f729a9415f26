"""A tenant's patterns and denied words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane_server.re2_patterns import MOST_MATCHES, check_pattern, matches
from inference_consumers.guardrails.check import CheckContext
from inference_consumers.guardrails.patterns import PatternsCheck
from tests.kit.cpu_time import cpu_time


def found(text: str, patterns: tuple[str, ...] = (), words: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    context = CheckContext(patterns=patterns, denied_words=words)
    [findings] = PatternsCheck().find([text], context)
    return [(one.type, text[one.start : one.end]) for one in findings]


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"(?=secret)", "not a pattern of RE2"),
        (r"(a)\1", "not a pattern of RE2"),
        ("(", "missing"),
        ("a{1001}", "repetition"),
        ("((a{100}){100}){100}", "not a pattern of RE2"),
        ("a*", "empty text"),
        ("", "empty text"),
        ("\ud800", "not a pattern of RE2"),
    ],
)
def test_what_is_not_to_be_used_is_refused_with_a_reason(pattern: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_pattern(pattern)


def test_nothing_of_a_refused_pattern_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="RE2"):
        check_pattern("(confidential")
    assert capfd.readouterr() == ("", "")


def test_a_pattern_is_found_where_it_matches() -> None:
    assert found("ids PX-1234 and px-1", (r"PX-\d+",)) == [("pattern", "PX-1234")]
    assert found("größe: PX-1, PX-2", (r"PX-\d",)) == [("pattern", "PX-1"), ("pattern", "PX-2")]
    assert found("P\u200bX-1", (r"PX-\d",)) == [("pattern", "P\u200bX-1")]
    assert found("foobaz barbaz", ("(foo|bar)baz",)) == [("pattern", "foobaz"), ("pattern", "barbaz")]


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*b", "(.*a){20}", "x[^y]*y|x"])
def test_no_pattern_takes_long(pattern: str) -> None:
    """The last one searches to the end of the text for each of its matches."""
    check_pattern(pattern)
    with cpu_time() as time:
        found("a" * 50_000 + "x" * 50_000, (pattern,))
    assert time.spent_s < 5


def test_behind_the_most_matches_all_of_the_text_is_one() -> None:
    spans = list(matches("ab", "ab." * (MOST_MATCHES + 500)))
    assert len(spans) == MOST_MATCHES + 1
    assert spans[-1] == (3 * MOST_MATCHES, 3 * (MOST_MATCHES + 500))


@pytest.mark.parametrize(
    ("text", "hits"),
    [
        ("The Project FALCON is late", ["Project FALCON"]),
        ("project\n falcon", ["project\n falcon"]),
        ("a falconer", []),
        ("\uff46\uff41\uff4c\uff43\uff4f\uff4e is not enough", []),
        ("C++ and c ++, not C", ["C++", "c ++"]),
        ("STRASSE", ["STRASSE"]),
    ],
)
def test_denied_words_are_whole_words_in_any_case(text: str, hits: list[str]) -> None:
    assert found(text, words=("Project Falcon", "c++", "straße", " ")) == [("denied_word", hit) for hit in hits]


@pytest.mark.parametrize(
    "words",
    [tuple(f"the {number}" for number in range(500)), tuple("the " * (number + 1) for number in range(25))],
    ids=["one first word", "one word again and again"],
)
def test_no_denied_words_take_long(words: tuple[str, ...]) -> None:
    """As many words, and as long ones, as a policy may have."""
    with cpu_time() as time:
        found("the " * 62_500, words=words)
        found("the 7 " * 40_000, words=words)
    assert time.spent_s < 5


def test_behind_the_most_denied_words_all_of_the_text_is_one() -> None:
    text = "red or " * (MOST_MATCHES + 500)
    hits = found(text, words=("red",))
    assert len(hits) == MOST_MATCHES + 1
    assert hits[-1] == ("denied_word", text[7 * MOST_MATCHES :])


def test_the_longest_phrase_is_found_whole() -> None:
    words = ("red", "red green blue", "green", "blue sky")
    assert found("a red green sky, a red green blue sky", words=words) == [
        ("denied_word", "red"),
        ("denied_word", "green"),
        ("denied_word", "red green blue sky"),
    ]


@given(st.lists(st.sampled_from(["red", "green", "blue", "Red Green"]), max_size=12))
def test_every_occurrence_of_a_denied_word_is_found(parts: list[str]) -> None:
    text = " ".join(parts)
    hits = "".join(hit for _, hit in found(text, words=("red", "red green")))
    assert hits.lower().count("red") == text.lower().count("red")
