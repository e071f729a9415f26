"""Confidence intervals of mean scores, and comparisons of two versions on the same examples. Pure.

For one look at a finished run. What is looked at again and again, as a rollout is, needs the bounds in ``rollouts``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

RESAMPLES = 2_000
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class MeanScore:
    """The mean of the scores that there are, and its interval; ``count`` is their number. Without scores the mean is
    None and the interval everything."""

    mean: float | None
    low: float
    high: float
    count: int


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """A candidate beside a baseline on the examples that both have a score of.

    Attributes:
        pairs: their number.
        better: those where the candidate's score is higher; ``worse``: lower.
        difference: mean of candidate less baseline, with its interval.
        p_value: of the hypothesis that there is no difference, two-sided.
        is_exact: McNemar's exact test of scores of 0 and 1; else a bootstrap.
    """

    pairs: int
    better: int
    worse: int
    difference: float
    low: float
    high: float
    p_value: float
    is_exact: bool


@dataclass(frozen=True, slots=True)
class RatioOfMeans:
    """A candidate's mean of some positive value, divided by the baseline's on the same examples, and its interval."""

    pairs: int
    ratio: float
    low: float
    high: float


def mean_score(scores: Sequence[float | None], *, level: float = LEVEL, seed: int = 0) -> MeanScore:
    """The mean with Wilson's interval (1927) if all scores are 0 or 1, and else a bootstrap percentile interval (Efron
    1979). None is an example without a score."""
    values = _scored(scores)
    if not values.size:
        return MeanScore(None, 0.0, 1.0, 0)
    if _is_binary(values):
        low, high = wilson_interval(int(values.sum()), values.size, level)
    else:
        low, high = _percentiles(_resampled_means(values, seed), level)
    return MeanScore(float(values.mean()), low, high, values.size)


def wilson_interval(hits: int, count: int, level: float = LEVEL) -> tuple[float, float]:
    """Of a proportion. Raises ValueError without any."""
    if not 0 <= hits <= count or not count:
        raise ValueError(f"hits: {hits} of {count} is no proportion")
    z = NormalDist().inv_cdf((1 + level) / 2)
    rate, weight = hits / count, z * z / count
    middle = (rate + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(rate * (1 - rate) / count + weight / (4 * count))
    return max(0.0, min(rate, middle - half)), min(1.0, max(rate, middle + half))


def compare(
    baseline: Sequence[float | None], candidate: Sequence[float | None], *, level: float = LEVEL, seed: int = 0
) -> PairedComparison:
    """Compare scores of the same examples, in the same order: scores of 0 and 1 by McNemar's exact test (1947), others
    by a paired bootstrap, which resamples examples.

    Raises ValueError if there is no example with both scores, or the lengths differ.
    """
    if len(baseline) != len(candidate):
        raise ValueError(f"candidate: {len(candidate)} scores beside {len(baseline)} of the baseline")
    pairs = [(old, new) for old, new in zip(baseline, candidate, strict=True) if old is not None and new is not None]
    if not pairs:
        raise ValueError("no example has a score of both")
    values = np.asarray(pairs, np.float64)
    differences = values[:, 1] - values[:, 0]
    better, worse = int((differences > 0).sum()), int((differences < 0).sum())
    means = _resampled_means(differences, seed)
    low, high = _percentiles(means, level)
    is_exact = _is_binary(values)
    p_value = mcnemar_p_value(better, worse) if is_exact else _bootstrap_p_value(means)
    return PairedComparison(len(pairs), better, worse, float(differences.mean()), low, high, p_value, is_exact)


def ratio_of_means(
    baseline: Sequence[float], candidate: Sequence[float], *, level: float = LEVEL, seed: int = 0
) -> RatioOfMeans | None:
    """The candidate's mean by the baseline's, of values from 0 of the same examples, with a paired bootstrap interval.
    None if the baseline's mean is 0. Raises ValueError if the lengths differ, or are 0."""
    old, new = np.asarray(baseline, np.float64), np.asarray(candidate, np.float64)
    if len(old) != len(new) or not len(old):
        raise ValueError(f"candidate: {len(new)} values beside {len(old)} of the baseline")
    if not old.any():
        return None
    random, count = np.random.default_rng(seed), len(old)
    ratios = np.empty(RESAMPLES)
    for number in range(RESAMPLES):
        chosen = random.integers(count, size=count)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios[number] = new[chosen].mean() / old[chosen].mean()
    # A resample of zeros of the baseline alone says nothing.
    low, high = _percentiles(ratios[np.isfinite(ratios)], level)
    return RatioOfMeans(count, float(new.mean() / old.mean()), low, high)


def mcnemar_p_value(better: int, worse: int) -> float:
    """Two-sided, exact: of the examples on which two versions differ, as many are better as a fair coin shows heads."""
    changed, fewer = better + worse, min(better, worse)
    logs = (
        math.lgamma(changed + 1) - math.lgamma(hits + 1) - math.lgamma(changed - hits + 1) - changed * math.log(2)
        for hits in range(fewer + 1)
    )
    return min(1.0, 2 * math.fsum(math.exp(one) for one in logs))


def _bootstrap_p_value(means: npt.NDArray[np.float64]) -> float:
    # The one more is the observed sample itself (Davison and Hinkley 1997, section 4.2).
    smaller = min(int((means <= 0).sum()), int((means >= 0).sum()))
    return min(1.0, 2 * (smaller + 1) / (len(means) + 1))


def _resampled_means(values: npt.NDArray[np.float64], seed: int) -> npt.NDArray[np.float64]:
    random = np.random.default_rng(seed)
    count = len(values)
    # One resample at a time: all at once would take 1.5 GiB for 100,000 scores.
    return np.asarray([values[random.integers(count, size=count)].mean() for _ in range(RESAMPLES)])


def _percentiles(means: npt.NDArray[np.float64], level: float) -> tuple[float, float]:
    low, high = np.quantile(means, ((1 - level) / 2, (1 + level) / 2))
    return float(low), float(high)


def _scored(scores: Sequence[float | None]) -> npt.NDArray[np.float64]:
    return np.asarray([value for value in scores if value is not None], np.float64)


def _is_binary(values: npt.NDArray[np.float64]) -> bool:
    return bool(np.isin(values, (0.0, 1.0)).all())
