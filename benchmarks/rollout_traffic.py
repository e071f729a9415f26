"""Requests of a candidate and its control in one step of a rollout, simulated.

Sizes are those of the trace. The engine takes the time of the simulated engine; in front of it is a queue that both
arms share, with the capacity of 1 / LOAD times the mean rate. A slower candidate multiplies both times, so the ratio of
the quantiles is known. What makes the candidate worse is known of every request, so its harm is counted, not estimated.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.trace import TraceSampler, load_trace
from benchmarks.traffic import BURST_EVERY_S, BURST_RATE, BURST_S, CALM_RATE
from fairlane_server.rollouts.evidence import LATENCY_BOUNDS_MS, OVERDUE_BUCKET, ArmEvidence, Moments
from inference_consumers.engines.protocol import SimulatedCost

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

COST = SimulatedCost(prefill_tokens_per_s=20_000, decode_tokens_per_s=50, batch_ms=20)
"""``decode_tokens_per_s``: of one request."""
LOAD = 0.7
DEADLINE_S = 30.0
FAILING = 0.005
GOOD = 0.85
"""Part of the answers with a score that have 1; the others have 0."""
SCORED = 0.5
NANOS_PER_TOKEN = 100
_MOST_REQUESTS = 120_000
_MOST_S = 24 * 3_600
_SIZES = 8_192


@dataclass(frozen=True, slots=True)
class Candidate:
    """Differences of a candidate from the champion. ``is_good``: it should be promoted."""

    name: str
    is_good: bool
    slower: float = 1.0
    failing: float = 0.0
    lost_quality: float = 0.0
    costlier: float = 1.0
    hanging: float = 0.0


CANDIDATES = (
    Candidate("equal", is_good=True),
    Candidate("better", is_good=True, slower=0.8, failing=-0.002, lost_quality=-0.02, costlier=0.9),
    Candidate("1.1 times slower", is_good=True, slower=1.1),
    Candidate("1.3 times slower", is_good=False, slower=1.3),
    Candidate("2 times slower", is_good=False, slower=2.0),
    Candidate("2 % more failures", is_good=False, failing=0.02),
    Candidate("10 % more failures", is_good=False, failing=0.1),
    Candidate("nothing but failures", is_good=False, failing=1.0),
    Candidate("5 % fewer good answers", is_good=False, lost_quality=0.05),
    Candidate("10 % fewer good answers", is_good=False, lost_quality=0.1),
    Candidate("1.3 times the cost", is_good=False, costlier=1.3),
    Candidate("5 % hang", is_good=False, hanging=0.05),
)


@dataclass(frozen=True, slots=True)
class ArmTraffic:
    """A shape of traffic.

    Attributes:
        rate_per_s: of all requests of the model, in the mean.
        bursts: three times the mean rate for 2 s in 10, half of it else.
        slow_phases: a minute in ten, in the mean, the engine takes 2.5 times as long, on both arms.
        key_correlation: of failures, scores and engine time between five requests in a row, those of one sticky key.
    """

    name: str
    rate_per_s: float = 200.0
    bursts: bool = False
    slow_phases: bool = False
    key_correlation: float = 0.0


SHAPES = (
    ArmTraffic("constant"),
    ArmTraffic("bursts", bursts=True),
    ArmTraffic("slow phases", slow_phases=True),
    ArmTraffic("conversations", key_correlation=0.1),
    ArmTraffic("low traffic", rate_per_s=2.0),
)
REQUESTS_OF_KEY = 5
_SLOW_FACTOR = 2.5
_SLOW_S, _USUAL_S = 60.0, 540.0


@dataclass(frozen=True, slots=True)
class ArmRequests:
    """One arm's requests in the order of their arrival; times in seconds from the beginning of the step.

    Attributes:
        done_s: when each is answered or overdue.
        scores: NaN where there is none.
        bad: answers that are failures or wrong because of the candidate.
        excess_s: time that they take because of the candidate.
    """

    arrived_s: Floats
    done_s: Floats
    failed: Flags
    overdue: Flags
    costs: Floats
    scores: Floats
    bad: Flags
    excess_s: Floats
    has_keys: bool

    def evidence(self, looks_s: Floats) -> Iterator[ArmEvidence]:
        """Evidence at each of these times, in order."""
        by_end = np.argsort(self.done_s, kind="stable")
        ends = np.searchsorted(self.done_s[by_end], looks_s, side="right")
        admitted = np.searchsorted(self.arrived_s, looks_s, side="right")
        buckets = np.where(self.overdue, OVERDUE_BUCKET, np.searchsorted(LATENCY_BOUNDS_MS, self._latency_ms, "right"))
        buckets, slow_or_good = buckets[by_end], (~self.failed | self.overdue)[by_end]
        has_score = ~np.isnan(self.scores)
        sums = [_running(values[by_end]) for values in (self.failed, self.costs, self.costs**2, has_score)]
        sums += [_running(np.nan_to_num(self.scores)[by_end])]
        seen: npt.NDArray[np.int64] = np.zeros(OVERDUE_BUCKET + 1, np.int64)
        start = 0
        for end, total in zip(ends.tolist(), admitted.tolist(), strict=True):
            chosen = buckets[start:end][slow_or_good[start:end]]
            seen += np.bincount(chosen, minlength=OVERDUE_BUCKET + 1)
            start = end
            failed, cost, squares, scored, score = (float(one[end]) for one in sums)
            full, rest = divmod(total, REQUESTS_OF_KEY)
            found = np.flatnonzero(seen)
            yield ArmEvidence(
                requests=total,
                failed=int(failed),
                in_flight=total - end,
                latencies=dict(zip(found.tolist(), seen[found].tolist(), strict=True)),
                cost=Moments(end, cost, squares),
                quality=Moments(int(scored), score, score),
                squared_requests_of_keys=full * REQUESTS_OF_KEY**2 + rest**2 if self.has_keys else 0,
            )

    @property
    def _latency_ms(self) -> Floats:
        return 1_000 * (self.done_s - self.arrived_s)

    def harm(self, until_s: float) -> tuple[int, float]:
        """Bad answers, and excess seconds, of the requests that arrived until then."""
        count = int(np.searchsorted(self.arrived_s, until_s, side="right"))
        return int(self.bad[:count].sum()), float(self.excess_s[:count].sum())


@dataclass(frozen=True)
class SimulatedStep:
    """Both arms in one step; ``seconds`` until the simulation ends."""

    candidate: ArmRequests
    control: ArmRequests
    seconds: int

    @cached_property
    def looks_s(self) -> Floats:
        """Every second, and later whenever there is GROWTH times the evidence of the look before."""
        arrived = np.searchsorted(self.candidate.arrived_s, np.arange(self.seconds + 1), side="right")
        looks: list[int] = []
        wanted = 1.0
        for second, count in enumerate(arrived.tolist()):
            if count >= wanted:
                looks.append(second)
                wanted = max(count + 1.0, count * GROWTH)
        return np.asarray([*looks, self.seconds], np.float64)


GROWTH = 1.03


class RolloutTraffic:
    """Draws the steps of rollouts; the same seed draws the same."""

    def __init__(self, shape: ArmTraffic, seed: int) -> None:
        self._shape = shape
        self._engine_s, self._cost_nanos = _engine_times_and_costs()
        self._random = np.random.default_rng(seed)

    def step(self, candidate: Candidate, percent: float) -> SimulatedStep:
        """A step of so many percent, until there are enough requests, or a day is over."""
        shape, random = self._shape, self._random
        arm_rate = shape.rate_per_s * percent / 100
        seconds = round(min(_MOST_S, _MOST_REQUESTS / arm_rate))
        place = np.arange(seconds)
        rates = np.ones(seconds)
        if shape.bursts:
            rates = np.where(place % BURST_EVERY_S < BURST_S, BURST_RATE, CALM_RATE)
        factors = self._phases(seconds) if shape.slow_phases else np.ones(seconds)
        # A second's work of the whole pool, in seconds; what is left of it waits (Lindley 1952).
        work = LOAD * random.poisson(rates * shape.rate_per_s) / shape.rate_per_s
        total = np.cumsum(work - 1.0)
        waits = total - np.minimum(np.minimum.accumulate(total), 0.0)
        tried = self._arm(candidate, arm_rate * rates, factors, waits)
        control = self._arm(Candidate("champion", is_good=True), arm_rate * rates, factors, waits)
        return SimulatedStep(tried, control, seconds)

    def _phases(self, seconds: int) -> Floats:
        lengths = self._random.exponential(
            np.tile((_USUAL_S, _SLOW_S), 2 + 2 * seconds // round(_USUAL_S + _SLOW_S))
        ).astype(int)
        slow = np.repeat(np.tile((1.0, _SLOW_FACTOR), len(lengths) // 2), lengths)
        return np.resize(slow, seconds)

    def _arm(self, candidate: Candidate, rates: Floats, factors: Floats, waits: Floats) -> ArmRequests:
        random = self._random
        seconds = np.repeat(np.arange(len(rates)), random.poisson(rates))
        count = len(seconds)
        arrived = np.sort(seconds + random.random(count))
        drawn = random.integers(len(self._engine_s), size=count)
        usual_s = self._engine_s[drawn] * factors[seconds] * self._key_factors(count)
        waited_s = waits[seconds] * random.random(count)
        hangs = random.random(count) < candidate.hanging
        usual_s += waited_s
        latency_s = np.where(hangs, np.inf, usual_s * candidate.slower)
        overdue = latency_s > DEADLINE_S
        draws = self._uniform_of_keys(count)
        failed = overdue | (draws < FAILING + candidate.failing)
        scored = (random.random(count) < SCORED) & ~failed
        quality_draws = self._uniform_of_keys(count)
        scores = np.where(scored, (quality_draws < GOOD - candidate.lost_quality).astype(float), np.nan)
        fails_usually = (draws < FAILING) | (usual_s > DEADLINE_S)
        made_wrong = ~failed & (quality_draws < GOOD) & (quality_draws >= GOOD - candidate.lost_quality)
        spent_s = np.minimum(latency_s, DEADLINE_S)
        return ArmRequests(
            arrived_s=arrived,
            done_s=arrived + spent_s,
            failed=failed,
            overdue=overdue,
            costs=self._cost_nanos[drawn] * candidate.costlier,
            scores=scores,
            bad=(failed & ~fails_usually) | made_wrong,
            excess_s=np.maximum(0.0, spent_s - np.minimum(usual_s, DEADLINE_S)),
            has_keys=self._shape.key_correlation > 0,
        )

    def _uniform_of_keys(self, count: int) -> Floats:
        """Uniform numbers, equal for requests of one key with the probability that makes the correlation."""
        own = self._random.random(count)
        correlation = self._shape.key_correlation
        if not correlation:
            return own
        of_key = np.repeat(self._random.random(count // REQUESTS_OF_KEY + 1), REQUESTS_OF_KEY)[:count]
        return np.where(self._random.random(count) < np.sqrt(correlation), of_key, own)

    def _key_factors(self, count: int) -> Floats:
        if not self._shape.key_correlation:
            return np.ones(count)
        logs = self._random.normal(0.0, np.sqrt(self._shape.key_correlation), count // REQUESTS_OF_KEY + 1)
        return np.exp(np.repeat(logs, REQUESTS_OF_KEY)[:count])


@cache
def _engine_times_and_costs() -> tuple[Floats, Floats]:
    """Of requests of the trace, in seconds and nano-USD."""
    sampler = TraceSampler(load_trace(), seed=0)
    sizes = [sampler.size() for _ in range(_SIZES)]
    times_s = [
        COST.prefill_seconds(size.prompt_tokens) + size.output_tokens / COST.decode_tokens_per_s for size in sizes
    ]
    return np.asarray(times_s), np.asarray([float(NANOS_PER_TOKEN * size.cost_tokens) for size in sizes])


def _running(values: Any) -> Floats:
    return np.concatenate(([0.0], np.cumsum(values, dtype=np.float64)))


BY_NAME: Mapping[str, ArmTraffic] = {shape.name: shape for shape in SHAPES}
