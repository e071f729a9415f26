"""Bounds of the difference of two failure rates, valid at every look and for any number of requests. Pure.

The hypothesis "the candidate's rate is higher by d" is tested with the product of both arms' beta-binomial martingales
(``bounds.log_mixture``) divided by the largest likelihood of any two rates with this difference (Turner and Grünwald
2023, "Exact anytime-valid confidence intervals for contingency tables and beyond"; Wasserman, Ramdas and Balakrishnan
2020, "Universal inference", section 8). The bounds are the smallest and largest differences that are not rejected. No
approximation is used: ten failures of ten beside none of ten are enough for a verdict.
"""

import math
from dataclasses import dataclass

from fairlane_server.rollouts.bounds import UNKNOWN, HarmBounds, log_likelihood, log_mixture

_HALVINGS = 16
_BISECTIONS = 60
_LEAST_RANGE = 1e-6
_MARGIN = 1e-12
"""Distance of the rates from 0 and 1, so that the gradient is finite."""
_MOST_MISSING = 1e-3
"""Of a log-likelihood."""


@dataclass(frozen=True, slots=True)
class FailureCount:
    """Failures of so many requests; not whole numbers where requests weigh less than one."""

    failed: float
    requests: float

    @property
    def rate(self) -> float:
        return self.failed / self.requests


def lower_bound(candidate: FailureCount, control: FailureCount, level: float) -> float:
    """The candidate's rate is higher than the control's by more than this, but for an error rate of ``level``; from
    -1 to 1."""
    needed = math.log(1.0 / level)
    if not candidate.requests or not control.requests:
        return -1.0
    known = log_mixture(candidate.failed, candidate.requests) + log_mixture(control.failed, control.requests)
    # The likelihood falls on both sides of the measured difference.
    rejected, open_ = -1.0, candidate.rate - control.rate
    if open_ - rejected < _LEAST_RANGE:
        # All of the control failed, and none of the candidate's.
        return rejected
    for _ in range(_HALVINGS):
        middle = (rejected + open_) / 2
        if known - largest_log_likelihood(candidate, control, middle) >= needed:
            rejected = middle
        else:
            open_ = middle
    return rejected


def difference_bounds(
    candidate: FailureCount,
    control: FailureCount,
    lower_level: float,
    upper_level: float,
    missing: tuple[float, float] = (0.0, 0.0),
) -> HarmBounds:
    """The measured difference of the rates, candidate's less control's, and its bounds.

    ``missing``: requests of the candidate and of the control that count as failed where that makes the bound weaker.
    """
    if not candidate.requests or not control.requests:
        return UNKNOWN
    of_candidate, of_control = missing
    # Requests that weigh less than one do not add up exactly.
    with_missing = FailureCount(min(candidate.requests, candidate.failed + of_candidate), candidate.requests)
    control_with_missing = FailureCount(min(control.requests, control.failed + of_control), control.requests)
    # Where none failed a first failure can sharpen a bound a little: the mixture is farther from the best rate there.
    return HarmBounds(
        candidate.rate - control.rate,
        min(lower_bound(candidate, one, lower_level) for one in {control, control_with_missing}),
        max(-lower_bound(control, one, upper_level) for one in {candidate, with_missing}),
    )


def largest_log_likelihood(candidate: FailureCount, control: FailureCount, difference: float) -> float:
    """Of both counts under any two rates with this difference; never less, and hardly more.

    The best rate of the control is the root of a cubic (Miettinen and Nurminen 1985, "Comparative analysis of two
    rates", appendix 1). Near 0 and 1 its formula loses digits, and a likelihood that is too small would make a false
    verdict: so the gradient there bounds what is missing, and is followed to its zero if that is much.
    """
    low, high = max(0.0, -difference), min(1.0, 1.0 - difference)
    margin = min(_MARGIN, (high - low) / 4)
    low_inside, high_inside = low + margin, high - margin

    def gradient(rate: float) -> float:
        return _gradient(candidate, rate + difference) + _gradient(control, rate)

    rate = min(high_inside, max(low_inside, _root(candidate, control, difference)))
    slope = gradient(rate)
    if abs(slope) * (high - low) > _MOST_MISSING:
        for _ in range(_BISECTIONS):
            if slope > 0:
                low_inside = rate
            else:
                high_inside = rate
            rate = (low_inside + high_inside) / 2
            slope = gradient(rate)
    # The logarithm is concave: it is below its tangent.
    missing = max(slope * (low - rate), slope * (high - rate))
    found = log_likelihood(candidate.failed, candidate.requests, rate + difference)
    return found + log_likelihood(control.failed, control.requests, rate) + missing


def _gradient(count: FailureCount, rate: float) -> float:
    return count.failed / rate - (count.requests - count.failed) / (1.0 - rate)


def _root(candidate: FailureCount, control: FailureCount, difference: float) -> float:
    requests = candidate.requests + control.requests
    failed = candidate.failed + control.failed
    square = (candidate.requests + 2 * control.requests) * difference - requests - failed
    linear = (control.requests * difference - requests - 2 * control.failed) * difference + failed
    constant = control.failed * difference * (1 - difference)
    third = square / (3 * requests)
    q = third**3 - linear * square / (6 * requests**2) + constant / (2 * requests)
    p = math.copysign(math.sqrt(max(0.0, third**2 - linear / (3 * requests))), q)
    angle = (math.pi + math.acos(min(1.0, max(-1.0, q / p**3)))) / 3 if p else 0.0
    return 2 * p * math.cos(angle) - third
