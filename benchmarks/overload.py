"""overload: eight tenants ask for three and ten times the pool's capacity, in several shapes of load.

Sizes and bursts are those of a trace (``--trace``); the shapes are in ``traffic``, ``--shape`` runs one alone. Half of
the tenants ask for exactly the tokens they get; the others allow more, as most clients do, so that lengths must be
learned. Counted are cost tokens answered before their deadlines, beside the pool's declared speed; how long the served
waited; and how soon a refusal comes. A flash crowd asks for less than the capacity most of the time: of it, the time
until latency is as before.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from threading import Event, Thread

from benchmarks.cluster import BenchStack, cluster
from benchmarks.load import (
    WARM_UP_S,
    GeneratorLateError,
    LoadGenerator,
    Observed,
    completions,
    goodput_tokens,
    plan_arrivals,
    refusal_times_ms,
    submitted_within,
)
from benchmarks.processes import resident_bytes
from benchmarks.result import Figure, Result
from benchmarks.service_curve import jain_index, percentile, served_tokens, within
from benchmarks.simulated_pool import SimulatedPool, dispatchers
from benchmarks.trace import TRACE_FILE
from benchmarks.traffic import FLASH_S, FLASH_START_S, SHAPES, Shape, Traffic

NAME = "overload"
SECONDS = 40.0
HOW = f"{SECONDS:g} s of each shape and load, one after another on one cluster"
TENANTS = tuple(f"tenant-{number}" for number in range(1, 9))
LOADS = (3.0, 10.0)
AIM_GOODPUT, AIM_LATE, AIM_LATE_ADMITTED, AIM_GROWTH = 0.95, 0.002, 0.005, 1.1
AIM_P50, AIM_P99 = 0.35, 0.8
"""Of the deadline."""
AIM_REFUSAL_MS, AIM_REFUSAL_P99_MS = 20.0, 250.0
AIM_SHED_LATER = 0.005
AIM_CALM_AGAIN_S = 10.0
_TIMEOUT_MS = 10_000
_ANSWER_TIMEOUT_S = 60.0
_MOST_LAG_MS = 2_000.0
"""The bursts of a trace at ten times the capacity are hundreds of records in an instant. All times count from when the
broker has a record."""
_SAMPLE_S = 0.5
_SEED = 11
_MIB = 1024 * 1024

Run = dict[str, float]


def run(seconds: float = SECONDS, trace: Path = TRACE_FILE, shape: str | None = None) -> Result:
    """Every shape, or the one of that name, at both loads; a flash crowd has a load of its own."""
    shapes = [SHAPES[shape]] if shape else list(SHAPES.values())
    # Longer batches than elsewhere: what an engine rests between two of them is lost.
    pool = SimulatedPool(max_batch_size=8)
    runs: list[Run] = []
    figures: list[Figure] = []
    with cluster([*dispatchers("drr"), *pool.services()], tenants=TENANTS) as running:
        pid = running.stack.supervisor.process("dispatcher-1").pid
        assert pid is not None, "the dispatcher does not run"
        with sampled_mib(pid) as memory_mib:
            for one in shapes:
                for name, load in one.runs(LOADS):
                    measured = _measured(running, pool, Traffic(one, trace), load, seconds)
                    runs.append(measured)
                    figures += _figures(one, name, measured)
        figures += [
            Figure("largest delay of a record at the generator", max(one["generator_lag_ms"] for one in runs), "ms"),
            Figure("memory at the end divided by memory before", growth(memory_mib), "ratio", "at most", AIM_GROWTH),
            Figure("largest memory of the dispatcher", max(memory_mib), "MiB"),
        ]
    return Result(NAME, tuple(figures), tuple(runs))


def _measured(running: BenchStack, pool: SimulatedPool, traffic: Traffic, load: float, seconds: float) -> Run:
    """Once more if the generator was late: then the load was not the one that was asked for."""
    try:
        return _measure(running, pool, traffic, load, seconds)
    except GeneratorLateError as error:
        print(f"{traffic.shape.name}, {load:g} times, once more: {error}", file=sys.stderr)
        return _measure(running, pool, traffic, load, seconds)


def _measure(running: BenchStack, pool: SimulatedPool, traffic: Traffic, load: float, seconds: float) -> Run:
    arrivals = traffic.arrivals(TENANTS, load, pool.cost_tokens_per_s, WARM_UP_S + seconds, _SEED)
    records = plan_arrivals(arrivals, TENANTS[1::2], timeout_ms=_TIMEOUT_MS)
    with LoadGenerator(running.settings, TENANTS) as generator:
        generator.start(records)
        generator.wait_published(WARM_UP_S + seconds + _ANSWER_TIMEOUT_S)
        generator.wait_answered(_ANSWER_TIMEOUT_S)
        observed, interval = generator.observed(), generator.interval(seconds)
        lag_ms, started_at_ms = generator.checked_lag_ms(_MOST_LAG_MS), generator.started_at_ms
    of_interval = submitted_within(observed, interval)
    if unanswered := sum(one.replies != 1 for one in observed):
        raise RuntimeError(f"{unanswered} requests have no reply, or more than one")
    replies = [one for one in of_interval if one.outcome]
    admitted = [one for one in replies if not one.refused]
    # Nobody refused at three times the capacity is no quick refusal.
    refusals = refusal_times_ms(of_interval) or [_TIMEOUT_MS]
    # Refused that late, they had been admitted, or nearly so: a promise that was not kept.
    shed_later = sum(ms > AIM_REFUSAL_P99_MS for ms in refusal_times_ms(of_interval))
    latencies = [one.latency_ms for one in of_interval if one.served]
    late = sum(one.late for one in replies)
    served = served_tokens(within(completions(observed), interval), TENANTS)
    return {
        "load": load,
        "requests": float(len(observed)),
        "answered": float(sum(one.replies == 1 for one in observed)),
        "generator_lag_ms": lag_ms,
        "goodput": goodput_tokens(observed, interval) / (pool.cost_tokens_per_s * seconds),
        "p50": percentile(latencies, 0.5) / _TIMEOUT_MS,
        "p99": percentile(latencies, 0.99) / _TIMEOUT_MS,
        "late": late / max(1, len(replies)),
        "late_admitted": late / max(1, len(admitted)),
        "shed_later": shed_later / max(1, len(admitted) + shed_later),
        "refusal_ms": median(refusals),
        "refusal_p99_ms": percentile(refusals, 0.99),
        "refused": sum(one.refused for one in of_interval) / max(1, len(of_interval)),
        "jain": jain_index(list(served.values())),
        "calm_again_s": calm_again_s(observed, started_at_ms) if traffic.shape.is_absolute else 0.0,
    }


def calm_again_s(observed: Sequence[Observed], started_at_ms: int) -> float:
    """Seconds from the end of the flash until each second's p99 is within one and a half of that of what was served
    before the flash. A refused request counts as one that took all its time."""
    flash_ms = started_at_ms + round(1000 * FLASH_START_S)
    end_ms = flash_ms + round(1000 * FLASH_S)
    before = [one.latency_ms for one in observed if one.served and started_at_ms <= one.submitted_at_ms < flash_ms]
    most_ms = 1.5 * percentile(before, 0.99)
    by_second: defaultdict[int, list[int]] = defaultdict(list)
    for one in observed:
        if one.submitted_at_ms >= end_ms:
            by_second[(one.submitted_at_ms - end_ms) // 1000].append(one.latency_ms)
    return float(
        max((second + 1 for second, found in by_second.items() if percentile(found, 0.99) > most_ms), default=0)
    )


def _figures(shape: Shape, name: str, run: Run) -> Iterator[Figure]:
    if shape.is_absolute:
        yield Figure(f"{shape.name}: calm again after", run["calm_again_s"], "s", "at most", AIM_CALM_AGAIN_S)
    goodput = f"{name}: tokens served in time divided by capacity"
    if shape.is_absolute:
        yield Figure(goodput, run["goodput"], "ratio")
    else:
        yield Figure(goodput, run["goodput"], "ratio", "at least", AIM_GOODPUT)
    for what, key, unit, aim in (
        ("p50 of the served divided by the deadline", "p50", "ratio", AIM_P50),
        ("p99 of the served divided by the deadline", "p99", "ratio", AIM_P99),
        ("replies after their deadline", "late", "ratio", AIM_LATE),
        ("replies after their deadline, of those not refused", "late_admitted", "ratio", AIM_LATE_ADMITTED),
        ("median time to a refusal", "refusal_ms", "ms", AIM_REFUSAL_MS),
        ("p99 of the time to a refusal", "refusal_p99_ms", "ms", AIM_REFUSAL_P99_MS),
        (
            f"refused after {AIM_REFUSAL_P99_MS:g} ms, of those not refused before",
            "shed_later",
            "ratio",
            AIM_SHED_LATER,
        ),
    ):
        yield Figure(f"{name}: {what}", run[key], unit, "at most", aim)
    yield Figure(f"{name}: refused", run["refused"], "ratio")
    if not shape.giant_part:
        yield Figure(f"{name}: Jain index", run["jain"], "of 1")


def growth(samples: Sequence[float]) -> float:
    """Mean of the last quarter of the samples divided by that of the second; queues still fill during the first."""
    quarter = max(1, len(samples) // 4)
    return fmean(samples[-quarter:]) / fmean(samples[quarter : 2 * quarter] or samples[-quarter:])


@contextmanager
def sampled_mib(pid: int) -> Iterator[list[float]]:
    """The process's resident memory, twice a second; at least one sample. Raises OSError when it ends meanwhile."""
    samples: list[float] = [resident_bytes(pid) / _MIB]
    failures: list[OSError] = []
    stopping = Event()

    def sample() -> None:
        while not stopping.wait(_SAMPLE_S):
            try:
                samples.append(resident_bytes(pid) / _MIB)
            except OSError as error:
                failures.append(error)
                return

    thread = Thread(target=sample, name="memory", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stopping.set()
        thread.join()
    if failures:
        raise failures[0]
