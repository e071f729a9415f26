"""Cancelling a request, without a broker."""

import asyncio

import pytest
from confluent_kafka import KafkaError, KafkaException
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace import TracerProvider

from fairlane import headers
from fairlane.client import AsyncClient, Client, Handle
from fairlane.errors import Backpressure, Cancelled, ClientClosed, PublishFailed
from fairlane.records import CancelRequest, InferenceReply
from fairlane.schema_files import default_codec
from tests.kit.client_fakes import FakeConnector, FakeProducer, Sent, reply_message
from tests.kit.waiting import eventually

WAIT_S = 10


def cancellations(producer: FakeProducer) -> list[Sent]:
    return [sent for sent in producer.sent if isinstance(default_codec().decode(sent.value), CancelRequest)]


def answer(kafka: FakeConnector, handle: Handle, outcome: str = "cancelled") -> None:
    kafka.made_consumer.push(reply_message(InferenceReply(handle.request_id, "acme", outcome)))


def test_a_cancellation_follows_its_request_once(client: Client, producer: FakeProducer) -> None:
    handle = client.submit(model="m", prompt="p")
    assert handle.cancellable
    for _ in range(3):
        handle.cancel()
    request, cancellation = producer.sent
    assert (cancellation.topic, cancellation.key) == (request.topic, request.key) == (handle.topic, request.key)
    assert default_codec().decode(cancellation.value) == CancelRequest(handle.request_id)
    assert handle.cancel_sent_at_ms is not None
    assert not handle.done()
    assert client.stats.in_flight == 1, "until the reply is here"


def test_a_cancellation_carries_the_trace_of_whoever_cancels(client: Client, producer: FakeProducer) -> None:
    tracer = TracerProvider().get_tracer("test")
    carried = context.attach(baggage.set_baggage("key", "secret"))
    try:
        with tracer.start_as_current_span("ask"):
            handle = client.submit(model="m", prompt="p")
        with tracer.start_as_current_span("give up") as span:
            handle.cancel()
    finally:
        context.detach(carried)
    (cancellation,) = cancellations(producer)
    assert dict(cancellation.headers)[headers.TRACE_PARENT] == trace_parent(span)
    assert dict(cancellation.headers)[headers.CE_TYPE] == b"fairlane.CancelRequest"
    assert "secret" not in repr(cancellation.headers)


def test_a_cancellation_outside_of_any_span_carries_the_trace_of_its_request(
    client: Client, producer: FakeProducer
) -> None:
    with TracerProvider().get_tracer("test").start_as_current_span("ask") as span:
        traced = client.submit(model="m", prompt="p")
    for handle in (traced, client.submit(model="m", prompt="p")):
        handle.cancel()
    found = [dict(sent.headers).get(headers.TRACE_PARENT) for sent in cancellations(producer)]
    assert found == [trace_parent(span), None]


def trace_parent(span: trace.Span) -> bytes:
    of = span.get_span_context()
    return f"00-{trace.format_trace_id(of.trace_id)}-{trace.format_span_id(of.span_id)}-{of.trace_flags:02x}".encode()


def test_the_reply_says_what_became_of_it(client: Client, kafka: FakeConnector) -> None:
    stopped, too_late = (client.submit(model="m", prompt="p") for _ in range(2))
    for handle in (stopped, too_late):
        handle.cancel()
    answer(kafka, stopped)
    answer(kafka, too_late, "ok")
    with pytest.raises(Cancelled):
        stopped.result(WAIT_S)
    assert stopped.reply().outcome == "cancelled"
    assert too_late.result(WAIT_S).outcome == "ok"


def test_nothing_is_sent_for_what_is_answered(client: Client, kafka: FakeConnector) -> None:
    handle = client.submit(model="m", prompt="p")
    answer(kafka, handle, "ok")
    handle.result(WAIT_S)
    handle.cancel()
    client.close()
    handle.cancel()
    assert cancellations(kafka.made_producer) == []


def test_what_is_answered_elsewhere_can_be_cancelled(client: Client, producer: FakeProducer) -> None:
    handle = client.submit(model="m", prompt="p", reply_to="replies.acme.billing")
    assert handle.done()
    handle.cancel()
    assert len(cancellations(producer)) == 1


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        (KafkaException(KafkaError(KafkaError._FATAL, "fenced")), PublishFailed),
        (BufferError("queue full"), Backpressure),
    ],
)
def test_a_cancellation_that_the_producer_refuses_may_be_tried_again(
    client: Client, producer: FakeProducer, refusal: Exception, expected: type[Exception]
) -> None:
    handle = client.submit(model="m", prompt="p")
    producer.refuse_with = refusal
    for _ in range(2):
        with pytest.raises(expected) as caught:
            handle.cancel()
    if isinstance(caught.value, PublishFailed):
        assert str(caught.value) == (
            f"cancellation of request {handle.request_id}: not published to requests.acme: fenced"
        )
    producer.refuse_with = None
    handle.cancel()
    assert len(cancellations(producer)) == 1


def test_a_cancellation_that_the_broker_refuses_is_logged_and_may_be_tried_again(
    client: Client, producer: FakeProducer, caplog: pytest.LogCaptureFixture
) -> None:
    handle = client.submit(model="m", prompt="p")
    producer.acknowledge()
    handle.cancel()
    producer.refuse(KafkaError._MSG_TIMED_OUT)
    eventually(lambda: handle.cancel_sent_at_ms is None)
    assert f"cancel_not_published request_id={handle.request_id} topic=requests.acme" in caplog.text
    assert not handle.done(), "the request itself goes on"
    handle.cancel()
    assert len(cancellations(producer)) == 2


def test_a_closed_client_cancels_nothing(client: Client) -> None:
    handle = client.submit(model="m", prompt="p")
    client.close()
    with pytest.raises(ClientClosed):
        handle.cancel()


def test_an_async_handle_cancels_without_waiting(kafka: FakeConnector) -> None:
    async def run() -> None:
        async with AsyncClient("acme", connector=kafka, close_timeout_ms=0) as client:
            handle = await client.submit(model="m", prompt="p")
            handle.cancel()
            handle.cancel()
            assert len(cancellations(kafka.made_producer)) == 1
            assert handle.cancel_sent_at_ms is not None
            kafka.made_consumer.push(reply_message(InferenceReply(handle.request_id, "acme", "cancelled")))
            with pytest.raises(Cancelled):
                await handle

    asyncio.run(run())
