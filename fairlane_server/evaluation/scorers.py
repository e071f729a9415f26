"""Scores of single answers against what was expected, from 0 to 1. Pure.

An answer that is wrong has the score 0, also one of the wrong shape. An example that cannot be scored, since what it
expects is no pattern, no schema or of the wrong shape, has none: it says nothing of the model, and a mean leaves it
out.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import Any

from fairlane_server.json_schemas import check_schema, unmet
from fairlane_server.re2_patterns import check_pattern, compiled


class ScorerName(StrEnum):
    """What an evaluation measures."""

    EXACT = "exact"
    CONTAINS = "contains"
    REGEX = "regex"
    JSON_SCHEMA = "json_schema"
    ACCURACY = "accuracy"
    NDCG = "ndcg"
    SIMILARITY = "similarity"


@dataclass(frozen=True, slots=True)
class AnswerScore:
    """``value`` from 0 to 1; None if the example cannot be scored. ``reason`` says why it cannot, or why the answer is
    none that could be right; it quotes nothing of the answer."""

    value: float | None
    reason: str = ""


class _NotScorableError(Exception):
    """The example cannot be scored."""


class _NoAnswerError(Exception):
    """The answer is of the wrong shape."""


def score(scorer: ScorerName, expected: Any, answer: Any, *, top: int | None = None) -> AnswerScore:
    """Score one answer.

    Args:
        scorer: what is measured:
            exact: the text is the expected one, but for white space at its ends;
            contains: part of the expected texts, or the one text, that the answer contains;
            regex: the pattern of RE2 matches somewhere in the answer;
            json_schema: the answer is JSON that satisfies the schema;
            accuracy: the label is the expected one;
            ndcg: normalised discounted cumulative gain of the answer's scores of documents, given how relevant each is;
            similarity: cosine of two vectors; negative ones count as 0.
        expected: from the evaluation set.
        answer: a text; for ndcg a score for each document; for similarity a vector.
        top: for ndcg, the ranks that count; None: all.
    """
    try:
        if scorer is ScorerName.NDCG:
            value = _ndcg(_numbers(expected), answer, top)
        else:
            value = _SCORERS[scorer](expected, answer)
    except _NotScorableError as error:
        return AnswerScore(None, str(error))
    except _NoAnswerError as error:
        return AnswerScore(0.0, str(error))
    return AnswerScore(value)


def _exact(expected: Any, answer: Any) -> float:
    return float(_text(expected).strip() == _answered_text(answer).strip())


def _contains(expected: Any, answer: Any) -> float:
    texts = expected if isinstance(expected, list) else [expected]
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise _NotScorableError("expected: must be a text that is not empty, or several")
    found = _answered_text(answer)
    return sum(text in found for text in texts) / len(texts)


def _regex(expected: Any, answer: Any) -> float:
    pattern = _text(expected)
    try:
        check_pattern(pattern)
    except ValueError as error:
        raise _NotScorableError(f"expected: {error}") from None
    try:
        return float(compiled(pattern).search(_answered_text(answer)) is not None)
    except UnicodeEncodeError:
        raise _NoAnswerError("answer: has half of a surrogate pair") from None


def _json_schema(expected: Any, answer: Any) -> float:
    schema = json.dumps(expected) if isinstance(expected, Mapping) else _text(expected)
    try:
        check_schema(schema)
    except ValueError as error:
        raise _NotScorableError(f"expected: {error}") from None
    try:
        return float(unmet(json.loads(_answered_text(answer), parse_constant=_no_constant), schema) is None)
    except (ValueError, RecursionError):
        # No JSON, or nested too deeply for anybody to read.
        return 0.0


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _accuracy(expected: Any, answer: Any) -> float:
    return float(_text(expected) == _answered_text(answer))


def _similarity(expected: Any, answer: Any) -> float:
    one = _numbers(expected)
    if not any(one):
        raise _NotScorableError("expected: the vector is zero")
    other = _answered_numbers(answer)
    if len(one) != len(other):
        raise _NoAnswerError(f"answer: {len(other)} dimensions, and {len(one)} are expected")
    if not any(other):
        raise _NoAnswerError("answer: the vector is zero")
    lengths = math.hypot(*one), math.hypot(*other)
    # Scaled first: products of large numbers are infinite.
    cosine = math.fsum((a / lengths[0]) * (b / lengths[1]) for a, b in zip(one, other, strict=True))
    return min(1.0, max(0.0, cosine))


def _ndcg(relevance: Sequence[float], answer: Any, top: int | None) -> float:
    """Järvelin and Kekäläinen 2002, with gains ``2 ** relevance - 1`` (Burges et al. 2005). Documents with one score
    share their ranks: each gets the mean of their discounts (McSherry and Najork 2008)."""
    if top is not None and top < 1:
        raise _NotScorableError(f"top: {top} is less than 1")
    if not all(0 <= value <= _MOST_RELEVANCE for value in relevance):
        raise _NotScorableError(f"expected: a relevance is not from 0 to {_MOST_RELEVANCE}")
    gains = [2.0**value - 1.0 for value in relevance]
    counted = len(gains) if top is None else top
    best = math.fsum(gain * _discount(rank, counted) for rank, gain in enumerate(sorted(gains, reverse=True)))
    if not best:
        raise _NotScorableError("expected: no document is relevant")
    scores = _answered_numbers(answer)
    if len(relevance) != len(scores):
        raise _NoAnswerError(f"answer: {len(scores)} scores of {len(relevance)} documents")
    order = sorted(range(len(scores)), key=lambda place: -scores[place])
    total, rank = 0.0, 0
    for _, tied in groupby(order, key=lambda place: scores[place]):
        places = list(tied)
        discounts = math.fsum(_discount(rank + step, counted) for step in range(len(places)))
        total += discounts / len(places) * math.fsum(gains[place] for place in places)
        rank += len(places)
    return min(1.0, total / best)


def _discount(rank: int, counted: int) -> float:
    return 1.0 / math.log2(rank + 2) if rank < counted else 0.0


def _text(expected: Any) -> str:
    if not isinstance(expected, str):
        raise _NotScorableError(f"expected: {_NO_TEXT}")
    return expected


def _answered_text(answer: Any) -> str:
    if not isinstance(answer, str):
        raise _NoAnswerError(f"answer: {_NO_TEXT}")
    return answer


def _numbers(expected: Any) -> Sequence[float]:
    if not _are_numbers(expected):
        raise _NotScorableError(f"expected: {_NO_NUMBERS}")
    return [float(one) for one in expected]


def _answered_numbers(answer: Any) -> Sequence[float]:
    if not _are_numbers(answer):
        raise _NoAnswerError(f"answer: {_NO_NUMBERS}")
    return [float(one) for one in answer]


def _are_numbers(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(_is_number(one) for one in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST


_SCORERS: Mapping[ScorerName, Callable[[Any, Any], float]] = {
    ScorerName.EXACT: _exact,
    ScorerName.CONTAINS: _contains,
    ScorerName.REGEX: _regex,
    ScorerName.JSON_SCHEMA: _json_schema,
    ScorerName.ACCURACY: _accuracy,
    ScorerName.SIMILARITY: _similarity,
}
_NO_TEXT = "must be a text"
_NO_NUMBERS = "must be finite numbers, one at least"
_MOST_RELEVANCE = 100
_LARGEST = 1e150
