"""scale-out: the throughput of four consumers, divided by four times that of one.

The engines are simulated: 400 ms a batch of 32, so that what is measured is whether consumers hold one another up, and
not how many models fit on this machine's cores.
"""

from benchmarks.cluster import cluster
from benchmarks.observed import REQUEST_TIMEOUT_MS, Answer, Backlog, make_request
from benchmarks.result import MEDIAN_OF_REPETITIONS, Figure, Result, median_of, repeated
from benchmarks.simulated_pool import POOL, UNBOUNDED, UNBOUNDED_TENANT, fixed_batch_engine
from deploy.local.services import Service
from fairlane.records import InferenceRequest, Parameters

NAME = "scale-out"
HOW = MEDIAN_OF_REPETITIONS
AIM = 0.9
CONSUMERS = (1, 2, 4)
BATCH_ITEMS = 32
BATCH_MS = 400.0
BATCHES_EACH = 25
_TENANT = "acme"
_TIMEOUT_S = 120.0
_ENGINE = fixed_batch_engine(BATCH_MS, BATCH_ITEMS)


def run() -> Result:
    """Three repetitions; in each, pools of 1, 2 and 4 consumers work off so many batches each."""
    runs = repeated(lambda _number: {f"at_{count}_per_s": _items_per_s(count) for count in CONSUMERS})
    first, last = f"at_{CONSUMERS[0]}_per_s", f"at_{CONSUMERS[-1]}_per_s"
    runs = tuple({**one, "ratio": one[last] / (CONSUMERS[-1] * one[first])} for one in runs)
    return Result(
        NAME,
        (
            Figure("throughput of 4 divided by 4 times that of 1", median_of(runs, "ratio"), "ratio", "at least", AIM),
            *(
                Figure(f"with {count} consumers", median_of(runs, f"at_{count}_per_s"), "items/s")
                for count in CONSUMERS
            ),
        ),
        runs,
    )


def _items_per_s(consumers: int) -> float:
    services = [
        Service("dispatcher-1", ("-m", "stream_processors.dispatcher"), UNBOUNDED),
        *(
            Service(f"consumer-{number}", ("-m", "inference_consumers", "--pool", POOL), _ENGINE)
            for number in range(consumers)
        ),
    ]
    tenants = [{"tenant": _TENANT, **UNBOUNDED_TENANT}]
    with cluster(services, tenants=tenants) as running, Backlog(running.settings, _TENANT) as backlog:
        return _rate(backlog.run(_requests(consumers * BATCHES_EACH * BATCH_ITEMS), _TIMEOUT_S))


def _rate(answers: list[Answer]) -> float:
    """Over the middle of the run: at its two ends not everybody has work."""
    times_ms = sorted(answer.appended_at_ms for answer in answers)
    first, last = len(times_ms) // 5, len(times_ms) * 4 // 5
    return (last - first) / ((times_ms[last] - times_ms[first]) / 1_000)


def _requests(count: int) -> list[InferenceRequest]:
    return [make_request(parameters=Parameters(max_tokens=4), timeout_ms=REQUEST_TIMEOUT_MS) for _ in range(count)]
