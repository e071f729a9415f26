"""Texts with redactions, and the places of their parts in the original."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from inference_consumers.guardrails.check import Finding
from inference_consumers.guardrails.rewriting import Rewriting

findings = st.lists(
    st.builds(
        lambda kind, start, length: Finding(kind, start, start + length, 0.5),
        st.sampled_from(("A", "BB")),
        st.integers(-2, 30),
        st.integers(1, 12),
    ),
    max_size=4,
)
texts = st.text("abc é", max_size=25)


def redacted(text: str, findings: Sequence[Finding]) -> str:
    """The same by another way: over the whole text at once, without the places of its parts."""
    parts: list[str] = []
    done = 0
    for start, end, kind in _merged(findings, len(text)):
        parts += (text[done:start], f"[{kind}]")
        done = end
    parts.append(text[done:])
    return "".join(parts)


def _merged(findings: Sequence[Finding], length: int) -> list[tuple[int, int, str]]:
    spans: list[tuple[int, int, tuple[float, int, str]]] = []
    for one in findings:
        start, end = max(0, one.start), min(length, one.end)
        if start < end:
            spans.append((start, end, (-one.score, start - end, one.type)))
    merged: list[tuple[int, int, tuple[float, int, str]]] = []
    for start, end, rank in sorted(spans):
        if merged and start <= merged[-1][1]:
            first, last, best = merged[-1]
            merged[-1] = (first, max(last, end), min(best, rank))
        else:
            merged.append((start, end, rank))
    return [(start, end, rank[2]) for start, end, rank in merged]


@given(texts, findings)
def test_a_text_is_redacted_as_a_whole(text: str, found: list[Finding]) -> None:
    assert Rewriting.of(text).redacted(found).text == redacted(text, found)


@given(texts, st.lists(findings, max_size=3))
def test_every_part_has_its_place_in_the_original(text: str, rounds: list[list[Finding]]) -> None:
    made = Rewriting.of(text)
    for found in rounds:
        made = made.redacted(found)
    assert [piece.start for piece in made.pieces] == [0, *(piece.end for piece in made.pieces)][: len(made.pieces)]
    assert made.pieces[-1].end == len(text)
    for piece in made.pieces:
        assert piece.replaced or text[piece.start : piece.end] == piece.text
    assert made.between(0, len(text)) == made.text or not text


@given(texts, st.lists(findings, max_size=3), st.lists(st.integers(0, 25), max_size=3))
def test_a_text_that_is_cut_where_it_may_be_is_the_same(
    text: str, rounds: list[list[Finding]], positions: list[int]
) -> None:
    made = Rewriting.of(text)
    for found in rounds:
        made = made.redacted(found)
    cuts = [0, *sorted(made.whole_until(min(one, len(text))) for one in positions), len(text)]
    parts = [made.between(start, end) for start, end in pairwise(cuts)]
    assert "".join(parts) == made.text or not text


def test_a_second_finding_takes_what_the_first_replaced_whole() -> None:
    made = Rewriting.of("call 0301234567 now").redacted([Finding("PHONE", 5, 15, 1.0)])
    assert made.text == "call [PHONE] now"
    assert made.redacted([Finding("WORD", 8, 16, 1.0)]).text == "call [WORD]"
    assert made.whole_until(9) == 5
