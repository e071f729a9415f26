"""Findings joined, texts replaced, and texts cut into pieces: nothing is lost and nothing moves."""

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_consumers.engines.windows import WindowSize
from inference_consumers.guardrails.check import Finding
from inference_consumers.guardrails.rewriting import Rewriting
from inference_consumers.guardrails.spans import joined, pieces, shifted

LENGTH = 40
findings = st.lists(
    st.builds(
        lambda kind, start, length, score: Finding(kind, start, start + length, score),
        st.sampled_from(["A", "B"]),
        st.integers(0, LENGTH - 1),
        st.integers(1, 10),
        st.sampled_from([0.5, 0.75, 1.0]),
    ),
    max_size=8,
)


def covered(found: list[Finding]) -> set[tuple[str, int]]:
    return {(one.type, place) for one in found for place in range(one.start, one.end)}


@given(findings)
def test_joined_findings_cover_the_same_characters(found: list[Finding]) -> None:
    result = joined(found)
    assert covered(result) == covered(found)
    assert [one.start for one in result] == sorted(one.start for one in result)
    for kind in ("A", "B"):
        of_kind = [one for one in result if one.type == kind]
        assert all(before.end < after.start for before, after in pairwise(of_kind))


def test_a_joined_finding_has_the_highest_score() -> None:
    assert joined([Finding("A", 3, 6, 0.5), Finding("A", 0, 3, 0.9)]) == [Finding("A", 0, 6, 0.9)]


@given(st.text(min_size=LENGTH, max_size=LENGTH, alphabet="xyz"), findings)
def test_what_is_found_is_replaced_and_all_else_stays(text: str, found: list[Finding]) -> None:
    replaced = {place for one in found for place in range(one.start, min(one.end, LENGTH))}
    rest = "".join(character for place, character in enumerate(text) if place not in replaced)
    assert Rewriting.of(text).redacted(found).text.replace("[A]", "").replace("[B]", "") == rest


def test_overlapping_findings_are_replaced_once_by_the_surest() -> None:
    text = "mail ada@example.org now"
    found = [Finding("PERSON", 5, 8, 0.85), Finding("EMAIL_ADDRESS", 5, 20, 1.0)]
    assert Rewriting.of(text).redacted(found).text == "mail [EMAIL_ADDRESS] now"
    assert Rewriting.of(text).redacted([]).text == text
    assert Rewriting.of(text).redacted([Finding("A", 20, 999, 1.0)]).text == "mail ada@example.org[A]"


@given(st.text(alphabet="ab ", max_size=300), st.integers(0, 20), st.integers(1, 40))
def test_pieces_have_every_character_and_overlap(text: str, overlap: int, more: int) -> None:
    overlap += 1
    most = 2 * overlap + more
    cut = list(pieces(text, most, overlap))
    assert all(text[start : start + len(piece)] == piece and len(piece) <= most for start, piece in cut)
    assert cut[0][0] == 0
    assert cut[-1][0] + len(cut[-1][1]) == len(text)
    for (start, piece), (following, _) in pairwise(cut):
        assert start < following
        assert start + len(piece) - following >= overlap
    # So that whatever is not longer than the overlap is whole in one of them.
    for place in range(len(text) - overlap + 1):
        assert any(start <= place and place + overlap <= start + len(piece) for start, piece in cut)


@given(st.integers(0, 300), st.integers(1, 40), st.data())
def test_windows_have_every_token(count: int, tokens: int, data: st.DataObject) -> None:
    size = WindowSize(tokens, data.draw(st.integers(0, tokens - 1)))
    windows = size.cut(count)
    assert {place for first, last in windows for place in range(first, last)} == set(range(count))
    assert all(last - first == min(tokens, count) for first, last in windows)
    for (_, last), (first, _) in pairwise(windows):
        assert last - first >= size.overlap


def test_each_sentence_is_a_window_too_and_no_window_comes_twice() -> None:
    text = "one two three four. five six seven eight nine!\nten. eleven twelve thirteen fourteen"
    offsets = [match.span() for match in re.finditer(r"\w+|[.!]", text)]
    windows = WindowSize(8, 2).cut_with_sentences(text, offsets)
    parts = [text[offsets[first][0] : offsets[last - 1][1]] for first, last in windows]
    assert parts[-3:] == ["one two three four.", "five six seven eight nine!", "eleven twelve thirteen fourteen"]
    assert windows[:-3] == WindowSize(8, 2).cut(len(offsets))
    assert WindowSize(8, 2).cut_with_sentences("one two three four", offsets[:4]) == [(0, 4)]
    assert WindowSize(8, 2).cut_with_sentences("", []) == []


@given(st.text(alphabet="ab .\n", max_size=200), st.integers(2, 12))
def test_sentences_add_windows_of_the_same_size(text: str, tokens: int) -> None:
    offsets = [match.span() for match in re.finditer(r"\w+|\.", text)]
    size = WindowSize(tokens, 1)
    windows = size.cut_with_sentences(text, offsets)
    assert windows[: len(size.cut(len(offsets)))] == size.cut(len(offsets))
    assert len(set(windows)) == len(windows)
    assert all(0 <= first < last <= min(len(offsets), first + tokens) for first, last in windows)


def test_windows_that_never_end_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot overlap"):
        WindowSize(16, 16)
    with pytest.raises(ValueError, match="cannot overlap"):
        next(pieces("text", 10, 5))


def test_a_shifted_finding_keeps_its_length() -> None:
    assert shifted(Finding("A", 1, 3, 0.5), 10) == Finding("A", 11, 13, 0.5)
