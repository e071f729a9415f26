"""Bounds of the ratio of two latency quantiles from histograms, valid at every look, for any distribution. Pure.

If the candidate's quantile is at most ``r`` times the control's, there is a latency ``x``, the control's quantile, such
that the control exceeds ``x`` in no less than 5 % of its requests (for the quantile 0.95), and the candidate ``r x`` in
no more. For each ``x`` both parts are tested with a beta-binomial martingale of the counts above it, and the product
counts; ``x`` is unknown, so the least product over all ``x`` does (Howard and Ramdas 2022, "Sequential estimation of
quantiles with applications to A/B testing and best-arm identification", test the same with confidence sequences of
each quantile). All ``x`` in a bucket are judged by the bounds of the bucket that prove less, so buckets cost power of
one bucket's width, and never validity.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate

from fairlane_server.rollouts.bounds import UNKNOWN, HarmBounds, log_likelihood, log_mixture, most_regret
from fairlane_server.rollouts.evidence import LATENCY_BOUNDS_MS, LATENCY_GROWTH, OVERDUE_BUCKET

_PRIOR_REQUESTS = 200.0
"""Of the half of the mixture that is about the quantile's rate: a deviation of 0.015 for the quantile 0.95."""
_LOG_2 = math.log(2.0)

Histogram = Sequence[float]
"""Requests by bucket, all of them; not whole numbers where requests weigh less than one."""


def quantile_ms(histogram: Histogram, quantile: float) -> float:
    """The upper end of the bucket that has the quantile, of a histogram that is not empty; infinite for the last."""
    passed = list(accumulate(histogram))
    bucket = min(bisect_right(passed, quantile * passed[-1]), OVERDUE_BUCKET)
    return LATENCY_BOUNDS_MS[bucket] if bucket < OVERDUE_BUCKET else math.inf


def ratio_bounds(
    candidate: Histogram,
    control: Histogram,
    quantile: float,
    lower_level: float,
    upper_level: float,
    missing: tuple[float, float] = (0.0, 0.0),
) -> HarmBounds:
    """The measured ratio of the quantiles, candidate's by control's, less 1, and its bounds.

    ``missing``: requests of the candidate and of the control, of no bucket, that count as the slowest where that makes
    the bound weaker.
    """
    if not sum(candidate) or not sum(control):
        return UNKNOWN
    of_candidate, of_control = missing
    exceeding = 1.0 - quantile
    lower = _least_steps(_above(candidate, 0.0), _above(control, of_control), exceeding, lower_level)
    upper = _least_steps(_above(control, 0.0), _above(candidate, of_candidate), exceeding, upper_level)
    slow, usual = quantile_ms(candidate, quantile), quantile_ms(control, quantile)
    ratio = 1.0 if slow == usual else slow / usual
    return HarmBounds(ratio - 1.0, _grown(lower) - 1.0, _grown(-upper) - 1.0)


def _grown(steps: float) -> float:
    return math.inf if steps == math.inf else LATENCY_GROWTH**steps


def _above(histogram: Histogram, missing: float) -> list[float]:
    """Requests in each bucket and those behind it."""
    above = list(accumulate(reversed(histogram), initial=missing))
    return above[:0:-1]


def _least_steps(slow: Sequence[float], fast: Sequence[float], exceeding: float, level: float) -> float:
    """By how many buckets the quantile of ``slow`` is at least above that of ``fast``, but for an error rate of
    ``level``; minus infinity if nothing is known. Both are counts of requests in each bucket and behind it."""
    needed = math.log(1.0 / level)
    exceeds = _evidence(slow[0], exceeding, more=True)
    keeps = _evidence(fast[0], exceeding, more=False)
    enough = -most_regret(slow[0]) - _LOG_2
    if needed - keeps(fast[OVERDUE_BUCKET]) > enough:
        # The fast quantile may be behind all bounds.
        return -math.inf
    # In the buckets before this one ``keeps`` proves no more, and the same number of steps is met more easily.
    bucket = bisect_right(fast, -exceeding * fast[0], key=lambda count: -count) - 1
    place = _last_with(slow, exceeds, needed - keeps(fast[bucket]))
    least = math.inf
    while place >= 0 and (wanted := needed - keeps(fast[bucket])) > enough:
        while place < OVERDUE_BUCKET and exceeds(slow[place + 1]) >= wanted:
            place += 1
        least = min(least, place - bucket - 1)
        bucket += 1
    return least if place >= 0 else -math.inf


def _last_with(above: Sequence[float], evidence: Callable[[float], float], wanted: float) -> int:
    """The last bucket in which the evidence of the count is at least that, or -1."""
    return bisect_right(above, -wanted, key=lambda count: -evidence(count)) - 1


def _evidence(requests: float, exceeding: float, *, more: bool) -> Callable[[float], float]:
    """Logarithm of a martingale against "at most (``more``: at least) this part exceeds", by the count that does. Where
    the count agrees with that, a lower bound of it: so the evidence is monotonic in the count.

    The mixture is half of the default one, for large differences, and half of one about the rate in question, which
    needs fewer requests for small ones.
    """
    least = -most_regret(requests) - _LOG_2
    near = (_PRIOR_REQUESTS * exceeding, _PRIOR_REQUESTS * (1.0 - exceeding))

    @cache
    def of(count: float) -> float:
        if (count > exceeding * requests) != more or count == exceeding * requests:
            return least
        far, close = log_mixture(count, requests), log_mixture(count, requests, *near)
        mixture = max(far, close) + math.log1p(math.exp(-abs(far - close))) - _LOG_2
        return max(least, mixture - log_likelihood(count, requests, exceeding))

    return of
