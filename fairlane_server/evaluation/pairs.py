"""Pairwise comparison of copies with their originals: the same request, answered by two versions. Pure.

Agreement says how alike two answers are, not which is better. Two runs of one version need not agree: a batch of
another size rounds otherwise, and sampling draws otherwise. A replay measures that noise.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fairlane.outcomes import Outcome, Task
from fairlane_server.evaluation.comparison import (
    MeanScore,
    PairedComparison,
    RatioOfMeans,
    compare,
    mean_score,
    ratio_of_means,
)
from fairlane_server.evaluation.copies import CopyEnd

MOST_COMPARED_CHARACTERS = 20_000
"""Of each text: its beginning is compared."""

_LONGEST_GRAM = 6


@dataclass(frozen=True, slots=True)
class Answer:
    """What one version made of a request. ``output`` is as in ``results``: text, embeddings, scores, or labels as
    {label, score}; None without an answer. ``engine_ms`` is of the run of the whole batch."""

    outcome: str
    output: Mapping[str, Any] | None = None
    code: str | None = None
    model_version: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    engine_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """A copy beside its original, None if that is not recorded. ``end`` is that of the copy."""

    tenant: str
    request_id: str
    task: str
    original: Answer | None
    copy: Answer
    end: str


@dataclass(frozen=True, slots=True)
class Agreement:
    """How alike two answers are.

    Attributes:
        equal: 1 for the same text, label, order of documents or vectors; else 0.
        similarity: from 0 to 1; None if it is not defined, as for the order of documents that all score the same.
    """

    equal: float
    similarity: float | None


def agreement(task: str, original: Mapping[str, Any], copy: Mapping[str, Any]) -> Agreement | None:
    """Agreement of two outputs of a task; None if one of them is no output of it.

    generate: similarity is the F score of character n-grams, chrF (Popović 2015, with n from 1 to 6 and beta 1);
    classify: 1 or 0 by the first label; rank: Spearman's rank correlation, 0 if negative, ties share their mean rank;
    embed: the mean cosine of the vectors, 0 if negative. Vectors are equal if their cosine is 1 but for rounding.
    """
    if task == Task.GENERATE:
        return _of_texts(original.get("text"), copy.get("text"))
    if task == Task.CLASSIFY:
        labels = _first_label(original), _first_label(copy)
        if None in labels:
            return None
        same = float(labels[0] == labels[1])
        return Agreement(same, same)
    if task == Task.RANK:
        return _of_scores(original.get("scores"), copy.get("scores"))
    return _of_vectors(original.get("embeddings"), copy.get("embeddings"))


@dataclass(frozen=True, slots=True)
class PairReport:
    """Comparison of the copies of one task with their originals.

    Attributes:
        pairs: copies that ran and whose original is recorded; only these are compared.
        compared: of them, those where both versions answered.
        ended: copies by how they ended.
        without_original: copies that ran and whose original is not recorded, yet or any more.
        equal, similarity: of the answers, where both answered.
        answered: part of the requests that were answered: of the copies less that of the originals; None without pairs.
        engine_ms, completion_tokens: mean of the copies by that of the originals, where both answered.
        failed_codes: failures of the copies by code or outcome.
    """

    task: str
    pairs: int
    compared: int
    ended: Mapping[str, int]
    without_original: int
    equal: MeanScore
    similarity: MeanScore
    answered: PairedComparison | None
    engine_ms: RatioOfMeans | None
    completion_tokens: RatioOfMeans | None
    failed_codes: Mapping[str, int]


@dataclass(slots=True)
class PairTally:
    """Pairs of one task, added one at a time: of each its numbers are kept, not its texts."""

    task: str
    ended: Counter[str] = field(default_factory=Counter)
    failed_codes: Counter[str] = field(default_factory=Counter)
    without_original: int = 0
    _agreements: list[Agreement] = field(default_factory=list)
    _answered: list[tuple[float, float]] = field(default_factory=list)
    _engine_ms: list[tuple[float, float]] = field(default_factory=list)
    _completion_tokens: list[tuple[float, float]] = field(default_factory=list)

    def add(self, pair: Pair) -> None:
        """Add a pair. A copy that was dropped is counted, and not compared."""
        self.ended[pair.end] += 1
        if pair.end == CopyEnd.DROPPED:
            return
        original, copy = pair.original, pair.copy
        if original is None:
            self.without_original += 1
            return
        answered = [one.outcome == Outcome.OK for one in (original, copy)]
        self._answered.append((float(answered[0]), float(answered[1])))
        if not answered[1]:
            self.failed_codes[copy.code or copy.outcome] += 1
        if not all(answered) or original.output is None or copy.output is None:
            return
        found = agreement(self.task, original.output, copy.output)
        if found is not None:
            self._agreements.append(found)
        if original.engine_ms is not None and copy.engine_ms is not None:
            self._engine_ms.append((original.engine_ms, copy.engine_ms))
        self._completion_tokens.append((original.completion_tokens, copy.completion_tokens))

    def report(self) -> PairReport:
        return PairReport(
            task=self.task,
            pairs=len(self._answered),
            compared=len(self._agreements),
            ended=dict(self.ended),
            without_original=self.without_original,
            equal=mean_score([one.equal for one in self._agreements]),
            similarity=mean_score([one.similarity for one in self._agreements]),
            answered=compare(*zip(*self._answered, strict=True)) if self._answered else None,
            engine_ms=_ratio(self._engine_ms),
            completion_tokens=_ratio(self._completion_tokens),
            failed_codes=dict(self.failed_codes),
        )


def _ratio(pairs: Sequence[tuple[float, float]]) -> RatioOfMeans | None:
    return ratio_of_means(*zip(*pairs, strict=True)) if pairs else None


def _first_label(output: Mapping[str, Any]) -> Any:
    labels = output.get("labels")
    return labels[0].get("label") if labels else None


def _of_texts(original: Any, copy: Any) -> Agreement | None:
    if not isinstance(original, str) or not isinstance(copy, str):
        return None
    if original == copy:
        return Agreement(1.0, 1.0)
    return Agreement(0.0, chrf(original[:MOST_COMPARED_CHARACTERS], copy[:MOST_COMPARED_CHARACTERS]))


def chrf(one: str, other: str) -> float:
    """F score of the n-grams of characters of two texts without their white space, 0 to 1, the mean over the n for
    which both have some. Symmetric. Two empty texts are alike."""
    texts = "".join(one.split()), "".join(other.split())
    if texts[0] == texts[1]:
        return 1.0
    scores = []
    for size in range(1, min(_LONGEST_GRAM, len(texts[0]), len(texts[1])) + 1):
        grams = [Counter(text[at : at + size] for at in range(len(text) - size + 1)) for text in texts]
        common = (grams[0] & grams[1]).total()
        scores.append(2 * common / (grams[0].total() + grams[1].total()))
    return math.fsum(scores) / len(scores) if scores else 0.0


def _of_scores(original: Any, copy: Any) -> Agreement | None:
    values = _matrix(original), _matrix(copy)
    if values[0] is None or values[1] is None or values[0].shape != values[1].shape or values[0].ndim != 1:
        return None
    ranks = _ranks(values[0]), _ranks(values[1])
    same = float(np.array_equal(*ranks))
    if np.ptp(ranks[0]) == 0 or np.ptp(ranks[1]) == 0:
        return Agreement(same, 1.0 if same else None)
    correlation = float(np.corrcoef(*ranks)[0, 1])
    return Agreement(same, min(1.0, max(0.0, correlation)))


def _ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Ranks from 0; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    means: npt.NDArray[np.float64] = (last - (counts + 1) / 2)[inverse]
    return means


def _of_vectors(original: Any, copy: Any) -> Agreement | None:
    one, other = _matrix(original), _matrix(copy)
    if one is None or other is None or one.shape != other.shape or one.ndim != 2:
        return None
    lengths = np.linalg.norm(one, axis=1), np.linalg.norm(other, axis=1)
    if not (lengths[0].all() and lengths[1].all()):
        return None
    cosines = np.einsum("ij,ij->i", one / lengths[0][:, None], other / lengths[1][:, None])
    mean = float(cosines.mean())
    return Agreement(float(bool(cosines.min() >= _SAME_COSINE)), min(1.0, max(0.0, mean)))


_SAME_COSINE = 1 - 1e-6
"""Vectors of single precision differ by as much in two batches."""


def _matrix(value: Any) -> npt.NDArray[np.float64] | None:
    """The numbers as an array; None if they are none, ragged, not finite, or so large that a length overflows."""
    if not value:
        return None
    try:
        found = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        return None
    return found if found.size and bool((np.abs(found) <= _LARGEST).all()) else None


_LARGEST = 1e150
