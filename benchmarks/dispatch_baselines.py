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

from fairlane.kafka_config import idempotent_producer
from fairlane.names import dispatcher_group, replies_topic, tenant_of_request_topic
from fairlane.records import InferenceRequest, SourceCoordinate, WorkItem
from fairlane.schema_files import default_codec
from fairlane.settings import Settings
from fairlane_server.processes.service import HealthServer, Readiness


def work_item(request: InferenceRequest, topic: str, offset: int, timestamp_ms: int) -> WorkItem:
    """The same record the dispatcher writes."""
    return WorkItem(
        request=request,
        tenant=tenant_of_request_topic(topic),
        pool="generate",
        model_version="1",
        priority_class=request.priority,
        cost_tokens=100,
        submitted_at_ms=timestamp_ms,
        admitted_at_ms=timestamp_ms,
        dispatched_at_ms=timestamp_ms,
        deadline_at_ms=timestamp_ms + 60_000,
        reply_topic=replies_topic("acme"),
        dispatcher_id="baseline-1",
        source=SourceCoordinate(topic, 0, offset),
    )


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
            item = work_item(request, message.topic, message.offset, round(message.timestamp * 1000))
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
