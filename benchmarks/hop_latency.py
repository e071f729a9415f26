"""hop-latency: one request at a time through dispatcher and consumer, beside a bare chain of the same two hops.

Both chains run all the time and are asked in turn, so that whatever else the machine does hits both alike.
"""

from itertools import pairwise
from statistics import median
from time import perf_counter

from confluent_kafka import Consumer, Producer

from benchmarks.cluster import Cluster, cluster
from benchmarks.load import ends_of, make_request
from benchmarks.result import MEDIAN_OF_REPETITIONS, Figure, Result, median_of, repeated
from benchmarks.simulated_pool import INSTANT_SERVICES
from deploy.local.services import Service
from fairlane.kafka_config import idempotent_producer, read_committed_consumer
from fairlane.names import replies_topic, requests_topic
from fairlane.schema_files import default_codec

NAME = "hop-latency"
HOW = MEDIAN_OF_REPETITIONS
AIM = 1.5
REQUESTS = 200
_WARM_UP = 30
_TIMEOUT_S = 30.0
_BARE_TOPICS = ("bare.in", "bare.middle", "bare.out")


class _Chain:
    """Sends one record in and waits until it comes out."""

    def __init__(self, running: Cluster, producer: Producer, source: str, target: str) -> None:
        self._producer = producer
        self._source = source
        self._consumer = Consumer(read_committed_consumer(running.settings, "bench-reader"))
        self._consumer.assign(ends_of(running.settings, (target,)))

    def ask_ms(self) -> float:
        request = make_request()
        value = default_codec().encode(request)
        started = perf_counter()
        self._producer.produce(self._source, value=value, key=request.request_id)
        while perf_counter() - started < _TIMEOUT_S:
            self._producer.poll(0)
            message = self._consumer.poll(0.05)
            if message is not None and message.error() is None and message.key() == request.request_id.encode():
                return (perf_counter() - started) * 1000
        raise TimeoutError(f"{self._source}: no answer within {_TIMEOUT_S:g} s")

    def close(self) -> None:
        self._consumer.close()


def run() -> Result:
    """Three repetitions; the ratio of the medians."""
    bare = [
        Service(f"bare-{number}", ("-m", "benchmarks.baselines", "chain", source, target, f"bare-{number}"))
        for number, (source, target) in enumerate(pairwise(_BARE_TOPICS), 1)
    ]
    with cluster([*INSTANT_SERVICES, *bare], topics=_BARE_TOPICS) as running:
        # No batching of the client's own: both chains are asked one record at a time.
        producer = Producer(idempotent_producer(running.settings) | {"linger.ms": 0})
        fairlane = _Chain(running, producer, requests_topic("acme"), replies_topic("acme"))
        chain = _Chain(running, producer, _BARE_TOPICS[0], _BARE_TOPICS[-1])
        for _ in range(_WARM_UP):
            fairlane.ask_ms()
            chain.ask_ms()

        def measure(_number: int) -> dict[str, float]:
            pairs = [(fairlane.ask_ms(), chain.ask_ms()) for _ in range(REQUESTS)]
            ours_ms, bare_ms = median(pair[0] for pair in pairs), median(pair[1] for pair in pairs)
            return {"fairlane_ms": ours_ms, "bare_chain_ms": bare_ms, "ratio": ours_ms / bare_ms}

        runs = repeated(measure)
        fairlane.close()
        chain.close()
    return Result(
        NAME,
        (
            Figure("latency divided by the bare chain's", median_of(runs, "ratio"), "ratio", "at most", AIM),
            Figure("latency", median_of(runs, "fairlane_ms"), "ms"),
            Figure("bare chain", median_of(runs, "bare_chain_ms"), "ms"),
        ),
        runs,
    )
