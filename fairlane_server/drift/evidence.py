"""Evidence that blocks of requests are farther from a reference than blocks used to be, at every look. Pure.

Each block has a score, its distance from the reference. The rank of a score among the scores before it, with ties
broken at random, is a conformal p-value: while blocks are exchangeable, these are independent and uniform (Vovk,
Gammerman and Shafer 2022, "Algorithmic Learning in a Random World", chapter 8). A bet on small ones multiplies its
stake by ``f(p)``, whose mean is then 1. The Shiryaev-Roberts statistic ``R = (R + 1) f(p)`` starts a new bet of 1 with
every block, since the change may come at any time. ``R`` less the number of blocks is a martingale. So alarms at
``R >= A``, after each of which it starts at 0 again, number at most one in A blocks on average (Shin, Ramdas and
Rinaldo 2024, "E-detectors"). Expected numbers add up, however streams depend on one another.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

_BINS_PER_DOUBLING = 16
_LEAST_SCORE = 2.0**-20

EXPONENTS = (0.2, 0.5)
"""Of the bets: the smaller one wins most by scores that are the largest so far, the other one by scores that are rather
large."""
LEAST_P = 1 / 200
"""Smaller p-values win no more than this one, so that a few strange blocks are not enough for an alarm."""


def score_bin(score: float) -> int:
    """The bin of a score, which is not negative. Scores of a bin count as equal: ranks of bins are as exact as those of
    scores, and need a bounded memory."""
    return math.floor(_BINS_PER_DOUBLING * math.log2(max(score, _LEAST_SCORE)))


def p_value(earlier: Mapping[int, int], score: int, chance: float) -> float:
    """The rank of a score among itself and the earlier ones, from above, as a part of them; above 0.

    Args:
        earlier: number of scores by bin.
        score: the bin of the new one.
        chance: uniform on (0, 1], independent of everything; orders equal scores.
    """
    larger = sum(count for one, count in earlier.items() if one > score)
    return (larger + chance * (earlier.get(score, 0) + 1)) / (sum(earlier.values()) + 1)


def log_bet(p: float, exponent: float) -> float:
    """Logarithm of the bet ``f(p)``, ``exponent * p ** (exponent - 1)`` down to ``LEAST_P`` and constant below; scaled
    so that its mean is 1 for a uniform p."""
    mean = 1.0 - (1.0 - exponent) * LEAST_P**exponent
    return math.log(exponent / mean) + (exponent - 1.0) * math.log(max(p, LEAST_P))


MOST_LOG_BET = max(log_bet(0.0, one) for one in EXPONENTS)
"""By how much the logarithm of the evidence grows in a block at most."""


@dataclass(frozen=True, slots=True)
class DriftEvidence:
    """The Shiryaev-Roberts statistic of each bet, and where the bet that leads began.

    Attributes:
        logs: logarithm of the statistic, by bet; minus infinity at the start.
        gains: logarithm of what the best single bet has won, by bet: Page's (1954) cumulative sum.
        began_ms: the beginning of the first block of that bet, which estimates the time of the change.
    """

    logs: tuple[float, ...] = (-math.inf,) * len(EXPONENTS)
    gains: tuple[float, ...] = (0.0,) * len(EXPONENTS)
    began_ms: tuple[int, ...] = (0,) * len(EXPONENTS)

    @property
    def log(self) -> float:
        """Logarithm of the mean of the statistics, which has the same rate of false alarms as each."""
        largest = max(self.logs)
        if largest == -math.inf:
            return largest
        return largest + math.log(sum(math.exp(one - largest) for one in self.logs) / len(self.logs))

    @property
    def changed_at_ms(self) -> int:
        """The estimated time of the change, if there was one."""
        return self.began_ms[max(range(len(self.logs)), key=self.logs.__getitem__)]

    def after(self, p: float, began_ms: int) -> "DriftEvidence":
        """With one more block, which began then."""
        bets = [log_bet(p, exponent) for exponent in EXPONENTS]
        return DriftEvidence(
            tuple(_log_of_one_more(log) + bet for log, bet in zip(self.logs, bets, strict=True)),
            tuple(max(0.0, gain) + bet for gain, bet in zip(self.gains, bets, strict=True)),
            tuple(
                began_ms if gain <= 0.0 else since_ms for gain, since_ms in zip(self.gains, self.began_ms, strict=True)
            ),
        )


NO_EVIDENCE = DriftEvidence()


def _log_of_one_more(log: float) -> float:
    """Logarithm of 1 + exp(log)."""
    return math.log1p(math.exp(log)) if log < 0.0 else log + math.log1p(math.exp(-log))
