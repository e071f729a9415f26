"""Texts with redactions, and the places of their parts in the original."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from inference_consumers.guardrails.check import Finding
from inference_consumers.guardrails.redaction import redacted
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
