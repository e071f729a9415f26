"""Calibration of a judge: how well its grades agree with people, and what its grades are worth. Pure.

Agreement is Cohen's kappa with quadratic weights (Cohen 1968) of grades and of people's ratings at the same levels: 0
is what chance gives, 1 is always the same. Its interval is a bootstrap over examples. Grades become scores by isotonic
regression of the ratings (Zadrozny and Elkan 2002): a higher grade is worth no less.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fairlane_server.evaluation.comparison import LEVEL, RESAMPLES
from fairlane_server.evaluation.judge import LEVELS

LEAST_EXAMPLES = 30
LEAST_KAPPA = 0.4
"""Moderate agreement (Landis and Koch 1977). The interval must lie above it, not the estimate alone."""
MOST_WITHOUT_VERDICT = 0.1
"""Of the examples."""


@dataclass(frozen=True, slots=True)
class RatedGrade:
    """A person's rating of an answer, from 0 to 1, and the judge's grade of it; None: no verdict."""

    rating: float
    grade: int | None


@dataclass(frozen=True, slots=True)
class JudgeAgreement:
    """How a judge agrees with people.

    Attributes:
        examples: how many have a rating; ``graded``: those of them with a verdict.
        kappa: with its interval at 95 %; None without two different ratings.
        rank_correlation: Spearman's, of ratings and grades; None where one of them is always the same.
        scores: by grade, from the first on, what an answer with it is worth.
        refusal: why the judge must not be relied on; None if it may be.
    """

    examples: int
    graded: int
    kappa: float | None
    kappa_low: float | None
    kappa_high: float | None
    rank_correlation: float | None
    scores: tuple[float, ...]
    refusal: str | None

    def score_of(self, grade: int) -> float:
        return self.scores[grade - 1]


def agreement_of(rated: Sequence[RatedGrade], *, seed: int = 0) -> JudgeAgreement:
    """The agreement of a judge on these examples. Raises ValueError without a rating."""
    if not rated:
        raise ValueError("no example has an output and a rating")
    graded = [(one.rating, one.grade) for one in rated if one.grade is not None]
    ratings = np.asarray([rating for rating, _ in graded], np.float64)
    grades = np.asarray([grade - 1 for _, grade in graded], np.int64)
    levels = np.rint(ratings * (LEVELS - 1)).astype(np.int64)
    kappa, low, high = _kappa_with_interval(levels, grades, seed)
    return JudgeAgreement(
        examples=len(rated),
        graded=len(graded),
        kappa=kappa,
        kappa_low=low,
        kappa_high=high,
        rank_correlation=_rank_correlation(ratings, grades),
        scores=_isotonic_scores(ratings, grades),
        refusal=_refusal(len(rated), len(graded), low),
    )


def weighted_kappa(one: npt.NDArray[np.int64], other: npt.NDArray[np.int64]) -> float | None:
    """Cohen's kappa with quadratic weights, of levels from 0 on; None where chance alone would always agree."""
    found = _kappas(_pairs(one, other)[None, :])[0]
    return None if np.isnan(found) else float(found)


def _pairs(one: npt.NDArray[np.int64], other: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How often each pair of levels comes, by ``one * LEVELS + other``."""
    return np.bincount(one * LEVELS + other, minlength=LEVELS * LEVELS)


def _kappas(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Of each row of ``_pairs``; NaN where chance alone would always agree."""
    pairs = counts.reshape(-1, LEVELS, LEVELS)
    place = np.arange(LEVELS)
    weights = (place[:, None] - place[None, :]) ** 2
    total = np.maximum(pairs.sum(axis=(1, 2)), 1)
    by_chance = np.einsum("ij,ni,nj->n", weights, pairs.sum(axis=2), pairs.sum(axis=1)) / total
    observed = np.einsum("ij,nij->n", weights, pairs)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(by_chance > 0, 1.0 - observed / by_chance, np.nan)


def _kappa_with_interval(
    levels: npt.NDArray[np.int64], grades: npt.NDArray[np.int64], seed: int
) -> tuple[float | None, float | None, float | None]:
    kappa = weighted_kappa(levels, grades) if np.unique(levels).size > 1 else None
    if kappa is None:
        return None, None, None
    # A resample of the examples is a draw of how often each pair of levels comes.
    pairs, count = _pairs(levels, grades), len(levels)
    drawn = np.random.default_rng(seed).multinomial(count, pairs / count, size=RESAMPLES)
    # One in which all are the same says nothing of agreement: 0.
    found = np.nan_to_num(_kappas(drawn), nan=0.0)
    low, high = np.quantile(found, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return kappa, float(low), float(high)


def _rank_correlation(ratings: npt.NDArray[np.float64], grades: npt.NDArray[np.int64]) -> float | None:
    if np.unique(ratings).size < 2 or np.unique(grades).size < 2:
        return None
    from scipy.stats import spearmanr

    return float(spearmanr(ratings, grades).statistic)


def _isotonic_scores(ratings: npt.NDArray[np.float64], grades: npt.NDArray[np.int64]) -> tuple[float, ...]:
    """By grade. One that the judge never gave lies between its neighbours; without any the scores are the grades'
    own."""
    from scipy.optimize import isotonic_regression

    seen = np.unique(grades)
    if not seen.size:
        return tuple(np.linspace(0.0, 1.0, LEVELS).tolist())
    means = [ratings[grades == grade].mean() for grade in seen]
    counts = [int((grades == grade).sum()) for grade in seen]
    fitted = isotonic_regression(means, weights=counts).x
    return tuple(np.interp(np.arange(LEVELS), seen, np.clip(fitted, 0.0, 1.0)).tolist())


def _refusal(examples: int, graded: int, low: float | None) -> str | None:
    if examples < LEAST_EXAMPLES:
        return f"{examples} rated examples; {LEAST_EXAMPLES} are needed"
    if examples - graded > MOST_WITHOUT_VERDICT * examples:
        return f"no verdict on {examples - graded} of {examples} examples"
    if low is None:
        return "all ratings are the same"
    if low < LEAST_KAPPA:
        return f"kappa may be as low as {low:.2f}; {LEAST_KAPPA:g} is needed"
    return None
