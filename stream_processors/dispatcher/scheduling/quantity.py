"""A positive quantity learned online: its mean, and a value that it seldom exceeds. Pure."""

from dataclasses import dataclass
from math import exp

CAUTION = 0.9
"""The quantile that admission plans with. A late answer wastes the engine time of another request that would have been
in time; a refusal wastes nothing while others wait. If being late costs nine times as much as a refusal, the best
quantile is 9 / (9 + 1) (the newsvendor's problem)."""

_FIRST_STEP = 0.5
_LEAST_STEP = 0.05
_LEAST = 1e-6
_SAMPLES_OF_A_PRIOR = 5


@dataclass(slots=True)
class Quantity:
    """Mean and ``CAUTION`` quantile of recent samples.

    The quantile is a stochastic approximation (Robbins and Monro, 1951) on a logarithmic scale, in steps as in Ma,
    Muthukrishnan and Sandler, "Frugal Streaming for Estimating Quantiles", 2013: a sample above it raises it by ``step
    x CAUTION``, one below lowers it by ``step x (1 - CAUTION)``. O(1), no samples are kept.

    Attributes:
        smoothing: weight of the newest sample in the mean, after a plain mean over the first 1 / ``smoothing``.
    """

    smoothing: float = 0.1
    samples: int = 0
    mean: float = 0.0
    cautious: float = 0.0

    def learn(self, sample: float) -> None:
        self.samples += 1
        self.mean += max(self.smoothing, 1 / self.samples) * (sample - self.mean)
        if self.samples == 1:
            self.cautious = max(sample, _LEAST)
            return
        step = max(_LEAST_STEP, _FIRST_STEP / self.samples)
        self.cautious *= exp(step * (CAUTION if sample > self.cautious else CAUTION - 1))
        self.cautious = max(self.cautious, _LEAST)

    def as_prior(self) -> "Quantity":
        """A start for a quantity expected to be alike, which its own samples soon outweigh."""
        return Quantity(self.smoothing, min(self.samples, _SAMPLES_OF_A_PRIOR), self.mean, self.cautious)
