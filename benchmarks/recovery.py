"""recovery: seconds until replies flow again after a SIGKILL and the supervisor's restart.

One dispatcher and one consumer, so that nobody stands in. Requests of three tenants are published all the time; replies
flow again when one published after the kill has been answered for every tenant.
"""

import random
import signal
import threading
from time import monotonic, sleep

from confluent_kafka import Consumer, Producer, TopicPartition

from benchmarks.cluster import Cluster, cluster
from benchmarks.load import make_request
from benchmarks.result import Figure, Result
from deploy.local.services import Service
from fairlane.kafka_config import idempotent_producer, read_committed_consumer
from fairlane.names import replies_topic, requests_topic
from fairlane.records import InferenceReply
from fairlane.schema_files import default_codec

NAME = "recovery"
AIM_S = 10.0
KILLS = 10
HOW = f"{KILLS} kills on one cluster, the worst of each kind"
_DISPATCHER, _CONSUMER = "dispatcher-1", "consumer-generate-1"
_VICTIMS = ((_DISPATCHER,), (_CONSUMER,), (_DISPATCHER, _CONSUMER))
_TENANTS = ("acme", "globex", "initech")
_INTERVAL_S = 0.05
_TIMEOUT_S = 60.0


class _Traffic:
    """Publishes a request per tenant all the time and remembers when each was published."""

    def __init__(self, running: Cluster) -> None:
        self._producer = Producer(idempotent_producer(running.settings))
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.published_at: dict[str, float] = {}

    def __enter__(self) -> "_Traffic":
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._producer.flush(10)

    def _run(self) -> None:
        codec = default_codec()
        while not self._stopping.wait(_INTERVAL_S):
            for tenant in _TENANTS:
                request = make_request()
                self.published_at[request.request_id] = monotonic()
                self._producer.produce(requests_topic(tenant), value=codec.encode(request), key=request.request_id)
            self._producer.poll(0)


def run(kills: int = KILLS) -> Result:
    """Ten kills in turn of a dispatcher, of a consumer, of both; the worst counts."""
    services = [
        Service(_DISPATCHER, ("-m", "stream_processors.dispatcher")),
        Service(_CONSUMER, ("-m", "inference_consumers", "--pool", "generate", "--engine", "simulated")),
    ]
    random.seed(20)
    with cluster(services, tenants=_TENANTS) as running, _Traffic(running) as traffic:
        reader = Consumer(read_committed_consumer(running.settings, "bench-reader"))
        reader.assign([TopicPartition(replies_topic(tenant), 0, 0) for tenant in _TENANTS])
        _wait_for_replies(reader, traffic, monotonic())
        runs = []
        for number in range(kills):
            sleep(random.uniform(0.5, 1.5))  # a random moment, so that the kill hits any phase of the loop
            victims = _VICTIMS[number % len(_VICTIMS)]
            killed_at = monotonic()
            for victim in victims:
                running.stack.supervisor.kill(victim, signal.SIGKILL)
            seconds = _wait_for_replies(reader, traffic, killed_at)
            runs.append(
                {"dispatcher": float(_DISPATCHER in victims), "consumer": float(_CONSUMER in victims), "s": seconds}
            )
        reader.close()
    by_victim = {
        name: [run["s"] for run in runs if (run["dispatcher"], run["consumer"]) == kind]
        for name, kind in (("dispatcher", (1.0, 0.0)), ("consumer", (0.0, 1.0)), ("both", (1.0, 1.0)))
    }
    return Result(
        NAME,
        (
            Figure(f"worst of {kills}", max(run["s"] for run in runs), "s", "at most", AIM_S),
            *(
                Figure(f"worst after a kill of {name}", max(values), "s")
                for name, values in by_victim.items()
                if values
            ),
        ),
        tuple(runs),
    )


def _wait_for_replies(reader: Consumer, traffic: _Traffic, since: float) -> float:
    """Seconds from ``since`` until every tenant has the reply to a request published after it."""
    waiting = set(_TENANTS)
    while waiting:
        if monotonic() - since > _TIMEOUT_S:
            raise TimeoutError(f"no replies for {sorted(waiting)} within {_TIMEOUT_S:g} s")
        for message in reader.consume(500, 0.02):
            if message.error() is not None:
                continue
            reply = default_codec().decode_as(InferenceReply, message.value())
            if traffic.published_at.get(reply.request_id, 0.0) > since:
                waiting.discard(reply.tenant)
    return monotonic() - since
