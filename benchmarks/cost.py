"""cost: processor time of every process for each request, at three loads, and of the idle stack.

The work is none (an engine that takes no time), so what is left is Fairlane's own. Requests go through the SDK in this
process: one after another, from 32 callers, and as fast as the client's window allows. The times are the kernel's
counters of each process; of the dispatcher and the consumer also of each thread, and of the dispatcher's stages, which
its main thread runs. A profiler that samples misleads here: its samples cluster at system calls.
"""

from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter, process_time, sleep

from benchmarks.cluster import BenchStack, cluster
from benchmarks.loads import CALLERS, Pending, from_callers, one_at_a_time, open_loop
from benchmarks.processes import cpu_with_children_s
from benchmarks.result import MEDIAN_OF_REPETITIONS, Figure, Result, median_of, repeated
from benchmarks.simulated_pool import INSTANT_SERVICES, QUESTION, recorder
from fairlane import Client

NAME = "cost"
HOW = MEDIAN_OF_REPETITIONS
WARM_UP = 6_000
ALONE, TOGETHER, OPEN = 200, 6_000, 8_000
IDLE_S = 10.0
_TENANT = "acme"
_SERVICES = (*INSTANT_SERVICES, recorder())
_CLIENT = "client"
_LOOKED_INTO = ("dispatcher-1", "consumer-1")
_INSIDE = {"fairlane_thread_cpu_seconds_total": "thread", "fairlane_stage_cpu_seconds_total": "stage"}
"""Metrics of processor time, and their labels."""


def run() -> Result:
    """Three repetitions of each load on one stack, which is warm."""
    with (
        cluster(_SERVICES, parts=("kafka", "redis", "postgres"), tenants=(_TENANT,)) as running,
        Client(tenant=_TENANT, bootstrap_servers=running.settings.kafka_bootstrap_servers) as client,
    ):

        def submit() -> Pending:
            return client.submit(**QUESTION)

        def in_open_loop(requests: int) -> list[float]:
            open_loop(client.submit_many(QUESTION for _ in range(requests)))
            return []

        in_open_loop(WARM_UP)

        def measure(_number: int) -> dict[str, float]:
            idle = _spent(running, lambda: sleep(IDLE_S))
            return {
                "idle_cores": sum(used for name, used in idle.items() if name != _CLIENT and ":" not in name) / IDLE_S,
                **_load(running, "open", OPEN, lambda: in_open_loop(OPEN)),
                **_load(running, "callers", TOGETHER, lambda: from_callers(submit, TOGETHER)),
                **_load(running, "alone", ALONE, lambda: one_at_a_time(submit, ALONE)),
            }

        runs = repeated(measure)
    return Result(NAME, tuple(_figures(runs)), runs)


def _figures(runs: tuple[dict[str, float], ...]) -> list[Figure]:
    def figure(name: str, key: str, unit: str, aim: float | None = None) -> Figure:
        return Figure(name, median_of(runs, key), unit, None if aim is None else "at most", aim)

    figures = [
        figure("processor time of a request, open loop", "open_cpu_ms", "ms", 0.5),
        figure(f"processor time of a request, {CALLERS} callers", "callers_cpu_ms", "ms", 0.8),
        figure("idle stack", "idle_cores", "cores", 0.08),
        figure("processor time of a request, one at a time", "alone_cpu_ms", "ms"),
        figure("rate, open loop", "open_per_s", "requests/s"),
        figure(f"rate, {CALLERS} callers", "callers_per_s", "requests/s"),
        figure(f"median latency, {CALLERS} callers", "callers_p50_ms", "ms"),
        figure("median latency, one at a time", "alone_p50_ms", "ms"),
    ]
    processes = sorted({key.split("/")[1] for key in runs[0] if "/" in key})
    for load, name in (("open", "open loop"), ("callers", f"{CALLERS} callers"), ("alone", "one at a time")):
        figures += [
            figure(f"requests in a transaction of {service}, {name}", f"{load}_batch_{service}", "requests")
            for service in _LOOKED_INTO
        ]
        figures += [figure(f"{process}, {name}", f"{load}/{process}", "us a request") for process in processes]
    return figures


def _load(running: BenchStack, load: str, requests: int, send: Callable[[], list[float]]) -> dict[str, float]:
    """Rate, median latency where the load waits for each answer, and processor time of each process for a request."""
    latencies_ms: list[float] = []
    transactions = _transactions(running)
    started = perf_counter()
    spent = _spent(running, lambda: latencies_ms.extend(send()))
    took_s = perf_counter() - started
    batches = {name: requests / max(1.0, after - transactions[name]) for name, after in _transactions(running).items()}
    return {
        **{f"{load}_batch_{name}": size for name, size in batches.items()},
        f"{load}_per_s": requests / took_s,
        **({f"{load}_p50_ms": median(latencies_ms)} if latencies_ms else {}),
        f"{load}_cpu_ms": sum(used for name, used in spent.items() if ":" not in name) / requests * 1e3,
        **{f"{load}/{name}": used / requests * 1e6 for name, used in spent.items()},
    }


def _transactions(running: BenchStack) -> dict[str, float]:
    """Transactions of each service so far."""
    return {
        name: sum(one.value for one in running.samples(name) if one.name == "fairlane_transaction_records_count")
        for name in _LOOKED_INTO
    }


def _spent(running: BenchStack, act: Callable[[], None]) -> dict[str, float]:
    """Seconds of processor time that each process used meanwhile."""
    before = _counters(running)
    act()
    return {name: used - before.get(name, 0.0) for name, used in _counters(running).items()}


def _counters(running: BenchStack) -> Mapping[str, float]:
    found = {_CLIENT: process_time()}
    for view in running.stack.supervisor.processes():
        if view.pid is not None:
            kind = "broker" if view.name == "kafka" else view.name.partition("-")[0]
            found[kind] = cpu_with_children_s(view.pid)
    for name in _LOOKED_INTO:
        kind = name.partition("-")[0]
        for sample in running.samples(name):
            if sample.name in _INSIDE:
                found[f"{kind}: {_INSIDE[sample.name]} {sample.labels[_INSIDE[sample.name]]}"] = sample.value
    return found
