"""Feedback of a client, without a broker."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from confluent_kafka import KafkaError, KafkaException

from fairlane import headers
from fairlane.client import AsyncClient, Client
from fairlane.errors import Backpressure, ClientClosed, PublishFailed
from fairlane.records import Feedback
from fairlane.schema_files import default_codec
from tests.kit.client_fakes import FakeConnector, FakeProducer
from tests.kit.waiting import eventually, eventually_async

REQUEST = "0b6f9c1e-5d0a-4c57-9f43-2a7c61d0e001"
WAIT_S = 10


def test_feedback_is_published_on_the_topic_of_the_request_and_confirmed(
    client: Client, producer: FakeProducer
) -> None:
    producer.acknowledge_at_once = True
    client.feedback(REQUEST, score=0.25, tags=["wrong-fact"], comment="no", given_by="user:7")
    (sent,) = producer.sent
    assert (sent.topic, sent.key) == ("requests.acme", REQUEST.encode())
    said = Feedback(REQUEST, score=0.25, tags=("wrong-fact",), comment="no", given_by="user:7")
    assert default_codec().decode(sent.value) == said
    assert dict(sent.headers)[headers.CE_TYPE] == b"fairlane.Feedback"
    client.feedback(REQUEST, thumb="up")
    assert len({dict(one.headers)[headers.CE_ID] for one in producer.sent}) == 2, "two events"
    assert client.stats.submitted == client.stats.in_flight == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "feedback: says nothing"),
        ({"thumb": "sideways"}, "thumb: must be up or down"),
        ({"score": "0.5"}, "feedback: a field has the wrong type"),
        ({"tags": [""]}, "tags[0]: "),
        ({"tags": [7]}, "feedback: a field has the wrong type"),
        ({"tags": "flagged"}, "tags: must be a sequence of texts"),
        ({"tags": 7}, "tags: must be a sequence of texts"),
        ({"thumb": "up", "tag": ["flagged"]}, "tag: feedback has no such field; it has thumb, score, "),
    ],
)
def test_an_invalid_field_is_named_and_nothing_is_sent(
    client: Client, producer: FakeProducer, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match="^" + message.replace("[", r"\[")):
        client.feedback(REQUEST, **fields)  # type: ignore[arg-type]  # wrong on purpose
    assert producer.sent == []


def test_tags_may_be_none_and_any_sequence(client: Client, producer: FakeProducer) -> None:
    producer.acknowledge_at_once = True
    for tags in (None, [], ("flagged",), ["flagged"]):
        client.feedback(REQUEST, thumb="up", tags=tags)
    said = [default_codec().decode(sent.value) for sent in producer.sent]
    assert [one.tags for one in said if isinstance(one, Feedback)] == [(), (), ("flagged",), ("flagged",)]


def test_what_the_log_does_not_take_is_an_error(client: Client, producer: FakeProducer) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.feedback, REQUEST, thumb="up")
        eventually(lambda: producer.sent, what="the feedback")
        producer.refuse(KafkaError.TOPIC_AUTHORIZATION_FAILED)
        with pytest.raises(PublishFailed, match=f"feedback on request {REQUEST}: not published to requests.acme"):
            waiting.result(WAIT_S)
    producer.refuse_with = BufferError()
    with pytest.raises(Backpressure):
        client.feedback(REQUEST, thumb="up")
    producer.refuse_with = KafkaException(KafkaError(KafkaError._ALL_BROKERS_DOWN))
    with pytest.raises(PublishFailed):
        client.feedback(REQUEST, thumb="up")


def test_a_closed_client_takes_none(kafka: FakeConnector) -> None:
    client = Client("acme", connector=kafka)
    client.start()
    client.close()
    with pytest.raises(ClientClosed):
        client.feedback(REQUEST, thumb="up")


def test_the_client_for_asyncio_confirms_and_a_task_that_is_cancelled_ends_nothing_else(kafka: FakeConnector) -> None:
    async def scene() -> None:
        async with AsyncClient("acme", connector=kafka) as client:
            await client.start()
            producer = kafka.made_producer
            given = asyncio.create_task(client.feedback(REQUEST, thumb="up"))
            await eventually_async(lambda: bool(producer.sent), what="the feedback")
            given.cancel()
            with pytest.raises(asyncio.CancelledError):
                await given
            producer.acknowledge()
            producer.acknowledge_at_once = True
            await client.feedback(REQUEST, thumb="down")
            assert len(producer.sent) == 2

    asyncio.run(scene())
