"""overload: eight tenants ask for three times the pool's capacity, sizes and bursts as in the trace.

Counted are cost tokens answered before their deadlines, beside the pool's declared speed; the time to a refusal; and
the growth of the dispatcher's memory.
"""

from collections.abc import Sequence
from statistics import fmean, median
from time import monotonic, sleep

from benchmarks.cluster import cluster
from benchmarks.load import (
    WARM_UP_S,
    LoadGenerator,
    Offered,
    completions,
    goodput_tokens,
    plan,
    refusal_times_ms,
    submitted_within,
)
from benchmarks.processes import resident_bytes
from benchmarks.result import Figure, Result
from benchmarks.service_curve import jain_index, percentile, served_tokens, within
from benchmarks.simulated_pool import SimulatedPool, dispatchers
from benchmarks.trace import TraceSampler, load_trace

NAME = "overload"
SECONDS = 60.0
HOW = f"one run of {SECONDS:g} s"
TENANTS = tuple(f"tenant-{number}" for number in range(1, 9))
LOAD = 3.0
AIM_GOODPUT, AIM_LATE, AIM_REFUSAL_MS, AIM_GROWTH = 0.9, 0.01, 50.0, 1.1
_TIMEOUT_MS = 10_000
_ANSWER_TIMEOUT_S = 60.0
_SAMPLE_S = 0.5
_SEED = 11
_MIB = 1024 * 1024


def run(seconds: float = SECONDS) -> Result:
    """One run of ``seconds``."""
    # Longer batches than elsewhere: what an engine rests between two of them is lost.
    pool = SimulatedPool(max_batch_size=8)
    sampler = TraceSampler(load_trace(), _SEED)
    rate = LOAD * pool.requests_per_s(sampler.mean_cost_tokens) / len(TENANTS)
    planned = plan([Offered(tenant, rate, timeout_ms=_TIMEOUT_MS) for tenant in TENANTS], WARM_UP_S + seconds, sampler)
    with (
        cluster([*dispatchers("drr"), *pool.services()], tenants=TENANTS) as running,
        LoadGenerator(running.settings, TENANTS) as load,
    ):
        pid = running.stack.supervisor.process("dispatcher-1").pid
        assert pid is not None, "the dispatcher does not run"
        load.start(planned)
        memory_mib = sampled_mib(pid, WARM_UP_S + seconds)
        load.wait_published(_ANSWER_TIMEOUT_S)
        load.wait_answered(_ANSWER_TIMEOUT_S)
        interval = load.interval(seconds)
        observed = load.observed()
        lag_ms = load.checked_lag_ms()
    of_interval = submitted_within(observed, interval)
    replies = [one for one in of_interval if one.outcome]
    not_refused = [one for one in replies if not one.refused]
    # Nobody refused at three times the capacity is no quick refusal.
    refusals = refusal_times_ms(of_interval) or [_TIMEOUT_MS]
    refused = sum(one.refused for one in of_interval)
    latencies = [one.latency_ms for one in of_interval if one.served]
    served = served_tokens(within(completions(observed), interval), TENANTS)
    late = sum(one.late for one in replies)
    figures = (
        Figure(
            "tokens served in time divided by capacity",
            goodput_tokens(observed, interval) / (pool.cost_tokens_per_s * seconds),
            "ratio",
            "at least",
            AIM_GOODPUT,
        ),
        Figure("replies after their deadline", late / max(1, len(replies)), "ratio", "at most", AIM_LATE),
        Figure("replies after their deadline, of those not refused", late / max(1, len(not_refused)), "ratio"),
        Figure("median time to a refusal", median(refusals), "ms", "at most", AIM_REFUSAL_MS),
        Figure("p99 of the time to a refusal", percentile(refusals, 0.99), "ms"),
        Figure("memory at the end divided by memory before", growth(memory_mib), "ratio", "at most", AIM_GROWTH),
        Figure("largest memory of the dispatcher", max(memory_mib), "MiB"),
        Figure("refused", refused / max(1, len(of_interval)), "ratio"),
        Figure("p50 of the served", percentile(latencies, 0.5), "ms"),
        Figure("p99 of the served", percentile(latencies, 0.99), "ms"),
        Figure("Jain index", jain_index(list(served.values())), "of 1"),
    )
    answered = sum(one.replies == 1 for one in observed)
    run = {"requests": float(len(observed)), "answered": float(answered), "generator_lag_ms": lag_ms}
    return Result(NAME, figures, (run,))


def growth(samples: Sequence[float]) -> float:
    """Mean of the last quarter of the samples divided by that of the second; queues still fill during the first."""
    quarter = max(1, len(samples) // 4)
    return fmean(samples[-quarter:]) / fmean(samples[quarter : 2 * quarter] or samples[-quarter:])


def sampled_mib(pid: int, seconds: float) -> list[float]:
    """The process's resident memory, twice a second. Raises RuntimeError when it ends meanwhile."""
    samples: list[float] = []
    end_s = monotonic() + seconds
    try:
        while True:
            samples.append(resident_bytes(pid) / _MIB)
            left_s = end_s - monotonic()
            if left_s <= 0:
                return samples
            sleep(min(_SAMPLE_S, left_s))
    except OSError as error:
        raise RuntimeError(f"process {pid} died while its memory was measured, after {len(samples)} samples") from error
