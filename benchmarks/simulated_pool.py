"""A pool of simulated engines of a declared speed, and the dispatchers before it.

An engine decodes at half the speed of its prefill, so that a batch takes exactly its cost tokens (prompt plus twice the
output) divided by the speed: the pool's capacity is known without measuring it, in the unit that fairness is measured
in. It is slow on purpose. At 40,000 cost tokens a second and the trace's sizes it serves about 76 requests a second,
and ten times that is still little for the broker, one dispatcher and a load generator on two cores; at the speed of a
real GPU fleet this machine would be what is measured. A batch of 4 then takes 105 ms on each of two engines: longer
than the way from its settlement to the next work (some 30 ms), so that the batch that lies ready covers that way.

A dispatcher sends on what the consumers have room for. With none there, its rate would be that of an empty window; with
simulated ones, theirs. So a thread reports the capacity of a consumer that is larger than anything a benchmark sends.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Literal

from confluent_kafka import ConsumerGroupState, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from benchmarks.load import MODEL
from deploy.local.services import Service
from fairlane.clock import now_ms
from fairlane.kafka_config import connection, idempotent_producer
from fairlane.names import CONTROL_CAPACITY, dispatcher_group, requests_topic
from fairlane.outcomes import Health
from fairlane.records import CapacityReport
from fairlane.schema_files import default_codec
from fairlane.settings import KafkaSettings, Settings

POOL = "generate"
FairnessPolicy = Literal["drr", "vtc", "fifo"]
_HELD_REQUESTS = 200_000
_HELD_BYTES = 1 << 30


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
        return [
            Service(f"consumer-{POOL}-{number}", ("-m", "inference_consumers", "--pool", POOL), self.env)
            for number in range(1, self.consumers + 1)
        ]

    def requests_per_s(self, mean_cost_tokens: float) -> float:
        """How many requests of this mean size it serves."""
        return self.cost_tokens_per_s / mean_cost_tokens


def dispatchers(policy: FairnessPolicy, count: int = 1, env: Mapping[str, str] | None = None) -> list[Service]:
    """Dispatchers under a fairness policy."""
    return [
        Service(
            f"dispatcher-{number}", ("-m", "stream_processors.dispatcher"), {"FAIRNESS_POLICY": policy, **(env or {})}
        )
        for number in range(1, count + 1)
    ]


UNBOUNDED = {"MAX_QUEUE_SIZE": str(_HELD_REQUESTS), "MAX_QUEUE_BYTES": str(_HELD_BYTES)}
"""A dispatcher's bounds where nothing is to be refused."""
UNBOUNDED_TENANT = {"queue": {"max_requests": _HELD_REQUESTS, "max_bytes": _HELD_BYTES}}
"""A tenant's."""


_TIMEOUT_S = 60.0
_CALL_TIMEOUT_S = 10.0
_LOOK_EVERY_S = 0.1

Owners = Mapping[str, frozenset[str]]
"""By the id of each member of the dispatchers' group, its tenants."""


def owners(settings: Settings, tenants: Sequence[str]) -> Owners:
    """By the broker's word; nothing while the group rebalances or the broker does not answer."""
    admin = AdminClient(connection(settings))
    group = dispatcher_group(settings.group_prefix)
    try:
        described = admin.describe_consumer_groups([group], request_timeout=_CALL_TIMEOUT_S)[group]
        found = described.result(_CALL_TIMEOUT_S)
    except KafkaException:
        return {}
    if found.state != ConsumerGroupState.STABLE:
        return {}
    tenant_of = {requests_topic(tenant): tenant for tenant in tenants}
    return {
        member.member_id: frozenset(
            tenant_of[one.topic]
            for one in (member.assignment.topic_partitions if member.assignment else ())
            if one.topic in tenant_of
        )
        for member in found.members
    }


def wait_owned(settings: Settings, tenants: Sequence[str], dispatchers: int, timeout_s: float = _TIMEOUT_S) -> Owners:
    """Wait until so many dispatchers share all of these tenants and each has some. Returns who has whom.

    Raises:
        TimeoutError: they do not within ``timeout_s``.
    """
    deadline = monotonic() + timeout_s
    while not are_shared(found := owners(settings, tenants), tenants, dispatchers):
        if monotonic() > deadline:
            raise TimeoutError(f"not {dispatchers} dispatchers share {len(tenants)} tenants, but: {found}")
        sleep(_LOOK_EVERY_S)
    return found


def are_shared(found: Owners, tenants: Sequence[str], dispatchers: int) -> bool:
    """Whether so many dispatchers share all of these tenants, and each has some."""
    counts = [len(own) for own in found.values()]
    return len(counts) == dispatchers and all(counts) and sum(counts) == len(tenants)


_INTERVAL_S = 0.25
_INSTANCE = "open-window"
_TOKENS_PER_S = 1e9
_BATCH_ITEMS = 1_000_000
_BATCH_TOKENS = 1_000_000_000


@contextmanager
def open_window(settings: KafkaSettings, pool: str = POOL) -> Iterator[None]:
    """Reports while its context is open; the first report is acknowledged before it opens."""
    producer = Producer(idempotent_producer(settings))
    stopping = threading.Event()

    def report() -> None:
        producer.produce(CONTROL_CAPACITY, default_codec().encode(_report(pool)), _INSTANCE)

    def keep_reporting() -> None:
        while not stopping.wait(_INTERVAL_S):
            report()
            producer.poll(0)

    report()
    if producer.flush(10):
        raise TimeoutError("a capacity report was not acknowledged within 10 s")
    thread = threading.Thread(target=keep_reporting, name="open-window", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()
        producer.flush(10)


def _report(pool: str) -> CapacityReport:
    return CapacityReport(
        instance_id=_INSTANCE,
        pool=pool,
        models=(MODEL,),
        health=Health.HEALTHY,
        draining=False,
        prefill_tokens_per_s=_TOKENS_PER_S,
        decode_tokens_per_s=_TOKENS_PER_S / 2,
        max_batch_size=_BATCH_ITEMS,
        max_batch_tokens=_BATCH_TOKENS,
        batch_fill=1.0,
        in_flight_items=0,
        in_flight_tokens=0,
        reported_at_ms=now_ms(),
        cost_tokens_per_s=_TOKENS_PER_S,
    )
