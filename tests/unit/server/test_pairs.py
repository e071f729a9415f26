"""Agreement of two versions on one request, and what a report says of many pairs."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane_server.evaluation.comparison import ratio_of_means
from fairlane_server.evaluation.pairs import Answer, Pair, PairTally, agreement, chrf

TEXTS = st.text(max_size=40)
SCORES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8)
VECTORS = st.lists(st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=3), min_size=1, max_size=4)
OUTPUTS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "generate": TEXTS.map(lambda text: {"text": text}),
    "classify": TEXTS.map(lambda label: {"labels": [{"label": label, "score": 1.0}]}),
    "rank": SCORES.map(lambda scores: {"scores": scores}),
    "embed": VECTORS.map(lambda vectors: {"embeddings": vectors}),
}
PAIRS = st.one_of(*(st.tuples(st.just(task), made, made) for task, made in OUTPUTS.items()))


@given(PAIRS)
def test_agreement_is_symmetric_and_from_0_to_1(given: tuple[str, dict[str, Any], dict[str, Any]]) -> None:
    task, one, other = given
    found, mirrored = agreement(task, one, other), agreement(task, other, one)
    assert (found is None) == (mirrored is None)
    if found is None or mirrored is None:
        return
    assert found.equal == mirrored.equal
    assert found.equal in (0.0, 1.0)
    if found.similarity is None or mirrored.similarity is None:
        assert found.similarity == mirrored.similarity
    else:
        assert 0.0 <= found.similarity <= 1.0
        assert math.isclose(found.similarity, mirrored.similarity, abs_tol=1e-9)


@given(st.one_of(*(st.tuples(st.just(task), made) for task, made in OUTPUTS.items())))
def test_an_answer_agrees_with_itself(given: tuple[str, dict[str, Any]]) -> None:
    task, output = given
    found = agreement(task, output, output)
    if task == "embed" and not all(sum(x * x for x in vector) for vector in output["embeddings"]):
        assert found is None, "a vector of zeros, or one whose length is too small for a number, has no direction"
        return
    assert found is not None
    assert found.equal == 1.0
    assert found.similarity is not None
    assert math.isclose(found.similarity, 1.0)


@pytest.mark.parametrize(
    ("task", "one", "other", "equal", "similarity"),
    [
        ("generate", {"text": "Canberra"}, {"text": "Sydney"}, 0.0, 0.1),
        ("generate", {"text": "It is Canberra."}, {"text": "It is  Canberra!"}, 0.0, 0.9),
        ("generate", {"text": ""}, {"text": "x"}, 0.0, 0.0),
        ("classify", {"labels": [{"label": "1"}, {"label": "7"}]}, {"labels": [{"label": "7"}]}, 0.0, 0.0),
        ("rank", {"scores": [0.1, 0.2, 0.3]}, {"scores": [10, 20, 30]}, 1.0, 1.0),
        ("rank", {"scores": [0.1, 0.2, 0.3]}, {"scores": [3, 2, 1]}, 0.0, 0.0),
        ("rank", {"scores": [1, 2, 3, 4]}, {"scores": [1, 2, 4, 3]}, 0.0, 0.8),
        ("embed", {"embeddings": [[1, 0], [1, 0]]}, {"embeddings": [[1, 0], [0, 1]]}, 0.0, 0.5),
        ("embed", {"embeddings": [[1, 0]]}, {"embeddings": [[2, 0]]}, 1.0, 1.0),
    ],
)
def test_known_agreements(
    task: str, one: dict[str, Any], other: dict[str, Any], equal: float, similarity: float
) -> None:
    found = agreement(task, one, other)
    assert found is not None
    assert found.equal == equal
    assert found.similarity == pytest.approx(similarity, abs=0.09)


@pytest.mark.parametrize(
    ("task", "one", "other"),
    [
        ("generate", {"text": "a"}, {"labels": []}),
        ("classify", {"labels": []}, {"labels": [{"label": "1"}]}),
        ("rank", {"scores": [1, 2]}, {"scores": [1, 2, 3]}),
        ("rank", {"scores": ["NaN", 1]}, {"scores": [1, 2]}),
        ("embed", {"embeddings": [[1, 2]]}, {"embeddings": [[1, 2], [3, 4]]}),
        ("embed", {"embeddings": [[1, 2], [3]]}, {"embeddings": [[1, 2], [3, 4]]}),
        ("embed", {}, {"embeddings": [[1, 2]]}),
    ],
)
def test_outputs_that_cannot_be_compared(task: str, one: dict[str, Any], other: dict[str, Any]) -> None:
    assert agreement(task, one, other) is None


def test_a_constant_order_has_no_rank_correlation() -> None:
    found = agreement("rank", {"scores": [1, 1, 1]}, {"scores": [1, 2, 3]})
    assert found is not None
    assert (found.equal, found.similarity) == (0.0, None)


def test_chrf_ignores_white_space_and_is_bounded_for_texts_of_one_character() -> None:
    assert chrf("a b c", "abc") == 1.0
    assert chrf("a", "b") == 0.0
    assert 0.0 < chrf("ab", "ac") < 1.0


def answer(label: str, outcome: str = "ok", engine_ms: int | None = 10, **more: Any) -> Answer:
    output = {"labels": [{"label": label, "score": 1.0}]} if outcome == "ok" else None
    return Answer(outcome, output, engine_ms=engine_ms, **more)


def pair(original: Answer | None, copy: Answer, end: str = "completed") -> Pair:
    return Pair("acme", "r", "classify", original, copy, end)


def test_a_report_counts_every_copy_once_and_compares_those_that_ran() -> None:
    tally = PairTally("classify")
    for number in range(30):
        tally.add(pair(answer("1"), answer("1" if number % 3 else "2", engine_ms=20)))
    tally.add(pair(answer("1"), answer("", "failed", code="poison"), "failed"))
    tally.add(pair(answer("", "failed"), answer("1")))
    tally.add(pair(answer("1"), answer("", "expired"), "dropped"))
    tally.add(pair(None, answer("1")))
    report = tally.report()
    assert report.ended == {"completed": 32, "failed": 1, "dropped": 1}
    assert (report.pairs, report.compared, report.without_original) == (32, 30, 1)
    assert report.failed_codes == {"poison": 1}
    assert report.equal.mean == pytest.approx(2 / 3)
    assert report.answered is not None
    assert (report.answered.better, report.answered.worse, report.answered.difference) == (1, 1, 0.0)
    assert report.engine_ms is not None
    assert (report.engine_ms.ratio, report.engine_ms.low, report.engine_ms.high) == (2.0, 2.0, 2.0)
    assert report.completion_tokens is None, "a classifier writes none"


def test_a_report_of_nothing() -> None:
    report = PairTally("generate").report()
    assert (report.pairs, report.answered, report.engine_ms, report.equal.mean) == (0, None, None, None)


def test_a_ratio_of_means_covers_the_true_ratio_and_refuses_what_does_not_belong_together() -> None:
    old, new = [10.0, 20.0, 30.0, 40.0] * 3, [11.0, 24.0, 30.0, 45.0] * 3
    found = ratio_of_means(old, new)
    assert found is not None
    assert found.ratio == pytest.approx(1.1)
    assert found.low < 1.1 < found.high
    assert ratio_of_means([0.0] * 12, new) is None
    assert ratio_of_means(old[:9], new[:9]) is None, "so few say nothing about an interval"
    with pytest.raises(ValueError, match="candidate: 1 values beside 2"):
        ratio_of_means([1.0, 2.0], [1.0])
