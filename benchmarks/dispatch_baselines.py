"""The baselines of dispatch-rate and tenants, each a process:
``python -m benchmarks.dispatch_baselines send|codec|bare TOPIC...``

bare:  Faust consume and plain produce of the same bytes.
send:  a plain Faust pass-through, ``await topic.send`` for every event.
codec: Faust consume that decodes each request and encodes the work item for it, produced by confluent-kafka without a
       transaction: what the dispatcher does, less deciding and exactly once.
"""

import asyncio
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import faust
from confluent_kafka import Producer

from benchmarks.load import make_work_item
from benchmarks.simulated_pool import POOL
from fairlane.kafka_config import idempotent_producer
from fairlane.names import dispatcher_group, tenant_of_request_topic
from fairlane.records import InferenceRequest
from fairlane.schema_files import default_codec
from fairlane.settings import Settings
from fairlane_server.processes.service import HealthServer, Readiness


def build(kind: str, topics: list[str], settings: Settings) -> Any:
    """The Faust application of one baseline."""
    app = faust.App(
        f"{dispatcher_group(settings.group_prefix)}.baseline-{kind}",
        broker=f"kafka://{settings.kafka_bootstrap_servers}",
        broker_max_poll_records=2_000,
        consumer_auto_offset_reset="earliest",
        store="memory://",
        datadir=str(Path(tempfile.gettempdir()) / "fairlane-faust"),
        topic_disable_leader=True,
        topic_allow_declare=False,
        web_enabled=False,
        stream_buffer_maxsize=16_384,
        # Otherwise it waits at its end for events that are never acknowledged.
        stream_wait_empty=False,
        table_standby_replicas=0,
    )
    source = app.topic(*topics, key_serializer="raw", value_serializer="raw")
    target = app.topic(f"baseline.{kind}", key_serializer="raw", value_serializer="raw")
    producer = Producer(idempotent_producer(settings) | {"queue.buffering.max.messages": 1_000_000})
    codec = default_codec()

    async def pass_through(stream: Any) -> None:
        async for event in stream.noack().events():
            await target.send(key=event.message.key, value=event.message.value)

    async def decode_and_encode(stream: Any) -> None:
        async for event in stream.noack().events():
            message = event.message
            request = codec.decode_as(InferenceRequest, message.value)
            item = make_work_item(request, tenant_of_request_topic(message.topic), POOL, message.offset)
            producer.produce(f"baseline.{kind}", value=codec.encode(item), key=message.key)
            producer.poll(0)

    async def copy(stream: Any) -> None:
        async for event in stream.noack().events():
            producer.produce(f"baseline.{kind}", value=event.message.value, key=event.message.key)
            producer.poll(0)

    app.agent(source, name=kind)({"send": pass_through, "codec": decode_and_encode, "bare": copy}[kind])
    return app


async def serve(kind: str, topics: list[str]) -> None:
    settings = Settings()
    app = build(kind, topics, settings)
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    readiness = Readiness("started")
    health = HealthServer(readiness, settings.metrics_host, settings.metrics_port)
    health.start()
    await app.start()
    readiness.set("started")
    await stopping.wait()
    await app.stop()
    health.stop()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2:]))
