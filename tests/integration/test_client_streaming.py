"""Streams and cancellations of the client SDK on a real broker; the test plays the other side."""

import asyncio
import statistics
import time
from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer, TopicPartition

from fairlane.client import AsyncClient, AsyncTextStream, Client, TextDelta, TextStream
from fairlane.errors import Cancelled
from fairlane.kafka_config import read_committed_consumer
from fairlane.names import chunks_topic, replies_topic, requests_topic
from fairlane.settings import KafkaSettings
from tests.kit.other_side import OtherSide, create_topics

pytestmark = pytest.mark.broker

WAIT_S = 20


@pytest.fixture
def tenant(broker: str, unique: str) -> str:
    create_topics(broker, requests_topic(unique), replies_topic(unique), chunks_topic(unique))
    return unique


@pytest.fixture
def pipeline(broker: str, tenant: str) -> Iterator[OtherSide]:
    with OtherSide(broker, tenant) as made:
        yield made


@pytest.fixture
def client(broker: str, tenant: str) -> Iterator[Client]:
    with Client(tenant, broker, close_timeout_ms=5_000) as made:
        yield made


def stream(client: Client) -> TextStream:
    return client.stream(model="m", prompt="hello", timeout=WAIT_S)


def test_an_answer_is_read_while_it_is_made(client: Client, pipeline: OtherSide) -> None:
    made = stream(client)
    request = pipeline.request()
    assert (request.request_id, request.parameters.stream) == (made.request_id, True)
    for seq, text in enumerate(["The capital", " is", " Paris"]):
        pipeline.chunk(request.request_id, seq, text)
        assert next(made) == TextDelta(text), "before the next one is made"
    pipeline.chunk(request.request_id, 3, "", last=True)
    pipeline.reply(request.request_id, "The capital is Paris.")
    assert list(made) == [TextDelta(".")]
    assert made.reply().output is not None
    assert made.text == "The capital is Paris."


def test_a_retry_in_the_middle_starts_the_text_again(client: Client, pipeline: OtherSide) -> None:
    made = stream(client)
    request_id = pipeline.request().request_id
    pipeline.chunk(request_id, 0, "The capi")
    assert next(made) == TextDelta("The capi")
    pipeline.chunk(request_id, 0, "Paris", attempt=2)
    assert next(made) == TextDelta("Paris", restarted=True, attempt=2)
    pipeline.chunk(request_id, 1, "tal is", attempt=1)  # a zombie's
    pipeline.reply(request_id, "Paris.")
    assert list(made) == [TextDelta(".", attempt=2)]


def test_the_chunks_of_many_streams_reach_each_its_own(client: Client, pipeline: OtherSide) -> None:
    streams = [stream(client) for _ in range(20)]
    for _ in streams:
        request_id = pipeline.request().request_id
        for seq in range(10):
            pipeline.chunk(request_id, seq, f"{request_id}-{seq} ")
    for made in streams:
        whole = "".join(f"{made.request_id}-{seq} " for seq in range(10))
        while made.text != whole:
            next(made)
        pipeline.reply(made.request_id, whole)
        assert list(made) == []
        assert made.text == whole


def test_a_client_that_came_later_gets_the_whole_text_with_the_reply(
    broker: str, tenant: str, client: Client, pipeline: OtherSide
) -> None:
    first = stream(client)
    request_id = pipeline.request().request_id
    pipeline.chunk(request_id, 0, "Par")
    next(first)
    with Client(tenant, broker) as other:
        second = other.stream(model="m", prompt="hello", request_id=request_id, timeout=WAIT_S)
        pipeline.chunk(request_id, 1, "is")
        assert next(first) == TextDelta("is")
        pipeline.reply(request_id, "Paris")
        assert list(second) == [TextDelta("Paris")]
    assert list(first) == []


def test_a_missing_chunk_topic_makes_the_answer_one_piece(broker: str, unique: str) -> None:
    create_topics(broker, requests_topic(unique), replies_topic(unique))
    with OtherSide(broker, unique) as pipeline, Client(unique, broker) as client:
        before = time.monotonic()
        made = stream(client)
        assert time.monotonic() - before < 8
        pipeline.reply(pipeline.request().request_id, "Paris")
        assert list(made) == [TextDelta("Paris")]


def test_a_cancellation_follows_its_request_in_the_log(client: Client, pipeline: OtherSide) -> None:
    handle = client.submit(model="m", prompt="hello")
    handle.cancel()
    handle.cancel()
    assert pipeline.request().request_id == handle.request_id
    assert pipeline.cancellation().request_id == handle.request_id
    pipeline.reply(handle.request_id, outcome="cancelled")
    with pytest.raises(Cancelled):
        handle.result(WAIT_S)
    handle.cancel()
    too_late = client.submit(model="m", prompt="hello")
    assert pipeline.request().request_id == too_late.request_id, "nothing was sent for what was answered"
    too_late.cancel()
    pipeline.reply(too_late.request_id, "Paris")
    assert too_late.result(WAIT_S).outcome == "ok"


def test_a_stream_that_is_left_cancels_its_request(client: Client, pipeline: OtherSide) -> None:
    with stream(client) as made:
        request_id = pipeline.request().request_id
        pipeline.chunk(request_id, 0, "Par")
        assert next(made) == TextDelta("Par")
    assert pipeline.cancellation().request_id == request_id
    pipeline.reply(request_id, outcome="cancelled")
    assert made.reply(WAIT_S).outcome == "cancelled"


def test_a_client_that_is_closed_cancels_the_stream_it_leaves(broker: str, tenant: str, pipeline: OtherSide) -> None:
    with Client(tenant, broker) as client:
        made = stream(client)
        request_id = pipeline.request().request_id
    assert pipeline.cancellation().request_id == request_id == made.request_id


def test_tasks_stream_and_leave(broker: str, tenant: str, pipeline: OtherSide) -> None:
    async def text_of(made: AsyncTextStream) -> str:
        return "".join([delta.text async for delta in made])

    async def run() -> None:
        async with AsyncClient(tenant, broker) as client:
            streams = [client.stream(model="m", prompt="hello", timeout=WAIT_S) for _ in range(5)]
            tasks = {made.request_id: asyncio.create_task(text_of(made)) for made in streams}
            for _ in streams:
                request_id = (await asyncio.to_thread(pipeline.request)).request_id
                for seq, text in enumerate(["Par", "is"]):
                    pipeline.chunk(request_id, seq, text)
            left = tasks.pop(request_id)
            left.cancel()
            cancellation = await asyncio.to_thread(pipeline.cancellation)
            assert cancellation.request_id == request_id
            for request_id in tasks:
                await asyncio.to_thread(pipeline.reply, request_id, "Paris.")
            assert await asyncio.gather(*tasks.values()) == ["Paris."] * 4
            with pytest.raises(asyncio.CancelledError):
                await left

    asyncio.run(run())


def test_a_chunk_is_in_the_callers_hands_as_soon_as_in_any_consumers(
    broker: str, client: Client, pipeline: OtherSide
) -> None:
    """Against a bare consumer, in turn, since a busy machine is slow for both."""
    settings = KafkaSettings(kafka_bootstrap_servers=broker)
    bare = Consumer(read_committed_consumer(settings, pipeline.tenant))
    made = stream(client)
    request_id = pipeline.request().request_id
    bare.assign([TopicPartition(chunks_topic(pipeline.tenant), 0, 0)])
    streamed_ms, bare_ms = [], []
    for seq in range(200):
        before = time.perf_counter()
        pipeline.chunk(request_id, seq, f"{seq} ")
        next(made)
        streamed_ms.append((time.perf_counter() - before) * 1_000)
        assert bare.poll(WAIT_S) is not None
        before = time.perf_counter()
        pipeline.chunk("another", seq, f"{seq} ")
        assert bare.poll(WAIT_S) is not None
        bare_ms.append((time.perf_counter() - before) * 1_000)
    bare.close()
    pipeline.reply(request_id, made.text)
    assert list(made) == []
    added_ms = statistics.median(streamed_ms) - statistics.median(bare_ms)
    assert added_ms < 5, f"{statistics.median(streamed_ms):.2f} ms against {statistics.median(bare_ms):.2f} ms"
