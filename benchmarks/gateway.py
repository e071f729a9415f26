"""gateway: requests a second that the gateway accepts for later, beside a bare route that only produces.

Both serve with uvicorn and uvloop in a process of their own, get the same body over as many connections from the same
generator (``benchmarks.http_load``), and answer 202 when the broker has acknowledged. They are loaded in turn, in an
order that alternates. No dispatcher runs.

Times are taken at 70 % of the gateway's peak, from calls at random moments, and count from when a call was due. The
cores used at the peak show the bottleneck: gateway, broker and generator share the machine. Other load on it changes
rates, but hardly the processor time for a submit. A second gateway has two workers behind its port.
"""

import json
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks.baselines import ROUTE_PATH
from benchmarks.cluster import BenchStack, HttpService, cluster
from benchmarks.http_load import HttpLoadResult, Order, load
from benchmarks.processes import cpu_s, cpu_with_children_s
from benchmarks.result import MEDIAN_OF_REPETITIONS, Figure, Result, median_of, repeated

NAME = "gateway"
HOW = MEDIAN_OF_REPETITIONS
AIM_RATIO = 1.0
AIM_PER_S = 1_000.0
AIM_WORKERS = 1.7
WORKERS = 2
AIM_P50_MS = 10.0
AIM_P99_MS = 50.0
SECONDS = 8.0
WARM_UP_S = 2.0
CONNECTIONS = 64
_PART_OF_PEAK = 0.7
TENANT = "acme"
BARE_TOPIC = "bare.submits"
PATH = "/v1/requests"
BODY = json.dumps(
    {
        "model": "smollm2-135m-instruct",
        "input": {"prompt": "What is the capital of France, and why? " * 5},
        "parameters": {"max_tokens": 32},
    }
)


@dataclass(frozen=True, slots=True)
class Side:
    """A server that is loaded."""

    name: str
    path: str
    service: HttpService


def run() -> Result:
    """Three repetitions on one cluster; the median of each figure."""
    with ExitStack() as stack:
        running = stack.enter_context(
            cluster([], parts=("kafka", "redis", "postgres"), tenants=(TENANT,), topics=(BARE_TOPIC,))
        )
        bare = running.http_service("bare", "-m", "benchmarks.baselines", "route", "{port}", BARE_TOPIC)
        workers = running.gateway(TENANT, "gateway-2", {"GATEWAY_WORKERS": str(WORKERS)})
        sides = (
            Side("gateway", PATH, stack.enter_context(running.gateway(TENANT))),
            Side("bare", ROUTE_PATH, stack.enter_context(bare)),
            Side("workers", PATH, stack.enter_context(workers)),
        )
        for side in sides:
            loaded(side, WARM_UP_S, connections=CONNECTIONS)
        runs = repeated(lambda number: _measure(number, running, sides))
    figures = (
        Figure("submits/s divided by a bare FastAPI route's", median_of(runs, "ratio"), "ratio", "at least", AIM_RATIO),
        Figure("the same by processor time for a submit", median_of(runs, "by_processor_time"), "ratio"),
        Figure("submits/s", median_of(runs, "gateway_per_s"), "requests/s", "at least", AIM_PER_S),
        Figure("p50 at 70 % of the peak", median_of(runs, "p50_ms"), "ms", "at most", AIM_P50_MS),
        Figure("p99 at 70 % of the peak", median_of(runs, "p99_ms"), "ms", "at most", AIM_P99_MS),
        Figure("p99 of how late the load was then", median_of(runs, "late_p99_ms"), "ms"),
        Figure(
            f"submits/s of {WORKERS} workers divided by one's",
            median_of(runs, "workers_ratio"),
            "ratio",
            "at least",
            AIM_WORKERS,
        ),
        Figure(f"cores used at the peak by {WORKERS} workers", median_of(runs, "workers_cores"), "cores"),
        Figure("the bare route", median_of(runs, "bare_per_s"), "requests/s"),
        Figure("p99 of the bare route at the same rate", median_of(runs, "bare_p99_ms"), "ms"),
        Figure("cores used at the peak by the gateway", median_of(runs, "gateway_cores"), "cores"),
        Figure("by the broker", median_of(runs, "broker_cores"), "cores"),
        Figure("by the load", median_of(runs, "load_cores"), "cores"),
        Figure("processor time of the gateway for a submit", median_of(runs, "gateway_us"), "µs"),
        Figure("of the bare route", median_of(runs, "bare_us"), "µs"),
        Figure("of the load", median_of(runs, "load_us"), "µs"),
    )
    return Result(NAME, figures, runs)


def _measure(number: int, running: BenchStack, sides: tuple[Side, ...]) -> dict[str, float]:
    kafka = running.stack.supervisor.process("kafka").pid
    assert kafka is not None
    in_turn = sides if number % 2 == 0 else sides[::-1]
    peaks: dict[str, HttpLoadResult] = {}
    server_cores, broker_cores = {}, {}
    for side in in_turn:
        before = cpu_with_children_s(side.service.pid), cpu_s(kafka)
        peaks[side.name] = loaded(side, SECONDS, connections=CONNECTIONS)
        server_cores[side.name] = (cpu_with_children_s(side.service.pid) - before[0]) / SECONDS
        broker_cores[side.name] = (cpu_s(kafka) - before[1]) / SECONDS
    ours, bare = peaks["gateway"], peaks["bare"]
    rate_per_s = _PART_OF_PEAK * ours.per_s
    paced = {side.name: loaded(side, SECONDS, rate_per_s=rate_per_s) for side in in_turn if side.name != "workers"}
    ours_us, bare_us = (1e6 * server_cores[name] / peaks[name].per_s for name in ("gateway", "bare"))
    return {
        "ratio": ours.per_s / bare.per_s,
        "by_processor_time": bare_us / ours_us,
        "workers_ratio": peaks["workers"].per_s / ours.per_s,
        "workers_cores": server_cores["workers"],
        "gateway_per_s": ours.per_s,
        "bare_per_s": bare.per_s,
        "p50_ms": paced["gateway"].p50_ms,
        "p99_ms": paced["gateway"].p99_ms,
        "late_p99_ms": paced["gateway"].late_p99_ms,
        "bare_p99_ms": paced["bare"].p99_ms,
        "gateway_cores": server_cores["gateway"],
        "broker_cores": broker_cores["gateway"],
        "load_cores": ours.cpu_us_per_request * ours.per_s / 1e6,
        "gateway_us": ours_us,
        "bare_us": bare_us,
        "load_us": ours.cpu_us_per_request,
    }


def loaded(side: Side, seconds: float, *, connections: int = 0, rate_per_s: float = 0.0) -> HttpLoadResult:
    """Load one side. Raises RuntimeError: not every call was answered with 202."""
    service = side.service
    measured = load(Order(service.url, side.path, service.headers, BODY, seconds, connections, rate_per_s))
    if measured.others or not measured.per_s:
        raise RuntimeError(f"{side.name}: not every call was accepted: {measured.statuses}")
    return measured
