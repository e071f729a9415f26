"""Evaluation sets, scores of answers, and comparisons of versions."""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, permutation_test
from sklearn.metrics import ndcg_score

from fairlane_server.evaluation import evaluation_set
from fairlane_server.evaluation.comparison import (
    compare,
    mcnemar_p_value,
    mean_score,
    sign_flip_p_value,
    wilson_interval,
)
from fairlane_server.evaluation.evaluation_set import EvaluationSetError, read_evaluation_set
from fairlane_server.evaluation.scorers import AnswerScore, ScorerName, score

LINE = b'{"id": "a", "input": {"prompt": "?"}, "expected": "x", "tags": {"topic": "t"}}\n'
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


def test_a_set_is_read_in_its_order() -> None:
    found = read_evaluation_set([LINE, b"\n", b'{"id": "b", "input": {"prompt": "!"}}'])

    assert [(one.example_id, one.expected) for one in found.examples] == [("a", "x"), ("b", None)]
    assert found.examples[0].tags == {"topic": "t"}


def test_the_digest_is_that_of_the_content() -> None:
    spaced = b'{ "tags": {"topic":"t"}, "expected":"x",  "input": {"prompt": "?"}, "id": "a"}'
    other = LINE.replace(b'"x"', b'"y"')

    assert read_evaluation_set([LINE]).digest == read_evaluation_set([b"", spaced]).digest
    assert read_evaluation_set([LINE]).digest != read_evaluation_set([other]).digest


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not JSON"),
        (b"\xff", "not UTF-8"),
        (b"[" * 100_000, "not JSON that can be used"),
        (b'{"id": "b", "input": {"x": NaN}}', "NaN"),
        (b"[]", "not an object"),
        (b'{"id": "b", "input": {"x": 1}, "outputs": 1}', "outputs: "),
        (b'{"input": {"x": 1}}', "id: "),
        (b'{"id": "", "input": {"x": 1}}', "id: "),
        (b'{"id": "b"}', "input: "),
        (b'{"id": "b", "input": {}}', "input: "),
        (b'{"id": "b", "input": {"x": 1}, "tags": {"n": 1}}', "tags: "),
        (b'{"id": "b", "input": {"x": 1}, "tags": []}', "tags: "),
        (LINE, "also the id of line 1"),
        (b" " * (evaluation_set.MOST_LINE_BYTES + 1), "longer than"),
    ],
)
def test_an_invalid_line_is_named(line: bytes, reason: str) -> None:
    with pytest.raises(EvaluationSetError, match=reason) as raised:
        read_evaluation_set([LINE, b"", line])

    assert raised.value.line == 3


def test_a_set_has_some_examples_and_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EvaluationSetError, match="no example"):
        read_evaluation_set([b"\n"])

    monkeypatch.setattr(evaluation_set, "MOST_EXAMPLES", 1)
    with pytest.raises(EvaluationSetError, match="more than 1 examples"):
        read_evaluation_set([LINE, LINE.replace(b'"a"', b'"b"')])


@pytest.mark.parametrize(
    ("scorer", "expected", "answer", "value"),
    [
        (ScorerName.EXACT, "Paris", " Paris\n", 1.0),
        (ScorerName.EXACT, "Paris", "paris", 0.0),
        (ScorerName.CONTAINS, "Paris", "It is Paris.", 1.0),
        (ScorerName.CONTAINS, ["Paris", "Seine"], "It is Paris.", 0.5),
        (ScorerName.REGEX, r"\bpar[iy]s\b", "in parys", 1.0),
        (ScorerName.REGEX, r"^paris$", "in paris", 0.0),
        (ScorerName.JSON_SCHEMA, SCHEMA, '{"age": 3}', 1.0),
        (ScorerName.JSON_SCHEMA, json.dumps(SCHEMA), '{"age": "3"}', 0.0),
        (ScorerName.JSON_SCHEMA, SCHEMA, "no JSON", 0.0),
        (ScorerName.JSON_SCHEMA, SCHEMA, "[" * 100_000, 0.0),
        (ScorerName.JSON_SCHEMA, {"type": "object"}, '{"a": NaN}', 0.0),
        (ScorerName.JSON_SCHEMA, {"type": "object"}, '{"a": -Infinity}', 0.0),
        (ScorerName.JSON_SCHEMA, {"type": "object"}, '{"a": 1}', 1.0),
        (ScorerName.ACCURACY, "7", "7", 1.0),
        (ScorerName.ACCURACY, "7", "1", 0.0),
        (ScorerName.NDCG, [3, 0], [0.9, 0.1], 1.0),
        (ScorerName.SIMILARITY, [1.0, 0.0], [2.0, 0.0], 1.0),
        (ScorerName.SIMILARITY, [1.0, 0.0], [-2.0, 0.0], 0.0),
        (ScorerName.SIMILARITY, [1.0, 0.0], [1.0, 1.0], math.sqrt(0.5)),
    ],
)
def test_an_answer_has_a_score(scorer: ScorerName, expected: Any, answer: Any, value: float) -> None:
    found = score(scorer, expected, answer)

    assert found.value == pytest.approx(value)
    assert found.reason == ""


@pytest.mark.parametrize(
    ("scorer", "expected", "answer"),
    [
        (ScorerName.EXACT, "3", None),
        (ScorerName.CONTAINS, "3", 3),
        (ScorerName.REGEX, "x", "\ud800"),
        (ScorerName.REGEX, "x", None),
        (ScorerName.JSON_SCHEMA, SCHEMA, None),
        (ScorerName.ACCURACY, "7", None),
        (ScorerName.NDCG, [1, 0], [1.0]),
        (ScorerName.NDCG, [1, 0], [math.nan, 1.0]),
        (ScorerName.NDCG, [1, 0], None),
        (ScorerName.SIMILARITY, [1.0], [1.0, 2.0]),
        (ScorerName.SIMILARITY, [1.0], [math.nan]),
        (ScorerName.SIMILARITY, [1.0], [0.0]),
        (ScorerName.SIMILARITY, [1.0], "text"),
    ],
)
def test_an_answer_of_the_wrong_shape_is_wrong(scorer: ScorerName, expected: Any, answer: Any) -> None:
    """Otherwise a model would do better by such answers: a mean leaves out what has no score."""
    found = score(scorer, expected, answer)

    assert found.value == 0.0
    assert found.reason.startswith("answer: ")


@pytest.mark.parametrize(
    ("scorer", "expected", "answer"),
    [
        (ScorerName.EXACT, 3, "3"),
        (ScorerName.CONTAINS, [], "x"),
        (ScorerName.CONTAINS, "", "x"),
        (ScorerName.REGEX, "(", "x"),
        (ScorerName.JSON_SCHEMA, "[]", "{}"),
        (ScorerName.JSON_SCHEMA, {"type": "nothing"}, "{}"),
        (ScorerName.ACCURACY, None, "7"),
        (ScorerName.NDCG, [0, 0], [1.0, 2.0]),
        (ScorerName.NDCG, [-1, 0], [1.0, 2.0]),
        (ScorerName.NDCG, [1, True], [1.0, 2.0]),
        (ScorerName.SIMILARITY, [0.0], [1.0]),
        (ScorerName.SIMILARITY, [math.inf], [1.0]),
    ],
)
def test_what_cannot_be_scored_has_a_reason_whatever_the_answer(scorer: ScorerName, expected: Any, answer: Any) -> None:
    for any_answer in (answer, None, "\ud800", [math.nan]):
        found = score(scorer, expected, any_answer)

        assert found.value is None
        assert found.reason.startswith("expected: ")


@given(
    st.sampled_from(ScorerName), st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists), st.text()
)
def test_anything_is_scored_or_has_a_reason(scorer: ScorerName, expected: Any, answer: str) -> None:
    found = score(scorer, expected, answer)

    assert bool(found.reason) if found.value is None else 0.0 <= found.value <= 1.0
    assert not found.reason or found.value in (None, 0.0)


documents = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from((0.1, 0.2, 0.5, 0.9))), min_size=2, max_size=12
).filter(lambda found: any(relevance for relevance, _ in found))


@given(documents, st.integers(1, 12))
def test_ndcg_is_that_of_scikit_learn(found: list[tuple[int, float]], top: int) -> None:
    relevance, scores = zip(*found, strict=True)
    gains = [2**value - 1 for value in relevance]

    ours = score(ScorerName.NDCG, list(relevance), list(scores), top=top).value
    assert ours == pytest.approx(ndcg_score([gains], [list(scores)], k=top))


def test_ndcg_counts_one_rank_at_least() -> None:
    assert score(ScorerName.NDCG, [1, 0], [1.0, 0.0], top=0) == AnswerScore(None, "top: 0 is less than 1")


@given(st.integers(1, 500).flatmap(lambda count: st.tuples(st.integers(0, count), st.just(count))))
def test_wilsons_interval_is_that_of_scipy(found: tuple[int, int]) -> None:
    hits, count = found
    interval = binomtest(hits, count).proportion_ci(0.95, method="wilson")

    assert wilson_interval(hits, count) == pytest.approx((interval.low, interval.high), abs=1e-9)


@given(st.integers(0, 300), st.integers(0, 300))
def test_mcnemars_test_is_that_of_a_fair_coin(better: int, worse: int) -> None:
    expected = binomtest(better, better + worse).pvalue if better + worse else 1.0

    assert mcnemar_p_value(better, worse) == pytest.approx(expected, rel=1e-6)


def test_examples_without_a_score_are_left_out() -> None:
    assert mean_score([1.0, None, 0.0]).count == 2
    assert mean_score([None]).mean is None
    assert compare([1.0, None, 0.0], [1.0, 1.0, 1.0]).pairs == 2


def test_the_interval_of_a_mean_is_repeatable_and_narrows() -> None:
    random = np.random.default_rng(1)
    values = random.random(2_000).tolist()
    few, many = mean_score(values[:50]), mean_score(values)

    assert mean_score(values) == many
    assert few.low < 0.5 < few.high
    assert many.high - many.low < (few.high - few.low) / 3


def test_a_paired_comparison_sees_what_unpaired_means_do_not() -> None:
    """Examples differ far more than versions."""
    random = np.random.default_rng(2)
    baseline = random.random(300) * 0.9
    candidate = baseline + random.normal(0.02, 0.02, 300).clip(-0.05, 0.1)
    found = compare(baseline.tolist(), candidate.tolist())

    assert not found.is_exact
    assert 0.0 < found.low < found.difference < found.high
    assert found.p_value < 0.01
    assert mean_score(candidate.tolist()).low < mean_score(baseline.tolist()).high


@pytest.mark.parametrize("count", range(1, 9))
def test_a_few_examples_prove_nothing(count: int) -> None:
    """Of n differences with one sign, 2 of the 2**n choices of signs are as far from 0."""
    found = compare([0.2] * count, [0.3] * count)

    assert found.p_value == pytest.approx(2 / 2**count)
    assert found.is_exact
    assert (found.low, found.high) == (-1.0, 1.0)
    mean = mean_score([0.5] * count)
    assert (mean.mean, mean.low, mean.high) == (0.5, 0.0, 1.0)


# Sums of eighths are exact: scipy counts ties as it adds, with all errors of rounding.
differences = st.lists(st.sampled_from((-0.375, -0.125, 0.0, 0.125, 0.25, 0.5)), min_size=1, max_size=8)


@given(differences)
def test_the_test_of_a_few_examples_is_that_of_scipy(found: list[float]) -> None:
    changed = [one for one in found if one]
    if len(changed) < 2:
        assert sign_flip_p_value(np.asarray(found)) == 1.0
        return
    expected = permutation_test((changed,), np.sum, permutation_type="samples", n_resamples=np.inf)
    assert sign_flip_p_value(np.asarray(found)) == pytest.approx(expected.pvalue, abs=1e-6)


def test_many_examples_are_tested_by_random_signs_at_the_rate_that_is_stated() -> None:
    random = np.random.default_rng(3)
    values = [sign_flip_p_value(random.normal(0, 0.1, 40), seed) for seed in range(100)]

    assert 1 <= sum(value <= 0.05 for value in values) <= 12
    assert sign_flip_p_value(random.normal(0.1, 0.05, 40)) == pytest.approx(1 / 2_001)
    assert not compare([0.2] * 13, [0.3] * 13).is_exact


def test_equal_versions_do_not_differ() -> None:
    found = compare([1.0, 0.0, 1.0], [1.0, 0.0, 1.0])

    assert (found.better, found.worse, found.difference, found.p_value) == (0, 0, 0.0, 1.0)
    assert found.is_exact


def test_exchanged_versions_have_the_opposite_difference() -> None:
    one, other = [1.0, 0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0, 1.0]
    forth, back = compare(one, other), compare(other, one)

    assert forth.difference == pytest.approx(-back.difference)
    assert (forth.better, forth.p_value) == (back.worse, back.p_value)


@pytest.mark.parametrize(("baseline", "candidate"), [([1.0], [1.0, 0.0]), ([None], [1.0]), ([], [])])
def test_scores_of_different_examples_are_not_compared(
    baseline: list[float | None], candidate: list[float | None]
) -> None:
    with pytest.raises(ValueError, match=r"scores? |a score "):
        compare(baseline, candidate)


def test_a_proportion_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^hits: "):
        wilson_interval(0, 0)
