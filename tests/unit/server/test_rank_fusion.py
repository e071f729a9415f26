"""Reciprocal rank fusion, held against its formula and what must be true of it for any lists."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane_server.retrieval.rank_fusion import RANK_CONSTANT, fuse, fused_scores
from fairlane_server.retrieval.store import Found, Hit

rankings = st.lists(st.lists(st.sampled_from("abcdefgh"), unique=True), max_size=4)


def hit(name: str, score: float = 0.0) -> Hit:
    return Hit(name, f"source of {name}", "", f"text of {name}", 3, score)


def test_the_formula() -> None:
    scores = fused_scores([["a", "b"], ["b", "c"]])
    assert list(scores) == ["b", "a", "c"]
    assert scores == pytest.approx({"b": 1 / 62 + 1 / 61, "a": 1 / 61, "c": 1 / 62})


@given(rankings)
def test_what_is_ranked_is_there_once_and_in_order_of_its_score(lists: list[list[str]]) -> None:
    scores = fused_scores(lists)
    assert set(scores) == {name for ranking in lists for name in ranking}
    values = list(scores.values())
    assert values == sorted(values, reverse=True)
    assert all(0 < value <= len(lists) / (RANK_CONSTANT + 1) for value in values)


@given(rankings)
def test_who_is_before_another_in_every_list_is_so_in_the_end(lists: list[list[str]]) -> None:
    order = list(fused_scores(lists))
    for better in order:
        for worse in order:
            both = [ranking for ranking in lists if worse in ranking]
            if better != worse and all(
                better in ranking and ranking.index(better) < ranking.index(worse) for ranking in both
            ):
                assert order.index(better) < order.index(worse)


@given(rankings, st.randoms(use_true_random=False))
def test_the_order_of_the_lists_changes_no_score(lists: list[list[str]], rng: object) -> None:
    assert fused_scores(lists[::-1]) == pytest.approx(fused_scores(lists))


@given(st.lists(st.sampled_from("abcdefgh"), unique=True))
def test_a_list_alone_keeps_its_order(ranking: Sequence[str]) -> None:
    assert list(fused_scores([ranking])) == list(ranking)
    assert list(fused_scores([ranking, []])) == list(ranking)


def test_an_id_that_is_there_twice_counts_once() -> None:
    assert fused_scores([["a", "a", "b"]]) == pytest.approx({"a": 1 / 61, "b": 1 / 62})


def test_hits_of_both_lists_become_one() -> None:
    found = Found((hit("a", 0.9), hit("b", 0.8)), (hit("b", 7.0), hit("c", 5.0)))
    fused = fuse(found, 2)
    assert [(one.passage_id, one.text, one.tokens) for one in fused] == [("b", "text of b", 3), ("a", "text of a", 3)]
    assert [one.score for one in fused] == pytest.approx([1 / 62 + 1 / 61, 1 / 61])
    assert len(fuse(found, 10)) == 3
    assert fuse(found, 0) == ()


@pytest.mark.parametrize("matching", [None, ()])
def test_without_full_text_the_nearest_stay_as_they_are(matching: tuple[Hit, ...] | None) -> None:
    found = Found((hit("b"), hit("a")), matching)
    assert [one.passage_id for one in fuse(found, 5)] == ["b", "a"]
    assert fuse(Found((), matching), 5) == ()
