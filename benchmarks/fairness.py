"""fairness: eight tenants with work all the time, one of which sends ten times its share; sizes as in the trace.

All offer more than their share, deadlines and latency targets are long and bounds high: nobody is refused and everybody
waits. The same load on the same pool runs under the fair queue and in order of arrival; compared is what completes
while all wait. The service difference is the largest between any two tenants over any part of that time
(``service_curve``). Repeated with two dispatchers, with weights 1, 2 and 4, and under vtc, which has no aim.
``--trace`` gives sizes and bursts, ``--shape`` the shape of the flood.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.cluster import cluster, wait_until
from benchmarks.faults.rig import members
from benchmarks.load import WARM_UP_S, LoadGenerator, Offered, completions, plan, plan_arrivals, waits
from benchmarks.result import Figure, Result
from benchmarks.service_curve import (
    jain_index,
    largest_gap,
    largest_share_error,
    longest_common_wait,
    served_tokens,
    within,
)
from benchmarks.simulated_pool import UNBOUNDED, UNBOUNDED_TENANT, SimulatedPool, dispatchers
from benchmarks.trace import TRACE_FILE, TraceSampler, load_trace
from benchmarks.traffic import SHAPES, Traffic
from fairlane.kafka_clients import KafkaAdmin
from fairlane.kafka_config import connection
from fairlane.names import dispatcher_group, requests_topic
from fairlane.settings import Settings
from stream_processors.dispatcher.scheduling.fair_queue import Policy

NAME = "fairness"
SECONDS = 60.0
HOW = f"one run of {SECONDS:g} s of each kind, each on a cluster of its own"
AIM_GAP, AIM_GAP_OF_TWO = 0.1, 0.15
AIM_THROUGHPUT = 0.98
AIM_SHARE_ERROR = 0.05
EQUAL: Mapping[str, float] = {f"tenant-{number}": 1.0 for number in range(1, 9)}
WEIGHTED: Mapping[str, float] = {"one": 1.0, "two": 2.0, "four": 4.0}
_FLOOD = 10.0
"""What the first of the equal tenants sends, in shares."""
_ABOVE_SHARE = 1.5
"""Load of each other tenant, in shares: half a share above its service, so that its backlog never runs out."""
_AHEAD_S = 4.0
"""What each has waiting at the start, in seconds of its share: silences in the trace are shorter."""
_LEAST_COMMON = 0.9
_TIMEOUT_MS = 3_600_000
_SEED, _FLOOD_SEED = 4, 5

Run = dict[str, float]


def run(seconds: float = SECONDS, trace: Path = TRACE_FILE, shape: str = "constant") -> Result:
    """Six runs of ``seconds`` each."""
    pool, flood = SimulatedPool(), Traffic(SHAPES[shape], trace)
    fifo = measure("fifo", 1, EQUAL, pool, seconds, flood)
    fair = measure("drr", 1, EQUAL, pool, seconds, flood)
    counted = measure("vtc", 1, EQUAL, pool, seconds, flood)
    weighted = measure("drr", 1, WEIGHTED, pool, seconds, flood)
    fifo_of_two = measure("fifo", 2, EQUAL, pool, seconds, flood)
    fair_of_two = measure("drr", 2, EQUAL, pool, seconds, flood)

    def gap(one: Run, other: Run) -> float:
        return one["gap_tokens"] / other["gap_tokens"]

    def rate(one: Run, other: Run) -> float:
        return one["tokens_per_s"] / other["tokens_per_s"]

    def jain(one: Run) -> float:
        return jain_index(list(served_in(one, EQUAL).values()))

    error = largest_share_error(served_in(weighted, WEIGHTED), WEIGHTED)
    gap_of_two = gap(fair_of_two, fifo_of_two)
    return Result(
        NAME,
        (
            Figure("service difference divided by fifo's", gap(fair, fifo), "ratio", "at most", AIM_GAP),
            Figure("throughput divided by fifo's", rate(fair, fifo), "ratio", "at least", AIM_THROUGHPUT),
            Figure("weights 1, 2, 4: largest error of a share", error, "ratio", "at most", AIM_SHARE_ERROR),
            Figure("two dispatchers: difference by fifo's", gap_of_two, "ratio", "at most", AIM_GAP_OF_TWO),
            Figure("two dispatchers: throughput by fifo's", rate(fair_of_two, fifo_of_two), "ratio"),
            Figure("under vtc: difference by fifo's", gap(counted, fifo), "ratio"),
            Figure("under vtc: throughput by fifo's", rate(counted, fifo), "ratio"),
            Figure("service difference", fair["gap_tokens"], "cost tokens"),
            Figure("service difference under fifo", fifo["gap_tokens"], "cost tokens"),
            Figure("service difference under vtc", counted["gap_tokens"], "cost tokens"),
            Figure("service difference, two dispatchers", fair_of_two["gap_tokens"], "cost tokens"),
            Figure("throughput divided by capacity", fair["tokens_per_s"] / pool.cost_tokens_per_s, "ratio"),
            Figure("Jain index", jain(fair), "of 1"),
            Figure("Jain index under fifo", jain(fifo), "of 1"),
        ),
        (fifo, fair, counted, weighted, fifo_of_two, fair_of_two),
    )


def served_in(run: Run, tenants: Iterable[str]) -> dict[str, float]:
    """Cost tokens by tenant."""
    return {tenant: run[f"served_{tenant}"] for tenant in tenants}


def measure(
    policy: Policy,
    dispatcher_count: int,
    weights: Mapping[str, float],
    pool: SimulatedPool,
    seconds: float,
    flood: Traffic,
) -> Run:
    """One run with tenants of these weights, on servers of its own, over the time in which all have work waiting.

    Raises:
        RuntimeError: too little of the time had every tenant waiting, or tenants changed dispatchers, so there is
            nothing to compare; or the load came too late.
        TimeoutError: not every dispatcher got tenants.
    """
    sampler, load_s = TraceSampler(load_trace(flood.trace), _SEED), WARM_UP_S + seconds
    planned = plan(offered(weights, pool.requests_per_s(sampler.mean_cost_tokens)), load_s, sampler)
    if weights is EQUAL:
        flooder = next(iter(weights))
        flood_load = (_FLOOD - _ABOVE_SHARE) / len(weights)
        more = flood.arrivals((flooder,), flood_load, pool.cost_tokens_per_s, load_s, _FLOOD_SEED)
        planned = sorted([*planned, *plan_arrivals(more, timeout_ms=_TIMEOUT_MS)], key=lambda one: one.at_s)
    entries = [{"tenant": tenant, "weight": weight, **UNBOUNDED_TENANT} for tenant, weight in weights.items()]
    services = [*dispatchers(policy, dispatcher_count, UNBOUNDED), *pool.services()]
    with cluster(services, tenants=entries) as running, LoadGenerator(running.settings, list(weights)) as load:
        wait_until(lambda: owners(running.settings, weights, dispatcher_count), 60, "tenants for every dispatcher")
        owned = owners(running.settings, weights, dispatcher_count)
        load.start(planned)
        load.wait_published(WARM_UP_S + seconds + 60)
        interval = load.interval(seconds)
        # Who owned tenants before and after had them in between, and alone could dispatch what they were served.
        if not owned or owners(running.settings, weights, dispatcher_count) != owned:
            raise RuntimeError(f"{policy}: tenants changed their dispatcher during the run")
        observed = load.observed()
        lag_ms = load.checked_lag_ms()
    common = longest_common_wait(waits(observed, list(weights), interval[1]), interval)
    common_s = (common[1] - common[0]) / 1000
    if common_s < _LEAST_COMMON * seconds:
        raise RuntimeError(f"{policy}: all tenants had work waiting for {common_s:.1f} s of {seconds:g} s only")
    done = within(completions(observed), common)
    served = served_tokens(done, list(weights))
    if not all(served.values()):
        raise RuntimeError(f"{policy}: not every tenant was served: {served}")
    return {
        **{name: float(name == policy) for name in ("fifo", "drr", "vtc")},
        "dispatchers": float(dispatcher_count),
        "gap_tokens": largest_gap(done, weights),
        "tokens_per_s": sum(served.values()) / common_s,
        "common_s": common_s,
        "generator_lag_ms": lag_ms,
        **{f"served_{tenant}": tokens for tenant, tokens in served.items()},
    }


def owners(settings: Settings, tenants: Collection[str], dispatchers: int) -> dict[str, frozenset[str]]:
    """Tenants by the member id of their dispatcher, by the broker's word; empty unless they ``are_shared``."""
    tenant_of = {requests_topic(tenant): tenant for tenant in tenants}
    found = {
        member.member_id: frozenset(tenant_of[topic] for topic, _ in member.partitions if topic in tenant_of)
        for member in members(KafkaAdmin(connection(settings)), dispatcher_group(settings.group_prefix))
    }
    return found if are_shared(found, tenants, dispatchers) else {}


def are_shared(found: Mapping[str, frozenset[str]], tenants: Collection[str], dispatchers: int) -> bool:
    """Whether exactly this many dispatchers own these tenants' partitions, at least one each."""
    counts = [len(own) for own in found.values()]
    return len(counts) == dispatchers and all(counts) and sum(counts) == len(tenants)


def offered(weights: Mapping[str, float], capacity_per_s: float) -> Sequence[Offered]:
    """The load of each tenant, above its share of the capacity in requests per second. The flood of the first tenant
    comes on top."""
    found = []
    for tenant, weight in weights.items():
        share_per_s = capacity_per_s * weight / sum(weights.values())
        burst = round(share_per_s * _AHEAD_S)
        found.append(Offered(tenant, share_per_s * _ABOVE_SHARE, burst=burst, timeout_ms=_TIMEOUT_MS))
    return found
