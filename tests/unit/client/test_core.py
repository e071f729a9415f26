"""The client without a broker: what reaches a handle, what holds a submit up, and how a client ends."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, KafkaException

from fairlane.client import Client, Handle
from fairlane.errors import (
    AnsweredElsewhere,
    Backpressure,
    ClientClosed,
    Expired,
    PublishFailed,
    Rejected,
    Timeout,
    Unavailable,
)
from fairlane.record_bounds import MAX_REQUEST_VALUE_BYTES
from fairlane.records import InferenceReply, InferenceRequest, RequestInput, SourceCoordinate
from fairlane.schema_files import default_codec
from fairlane.settings import KafkaSettings
from fairlane_server.topics.families import load_families
from tests.kit.client_fakes import (
    MODEL_FIELDS,
    FakeConnector,
    FakeConsumer,
    FakeProducer,
    error_message,
    no_broker,
    reply_message,
)
from tests.kit.waiting import eventually

WAIT_S = 10


@pytest.fixture
def consumer(kafka: FakeConnector) -> FakeConsumer:
    return kafka.made_consumer


@pytest.fixture
def client(kafka: FakeConnector) -> Iterator[Client]:
    with Client("acme", connector=kafka, max_in_flight=3, submit_timeout_ms=50, max_buffered_bytes=100_000) as made:
        yield made


def ok(handle: Handle) -> InferenceReply:
    return InferenceReply(handle.request_id, "acme", "ok")


def submit(client: Client) -> Handle:
    return client.submit(model="m", prompt="hello")


def test_the_end_of_the_replies_is_known_before_anything_is_published(client: Client, consumer: FakeConsumer) -> None:
    submit(client)
    assert consumer.steps == ["list", "watermarks", "assign", "producer"]
    assert [(start.topic, start.partition, start.offset) for start in consumer.assigned] == [("replies.acme", 0, 5)]


def test_the_request_is_published_as_it_is_under_its_id(client: Client, producer: FakeProducer) -> None:
    handle = client.submit(model="m", task="embed", texts=["a"], timeout_ms=7)
    (sent,) = producer.sent
    assert (sent.topic, sent.key) == ("requests.acme", handle.request_id.encode())
    assert default_codec().decode(sent.value) == InferenceRequest(
        handle.request_id, "m", "embed", RequestInput(texts=("a",)), timeout_ms=7
    )


def test_an_offline_client_publishes_and_cancels_on_the_topic_of_offline_requests(kafka: FakeConnector) -> None:
    with Client("acme", offline=True, connector=kafka) as client:
        handle = submit(client)
        assert (handle.topic, handle.reply_to) == ("backfill.acme", "replies.acme")
        kafka.made_producer.acknowledge()
        handle.cancel()
    assert {sent.topic for sent in kafka.made_producer.sent} == {"backfill.acme"}
    assert len(kafka.made_producer.sent) == 2


def test_a_service_is_answered_on_its_own_topic(kafka: FakeConnector) -> None:
    with Client("acme", service="billing", connector=kafka) as client:
        handle = submit(client)
        assert handle.reply_to == client.reply_topic == "replies.acme.billing"
    request = default_codec().decode_as(InferenceRequest, kafka.made_producer.sent[0].value)
    assert request.reply_to == "replies.acme.billing"


def test_an_acknowledgement_and_a_reply_reach_the_handle(
    client: Client, producer: FakeProducer, consumer: FakeConsumer
) -> None:
    handle = submit(client)
    assert "submitted" in repr(handle)
    producer.acknowledge()
    assert handle.published(WAIT_S) == SourceCoordinate("requests.acme", 0, 0)
    assert "published" in repr(handle)
    assert not handle.done()
    reply = ok(handle)
    consumer.push(reply_message(reply))
    assert handle.result(WAIT_S) == handle.reply() == reply
    assert handle.done()
    assert "done" in repr(handle)
    times = (handle.submitted_at_ms, handle.published_at_ms, handle.received_at_ms)
    assert None not in times
    assert times == tuple(sorted(time for time in times if time is not None))


def test_a_refusal_is_an_error_of_result_and_a_value_of_reply(client: Client, consumer: FakeConsumer) -> None:
    handle = submit(client)
    reply = InferenceReply(handle.request_id, "acme", "rejected", code="overloaded", retry_after_ms=9)
    consumer.push(reply_message(reply))
    with pytest.raises(Rejected) as caught:
        handle.result(WAIT_S)
    assert (caught.value.code, caught.value.retry_after_ms) == ("overloaded", 9)
    assert handle.reply() == reply


def test_only_the_first_reply_counts_and_a_replayed_one_is_as_good(client: Client, consumer: FakeConsumer) -> None:
    first, second = submit(client), submit(client)
    replayed = InferenceReply(first.request_id, "acme", "expired", replayed=True)
    consumer.push(reply_message(replayed), reply_message(ok(first)), reply_message(ok(second)))
    assert second.result(WAIT_S).outcome == "ok"
    with pytest.raises(Expired):
        first.result(WAIT_S)
    assert client.stats.answered == 2
    assert client.stats.ignored_replies == 1


def test_no_reply_in_time_is_a_timeout_and_waiting_again_is_allowed(client: Client, consumer: FakeConsumer) -> None:
    handle = submit(client)
    for wait in (handle.result, handle.reply, handle.published):
        with pytest.raises(Timeout, match=handle.request_id):
            wait(0.01)
    consumer.push(reply_message(ok(handle)))
    assert handle.result(WAIT_S).outcome == "ok"


def test_the_same_id_twice_is_answered_twice(client: Client, consumer: FakeConsumer) -> None:
    first = submit(client)
    again = client.submit(model="m", prompt="hello", request_id=first.request_id)
    consumer.push(reply_message(ok(first)))
    assert again.result(WAIT_S) == first.result(WAIT_S)
    eventually(lambda: client.stats.in_flight == 0)


def test_records_that_are_no_reply_are_skipped_and_counted(
    client: Client, consumer: FakeConsumer, caplog: pytest.LogCaptureFixture
) -> None:
    handle = submit(client)
    whole = default_codec().encode(ok(handle))
    for value in (b"\xff\xff", b"", None, whole[:-1], whole + b"\x00"):
        bad = reply_message(ok(handle))
        bad.set_value(value)
        consumer.push(bad)
    consumer.push(reply_message(ok(handle)))
    assert handle.result(WAIT_S).outcome == "ok"
    assert client.stats.undecodable_replies == 5
    assert "record_undecodable topic=replies.acme" in caplog.text
    assert all(record.levelno == logging.ERROR for record in caplog.records)


def test_replies_to_others_are_not_even_decoded(client: Client, consumer: FakeConsumer) -> None:
    handle = submit(client)
    other = reply_message(InferenceReply("another", "acme", "ok"))
    other.set_value(b"\xff")
    consumer.push(other, reply_message(ok(handle)))
    handle.result(WAIT_S)
    assert (client.stats.ignored_replies, client.stats.undecodable_replies) == (1, 0)


def test_a_request_the_broker_refuses_fails_its_handle(client: Client, producer: FakeProducer) -> None:
    handle = submit(client)
    producer.refuse(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    for wait in (handle.result, handle.published):
        with pytest.raises(PublishFailed, match=r"requests\.acme: refused by the broker") as caught:
            wait(WAIT_S)
        assert not caught.value.uncertain
    eventually(lambda: client.stats.in_flight == 0)
    assert client.stats.publish_failed == 1


def test_a_publish_nobody_answered_says_that_it_may_have_happened(client: Client, producer: FakeProducer) -> None:
    handle = submit(client)
    producer.refuse(KafkaError._MSG_TIMED_OUT)
    with pytest.raises(PublishFailed, match="may have been published") as caught:
        handle.result(WAIT_S)
    assert caught.value.uncertain


def test_a_reply_proves_what_the_acknowledgement_denies(
    client: Client, producer: FakeProducer, consumer: FakeConsumer
) -> None:
    handle = submit(client)
    consumer.push(reply_message(ok(handle)))
    handle.result(WAIT_S)
    producer.refuse(KafkaError._MSG_TIMED_OUT)
    assert handle.published(WAIT_S) is None
    assert client.stats.publish_failed == 0


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        (KafkaException(KafkaError(KafkaError._UNKNOWN_TOPIC, "no such topic")), PublishFailed),
        (BufferError("queue full"), Backpressure),
    ],
)
def test_what_the_producer_refuses_at_once_is_raised_by_submit(
    client: Client, producer: FakeProducer, refusal: Exception, expected: type[Exception]
) -> None:
    producer.refuse_with = refusal
    for _ in range(5):  # more than may be in flight: none of them keeps its room
        with pytest.raises(expected):
            submit(client)
    assert client.stats.in_flight == 0


def test_a_mistake_takes_no_room_and_sends_nothing(client: Client, producer: FakeProducer) -> None:
    for _ in range(5):
        with pytest.raises(ValueError, match=r"^prompt: "):
            client.submit(model="m", prompt="")
    assert (producer.sent, client.stats.in_flight) == ([], 0)


def test_a_value_no_record_can_hold_is_a_mistake_that_shows_nothing_of_it(client: Client) -> None:
    with pytest.raises(ValueError, match=r"^request: a field has the wrong type") as caught:
        client.submit(model="m", task="embed", texts=["fine", 17])  # type: ignore[list-item]  # the mistake under test
    assert "17" not in str(caught.value)


def test_a_request_above_the_size_limit_is_refused_before_it_is_sent(kafka: FakeConnector) -> None:
    with Client("acme", connector=kafka, max_request_bytes=1_000) as client:
        with pytest.raises(ValueError, match=r"^input: the request takes \d+ bytes, the limit is 1000"):
            client.submit(model="m", prompt="x" * 1_000)
        client.submit(model="m", prompt="x" * 800)
    assert len(kafka.made_producer.sent) == 1


def test_a_request_larger_than_its_topic_takes_is_refused_before_it_is_sent(kafka: FakeConnector) -> None:
    largest = {family.name: family.max_message_bytes for family in load_families()}["requests.{tenant}"]
    assert largest is not None
    with Client("acme", connector=kafka) as client:
        with pytest.raises(ValueError, match=rf"the limit is {MAX_REQUEST_VALUE_BYTES}$"):
            client.submit(model="m", prompt="x" * MAX_REQUEST_VALUE_BYTES)
        client.submit(model="m", prompt="x" * (MAX_REQUEST_VALUE_BYTES - 1_000))
    (sent,) = kafka.made_producer.sent
    assert len(sent.value) <= MAX_REQUEST_VALUE_BYTES < largest


def test_a_full_window_holds_submit_up_until_a_reply_comes(client: Client, consumer: FakeConsumer) -> None:
    handles = [submit(client) for _ in range(3)]
    with pytest.raises(Backpressure, match=r"3 requests under way \(limit 3\)"):
        submit(client)
    threading.Timer(0.01, consumer.push, [reply_message(ok(handles[0]))]).start()
    submit(client)
    assert client.stats.in_flight == 3


def test_too_many_bytes_hold_submit_up_until_an_acknowledgement_comes(client: Client, producer: FakeProducer) -> None:
    client.submit(model="m", prompt="x" * 90_000)
    with pytest.raises(Backpressure, match="bytes not acknowledged"):
        client.submit(model="m", prompt="x" * 90_000)
    threading.Timer(0.01, producer.acknowledge).start()
    client.submit(model="m", prompt="x" * 90_000)


def test_submit_many_is_lazy_and_says_which_item_is_wrong(client: Client, producer: FakeProducer) -> None:
    request = InferenceRequest("00000000-0000-0000-0000-000000000001", "m", "generate", RequestInput(prompt="p"))
    handles = client.submit_many([MODEL_FIELDS, request, {"model": ""}])
    assert producer.sent == []
    next(handles)
    assert next(handles).request_id == request.request_id
    with pytest.raises(ValueError, match=r"^model") as caught:
        next(handles)
    assert caught.value.__notes__ == ["item 2 of submit_many"]
    with pytest.raises(TypeError, match="not a request"):
        next(client.submit_many([3]))  # type: ignore[list-item]  # the mistake under test


def test_an_answer_elsewhere_takes_room_until_it_is_published(client: Client, producer: FakeProducer) -> None:
    handle = client.submit(model="m", prompt="p", reply_to="replies.acme.billing")
    assert handle.done()
    with pytest.raises(AnsweredElsewhere, match=r"replies\.acme\.billing"):
        handle.result()
    assert client.stats.in_flight == 1
    producer.acknowledge()
    assert handle.published(WAIT_S) is not None
    eventually(lambda: client.stats.in_flight == 0)


def test_closing_fails_what_is_open_and_refuses_what_comes(
    client: Client, producer: FakeProducer, consumer: FakeConsumer
) -> None:
    published = submit(client)
    producer.acknowledge()
    published.published(WAIT_S)
    unsent = submit(client)
    client.close()
    with pytest.raises(ClientClosed):
        published.result()
    with pytest.raises(PublishFailed, match="purged"):
        unsent.result()
    with pytest.raises(ClientClosed):
        submit(client)
    with pytest.raises(ClientClosed):
        client.replies("group")
    assert consumer.closed
    client.close()


def test_closing_wakes_a_submit_that_waits(kafka: FakeConnector) -> None:
    client = Client("acme", connector=kafka, max_in_flight=1, close_timeout_ms=0)
    submit(client)
    caught: list[Exception] = []

    def wait() -> None:
        try:
            submit(client)
        except ClientClosed as error:
            caught.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    eventually(lambda: client._core.window._line)
    client.close()
    waiter.join(WAIT_S)
    assert len(caught) == 1


def test_a_client_that_was_never_used_contacts_nobody(kafka: FakeConnector) -> None:
    with Client("acme", connector=kafka) as client:
        assert client.flush(1) == 0
    assert kafka.made_consumer.steps == []
    with pytest.raises(ClientClosed):
        client.start()


@pytest.mark.parametrize("victim", ["replies", "publisher"])
def test_a_thread_that_dies_fails_every_handle_and_every_later_submit(
    client: Client, producer: FakeProducer, consumer: FakeConsumer, victim: str
) -> None:
    handles = [submit(client) for _ in range(3)]
    if victim == "replies":
        consumer.push(error_message(KafkaError._FATAL, fatal=True))
    else:
        producer.poll_error = RuntimeError("says the broker")
    for handle in handles:
        with pytest.raises(Unavailable, match=f"{victim} thread died: says the broker"):
            handle.result(WAIT_S)
    with pytest.raises(Unavailable, match=victim):
        submit(client)


def test_a_start_that_fails_may_be_tried_again(client: Client, consumer: FakeConsumer) -> None:
    consumer.partitions = None
    with pytest.raises(Unavailable, match=r"replies\.acme does not exist"):
        submit(client)
    assert consumer.closed
    consumer.partitions = 2
    submit(client)
    assert [start.partition for start in consumer.assigned] == [0, 1]


def test_no_broker_is_said_within_the_start_timeout(kafka: FakeConnector) -> None:
    kafka.made_consumer.partitions = no_broker()
    with (
        Client("acme", connector=kafka, start_timeout_ms=200) as client,
        pytest.raises(Unavailable, match="no broker answers: nobody there"),
    ):
        client.start()


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("tenant", {"tenant": "Acme Inc"}),
        ("service", {"service": "a.b"}),
        ("max_in_flight", {"max_in_flight": 0}),
        ("max_buffered_bytes", {"max_buffered_bytes": 0}),
        ("max_request_bytes", {"max_request_bytes": MAX_REQUEST_VALUE_BYTES + 1}),
    ],
)
def test_arguments_that_make_no_sense_are_named(field: str, arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=rf"^{field}: "):
        Client(**{"tenant": "acme", **arguments})  # type: ignore[arg-type]  # the mistakes under test


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("topic", {"topic": "replies.globex"}),
        ("topic", {"topic": "replies.acme.x", "service": "x"}),
        ("max_processing_ms", {"max_processing_ms": 10}),
        ("group_id", {"group_id": ""}),
    ],
)
def test_options_of_replies_that_make_no_sense_are_named(
    client: Client, field: str, options: dict[str, object]
) -> None:
    with pytest.raises(ValueError, match=rf"^{field}: "):
        client.replies(**{"group_id": "g", **options})  # type: ignore[arg-type]  # the mistakes under test


def test_settings_that_no_client_can_be_made_from_are_said(tmp_path: Path) -> None:
    settings = KafkaSettings(kafka_security_protocol="SSL", kafka_ssl_ca_file=tmp_path / "missing.pem")
    with Client("acme", settings=settings) as client:
        with pytest.raises(Unavailable, match="settings of the connection are wrong"):
            client.start()
        with pytest.raises(Unavailable, match="settings of the connection are wrong"):
            client.replies("group")


def test_a_schema_registry_that_does_not_answer_is_said(kafka: FakeConnector) -> None:
    settings = KafkaSettings(schema_registry_url="http://127.0.0.1:1")
    with (
        Client("acme", settings=settings, connector=kafka) as client,
        pytest.raises(Unavailable, match="SCHEMA_REGISTRY_URL"),
    ):
        client.start()
    assert kafka.made_consumer.steps == []
