"""dispatch-rate: requests per second through a dispatcher, beside two Faust programs that do less.

A backlog is ready in four tenants' topics. Each program starts on it alone and is measured by the broker's timestamps
of its first and last output, so that its start does not count.
"""

from collections.abc import Sequence
from time import monotonic

from confluent_kafka import TopicPartition

from benchmarks.cluster import BenchStack, cluster
from benchmarks.load import REQUEST_TIMEOUT_MS, ends_of, make_request
from benchmarks.result import MEDIAN_OF_REPETITIONS, Figure, Result, median_of, repeated
from benchmarks.simulated_pool import open_window
from deploy.local.services import Service
from fairlane.kafka_clients import KafkaConsumer, KafkaProducer
from fairlane.kafka_config import idempotent_producer, read_committed_consumer
from fairlane.names import priority_topic, requests_topic
from fairlane.records import Message, Parameters, RequestInput
from fairlane.schema_files import default_codec
from fairlane.settings import Settings

NAME = "dispatch-rate"
HOW = MEDIAN_OF_REPETITIONS
REQUESTS = 20_000
_TENANTS = ("acme", "globex", "initech", "umbrella")
_TOPICS = tuple(requests_topic(tenant) for tenant in _TENANTS)
_OUTPUTS = {"send": "baseline.send", "codec": "baseline.codec", "fairlane": priority_topic("generate", "normal")}
_TIMEOUT_S = 180.0


def run() -> Result:
    """Three repetitions, each on a fresh cluster; the ratios of the rates."""
    runs = repeated(lambda _number: _measure())
    return Result(
        NAME,
        (
            Figure("rate divided by Faust with topic.send", median_of(runs, "by_send"), "ratio", "at least", 3.0),
            Figure(
                "rate divided by Faust with decode, encode and plain produce",
                median_of(runs, "by_codec"),
                "ratio",
                "at least",
                1.0,
            ),
            Figure("rate", median_of(runs, "fairlane_per_s"), "requests/s"),
            Figure("Faust with topic.send", median_of(runs, "send_per_s"), "requests/s"),
            Figure("Faust with decode, encode, plain produce", median_of(runs, "codec_per_s"), "requests/s"),
        ),
        runs,
    )


def _measure() -> dict[str, float]:
    services = [
        Service("fairlane", ("-m", "stream_processors.dispatcher")),
        *(Service(kind, ("-m", "benchmarks.baselines", kind, *_TOPICS)) for kind in ("send", "codec")),
    ]
    rates = {}
    for service in services:
        with cluster([], topics=("baseline.send", "baseline.codec"), tenants=_TENANTS) as running:
            publish_backlog(running.settings, _TENANTS, REQUESTS)
            rates[service.name] = rate_of(running, service, _OUTPUTS[service.name], REQUESTS)
    return {
        **{f"{name}_per_s": rate for name, rate in rates.items()},
        "by_send": rates["fairlane"] / rates["send"],
        "by_codec": rates["fairlane"] / rates["codec"],
    }


def rate_of(running: BenchStack, service: Service, output: str, requests: int) -> float:
    """Requests per second of a dispatcher, or of a program in its place, while the pool's window is open."""
    start = ends_of(running.settings, (output,))
    with open_window(running.settings), running.service(service):
        return output_rate(running.settings, start, requests)


def publish_backlog(settings: Settings, tenants: Sequence[str], requests: int) -> None:
    """Publish requests of each tenant in turn, with a deadline that none exceeds."""
    producer = KafkaProducer(idempotent_producer(settings) | {"queue.buffering.max.messages": 200_000, "linger.ms": 20})
    codec = default_codec()
    content = RequestInput(messages=(Message("user", "What is the capital of France, and why? " * 5),))
    for number in range(requests):
        request = make_request(input=content, parameters=Parameters(max_tokens=32), timeout_ms=REQUEST_TIMEOUT_MS)
        topic = requests_topic(tenants[number % len(tenants)])
        producer.produce(topic, value=codec.encode(request), key=request.request_id)
        producer.poll(0)
    if producer.flush(60):
        raise TimeoutError("the backlog could not be published within 60 s")


def output_rate(settings: Settings, start: Sequence[TopicPartition], count: int, *, skip: int = 1) -> float:
    """Records per second, by the broker's timestamps, from the ``skip``-th to the last of ``count`` after ``start``."""
    consumer = KafkaConsumer(read_committed_consumer(settings, "bench-reader"))
    consumer.assign(list(start))
    deadline = monotonic() + _TIMEOUT_S
    times_ms: list[int] = []
    while len(times_ms) < count:
        if monotonic() > deadline:
            raise TimeoutError(f"{start[0].topic}: {len(times_ms)} of {count} after {_TIMEOUT_S:g} s")
        for message in consumer.consume(2_000, 0.5):
            error = message.error()
            if error is not None:
                raise RuntimeError(f"{message.topic()}: {error.name()}")
            times_ms.append(message.timestamp()[1])
    consumer.close()
    times_ms.sort()
    return (len(times_ms) - skip + 1) / ((times_ms[-1] - times_ms[skip - 1]) / 1000)
