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
LEAST_RESAMPLED = 10
"""A bootstrap of fewer scores would only repeat them, and give an interval that is far too narrow."""
_MOST_ENUMERATED = 12
"""Pairs whose signs are flipped in every way, 4,096 at most; those of more pairs at random."""


@dataclass(frozen=True, slots=True)
class MeanScore:
    """The mean of the scores that there are, and its interval; ``count`` is their number. Without scores the mean is
    None. Where there are too few for an interval it is everything that a mean can be."""

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
        is_exact: whether the p-value counts all outcomes, rather than random ones.
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
    1979) of at least LEAST_RESAMPLED. None is an example without a score."""
    values = _scored(scores)
    if not values.size:
        return MeanScore(None, 0.0, 1.0, 0)
    if _is_binary(values):
        low, high = wilson_interval(int(values.sum()), values.size, level)
    else:
        low, high = _interval_of_mean(values, level, seed, least=0.0)
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
    by flipping the signs of differences (Fisher 1935, section 21), each as likely as not if there is no difference. The
    interval is that of a paired bootstrap, which resamples examples, at least LEAST_RESAMPLED.

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
    low, high = _interval_of_mean(differences, level, seed, least=-1.0)
    is_binary = _is_binary(values)
    p_value = mcnemar_p_value(better, worse) if is_binary else sign_flip_p_value(differences, seed)
    is_exact = is_binary or better + worse <= _MOST_ENUMERATED
    return PairedComparison(len(pairs), better, worse, float(differences.mean()), low, high, p_value, is_exact)


def ratio_of_means(
    baseline: Sequence[float], candidate: Sequence[float], *, level: float = LEVEL, seed: int = 0
) -> RatioOfMeans | None:
    """The candidate's mean by the baseline's, of values from 0 of the same examples, with a paired bootstrap interval.
    None if the baseline's mean is 0, and of fewer than ``LEAST_RESAMPLED`` examples. Raises ValueError if the lengths
    differ, or are 0."""
    old, new = np.asarray(baseline, np.float64), np.asarray(candidate, np.float64)
    if len(old) != len(new) or not len(old):
        raise ValueError(f"candidate: {len(new)} values beside {len(old)} of the baseline")
    if len(old) < LEAST_RESAMPLED or not old.any():
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


def sign_flip_p_value(differences: npt.NDArray[np.float64], seed: int = 0) -> float:
    """Two-sided, of the hypothesis that each difference is as likely to have the other sign: exact for a few, and else
    of RESAMPLES random choices of signs with the observed one (Davison and Hinkley 1997, section 4.2)."""
    changed = differences[differences != 0]
    # Sums that differ by rounding alone are the same.
    observed = abs(changed.sum()) * (1 - 1e-9)
    if len(changed) <= _MOST_ENUMERATED:
        bits = np.arange(1 << len(changed))[:, None] >> np.arange(len(changed)) & 1
        return float((abs((2 * bits - 1) @ changed) >= observed).mean())
    random = np.random.default_rng(seed)
    # One choice at a time, as resamples.
    choices = (2 * random.integers(2, size=len(changed)) - 1 for _ in range(RESAMPLES))
    as_large = sum(abs(signs @ changed) >= observed for signs in choices)
    return float((as_large + 1) / (RESAMPLES + 1))


def _interval_of_mean(values: npt.NDArray[np.float64], level: float, seed: int, *, least: float) -> tuple[float, float]:
    """By a bootstrap; of too few values from ``least`` to 1, where a mean of scores or of differences always is."""
    if len(values) < LEAST_RESAMPLED:
        return min(least, float(values.min())), max(1.0, float(values.max()))
    return _percentiles(_resampled_means(values, seed), level)


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
