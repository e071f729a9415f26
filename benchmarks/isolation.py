"""isolation: a tenant well within its share, alone and beside one that floods the pool at ten times its capacity.

Eight engines run one request at a time: a simulated batch takes the time of all its requests together, so a full batch
would be slower than an empty one. They are slow (the longest request takes 0.8 s), so that the flood is 380 requests a
second and this machine is not the bottleneck. The victim asks for a fifth of the capacity at a steady pace and is
entitled to half of it. Both have the same class and weight, and neither may be degraded. The victim's requests are the
same alone, beside the flood, and beside it under fifo. One that is not served counts with all the time it allowed.
``--trace`` gives the sizes and bursts of both, ``--shape`` the shape of the flood.
"""

from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.cluster import BenchStack, cluster
from benchmarks.load import (
    WARM_UP_S,
    LoadGenerator,
    Offered,
    Planned,
    latency_percentile_ms,
    plan,
    plan_arrivals,
    submitted_within,
)
from benchmarks.result import Figure, Result
from benchmarks.simulated_pool import POOL, SimulatedPool, dispatchers
from benchmarks.trace import TRACE_FILE, TraceSampler, load_trace
from benchmarks.traffic import SHAPES, Traffic
from fairlane.names import priority_topic
from fairlane.outcomes import Priority
from fairlane_server.control.tenants_file import FORBIDDABLE
from stream_processors.dispatcher.scheduling.fair_queue import Policy

NAME = "isolation"
SECONDS = 60.0
HOW = f"one run of {SECONDS:g} s each: alone, beside the flood, beside it under fifo"
AIM = 1.2
POOL_UNDER_TEST = SimulatedPool(cost_tokens_per_s=20_000.0, consumers=8, max_batch_size=1)
_VICTIM, _FLOODER = "victim", "flooder"
_VICTIM_LOAD, _FLOOD_LOAD = 0.2, 10.0
"""In parts of the pool's capacity."""
_TIMEOUT_MS = 10_000
_ANSWER_TIMEOUT_S = 60.0
_SEED, _FLOOD_SEED = 7, 8


def run(seconds: float = SECONDS, trace: Path = TRACE_FILE, shape: str = "constant") -> Result:
    """Three runs of ``seconds`` each: alone and flooded on the same servers, and flooded under fifo."""
    pool, flood = POOL_UNDER_TEST, Traffic(SHAPES[shape], trace)
    with running("drr", pool) as servers:
        alone = {"fifo": 0.0, "flood": 0.0, **measure(servers, pool, seconds, flood, is_flooded=False)}
        beside = {"fifo": 0.0, "flood": 1.0, **measure(servers, pool, seconds, flood, is_flooded=True)}
    with running("fifo", pool) as servers:
        under_fifo = {"fifo": 1.0, "flood": 1.0, **measure(servers, pool, seconds, flood, is_flooded=True)}
    p99_ratio = beside["p99_ms"] / alone["p99_ms"]
    return Result(
        NAME,
        (
            Figure("p99 beside the flood divided by p99 alone", p99_ratio, "ratio", "at most", AIM),
            Figure("the same under fifo", under_fifo["p99_ms"] / alone["p99_ms"], "ratio"),
            Figure("p50 beside the flood divided by p50 alone", beside["p50_ms"] / alone["p50_ms"], "ratio"),
            Figure("p99 alone", alone["p99_ms"], "ms"),
            Figure("p99 beside the flood", beside["p99_ms"], "ms"),
            Figure("p99 beside the flood under fifo", under_fifo["p99_ms"], "ms"),
            Figure("served beside the flood", beside["served"] / beside["requests"], "ratio"),
            Figure("served beside the flood under fifo", under_fifo["served"] / under_fifo["requests"], "ratio"),
        ),
        (alone, beside, under_fifo),
    )


def running(policy: Policy, pool: SimulatedPool) -> AbstractContextManager[BenchStack]:
    forbid = list(map(str, FORBIDDABLE))
    return cluster(
        [*dispatchers(policy), *pool.services()],
        tenants=[{"tenant": tenant, "forbid": forbid} for tenant in (_VICTIM, _FLOODER)],
        # As many as engines, in every class alike.
        partitions={priority_topic(POOL, priority): pool.consumers for priority in Priority},
    )


def measure(
    servers: BenchStack, pool: SimulatedPool, seconds: float, flood: Traffic, *, is_flooded: bool
) -> dict[str, float]:
    """The victim's requests of one run, on servers that have nothing to do."""
    planned = planned_load(pool, seconds, flood, is_flooded=is_flooded)
    with LoadGenerator(servers.settings, (_VICTIM, _FLOODER)) as load:
        load.start(planned)
        load.wait_published(WARM_UP_S + seconds + 60)
        load.wait_answered(_ANSWER_TIMEOUT_S)
        observed = submitted_within(load.observed(), load.interval(seconds))
        victim = [one for one in observed if one.tenant == _VICTIM]
        return {
            "requests": len(victim),
            "served": sum(one.served for one in victim),
            "p50_ms": latency_percentile_ms(victim, 0.5),
            "p99_ms": latency_percentile_ms(victim, 0.99),
            "generator_lag_ms": load.checked_lag_ms(),
        }


def planned_load(pool: SimulatedPool, seconds: float, flood: Traffic, *, is_flooded: bool) -> list[Planned]:
    """The victim's requests, the same whether there is a flood or not, and the flood, which begins in the warm-up."""
    sampler = TraceSampler(load_trace(flood.trace), _SEED)
    rate = _VICTIM_LOAD * pool.requests_per_s(sampler.mean_cost_tokens)
    seconds += WARM_UP_S
    planned = plan([Offered(_VICTIM, rate, steady=True, timeout_ms=_TIMEOUT_MS)], seconds, sampler)
    if is_flooded:
        arrivals = flood.arrivals((_FLOODER,), _FLOOD_LOAD, pool.cost_tokens_per_s, seconds, _FLOOD_SEED)
        planned += plan_arrivals(arrivals, timeout_ms=_TIMEOUT_MS)
    return sorted(planned, key=lambda record: record.at_s)
