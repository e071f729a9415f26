"""Capacity without end, as far as a dispatcher can tell: for benchmarks of the dispatcher alone.

A dispatcher sends on what the consumers have room for. With none there, its rate would be that of an empty window; with
simulated ones, theirs. So a thread reports the capacity of a consumer that is larger than anything a benchmark sends.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from confluent_kafka import Producer

from benchmarks.load import MODEL
from benchmarks.simulated_pool import POOL
from fairlane.clock import now_ms
from fairlane.kafka_config import idempotent_producer
from fairlane.names import CONTROL_CAPACITY
from fairlane.outcomes import Health
from fairlane.records import CapacityReport
from fairlane.schema_files import default_codec
from fairlane.settings import KafkaSettings

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
