"""Checks of feedback, the same for clients, gateway and dispatcher. Pure."""

import re
from collections.abc import Iterable, Sequence
from typing import TypedDict, Unpack

from fairlane.names import is_request_id
from fairlane.outcomes import Thumb
from fairlane.record_bounds import MAX_COMMENT_CHARS, MAX_CORRECTION_CHARS, MAX_REQUESTED_BY_CHARS, MAX_TAGS
from fairlane.records import Feedback

FLAGGED = "flagged"
"""The tag of an output that somebody should look at, whatever its score."""

_THUMBS = frozenset(Thumb)
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,63}")
_MOST_CHARS = {
    "correction": MAX_CORRECTION_CHARS,
    "comment": MAX_COMMENT_CHARS,
    "given_by": MAX_REQUESTED_BY_CHARS,
}


class FeedbackFields(TypedDict, total=False):
    """Fields of ``feedback``, by keyword; one at least.

    Fields:
        thumb: up or down.
        score: from 0, useless, to 1, perfect; instead of ``thumb``.
        correction: the text, or the label, that the output should have been; at most 32,768 characters.
        tags: at most 16, such as ``wrong-fact``; ``flagged`` asks for a review.
        comment: free text; at most 4,096 characters.
        given_by: an opaque name of the person or program that says so. The latest of each about a request counts.
    """

    thumb: str | None
    score: float | None
    correction: str | None
    tags: Sequence[str] | None
    comment: str | None
    given_by: str | None


def build_feedback(request_id: str, **fields: Unpack[FeedbackFields]) -> Feedback:
    """The record of these fields. Raises ValueError: one is invalid, or unknown; the message begins with the field."""
    if unknown := sorted(fields.keys() - FeedbackFields.__annotations__.keys()):
        raise ValueError(
            f"{unknown[0]}: feedback has no such field; it has {', '.join(FeedbackFields.__annotations__)}"
        )
    tags: object = fields.get("tags")
    # A text is a sequence of texts, too, of one letter each.
    are_texts = tags is None or (isinstance(tags, Iterable) and not isinstance(tags, str))
    if not are_texts:
        raise ValueError("tags: must be a sequence of texts")
    given = Feedback(
        request_id,
        thumb=fields.get("thumb"),
        score=fields.get("score"),
        correction=fields.get("correction"),
        tags=tuple(fields.get("tags") or ()),
        comment=fields.get("comment"),
        given_by=fields.get("given_by"),
    )
    try:
        fault = fault_of(given)
    except (TypeError, AttributeError):
        fault = "feedback", "a field has the wrong type"
    if fault is not None:
        raise ValueError(": ".join(fault))
    return given


def rating_of(feedback: Feedback) -> float | None:
    """Rating of the output from 0 to 1; None for feedback without a thumb or a score."""
    if feedback.thumb is not None:
        return 1.0 if feedback.thumb == Thumb.UP else 0.0
    return feedback.score


def fault_of(feedback: Feedback) -> tuple[str, str] | None:
    """The first invalid field and the reason, which quotes nothing; None if the feedback is valid."""
    if not is_request_id(feedback.request_id):
        return "request_id", "must be a UUID"
    if feedback.thumb is not None and feedback.thumb not in _THUMBS:
        return "thumb", f"must be {' or '.join(Thumb)}"
    if feedback.score is not None:
        if feedback.thumb is not None:
            return "score", "thumb and score exclude each other"
        if not 0 <= feedback.score <= 1:  # NaN, too
            return "score", "must be from 0 to 1"
    for field, most in _MOST_CHARS.items():
        text = getattr(feedback, field)
        if text is not None and not 1 <= len(text) <= most:
            return field, f"must have from 1 to {most} characters"
    if len(feedback.tags) > MAX_TAGS:
        return "tags", f"{len(feedback.tags)} tags are more than {MAX_TAGS}"
    for index, tag in enumerate(feedback.tags):
        if _TAG.fullmatch(tag) is None:
            return f"tags[{index}]", "must have from 1 to 64 letters, digits and ._:/-, the first a letter or a digit"
    said = (feedback.thumb, feedback.score, feedback.correction, feedback.comment)
    if not feedback.tags and all(one is None for one in said):
        return "feedback", "says nothing: give a thumb, score, correction, tag or comment"
    return None
