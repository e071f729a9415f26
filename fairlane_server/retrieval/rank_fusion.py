"""Reciprocal rank fusion of two ranked lists. Pure.

Cormack, Clarke and Buettcher, "Reciprocal Rank Fusion outperforms Condorcet and individual Rank Learning Methods",
SIGIR 2009: a passage's score is the sum of 1 / (k + rank) over the lists that hold it, ranks counted from 1.
"""

from collections.abc import Sequence
from dataclasses import replace

from fairlane_server.retrieval.store import Found, Hit

RANK_CONSTANT = 60
"""The paper's k: how little the first places of one list count against agreement of both."""


def fused_scores(rankings: Sequence[Sequence[str]], k: int = RANK_CONSTANT) -> dict[str, float]:
    """Scores of ranked ids (best first), best first; equal scores keep the order of the first lists. An id that a list
    holds twice counts at its first place. ``k`` is above -1."""
    scores: dict[str, float] = {}
    for ranking in rankings:
        for rank, name in enumerate(dict.fromkeys(ranking), 1):
            scores[name] = scores.get(name, 0.0) + 1 / (k + rank)
    return dict(sorted(scores.items(), key=lambda entry: -entry[1]))


def fuse(found: Found, limit: int) -> tuple[Hit, ...]:
    """The best ``limit`` of both lists, with their fused scores; of the nearest alone where there is no other list."""
    lists = (found.nearest, found.matching or ())
    hits = {hit.passage_id: hit for ranked in reversed(lists) for hit in ranked}
    scores = fused_scores([[hit.passage_id for hit in ranked] for ranked in lists])
    return tuple(replace(hits[name], score=score) for name, score in list(scores.items())[: max(limit, 0)])
