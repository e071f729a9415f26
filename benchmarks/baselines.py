"""Programs that benchmarks compare Fairlane with, each a process: ``python -m benchmarks.baselines NAME ARGUMENT...``

chain IN OUT GROUP: one transactional hop in confluent-kafka and nothing else, for hop-latency. It copies records, one
    transaction per poll, with the same client settings as the project's own hops.
send TOPIC...: a plain Faust pass-through, ``await topic.send`` for every event, for dispatch-rate.
codec TOPIC...: Faust consume that decodes each request and encodes the work item for it, produced by confluent-kafka
    without a transaction, for dispatch-rate: what the dispatcher does, less deciding and exactly once.
bare TOPIC...: Faust consume and plain produce of the same bytes, for tenants.
route PORT TOPIC: a FastAPI route that checks a body, produces it to Kafka as JSON and awaits the acknowledgement, for
    gateway. No identity, no limits, no reply. Served like the gateway, by uvicorn with uvloop and httptools, without an
    access log.
"""

import asyncio
import signal
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from benchmarks.load import make_work_item
from benchmarks.simulated_pool import POOL
from fairlane.kafka_clients import KafkaConsumer, KafkaProducer
from fairlane.kafka_config import idempotent_producer, read_committed_consumer, transactional_producer
from fairlane.names import dispatcher_group, tenant_of_request_topic
from fairlane.records import InferenceRequest
from fairlane.schema_files import default_codec
from fairlane.settings import Settings
from fairlane_server.processes.service import HealthServer, Readiness, StopSignal

# Each program imports its own framework: none carries another's modules through its garbage collections.

ROUTE_PATH = "/submit"
_POLL_S = 0.1
_FLUSH_TIMEOUT_S = 10.0


@contextmanager
def _readiness(settings: Settings) -> Iterator[Readiness]:
    """Served by HTTP; ``started`` is to be set."""
    readiness = Readiness("started")
    health = HealthServer(readiness, settings.metrics_host, settings.metrics_port)
    health.start()
    yield readiness
    health.stop()


def copy_in_transactions(settings: Settings, source: str, target: str, group: str) -> None:
    """The program ``chain``."""
    stop = StopSignal()
    stop.install()
    consumer = KafkaConsumer(read_committed_consumer(settings, group) | {"auto.offset.reset": "earliest"})
    producer = KafkaProducer(transactional_producer(settings, f"{group}-producer", settings.transaction_timeout_ms))
    with _readiness(settings) as readiness:
        producer.init_transactions(30.0)
        consumer.subscribe([source], on_assign=lambda _consumer, _partitions: readiness.set("started"))
        while not stop.stopping:
            first = consumer.poll(0.1)
            if first is None:
                continue
            messages = [message for message in (first, *consumer.consume(256, 0)) if message.error() is None]
            if not messages:
                continue
            producer.begin_transaction()
            for message in messages:
                producer.produce(target, value=message.value(), key=message.key())
            offsets = consumer.position(consumer.assignment())
            moved = [TopicPartition(one.topic, one.partition, one.offset) for one in offsets if one.offset >= 0]
            producer.send_offsets_to_transaction(moved, consumer.consumer_group_metadata(), 10.0)
            producer.commit_transaction(10.0)
        consumer.close()


async def pass_on_with_faust(settings: Settings, kind: str, topics: list[str]) -> None:
    """The programs ``send``, ``codec`` and ``bare``."""
    import faust

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
    producer = KafkaProducer(idempotent_producer(settings) | {"queue.buffering.max.messages": 1_000_000})
    codec = default_codec()

    async def pass_on(stream: Any) -> None:
        async for event in stream.noack().events():
            message = event.message
            if kind == "send":
                await target.send(key=message.key, value=message.value)
                continue
            value = message.value
            if kind == "codec":
                request = codec.decode_as(InferenceRequest, value)
                tenant = tenant_of_request_topic(message.topic)
                value = codec.encode(make_work_item(request, tenant, POOL, message.offset))
            producer.produce(f"baseline.{kind}", value=value, key=message.key)
            producer.poll(0)

    app.agent(source, name=kind)(pass_on)
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    with _readiness(settings) as readiness:
        await app.start()
        readiness.set("started")
        await stopping.wait()
        await app.stop()


def serve_route(settings: Settings, port: int, topic: str) -> None:
    """The program ``route``."""
    import uvicorn
    from fastapi import FastAPI
    from pydantic import BaseModel

    class Prompt(BaseModel):
        prompt: str

    class Sampling(BaseModel):
        max_tokens: int

    class Body(BaseModel):
        """The body that the gateway's route also receives."""

        model: str
        input: Prompt
        parameters: Sampling

    class Accepted(BaseModel):
        id: str

    producer = KafkaProducer(idempotent_producer(settings))
    stopping = threading.Event()

    def poll() -> None:
        while not stopping.is_set():
            producer.poll(_POLL_S)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        thread = threading.Thread(target=poll, name="delivery-reports", daemon=True)
        thread.start()
        yield
        stopping.set()
        thread.join()
        producer.flush(_FLUSH_TIMEOUT_S)

    def settle(acknowledged: asyncio.Future[None], error: KafkaError | None) -> None:
        if acknowledged.done():
            return
        if error is None:
            acknowledged.set_result(None)
        else:
            acknowledged.set_exception(KafkaException(error))

    app = FastAPI(lifespan=lifespan)

    @app.post(ROUTE_PATH, status_code=202)
    async def submit(body: Body) -> Accepted:
        request_id = str(uuid4())
        loop = asyncio.get_running_loop()
        acknowledged: asyncio.Future[None] = loop.create_future()

        def report(error: KafkaError | None, _message: Message) -> None:
            loop.call_soon_threadsafe(settle, acknowledged, error)

        producer.produce(topic, body.model_dump_json().encode(), request_id, on_delivery=report)
        await acknowledged
        return Accepted(id=request_id)

    @app.get("/health/ready")
    async def ready() -> dict[str, str]:
        return {"status": "ready"}

    uvicorn.run(
        app,
        host="127.0.0.1",
        port=port,
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="warning",
    )


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["chain", source_topic, target_topic, group_id]:
            copy_in_transactions(Settings(), source_topic, target_topic, group_id)
        case ["route", port_number, produced_topic]:
            serve_route(Settings(), int(port_number), produced_topic)
        case [program, *source_topics]:
            asyncio.run(pass_on_with_faust(Settings(), program, source_topics))
