"""Bounds of a harm that hold at every look. Pure.

A *test martingale* of a hypothesis is a positive process that starts at 1 and, if the hypothesis is true, expects no
growth. By Ville's inequality (1939) it ever exceeds 1 / a with probability a at most, however often somebody looks. For
a hypothesis with many parameters (the rates of both arms), the least over the parameters that the hypothesis allows is
below the martingale of the true ones, so that the same holds for it. The martingales of two arms multiply.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HarmBounds:
    """A measured harm, and what it is above and below; infinite where nothing is known.

    ``lower < harm`` holds at all looks together but for the error rate of the lower bound, ``harm < upper`` likewise.
    """

    harm: float
    lower: float
    upper: float


UNKNOWN = HarmBounds(math.nan, -math.inf, math.inf)


def log_mixture(hits: float, count: float, of_hits: float = 0.5, of_others: float = 0.5) -> float:
    """Log probability of one sequence with so many hits, for a rate drawn from Beta(``of_hits``, ``of_others``).

    Divided by its probability under a fixed rate it is a test martingale of that rate: Robbins' (1970) mixture for
    Bernoulli variables. It needs the counts alone. The default prior is that of Krichevsky and Trofimov (1981).
    """
    return _log_beta(hits + of_hits, count - hits + of_others) - _log_beta(of_hits, of_others)


def _log_beta(one: float, other: float) -> float:
    return math.lgamma(one) + math.lgamma(other) - math.lgamma(one + other)


def most_regret(count: float) -> float:
    """Bound of how far ``log_mixture``, with the default prior, is below the best fixed rate (Willems, Shtarkov and
    Tjalkens 1995, equation 8)."""
    return 0.5 * math.log(max(1.0, count)) + _LOG_2


def log_likelihood(hits: float, count: float, rate: float) -> float:
    """Log probability of one sequence with so many hits under this rate; minus infinity if it is impossible."""
    total = 0.0
    if hits > 0.0:
        total += hits * math.log(rate) if rate > 0.0 else -math.inf
    if count > hits:
        total += (count - hits) * math.log1p(-rate) if rate < 1.0 else -math.inf
    return total


_LOG_2 = math.log(2.0)
