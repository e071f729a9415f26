"""A pool of simulated engines of a declared speed, and the dispatchers before it.

An engine decodes at half the speed of its prefill, so a batch takes exactly its cost tokens (prompt plus twice the
output) divided by the speed: the pool's capacity is known without measuring it, in the unit of fairness. It is slow on
purpose: 40,000 cost tokens a second with the trace's sizes are about 76 requests a second, far below what the broker,
one dispatcher and a load generator can do on two cores. A batch of 4 takes 105 ms on each of two engines, longer than
the 30 ms from its settlement to the next work, which the batch that is ready covers.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from deploy.local.services import Service
from fairlane.client.requests import RequestFields
from fairlane.clock import now_ms
from fairlane.kafka_clients import KafkaProducer
from fairlane.kafka_config import idempotent_producer
from fairlane.names import CONTROL_CAPACITY
from fairlane.outcomes import Degradation, Health, Task
from fairlane.records import CapacityReport
from fairlane.schema_files import default_codec
from fairlane.settings import KafkaSettings
from fairlane_server.access.users import KafkaUser
from fairlane_server.postgres.rights import PostgresRole
from fairlane_server.topics.families import KafkaRole
from stream_processors.dispatcher.scheduling.fair_queue import Policy

POOL = "generate"
MODEL = "smollm2-135m-instruct"
QUESTION: RequestFields = {"model": MODEL, "prompt": "What is the capital of France?", "max_tokens": 16}
"""A small request."""
_HELD_REQUESTS = 200_000
_HELD_BYTES = 1 << 30


def dispatcher(number: int = 1, env: Mapping[str, str] | None = None) -> Service:
    """The service ``dispatcher-NUMBER``."""
    arguments, user = ("-m", "stream_processors.dispatcher"), KafkaUser(KafkaRole.DISPATCHER).name
    return Service(f"dispatcher-{number}", arguments, env or {}, user=user, postgres_role=PostgresRole.DISPATCHER)


def recorder(name: str = "recorder-1") -> Service:
    """The service that fills Postgres."""
    user = KafkaUser(KafkaRole.RECORDER).name
    return Service(name, ("-m", "stream_processors.recorder"), user=user, postgres_role=PostgresRole.RECORDER)


def consumer(number: int = 1, env: Mapping[str, str] | None = None, pool: str = POOL) -> Service:
    """The service ``consumer-NUMBER``."""
    user = KafkaUser(KafkaRole.CONSUMER, pool).name
    return Service(f"consumer-{number}", ("-m", "inference_consumers", "--pool", pool), env or {}, user=user)


@dataclass(frozen=True, slots=True)
class SimulatedPool:
    """So many engines that together serve ``cost_tokens_per_s``."""

    cost_tokens_per_s: float = 40_000.0
    consumers: int = 2
    max_batch_size: int = 4

    @property
    def env(self) -> dict[str, str]:
        """The settings of each consumer."""
        speed = self.cost_tokens_per_s / self.consumers
        return {
            "ENGINE": "simulated",
            "SIMULATED_PREFILL_TOKENS_PER_S": str(speed),
            "SIMULATED_DECODE_TOKENS_PER_S": str(speed / 2),
            "MAX_BATCH_SIZE": str(self.max_batch_size),
        }

    def services(self) -> list[Service]:
        """The consumers."""
        return [consumer(number, self.env) for number in range(1, self.consumers + 1)]

    def requests_per_s(self, mean_cost_tokens: float) -> float:
        """How many requests of this mean size it serves."""
        return self.cost_tokens_per_s / mean_cost_tokens


def dispatchers(policy: Policy, count: int = 1, env: Mapping[str, str] | None = None) -> list[Service]:
    """Dispatchers under a fairness policy."""
    return [dispatcher(number, {"FAIRNESS_POLICY": policy, **(env or {})}) for number in range(1, count + 1)]


UNBOUNDED = {"MAX_QUEUE_SIZE": str(_HELD_REQUESTS), "MAX_QUEUE_BYTES": str(_HELD_BYTES)}
"""A dispatcher's bounds where nothing is to be refused."""
UNBOUNDED_TENANT = {
    "queue": {"max_requests": _HELD_REQUESTS, "max_bytes": _HELD_BYTES},
    "forbid": [str(Degradation.SMALLER_MODEL)],
}
"""A tenant's. It gets no smaller model, as in ``cluster``."""


def simulated_model(model: str, task: Task, pool: str, **limits: int) -> dict[str, object]:
    """An entry of models.yaml."""
    entry = {"model": model, "version": "1", "pool": pool, "engine": "simulated", "tasks": [str(task)], "path": model}
    return {**entry, "limits": limits}


_NO_ENGINE_TIME = {
    "ENGINE": "simulated",
    "SIMULATED_PREFILL_TOKENS_PER_S": "inf",
    "SIMULATED_DECODE_TOKENS_PER_S": "inf",
}
INSTANT_SERVICES = (dispatcher(), consumer(env=_NO_ENGINE_TIME))
"""A dispatcher and a consumer whose engine takes no time."""
UNBOUNDED_INSTANT_SERVICES = (dispatcher(env=UNBOUNDED), consumer(env=_NO_ENGINE_TIME))
"""The same where nothing is to be refused."""


def fixed_batch_engine(batch_ms: float, batch_items: int) -> dict[str, str]:
    """Settings of a consumer whose batches all take the same time, whatever is in them."""
    return {
        "ENGINE": "simulated",
        "SIMULATED_BATCH_MS": str(batch_ms),
        "SIMULATED_PREFILL_TOKENS_PER_S": "1e12",
        "SIMULATED_DECODE_TOKENS_PER_S": "1e12",
        "MAX_BATCH_SIZE": str(batch_items),
    }


_REPORT_EVERY_S = 0.25


@contextmanager
def open_window(settings: KafkaSettings) -> Iterator[None]:
    """Report the capacity of a consumer with more room than a benchmark sends, for benchmarks of the dispatcher alone.

    Without it the dispatcher's rate would be that of an empty window; with simulated consumers, theirs. The first
    report is acknowledged before the context opens. Raises TimeoutError.
    """
    producer = KafkaProducer(idempotent_producer(settings))
    stopping = threading.Event()

    acknowledged = threading.Event()

    def keep_reporting() -> None:
        while not stopping.wait(_REPORT_EVERY_S):
            roomy = capacity_report("open-window", POOL, MODEL, 1e9, 1_000_000, 1_000_000_000, now_ms())
            producer.produce(CONTROL_CAPACITY, default_codec().encode(roomy), roomy.instance_id)
            if not producer.flush(_REPORT_EVERY_S):
                acknowledged.set()

    thread = threading.Thread(target=keep_reporting, name="open-window", daemon=True)
    thread.start()
    if not acknowledged.wait(10):
        raise TimeoutError("a capacity report was not acknowledged within 10 s")
    try:
        yield
    finally:
        stopping.set()
        thread.join()


def capacity_report(
    instance_id: str,
    pool: str,
    model: str,
    tokens_per_s: float,
    max_batch_size: int,
    max_batch_tokens: int,
    reported_at_ms: int,
    partitions: tuple[int, ...] = (),
) -> CapacityReport:
    """Of a consumer with nothing to do whose engine decodes at half the speed of its prefill."""
    return CapacityReport(
        instance_id=instance_id,
        pool=pool,
        models=(model,),
        health=Health.HEALTHY,
        draining=False,
        prefill_tokens_per_s=tokens_per_s,
        decode_tokens_per_s=tokens_per_s / 2,
        max_batch_size=max_batch_size,
        max_batch_tokens=max_batch_tokens,
        batch_fill=1.0,
        in_flight_items=0,
        in_flight_tokens=0,
        reported_at_ms=reported_at_ms,
        cost_tokens_per_s=tokens_per_s,
        partitions=partitions,
    )
