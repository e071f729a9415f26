"""The baseline of ``gateway``: a FastAPI route that checks a body, produces it to Kafka and awaits the acknowledgement.

``python -m benchmarks.bare_route PORT TOPIC``. No identity, no limits, no reply, the body as JSON. Served like the
gateway, by uvicorn with uvloop and httptools, without an access log.
"""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import uuid4

import uvicorn
from confluent_kafka import KafkaError, KafkaException, Message, Producer
from fastapi import FastAPI
from pydantic import BaseModel

from fairlane.kafka_config import idempotent_producer
from fairlane.settings import KafkaSettings

PATH = "/submit"
READY = "/health/ready"
_POLL_S = 0.1
_FLUSH_TIMEOUT_S = 10.0


class Input(BaseModel):
    prompt: str


class Parameters(BaseModel):
    max_tokens: int


class Body(BaseModel):
    """What the gateway's route is sent as well."""

    model: str
    input: Input
    parameters: Parameters


class Accepted(BaseModel):
    id: str


def build(settings: KafkaSettings, topic: str) -> FastAPI:
    """The application."""
    producer = Producer(idempotent_producer(settings))
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

    app = FastAPI(lifespan=lifespan)

    @app.post(PATH, status_code=202)
    async def submit(body: Body) -> Accepted:
        request_id = str(uuid4())
        loop = asyncio.get_running_loop()
        acknowledged: asyncio.Future[None] = loop.create_future()

        def report(error: KafkaError | None, _message: Message) -> None:
            loop.call_soon_threadsafe(_settle, acknowledged, error)

        producer.produce(topic, body.model_dump_json().encode(), request_id, on_delivery=report)
        await acknowledged
        return Accepted(id=request_id)

    @app.get(READY)
    async def ready() -> dict[str, str]:
        return {"status": "ready"}

    return app


def _settle(acknowledged: "asyncio.Future[None]", error: KafkaError | None) -> None:
    if acknowledged.done():
        return
    if error is None:
        acknowledged.set_result(None)
    else:
        acknowledged.set_exception(KafkaException(error))


def main() -> None:
    uvicorn.run(
        build(KafkaSettings(), sys.argv[2]),
        host="127.0.0.1",
        port=int(sys.argv[1]),
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="warning",
    )


if __name__ == "__main__":
    main()
