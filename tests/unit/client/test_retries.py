"""Requests that the client publishes again by itself, without a broker."""

import asyncio
from collections.abc import Iterator

import pytest
from confluent_kafka import KafkaError

from fairlane.client import AsyncClient, Client, Handle, RetryPolicy
from fairlane.errors import Backpressure, PublishFailed, Rejected
from fairlane.records import CancelRequest, InferenceReply, InferenceRequest, Output, SourceCoordinate
from fairlane.schema_files import default_codec
from tests.kit.client_fakes import MODEL_FIELDS, FakeConnector, FakeProducer, reply_message
from tests.kit.waiting import eventually, eventually_async

WAIT_S = 20
PATIENT = RetryPolicy(tries=3)
FAR_MS = 25_000


@pytest.fixture
def client(kafka: FakeConnector) -> Iterator[Client]:
    kafka.made_producer.acknowledge_at_once = True
    with Client("acme", connector=kafka, close_timeout_ms=0, max_buffered_bytes=1_000, retries=PATIENT) as made:
        yield made


def sent(producer: FakeProducer) -> list[InferenceRequest | CancelRequest]:
    return [default_codec().decode_any((InferenceRequest, CancelRequest), one.value) for one in producer.sent]


def requests(producer: FakeProducer) -> list[InferenceRequest]:
    return [record for record in sent(producer) if isinstance(record, InferenceRequest)]


def refuse(kafka: FakeConnector, request_id: str, retry_after_ms: int | None = 1) -> None:
    reply = InferenceReply(request_id, "acme", "rejected", code="overloaded", retry_after_ms=retry_after_ms)
    kafka.made_consumer.push(reply_message(reply))


def answer(kafka: FakeConnector, request_id: str) -> None:
    kafka.made_consumer.push(reply_message(InferenceReply(request_id, "acme", "ok", output=Output(text="yes"))))


def refuse_and_wait(kafka: FakeConnector, handle: Handle, tries: int) -> None:
    """Refuse the latest of so many publications, and wait for the next."""
    refuse(kafka, handle.request_id)
    eventually(lambda: len(kafka.made_producer.sent) == tries + 1, WAIT_S)


def test_a_refusal_with_a_retry_time_is_not_the_end(client: Client, kafka: FakeConnector) -> None:
    handle = client.submit(**MODEL_FIELDS)
    refuse_and_wait(kafka, handle, 1)
    assert not handle.done()
    answer(kafka, handle.request_id)
    assert handle.result(WAIT_S).outcome == "ok"
    first, second = requests(kafka.made_producer)
    assert first == second, "the same request under the same id"
    assert kafka.made_producer.sent[0].headers == kafka.made_producer.sent[1].headers
    assert (client.stats.submitted, client.stats.retried, client.stats.answered) == (1, 1, 1)
    assert client.stats.in_flight == 0


def test_it_is_tried_only_so_often_and_then_the_refusal_is_the_answer(client: Client, kafka: FakeConnector) -> None:
    handle = client.submit(**MODEL_FIELDS)
    for tries in (1, 2):
        refuse_and_wait(kafka, handle, tries)
    refuse(kafka, handle.request_id)
    with pytest.raises(Rejected) as caught:
        handle.result(WAIT_S)
    assert caught.value.retry_after_ms == 1
    assert (len(kafka.made_producer.sent), client.stats.in_flight) == (3, 0)


def test_what_is_tried_again_has_what_is_left_of_its_time(client: Client, kafka: FakeConnector) -> None:
    handle = client.submit(model="m", prompt="hello", timeout_ms=30_000)
    refuse_and_wait(kafka, handle, 1)
    first, second = requests(kafka.made_producer)
    assert first.timeout_ms == 30_000
    assert second.timeout_ms is not None
    assert 0 < second.timeout_ms <= 30_000 - 50, "at least the least wait is gone"


def test_who_has_no_time_for_another_try_is_told_at_once(client: Client, kafka: FakeConnector) -> None:
    handle = client.submit(model="m", prompt="hello", timeout_ms=5_000)
    refuse(kafka, handle.request_id, retry_after_ms=5_000)
    with pytest.raises(Rejected):
        handle.result(WAIT_S)
    assert len(kafka.made_producer.sent) == 1


def test_a_refusal_without_a_retry_time_is_final(client: Client, kafka: FakeConnector) -> None:
    handle = client.submit(**MODEL_FIELDS)
    refuse(kafka, handle.request_id, retry_after_ms=None)
    with pytest.raises(Rejected):
        handle.result(WAIT_S)


def test_without_being_told_to_a_client_tries_once(kafka: FakeConnector) -> None:
    with Client("acme", connector=kafka, close_timeout_ms=0) as client:
        handles = [client.submit(**MODEL_FIELDS), client.submit(**MODEL_FIELDS, retries=PATIENT)]
        refuse(kafka, handles[0].request_id)
        with pytest.raises(Rejected):
            handles[0].result(WAIT_S)
        refuse_and_wait(kafka, handles[1], 2)


def test_a_call_may_want_fewer_tries_than_its_client(client: Client, kafka: FakeConnector) -> None:
    handle = client.submit(**MODEL_FIELDS, retries=RetryPolicy(tries=1))
    refuse(kafka, handle.request_id)
    with pytest.raises(Rejected):
        handle.result(WAIT_S)


def test_what_is_lost_on_its_way_to_the_log_is_published_again(kafka: FakeConnector) -> None:
    with Client("acme", connector=kafka, close_timeout_ms=0, retries=PATIENT) as client:
        handle = client.submit(**MODEL_FIELDS)
        kafka.made_producer.refuse(KafkaError._MSG_TIMED_OUT)
        eventually(lambda: len(kafka.made_producer.sent) == 2, WAIT_S)
        kafka.made_producer.acknowledge()
        assert handle.published(WAIT_S) is not None
        answer(kafka, handle.request_id)
        assert handle.result(WAIT_S).outcome == "ok"
        assert {one.key for one in kafka.made_producer.sent} == {handle.request_id.encode()}
        assert (client.stats.publish_failed, client.stats.in_flight) == (0, 0)


def test_a_reply_that_comes_while_a_lost_request_waits_is_its_reply(kafka: FakeConnector) -> None:
    with Client("acme", connector=kafka, close_timeout_ms=0, retries=PATIENT) as client:
        handle = client.submit(**MODEL_FIELDS)
        kafka.made_producer.refuse(KafkaError._MSG_TIMED_OUT)
        eventually(lambda: handle.attempts is not None and handle.attempts.ending is not None, WAIT_S)
        answer(kafka, handle.request_id)
        assert handle.result(WAIT_S).outcome == "ok"
        assert client.stats.in_flight == 0


def test_what_the_broker_refuses_for_good_is_not_tried_again(kafka: FakeConnector) -> None:
    with Client("acme", connector=kafka, close_timeout_ms=0, retries=PATIENT) as client:
        handle = client.submit(**MODEL_FIELDS)
        kafka.made_producer.refuse(KafkaError.TOPIC_AUTHORIZATION_FAILED)
        with pytest.raises(PublishFailed) as caught:
            handle.result(WAIT_S)
        assert not caught.value.uncertain
        assert (client.stats.publish_failed, client.stats.in_flight) == (1, 0)


def test_a_request_that_is_answered_elsewhere_is_published_again_if_it_is_lost(kafka: FakeConnector) -> None:
    with Client("acme", connector=kafka, close_timeout_ms=0, retries=PATIENT) as client:
        handle = client.submit(model="m", prompt="hello", reply_to="replies.acme.billing")
        kafka.made_producer.refuse(KafkaError._MSG_TIMED_OUT)
        eventually(lambda: len(kafka.made_producer.sent) == 2, WAIT_S)
        kafka.made_producer.acknowledge()
        assert handle.published(WAIT_S) == SourceCoordinate("requests.acme", 0, 0)
        eventually(lambda: client.stats.in_flight == 0, WAIT_S)


def test_cancelling_what_waits_for_its_next_try_ends_it_with_its_refusal(client: Client, kafka: FakeConnector) -> None:
    handle = client.submit(**MODEL_FIELDS)
    refuse(kafka, handle.request_id, FAR_MS)
    eventually(lambda: handle.attempts is not None and handle.attempts.ending is not None, WAIT_S)
    handle.cancel()
    with pytest.raises(Rejected):
        handle.result(WAIT_S)
    assert len(kafka.made_producer.sent) == 1, "there is nothing in the service to cancel"
    assert client.stats.in_flight == 0


def test_what_was_cancelled_is_not_tried_again(client: Client, kafka: FakeConnector) -> None:
    handle = client.submit(**MODEL_FIELDS)
    handle.cancel()
    refuse(kafka, handle.request_id)
    with pytest.raises(Rejected):
        handle.result(WAIT_S)
    assert [type(record) for record in sent(kafka.made_producer)] == [InferenceRequest, CancelRequest]


def test_closing_the_client_gives_what_waits_its_refusal(client: Client, kafka: FakeConnector) -> None:
    handle = client.submit(**MODEL_FIELDS)
    refuse(kafka, handle.request_id, FAR_MS)
    eventually(lambda: handle.attempts is not None and handle.attempts.ending is not None, WAIT_S)
    client.close()
    with pytest.raises(Rejected):
        handle.result(WAIT_S)


def test_what_may_be_sent_again_keeps_its_room_until_its_reply(kafka: FakeConnector) -> None:
    """Its bytes are held for as long, so they are bounded for as long."""
    fields = {"max_buffered_bytes": 1_000, "submit_timeout_ms": 20, "close_timeout_ms": 0}
    kafka.made_producer.acknowledge_at_once = True
    with Client("acme", connector=kafka, **fields, retries=PATIENT) as client:  # type: ignore[arg-type]  # a dict of ints
        handle = client.submit(model="m", prompt="x" * 700)
        handle.published(WAIT_S)
        with pytest.raises(Backpressure):
            client.submit(model="m", prompt="x" * 700)
        client.submit(model="m", prompt="x")
        answer(kafka, handle.request_id)
        handle.result(WAIT_S)
        client.submit(model="m", prompt="x" * 700)


def test_two_handles_of_one_id_are_both_tried_again_and_both_answered(client: Client, kafka: FakeConnector) -> None:
    first = client.submit(**MODEL_FIELDS)
    second = client.submit(model="m", prompt="hello", request_id=first.request_id)
    refuse(kafka, first.request_id)
    eventually(lambda: len(kafka.made_producer.sent) == 4, WAIT_S)
    answer(kafka, first.request_id)
    assert {first.result(WAIT_S).outcome, second.result(WAIT_S).outcome} == {"ok"}
    assert (client.stats.in_flight, client._core.window.buffered_bytes) == (0, 0)


def test_a_stream_is_tried_again_like_any_request(client: Client, kafka: FakeConnector) -> None:
    with client.stream(**MODEL_FIELDS, timeout=WAIT_S) as stream:
        refuse(kafka, stream.request_id)
        eventually(lambda: len(kafka.made_producer.sent) == 2, WAIT_S)
        answer(kafka, stream.request_id)
        assert [delta.text for delta in stream] == ["yes"]


def test_the_client_for_asyncio_tries_again_by_the_same_rules(kafka: FakeConnector) -> None:
    async def main() -> None:
        async with AsyncClient("acme", connector=kafka, close_timeout_ms=0) as client:
            handle = await client.submit(**MODEL_FIELDS, retries=PATIENT)
            refuse(kafka, handle.request_id)
            await eventually_async(lambda: len(kafka.made_producer.sent) == 2, WAIT_S)
            answer(kafka, handle.request_id)
            assert (await handle.result(WAIT_S)).outcome == "ok"
            assert client.stats.retried == 1

    asyncio.run(main())
