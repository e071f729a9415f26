"""Evidence about one arm of a rollout in one step: sums and counts that one SQL query gives. Pure.

Nothing depends on the order of the requests. Evidence of disjoint sets of requests adds up.

Latencies are counted in buckets with fixed bounds, 32 in each doubling: a latency is known to 2.2 %. Bucket ``b`` holds
``LATENCY_BOUNDS_MS[b - 1] <= latency < LATENCY_BOUNDS_MS[b]``, as ``width_bucket(latency_ms, bounds)`` of Postgres.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

_BUCKETS_PER_DOUBLING = 32
_DOUBLINGS = 20
LATENCY_BOUNDS_MS: tuple[float, ...] = tuple(
    2 ** (number / _BUCKETS_PER_DOUBLING) for number in range(_BUCKETS_PER_DOUBLING * _DOUBLINGS + 1)
)
"""From 1 ms to 2^20 ms, which is 17 minutes."""
LATENCY_GROWTH = 2 ** (1 / _BUCKETS_PER_DOUBLING)
"""Ratio of a bound to the one below it."""
OVERDUE_BUCKET = len(LATENCY_BOUNDS_MS)
"""The last bucket; requests that expired or are overdue belong here, whatever time they took."""


def latency_bucket(latency_ms: float) -> int:
    """The bucket of a latency, from 0 to OVERDUE_BUCKET."""
    return bisect_right(LATENCY_BOUNDS_MS, latency_ms)


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, sum and sum of squares of a value of requests.

    Raises ValueError, with the field and the reason, for sums that no values have.
    """

    count: int = 0
    total: float = 0.0
    total_of_squares: float = 0.0

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"count: {self.count} is less than 0")
        # Cauchy-Schwarz, but for rounding.
        if self.total**2 > self.count * self.total_of_squares * (1 + 1e-9) + 1e-9:
            raise ValueError(
                f"total_of_squares: {self.total_of_squares} is too small for {self.count} values of this sum"
            )

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """The moments of these values."""
        listed = list(values)
        return cls(len(listed), sum(listed), sum(value * value for value in listed))

    @property
    def mean(self) -> float:
        """0 without values."""
        return self.total / self.count if self.count else 0.0

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(
            self.count + other.count, self.total + other.total, self.total_of_squares + other.total_of_squares
        )


@dataclass(frozen=True, slots=True)
class ArmEvidence:
    """What is known of one arm's requests in a step.

    Raises ValueError, with the field and the reason, for counts that contradict one another.

    Attributes:
        requests: all that were admitted to the arm.
        failed: those that failed, expired, or are unanswered behind their deadlines. The last count at once: a
            candidate that hangs fails.
        in_flight: those that are unanswered before their deadlines.
        latencies: how many requests are in each bucket. The overdue ones belong to OVERDUE_BUCKET; requests that
            failed in another way may be left out, since fast failures say nothing of speed.
        cost: nano-USD of each request.
        quality: scores from 0 to 1, of the requests that have one.
        squared_requests_of_keys: the sum, over the sticky keys, of the square of their requests. 0: every request has
            a key of its own.
    """

    requests: int = 0
    failed: int = 0
    in_flight: int = 0
    latencies: Mapping[int, int] = field(default_factory=dict)
    cost: Moments = Moments()
    quality: Moments = Moments()
    squared_requests_of_keys: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "failed", "in_flight"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: {getattr(self, name)} is less than 0")
        if self.failed + self.in_flight > self.requests:
            raise ValueError(f"requests: {self.requests} are fewer than those that failed or are in flight")
        if any(not 0 <= bucket <= OVERDUE_BUCKET or count < 0 for bucket, count in self.latencies.items()):
            raise ValueError(f"latencies: a bucket is not from 0 to {OVERDUE_BUCKET}, or its count is less than 0")
        if sum(self.latencies.values()) > self.answered:
            raise ValueError(f"latencies: more than the {self.answered} requests that are not in flight")
        if self.cost.total < 0:
            raise ValueError(f"cost: a sum of {self.cost.total} is less than 0")
        if not 0 <= self.quality.total <= self.quality.count:
            raise ValueError("quality: a score is not from 0 to 1")
        if self.squared_requests_of_keys and not (
            self.requests <= self.squared_requests_of_keys <= self.requests * self.requests
        ):
            raise ValueError(
                f"squared_requests_of_keys: {self.squared_requests_of_keys} is impossible for {self.requests} requests"
            )

    @property
    def answered(self) -> int:
        """Requests that are not in flight."""
        return self.requests - self.in_flight

    def __add__(self, other: "ArmEvidence") -> "ArmEvidence":
        """The evidence of both. Sticky keys must not be in both."""
        return ArmEvidence(
            self.requests + other.requests,
            self.failed + other.failed,
            self.in_flight + other.in_flight,
            Counter(self.latencies) + Counter(other.latencies),
            self.cost + other.cost,
            self.quality + other.quality,
            self._squared_requests() + other._squared_requests(),
        )

    def design_effect(self, correlation: float) -> float:
        """How many requests weigh as much as one independent request, for this correlation between requests of one
        sticky key (Kish 1965, "Survey Sampling", section 5.4, with keys of unequal size). At least 1."""
        if not self.requests:
            return 1.0
        return 1.0 + correlation * (self._squared_requests() / self.requests - 1.0)

    def _squared_requests(self) -> int:
        return self.squared_requests_of_keys or self.requests
