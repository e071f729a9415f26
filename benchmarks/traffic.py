"""Shapes of load over time, for any trace: how many requests come when, from whom, and how long their answers are.

Arrivals keep the bursts of the trace: its gaps are drawn as times of a clock that runs fast where the shape asks for
much and slowly where it asks for little. All shapes but the flash crowd have the same mean rate.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from benchmarks.trace import TRACE_FILE, RequestSize, TraceSampler, load_trace

_STEP_S = 0.01
BURST_EVERY_S, BURST_S, BURST_RATE, CALM_RATE = 10.0, 2.0, 3.0, 0.5
SAWTOOTH_S = 20.0
GIANT_PART = 0.9
"""Part of all requests that one tenant sends."""
FLASH_START_S, FLASH_S, FLASH_LOAD, CALM_LOAD = 10.0, 5.0, 20.0, 0.7
"""Loads in parts of the capacity."""


def _constant(_at_s: float, _seconds: float) -> float:
    return 1.0


def _burst(at_s: float, _seconds: float) -> float:
    return BURST_RATE if at_s % BURST_EVERY_S < BURST_S else CALM_RATE


def _sawtooth(at_s: float, _seconds: float) -> float:
    return 2 * (at_s % SAWTOOTH_S) / SAWTOOTH_S


def _flash_crowd(at_s: float, _seconds: float) -> float:
    return FLASH_LOAD if FLASH_START_S <= at_s < FLASH_START_S + FLASH_S else CALM_LOAD


@dataclass(frozen=True, slots=True)
class Shape:
    """A shape of load.

    Attributes:
        rate: of the mean rate, at a time in seconds of so many seconds; of the capacity where ``is_absolute``.
        giant_part: what the first tenant sends of everything; 0: as much as each other.
        answer_factors: by which answers are longer than in the trace at the beginning and at the end.
    """

    name: str
    rate: Callable[[float, float], float] = _constant
    is_absolute: bool = False
    giant_part: float = 0.0
    answer_factors: tuple[float, float] = (1.0, 1.0)

    def runs(self, loads: Sequence[float]) -> list[tuple[str, float]]:
        """The name of a run at each of these loads; of a shape that is absolute there is one."""
        if self.is_absolute:
            return [(self.name, loads[0])]
        return [(f"{self.name}, {load:g} times", load) for load in loads]


SHAPES: Mapping[str, Shape] = {
    shape.name: shape
    for shape in (
        # The bursts of the trace alone.
        Shape("constant"),
        # 2 s in 10 six times the rate of the others.
        Shape("burst", _burst),
        # From nothing to twice the mean within 20 s, again and again.
        Shape("sawtooth", _sawtooth),
        # 0.7 of the capacity, and for 5 s twenty times of it.
        Shape("flash-crowd", _flash_crowd, is_absolute=True),
        # One tenant sends nine tenths of everything.
        Shape("one-giant", giant_part=GIANT_PART),
        # Answers grow from half to twice their length.
        Shape("drifting-lengths", answer_factors=(0.5, 2.0)),
    )
}


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that is due."""

    at_s: float
    tenant: str
    size: RequestSize


@dataclass(frozen=True, slots=True)
class Traffic:
    """A trace and a shape. The same seed gives the same arrivals."""

    shape: Shape
    trace: Path = TRACE_FILE

    def arrivals(
        self, tenants: Sequence[str], load: float, capacity_tokens_per_s: float, seconds: float, seed: int
    ) -> list[Arrival]:
        """Requests of these tenants for so many seconds, in order, that together ask for ``load`` times the capacity in
        the mean."""
        sampler = TraceSampler(load_trace(self.trace), seed)
        shape = self.shape
        whole_per_s = (1.0 if shape.is_absolute else load) * capacity_tokens_per_s / sampler.mean_cost_tokens
        found: list[Arrival] = []
        for number, tenant in enumerate(tenants):
            part = 1 / len(tenants)
            if shape.giant_part:
                part = (1 - shape.giant_part) / (len(tenants) - 1) if number else shape.giant_part
            times = warped(sampler, shape.rate, whole_per_s * part, seconds)
            found += [Arrival(at_s, tenant, self._size(sampler, at_s / seconds)) for at_s in times]
        return sorted(found, key=lambda one: one.at_s)

    def _size(self, sampler: TraceSampler, part: float) -> RequestSize:
        size = sampler.size()
        first, last = self.shape.answer_factors
        factor = first + (last - first) * part
        return size if factor == 1 else sampler.bounded(size.prompt_tokens, round(size.output_tokens * factor))


def warped(
    sampler: TraceSampler, rate: Callable[[float, float], float], mean_per_s: float, seconds: float
) -> list[float]:
    """Arrival times in seconds with ``mean_per_s`` times the relative rate at each moment."""
    steps = round(seconds / _STEP_S)
    passed = list(accumulate((rate(step * _STEP_S, seconds) * _STEP_S for step in range(steps)), initial=0.0))
    times: list[float] = []
    for clock_s in sampler.arrivals(mean_per_s, passed[-1]):
        step = bisect_left(passed, clock_s, 1)
        width = passed[step] - passed[step - 1]
        times.append((step - 1 + (clock_s - passed[step - 1]) / width) * _STEP_S)
    return times
