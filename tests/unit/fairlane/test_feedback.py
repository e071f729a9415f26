"""Checks of feedback: what is refused, why, and that no reason quotes what was said."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.feedback import fault_of, rating_of
from fairlane.outcomes import Thumb
from fairlane.record_bounds import MAX_COMMENT_CHARS, MAX_CORRECTION_CHARS, MAX_FEEDBACK_BYTES, MAX_TAGS
from fairlane.records import Feedback
from fairlane.schema_files import default_codec

REQUEST = "0b6f9c1e-5d0a-4c57-9f43-2a7c61d0e001"
GOOD = Feedback(REQUEST, thumb="up")
SECRET = "what nobody may read"


@pytest.mark.parametrize(
    ("fields", "field", "reason"),
    [
        ({"request_id": SECRET}, "request_id", "must be a UUID"),
        ({"thumb": SECRET}, "thumb", "must be up or down"),
        ({"score": 0.5}, "score", "thumb and score exclude each other"),
        ({"thumb": None, "score": 1.01}, "score", "must be from 0 to 1"),
        ({"thumb": None, "score": float("nan")}, "score", "must be from 0 to 1"),
        ({"correction": ""}, "correction", f"must have from 1 to {MAX_CORRECTION_CHARS} characters"),
        ({"comment": SECRET * 1_000}, "comment", f"must have from 1 to {MAX_COMMENT_CHARS} characters"),
        ({"given_by": "x" * 261}, "given_by", "must have from 1 to 260 characters"),
        ({"tags": ("a",) * 17}, "tags", "17 tags are more than 16"),
        ({"tags": ("wrong-fact", SECRET)}, "tags[1]", "must have from 1 to 64 letters"),
        ({"thumb": None}, "feedback", "says nothing"),
    ],
)
def test_an_invalid_field_is_named_with_the_reason(fields: dict[str, Any], field: str, reason: str) -> None:
    fault = fault_of(replace(GOOD, **fields))
    assert fault is not None
    assert fault[0] == field
    assert fault[1].startswith(reason)
    assert SECRET not in fault[1]


words = st.text(max_size=40)
feedback = st.builds(
    Feedback,
    request_id=st.just(REQUEST),
    thumb=st.none() | st.sampled_from([*Thumb]),
    score=st.none() | st.floats(),
    correction=st.none() | words,
    tags=st.lists(st.sampled_from(["flagged", "tone", "", "a b"]), max_size=3).map(tuple),
    comment=st.none() | words,
    given_by=st.none() | words,
)


@given(feedback)
def test_what_is_valid_says_something_and_its_rating_is_from_0_to_1(one: Feedback) -> None:
    if fault_of(one) is not None:
        return
    assert one.thumb or one.score is not None or one.correction or one.comment or one.tags
    rating = rating_of(one)
    assert (rating is None) == (one.thumb is None and one.score is None)
    assert rating is None or 0 <= rating <= 1
    assert default_codec().decode(default_codec().encode(one)) == one


def test_the_longest_valid_feedback_fits_into_its_record() -> None:
    longest = Feedback(
        REQUEST,
        tenant="a" * 39,
        thumb="down",
        correction="\N{GRINNING FACE}" * MAX_CORRECTION_CHARS,
        tags=("t" * 64,) * MAX_TAGS,
        comment="\N{GRINNING FACE}" * MAX_COMMENT_CHARS,
        given_by="\N{GRINNING FACE}" * 260,
    )
    assert fault_of(longest) is None
    value = default_codec().encode(longest)
    assert len(value) <= MAX_FEEDBACK_BYTES
    assert default_codec().decode(value) == longest
