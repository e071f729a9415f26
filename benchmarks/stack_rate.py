"""stack-rate: requests a second and latency of the whole stack, beside a bare chain of two transactional hops.

The work is none (an engine that takes no time). Both are asked by the same loads in the same run: as fast as the
client's window allows, from 32 callers, and one after another. The bare chain copies bytes; its client is a producer
and a consumer of confluent-kafka.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from time import perf_counter
from uuid import uuid4

from benchmarks.cluster import cluster
from benchmarks.load import ends_of, make_request
from benchmarks.loads import CALLERS, Pending, Submit, from_callers, one_at_a_time, open_loop
from benchmarks.result import MEDIAN_OF_REPETITIONS, Bound, Figure, Result, median_of, repeated
from benchmarks.simulated_pool import QUESTION, UNBOUNDED_INSTANT_SERVICES, UNBOUNDED_TENANT
from deploy.local.services import Service
from fairlane import Client
from fairlane.kafka_clients import KafkaConsumer, KafkaProducer
from fairlane.kafka_config import idempotent_producer, read_committed_consumer
from fairlane.schema_files import default_codec
from fairlane.settings import KafkaSettings

NAME = "stack-rate"
HOW = MEDIAN_OF_REPETITIONS
WARM_UP = 20_000
ALONE, TOGETHER, OPEN = 200, 6_000, 10_000
_TENANT = "acme"
_TENANTS = ({"tenant": _TENANT, **UNBOUNDED_TENANT},)
_TOPICS = ("bare.in", "bare.middle", "bare.out")
_POLL_S = 0.1

_AIMS: dict[str, tuple[Bound, float, float | None]] = {
    "open_per_s": ("at least", 3_500, 0.6),
    "callers_per_s": ("at least", 2_000, 0.6),
    "callers_p50_ms": ("at most", 16, None),
    "alone_p50_ms": ("at most", 10, None),
}
"""The aim of a figure, and the least part of the chain's rate."""

SubmitMany = Callable[[int], Iterable[Pending]]


class BareClient:
    """Sends records into the chain; a future of each is resolved when it comes out. Any thread may ``submit``."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._producer = KafkaProducer(idempotent_producer(settings) | {"queue.buffering.max.messages": 200_000})
        self._reader = KafkaConsumer(read_committed_consumer(settings, "bench-bare"))
        self._reader.assign(ends_of(settings, _TOPICS[-1:]))
        self._value = default_codec().encode(make_request())
        self._futures: dict[bytes, Future[None]] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._read, name="bare-reader")

    def submit(self) -> Future[None]:
        key, future = uuid4().bytes, Future[None]()
        self._futures[key] = future
        self._producer.produce(_TOPICS[0], self._value, key)
        self._producer.poll(0)
        return future

    @contextmanager
    def reading(self) -> Iterator["BareClient"]:
        self._thread.start()
        try:
            yield self
        finally:
            self._stopping.set()
            self._thread.join()
            self._reader.close()

    def _read(self) -> None:
        while not self._stopping.is_set():
            first = self._reader.poll(_POLL_S)
            if first is None:
                continue
            for message in (first, *self._reader.consume(1_000, 0)):
                key = message.key()
                if message.error() is None and isinstance(key, bytes):
                    self._futures.pop(key).set_result(None)


def run() -> Result:
    """Three repetitions; each load goes to the stack and then to the bare chain."""
    bare = [
        Service(f"bare-{number}", ("-m", "benchmarks.baselines", "chain", source, target, f"bare-{number}"))
        for number, (source, target) in enumerate(pairwise(_TOPICS), 1)
    ]
    with (
        cluster([*UNBOUNDED_INSTANT_SERVICES, *bare], topics=_TOPICS, tenants=_TENANTS) as running,
        Client(tenant=_TENANT, bootstrap_servers=running.settings.kafka_bootstrap_servers) as client,
        BareClient(running.settings).reading() as chain,
    ):

        def submit() -> Pending:
            return client.submit(**QUESTION)

        def submit_many(requests: int) -> Iterable[Pending]:
            return client.submit_many(QUESTION for _ in range(requests))

        def chained(requests: int) -> Iterable[Pending]:
            return (chain.submit() for _ in range(requests))

        open_loop(submit_many(WARM_UP))
        open_loop(chained(WARM_UP))

        def measure(_number: int) -> dict[str, float]:
            found = {**_loads("stack", submit, submit_many), **_loads("chain", chain.submit, chained)}
            names = [name.removeprefix("stack_") for name in found if name.startswith("stack_")]
            return {**found, **{f"ratio_{name}": found[f"stack_{name}"] / found[f"chain_{name}"] for name in names}}

        runs = repeated(measure)
    return Result(NAME, tuple(_figures(runs)), runs)


def _loads(who: str, submit: Submit, submit_many: SubmitMany) -> dict[str, float]:
    started = perf_counter()
    open_loop(submit_many(OPEN))
    open_s = perf_counter() - started
    started = perf_counter()
    together_ms = from_callers(submit, TOGETHER)
    callers_s = perf_counter() - started
    return {
        f"{who}_open_per_s": OPEN / open_s,
        f"{who}_callers_per_s": len(together_ms) / callers_s,
        f"{who}_callers_p50_ms": median(together_ms),
        f"{who}_alone_p50_ms": median(one_at_a_time(submit, ALONE)),
    }


def _figures(runs: tuple[dict[str, float], ...]) -> list[Figure]:
    def figure(name: str, key: str, unit: str) -> list[Figure]:
        bound, aim, least_ratio = _AIMS[key]
        return [
            Figure(name, median_of(runs, f"stack_{key}"), unit, bound, aim),
            Figure(f"{name}, bare chain", median_of(runs, f"chain_{key}"), unit),
            Figure(
                f"{name}, divided by the bare chain's",
                median_of(runs, f"ratio_{key}"),
                "ratio",
                None if least_ratio is None else "at least",
                least_ratio,
            ),
        ]

    return [
        *figure("rate, open loop", "open_per_s", "requests/s"),
        *figure(f"rate, {CALLERS} callers", "callers_per_s", "requests/s"),
        *figure(f"median latency, {CALLERS} callers", "callers_p50_ms", "ms"),
        *figure("median latency, one at a time", "alone_p50_ms", "ms"),
    ]
