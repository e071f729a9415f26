"""tenants: the dispatch rate with a thousand tenants, beside a bare Faust consumer with as many topics.

A backlog is ready, in turn from each tenant; both programs read the same partitions on the same servers, each in a
group of its own. More partitions cost every Kafka consumer something: the dispatcher's own cost is the ratio of the
two programs' ratios.
"""

from benchmarks.cluster import cluster
from benchmarks.dispatch_rate import publish_backlog, rate_of
from benchmarks.result import MEDIAN_OF_REPETITIONS, REPETITIONS, Figure, Result, median_of
from benchmarks.simulated_pool import POOL, UNBOUNDED
from deploy.local.services import Service
from fairlane.names import backfill_topic, priority_topic, requests_topic
from fairlane.outcomes import Priority

NAME = "tenants"
HOW = MEDIAN_OF_REPETITIONS
AIM = 0.95
FEW, MANY = 10, 1_000
REQUESTS = 20_000
_BARE_TOPIC = "baseline.bare"
_OUTPUTS = {"bare": _BARE_TOPIC, "fairlane": priority_topic(POOL, Priority.NORMAL)}


def run(repetitions: int = REPETITIONS, requests: int = REQUESTS, many: int = MANY) -> Result:
    """Both programs with few and with many tenants, so many times each; the ratios of the medians."""
    few_runs, many_runs = (_measure(count, repetitions, requests) for count in (FEW, many))
    ratios = {kind: median_of(many_runs, f"{kind}_per_s") / median_of(few_runs, f"{kind}_per_s") for kind in _OUTPUTS}
    return Result(
        NAME,
        (
            Figure(
                f"rate with {many} tenants by that with {FEW}, divided by bare Faust's",
                ratios["fairlane"] / ratios["bare"],
                "ratio",
                "at least",
                AIM,
            ),
            Figure(f"rate with {many} tenants divided by that with {FEW}", ratios["fairlane"], "ratio"),
            Figure("bare Faust's", ratios["bare"], "ratio"),
            *(
                Figure(f"{kind} with {count} tenants", median_of(runs, f"{kind}_per_s"), "requests/s")
                for kind in _OUTPUTS
                for count, runs in ((FEW, few_runs), (many, many_runs))
            ),
        ),
        (*few_runs, *many_runs),
    )


def _measure(count: int, repetitions: int, requests: int) -> tuple[dict[str, float], ...]:
    tenants = [f"tenant-{number:04}" for number in range(count)]
    topics = [topic for tenant in tenants for topic in (requests_topic(tenant), backfill_topic(tenant))]
    arguments = {
        "bare": ("-m", "benchmarks.baselines", "bare", *topics),
        "fairlane": ("-m", "stream_processors.dispatcher"),
    }
    runs = []
    with cluster([], tenants=tenants, topics=(_BARE_TOPIC,), env=UNBOUNDED) as running:
        publish_backlog(running.settings, tenants, requests)
        # In turn, so that whatever else the machine does hits both alike.
        for number in range(repetitions):
            # A group that never committed, and nothing that remembers the requests of the last time.
            env = {"GROUP_PREFIX": f"{NAME}-{number}"}
            rates = {
                f"{kind}_per_s": rate_of(running, Service(f"{kind}-{number}", arguments[kind], env), output, requests)
                for kind, output in _OUTPUTS.items()
            }
            runs.append({"tenants": float(count), **rates})
    return tuple(runs)
