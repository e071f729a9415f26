"""Bounds of differences and ratios of means, valid at every look once there are some tens of values. Pure.

The difference of two means of independent values, times its information ``1 / variance``, behaves like a Brownian
motion with the difference as drift, whatever the sizes of the arms (Jennison and Turnbull 2000, "Group Sequential
Methods", chapter 11). A normal mixture over the drift gives bounds for all looks together (Robbins 1970; Howard et al.
2021, "Time-uniform, nonparametric, nonasymptotic confidence sequences"); with estimated variances they are asymptotic
(Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas 2024, "Time-uniform central limit theory and asymptotic confidence
sequences", the one-sided form). The scale of the mixture is the tolerance: the bounds are tightest about the time at
which a harm of that size can be told from none.

A variance has a floor, so that some equal values are no certainty: two more scores, 0 and 1, or for costs a coefficient
of variation of 1 / sqrt(count).
"""

import math

from fairlane_server.rollouts.bounds import UNKNOWN, HarmBounds
from fairlane_server.rollouts.evidence import Moments


def lost_quality_bounds(
    candidate: Moments, control: Moments, tolerance: float, levels: tuple[float, float], weights: tuple[float, float]
) -> HarmBounds:
    """By how much the candidate's mean score is lower. ``levels``: error rates of the lower and of the upper bound;
    ``weights``: how many values weigh as much as one independent value, of each arm."""
    variance = sum(
        weight * _variance_of_scores(arm) / arm.count for arm, weight in zip((candidate, control), weights, strict=True)
    )
    return _bounds(control.mean - candidate.mean, variance, tolerance, levels)


def cost_ratio_bounds(
    candidate: Moments, control: Moments, most_ratio: float, levels: tuple[float, float], weights: tuple[float, float]
) -> HarmBounds:
    """The ratio of the mean costs less 1, with bounds by the delta method on its logarithm. If the
    control costs nothing it is infinite, or unknown if the candidate does not either."""
    if control.total <= 0:
        return HarmBounds(math.inf, math.inf, math.inf) if candidate.total > 0 else UNKNOWN
    if candidate.total <= 0:
        return HarmBounds(-1.0, -1.0, -1.0)
    variance = sum(
        weight * _squared_variation(arm) / arm.count for arm, weight in zip((candidate, control), weights, strict=True)
    )
    found = _bounds(math.log(candidate.mean / control.mean), variance, math.log(most_ratio), levels)
    return HarmBounds(*(math.expm1(value) for value in (found.harm, found.lower, found.upper)))


def paired_bounds(differences: Moments, scale: float, levels: tuple[float, float]) -> HarmBounds:
    """The mean of differences of pairs, each from -1 to 1. Its variance has a floor of two more, 1 and -1, near which
    are the half cells that Agresti and Min (2005, "Simple improved confidence intervals for comparing matched
    proportions") add to a table of matched pairs. ``scale``: of the mixture. Raises ValueError without pairs."""
    if not differences.count:
        raise ValueError("differences: there are none")
    count = differences.count + 2
    mean = differences.total / count
    variance = (differences.total_of_squares + 2.0) / count - mean * mean
    return _bounds(differences.mean, variance / differences.count, scale, levels)


def _bounds(harm: float, variance: float, scale: float, levels: tuple[float, float]) -> HarmBounds:
    lower, upper = (_half_width(variance, scale, level) for level in levels)
    return HarmBounds(harm, harm - lower, harm + upper)


def _half_width(variance: float, scale: float, level: float) -> float:
    known = scale * scale / variance
    return math.sqrt(2 * variance * (1 + known) / known * math.log1p(math.sqrt(1 + known) / (2 * level)))


def _variance_of_scores(scores: Moments) -> float:
    count = scores.count + 2
    mean = (scores.total + 1.0) / count
    return (scores.total_of_squares + 1.0) / count - mean * mean


def _squared_variation(costs: Moments) -> float:
    """Square of the coefficient of variation, with its floor."""
    mean = costs.mean
    # Rounding may leave less than nothing of equal costs.
    return max(0.0, costs.total_of_squares / costs.count / (mean * mean) - 1.0) + 1.0 / costs.count
