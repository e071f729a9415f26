"""hop-latency: one request at a time through dispatcher and consumer, beside a bare chain of the same two hops.

Both chains run all the time and are asked in turn, so that whatever else the machine does hits both alike.
"""

from itertools import pairwise
from statistics import median
from time import perf_counter

from confluent_kafka import Consumer, Producer

from benchmarks.cluster import cluster
from benchmarks.load import ends_of, make_request
from benchmarks.result import MEDIAN_OF_REPETITIONS, Figure, Result, median_of, repeated
from benchmarks.simulated_pool import INSTANT_SERVICES
from deploy.local.services import Service
from fairlane.kafka_clients import KafkaConsumer, KafkaProducer
from fairlane.kafka_config import idempotent_producer, read_committed_consumer
from fairlane.names import replies_topic, requests_topic
from fairlane.schema_files import default_codec

NAME = "hop-latency"
HOW = MEDIAN_OF_REPETITIONS
AIM = 1.35
REQUESTS = 200
_WARM_UP = 30
_TIMEOUT_S = 30.0
_BARE_TOPICS = ("bare.in", "bare.middle", "bare.out")


def _ask_ms(producer: Producer, source: str, reader: Consumer) -> float:
    """Send one record in and wait until it comes out."""
    request = make_request()
    value = default_codec().encode(request)
    started = perf_counter()
    producer.produce(source, value=value, key=request.request_id)
    while perf_counter() - started < _TIMEOUT_S:
        producer.poll(0)
        message = reader.poll(0.05)
        if message is not None and message.error() is None and message.key() == request.request_id.encode():
            return (perf_counter() - started) * 1000
    raise TimeoutError(f"{source}: no answer within {_TIMEOUT_S:g} s")


def run() -> Result:
    """Three repetitions; the ratio of the medians."""
    bare = [
        Service(f"bare-{number}", ("-m", "benchmarks.baselines", "chain", source, target, f"bare-{number}"))
        for number, (source, target) in enumerate(pairwise(_BARE_TOPICS), 1)
    ]
    with cluster([*INSTANT_SERVICES, *bare], topics=_BARE_TOPICS) as running:
        # No batching of the client's own: both chains are asked one record at a time.
        producer = KafkaProducer(idempotent_producer(running.settings) | {"linger.ms": 0})
        readers = {}
        for source, target in ((requests_topic("acme"), replies_topic("acme")), (_BARE_TOPICS[0], _BARE_TOPICS[-1])):
            readers[source] = KafkaConsumer(read_committed_consumer(running.settings, "bench-reader"))
            readers[source].assign(ends_of(running.settings, (target,)))

        def measure(_number: int, requests: int | None = None) -> dict[str, float]:
            pairs = [
                [_ask_ms(producer, source, reader) for source, reader in readers.items()]
                for _ in range(requests or REQUESTS)
            ]
            ours_ms, bare_ms = map(median, zip(*pairs, strict=True))
            return {"fairlane_ms": ours_ms, "bare_chain_ms": bare_ms, "ratio": ours_ms / bare_ms}

        measure(0, _WARM_UP)
        runs = repeated(measure)
        for reader in readers.values():
            reader.close()
    return Result(
        NAME,
        (
            Figure("latency divided by the bare chain's", median_of(runs, "ratio"), "ratio", "at most", AIM),
            Figure("latency", median_of(runs, "fairlane_ms"), "ms"),
            Figure("bare chain", median_of(runs, "bare_chain_ms"), "ms"),
        ),
        runs,
    )
