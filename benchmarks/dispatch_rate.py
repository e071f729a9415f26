"""dispatch-rate: requests per second through a dispatcher, beside two Faust programs that do less.

A backlog lies ready in four tenants' topics; each program starts on it alone and is measured by the broker's own
timestamps of its first and its last output, so that starting up does not count.
"""

import uuid
from time import monotonic

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Producer, TopicPartition

from benchmarks.cluster import Cluster, cluster
from benchmarks.result import Figure, Result, median_of, repeated
from deploy.local.services import Service
from fairlane.kafka import idempotent_producer, read_committed_consumer
from fairlane.names import priority_topic, requests_topic
from fairlane.records import InferenceRequest, Message, Parameters, RequestInput
from fairlane.schema_files import default_codec

NAME = "dispatch-rate"
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
                0.7,
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
        *(Service(kind, ("-m", "benchmarks.dispatch_baselines", kind, *_TOPICS)) for kind in ("send", "codec")),
    ]
    rates = {}
    for service in services:
        with cluster([], topics=("baseline.send", "baseline.codec"), tenants=_TENANTS) as running:
            _publish(running)
            with running.service(service):
                rates[service.name] = _rate(running, _OUTPUTS[service.name])
    return {
        **{f"{name}_per_s": rate for name, rate in rates.items()},
        "by_send": rates["fairlane"] / rates["send"],
        "by_codec": rates["fairlane"] / rates["codec"],
    }


def _publish(running: Cluster) -> None:
    producer = Producer(
        idempotent_producer(running.settings) | {"queue.buffering.max.messages": 200_000, "linger.ms": 20}
    )
    codec = default_codec()
    content = RequestInput(messages=(Message("user", "What is the capital of France, and why? " * 5),))
    for number in range(REQUESTS):
        request = InferenceRequest(
            str(uuid.uuid4()), "smollm2-135m-instruct", "generate", content, Parameters(max_tokens=32)
        )
        producer.produce(_TOPICS[number % len(_TOPICS)], value=codec.encode(request), key=request.request_id)
        producer.poll(0)
    if producer.flush(60):
        raise TimeoutError("the backlog could not be published within 60 s")


def _rate(running: Cluster, topic: str) -> float:
    """Outputs per second between the broker's timestamps of the first and the last one."""
    consumer = Consumer(read_committed_consumer(running.settings, "bench-reader") | {"enable.partition.eof": True})
    partitions = consumer.list_topics(topic, timeout=10).topics[topic].partitions
    consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in partitions])
    deadline = monotonic() + _TIMEOUT_S
    first_ms, last_ms, count = 0, 0, 0
    while count < REQUESTS:
        if monotonic() > deadline:
            raise TimeoutError(f"{topic}: {count} of {REQUESTS} after {_TIMEOUT_S:g} s")
        for message in consumer.consume(2_000, 0.5):
            error = message.error()
            if error is not None:
                if error.code() != KafkaError._PARTITION_EOF:
                    raise RuntimeError(f"{topic}: {error.name()}")
                continue
            timestamp_ms = message.timestamp()[1]
            first_ms = min(first_ms or timestamp_ms, timestamp_ms)
            last_ms = max(last_ms, timestamp_ms)
            count += 1
    consumer.close()
    return count / ((last_ms - first_ms) / 1000)
